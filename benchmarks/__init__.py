"""Speed, measured: one file per question, each with a `measure()` that answers it.

`make bench` runs all of them, `python -m benchmarks NAME ...` some. Contenders for one
job are timed in turn, round by round, so that a drift of the machine hits all alike;
what is shown is the median and the middle half of the rounds.
"""

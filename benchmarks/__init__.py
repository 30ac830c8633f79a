"""Speed, measured: one file per question, each with a `measure()` that answers it.

`make bench` runs all of them, `python -m benchmarks NAME ...` some. The contenders for
a job are timed in turn, round by round, so that a drift of the machine affects all
alike. Tables show the median and the middle half of the rounds.
"""

"""Has PipeDream's steady state a bubble, beside its stages alone and 1F1B that flushes?

Two stages of six layers 1024 x 1024 in two processes, each pinned to one core. "Alone"
means that each process runs the passes and updates of its stage without communication;
the slower one counts. An epoch's fill and drain are not part of PipeDream's figures,
which are the time that a micro-batch adds to an epoch; a flush is part of every step of
1F1B.
"""

from benchmarks import _pipedream_jdist as jobs
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, timing
from benchmarks._pair import Pair
from jdist.rpc import ProcessSettings

ROUNDS = 3
GOALS = {jobs.ALONE: 0.97, jobs.SYNCHRONOUS: 1.1}


def measure() -> list[Case]:
    """Seconds per micro-batch, for each number of rows."""
    with Pair(jobs.prepare, ProcessSettings(callback_threads=0)) as pair:
        return [_case(pair, rows) for rows in jobs.ROWS]


def _case(pair: Pair, rows: int) -> Case:
    contenders = (jobs.STASHING, jobs.MACRO, jobs.ALONE, jobs.SYNCHRONOUS)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(1 + ROUNDS):
        for name in contenders:
            spent = pair.run(f"{rows} rows: {name}", 1).elapsed
            if turn:
                seconds[name].append(spent)
    timings = {name: timing(found) for name, found in seconds.items()}
    goals = [
        Goal(
            f"of the throughput of {other}{how}",
            ratio(timings[other], timings[kind]),
            least,
            at_least=True,
        )
        for other, least in GOALS.items()
        for kind, how in ((jobs.STASHING, ""), (jobs.MACRO, ", with macro-batches"))
    ]
    return Case(f"{rows} rows", timings, goals=goals)

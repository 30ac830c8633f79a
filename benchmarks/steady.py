"""Do calls stay fast while other programs use the cores?

Two processes as `spawn` starts them, not pinned, beside up to four others that compute
without a pause. The processes of jdist and of torch (as shipped) are alive together and
take turns. Each neighbour takes its share of a core whatever a scheduler does: of two
cores, four neighbours leave a third of each.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks import _autograd_jdist, _autograd_torch
from benchmarks import _autograd_models as models
from benchmarks._goals import Figure, Goal, ratio, scaled
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair
from jdist.rpc import ProcessSettings

NEIGHBOURS = 0, 2, 4
ROUNDS, WARMUP = 9, 1
OURS, TORCH = "jdist", "torch as shipped"
# Fewer calls for torch's, which take up to a hundred times longer beside neighbours.
CALLS = {
    OURS: {models.ECHO: 200, models.FAST: 40, models.END_TO_END: 10},
    TORCH: {models.ECHO: 20, models.FAST: 10, models.END_TO_END: 4},
}
SLOWER = 2.0
"""A goal: at most this multiple of the quiet time, unless torch slows down so much that
the ratio of both is no worse than when quiet."""


def measure() -> list[Case]:
    """Each job of both contenders, quiet and beside neighbours."""
    with (
        Pair(_autograd_jdist.prepare, ProcessSettings(), pin=0) as ours,
        Pair(_autograd_torch.prepare, None, pin=0) as theirs,
    ):
        pairs = {OURS: ours, TORCH: theirs}
        seconds: dict[str, dict[tuple[str, int], list[float]]] = {}
        for count in NEIGHBOURS:
            with _neighbours(count):
                for turn in range(WARMUP + ROUNDS):
                    for name, pair in pairs.items():
                        for job, calls in CALLS[name].items():
                            spent = pair.run(job, calls)
                            if turn >= WARMUP:
                                of_job = seconds.setdefault(job, {})
                                one = of_job.setdefault((name, count), [])
                                one.append(spent.elapsed)
    return [_case(job, found) for job, found in seconds.items()]


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Keeps `count` processes computing for the duration of the block."""
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _case(job: str, seconds: Mapping[tuple[str, int], list[float]]) -> Case:
    found = {key: timing(values) for key, values in seconds.items()}
    shown = {
        f"{name}, {count} neighbours" if count else f"{name}, quiet": found[name, count]
        for name in CALLS
        for count in NEIGHBOURS
    }
    goals = [
        Goal(
            f"of what is allowed beside {count} neighbours",
            _of_allowed(found, count),
            1,
        )
        for count in NEIGHBOURS[1:]
    ]
    return Case(job, shown, goals=goals)


def _of_allowed(found: Mapping[tuple[str, int], Timing], count: int) -> Figure:
    """The ratio of the time to the longest allowed one, by the more lenient rule."""
    slower = scaled(ratio(found[OURS, count], found[OURS, 0]), 1 / SLOWER)
    beside = ratio(found[OURS, count], found[TORCH, count])
    quiet = found[OURS, 0].median / found[TORCH, 0].median
    to_torch = scaled(beside, 1 / quiet)
    return min(slower, to_torch, key=lambda figure: figure.median)

"""How long are distributed backward passes, beside torch's?

The small jobs run in two processes, each pinned to a core; the chain of layers runs in
three processes that share the cores. The processes of torch and jdist are alive
together and take turns. Everything is compiled beforehand. Both use the memory settings
of `jdist.launch`.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks import _autograd_jdist, _autograd_timeline, _autograd_torch
from benchmarks import _autograd_models as models
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, timing
from benchmarks._pair import Pair
from jdist.rpc import ProcessSettings

SETTINGS = ProcessSettings()
ROUNDS, WARMUP = 25, 3
OURS, TORCH = "jdist", "torch"
CALLS = {models.CHAIN: 2, models.END_TO_END: 20}
GOALS = {models.FAST: 0.4, models.END_TO_END: 0.3, models.CHAIN: 1.0}
SMART_GOAL = 1.3


def measure() -> list[Case]:
    """Each job of both contenders, and SMART beside FAST."""
    with (
        Pair(_autograd_jdist.prepare, SETTINGS) as ours,
        Pair(_autograd_torch.prepare, SETTINGS) as theirs,
    ):
        cases = _race({OURS: ours, TORCH: theirs})
    with (
        Pair(_autograd_jdist.prepare_chain, SETTINGS, processes=3, pin=0) as ours,
        Pair(_autograd_torch.prepare_chain, SETTINGS, processes=3, pin=0) as theirs,
    ):
        cases |= _race({OURS: ours, TORCH: theirs})
    found = [_beside_torch(job, cases[job]) for job in GOALS]
    return [*found, _modes(cases)]


def draw(folder: Path) -> None:
    """A pass of example (iv) over time, as a picture for the page."""
    _autograd_timeline.draw(folder / "example_iv.png")


def _race(pairs: Mapping[str, Pair]) -> dict[str, dict[str, list[float]]]:
    """Seconds by job and contender; every contender does every job once a round."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for turn in range(WARMUP + ROUNDS):
        for name, pair in pairs.items():
            for job in pair.jobs:
                spent = pair.run(job, CALLS.get(job, 100))
                if turn >= WARMUP:
                    one = seconds.setdefault(job, {}).setdefault(name, [])
                    one.append(spent.elapsed)
    return seconds


def _beside_torch(job: str, seconds: Mapping[str, list[float]]) -> Case:
    timings = {name: timing(values) for name, values in seconds.items()}
    found = ratio(timings[OURS], timings[TORCH])
    return Case(job, timings, goals=[Goal("of torch's time", found, GOALS[job])])


def _modes(cases: Mapping[str, Mapping[str, list[float]]]) -> Case:
    timings = {
        name: timing(cases[job][OURS])
        for name, job in (
            ("FAST", models.FAST),
            ("SMART", models.SMART),
            ("SMART, mul and sum as one segment", models.COMPILED),
        )
    }
    found = ratio(timings["SMART"], timings["FAST"])
    goals = [Goal("of FAST for SMART", found, SMART_GOAL)]
    return Case(f"{models.EXAMPLE}, modes of jdist", timings, goals=goals)

"""Planning stages: seconds for 240 and 1000 layers on 16 and 256 workers."""

import numpy as np

from benchmarks._goals import Goal
from benchmarks._harness import Case, race
from jdist import pipeline

MACHINES: dict[str, tuple[int, tuple[int, ...], str]] = {
    "240 layers, 4 x 4": (240, (4, 4), ""),
    "240 layers, 8 x 2": (240, (8, 2), "the published planner takes 87 s"),
    "1000 layers, 256": (1000, (256,), ""),
    "1000 layers, 8 x 32": (1000, (8, 32), ""),
    "1000 layers, 16 x 16": (1000, (16, 16), ""),
}
GOAL = 60.0


def measure() -> list[Case]:
    """Plans random chains twice for each machine."""
    return [case(name, *machine) for name, machine in MACHINES.items()]


def case(name: str, layers: int, workers: tuple[int, ...], note: str) -> Case:
    """Times the planner for one machine."""
    profile = chain(layers)
    bandwidths = (1e11, 1e10)[: len(workers)]
    timings = race(
        {"partition": lambda: pipeline.partition(profile, workers, bandwidths)},
        rounds=2,
        warmup=0,
    )
    goals = [Goal("to plan", timings["partition"], GOAL, unit=" s")]
    return Case(name, timings, note=note, goals=goals)


def chain(count: int) -> pipeline.Profile:
    """A profile of `count` layers with random costs."""
    rng = np.random.default_rng(0)
    forward, backward = rng.uniform(1e-3, 5e-3, (2, count))
    outputs, parameters = rng.uniform(1e4, 1e7, count), rng.uniform(1e3, 1e7, count)
    return pipeline.Profile.chain(
        [
            pipeline.Layer(
                f"l{i}", "", forward[i], backward[i], (outputs[i],), parameters[i]
            )
            for i in range(count)
        ]
    )

"""Simulating a schedule: seconds for up to 8.4 million actions, and for small ones."""

from collections.abc import Callable
from typing import Any

from benchmarks._goals import Goal
from benchmarks._harness import Case, race
from jdist import pipeline

LINKED = pipeline.Costs(message_bytes=1.0, bandwidth=10.0, latency=0.05)


def measure() -> list[Case]:
    """From nothing to the timeline, for a large and a small pipeline."""
    return [
        case("1F1B, 1024 stages x 4096", pipeline.one_f_one_b, 1024, 4096, rounds=5),
        case("ZB-H1, 1024 stages x 4096", pipeline.zero_bubble, 1024, 4096, rounds=3),
        case("1F1B, 8 stages x 32", pipeline.one_f_one_b, 8, 32, rounds=50),
    ]


def case(
    name: str, make: Callable[[int, int], Any], n: int, m: int, *, rounds: int
) -> Case:
    """Times making and simulating a schedule, together and apart."""
    schedule = make(n, m)
    timings = race(
        {
            "make and simulate": lambda: _end(make(n, m), LINKED),
            "simulate": lambda: _end(schedule, LINKED),
            "simulate, free messages": lambda: _end(schedule, pipeline.Costs()),
            "make": lambda: len(make(n, m).columns),
        },
        rounds=rounds,
        warmup=1,
    )
    note = f"{len(schedule.columns)} actions"
    goals = []
    if n == 1024:
        note += "; its memory: experiment pipeline_scale"
        took = timings["make and simulate"]
        goals.append(Goal("to make and simulate it", took, 10.0, unit=" s"))
    return Case(name, timings, note=note, goals=goals)


def _end(schedule: pipeline.Schedule, costs: pipeline.Costs) -> float:
    return pipeline.simulate(schedule, costs).makespan

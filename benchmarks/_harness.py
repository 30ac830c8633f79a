"""Timing contenders side by side, and writing down what was measured where."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from benchmarks._goals import Figure, Goal
from experiments._environment import Environment


@dataclass(frozen=True, slots=True)
class Timing(Figure):
    """Seconds per call over all rounds: median and quartiles."""

    rounds: int


@dataclass(frozen=True, slots=True)
class Case:
    """One job and its contenders; the others are compared to the first.

    Attributes:
      name: The job, with its sizes.
      timings: Seconds per call by contender.
      limit: The physical limit in seconds (bytes over bandwidth, FLOPs over peak), or
        None.
      note: Remarks for the reader, such as the derivation of the limit and the threads.
      goals: Goals for figures of the case.
    """

    name: str
    timings: Mapping[str, Timing]
    limit: float | None = None
    note: str = ""
    goals: Sequence[Goal] = ()


def race(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    calls: int = 1,
    warmup: int = 2,
) -> dict[str, Timing]:
    """Times each contender once a round, in turn.

    Args:
      contenders: Functions without arguments; JAX results are waited for.
      rounds: The number of counted rounds.
      calls: Calls per round, for jobs that are short beside the clock's resolution; the
        time of a single call is reported.
      warmup: Uncounted rounds, for compilation and caches.

    Returns:
      The seconds per call of each contender.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            for _ in range(calls):
                result = contender()
            jax.block_until_ready(result)
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - start) / calls)
    return {name: timing(values) for name, values in seconds.items()}


def timing(values: list[float]) -> Timing:
    """Median and quartiles of measured seconds."""
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high, len(values))


def table(name: str, cases: list[Case]) -> Table:
    """The cases as a table; ratios are to each case's first contender."""
    shown = Table("job", "contender", "median", "middle half", "ratio", title=name)
    for case in cases:
        first = next(iter(case.timings.values())).median
        title = case.name
        for contender, found in case.timings.items():
            half = f"{duration(found.low)} .. {duration(found.high)}"
            ratio = f"{found.median / first:.2f}"
            shown.add_row(title, contender, duration(found.median), half, ratio)
            title = ""
        if case.limit is not None:
            share = f"{case.limit / first:.0%} of first"
            shown.add_row("", "physical limit", duration(case.limit), "", share)
        shown.add_section()
    notes = [
        f"{case.name}: {said}"
        for case in cases
        for said in (case.note, *case.goals)
        if said
    ]
    shown.caption = "\n".join(notes) or None
    shown.caption_justify = "left"
    return shown


def write(folder: Path, name: str, cases: list[Case]) -> Path:
    """Writes the cases and their environment as JSON; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"environment": asdict(Environment()), "cases": [asdict(c) for c in cases]}
    path.write_text(json.dumps(record, indent=1))
    return path


def duration(seconds: float) -> str:
    """Seconds as text, in a suitable unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"

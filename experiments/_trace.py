"""What ran when: a profile of JAX, read back as intervals."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Interval(NamedTuple):
    """One operation of a compiled program on one device, in seconds from the start."""

    start: float
    end: float
    program: str
    device: int


def traced(run: Callable[[], Any]) -> list[Interval]:
    """The operations of all programs that `run` executed, sorted by start."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        found = [
            (event.start_ns, event.end_ns, details["hlo_module"], details)
            for plane in profile.planes
            for line in plane.lines
            for event in line.events
            if "hlo_module" in (details := dict(event.stats))
            and not event.name.startswith("end: ")
        ]
    first = min((start for start, *_ in found), default=0)
    return sorted(
        Interval(
            (start - first) / 1e9,
            (end - first) / 1e9,
            str(program),
            int(details.get("device_ordinal", 0)),
        )
        for start, end, program, details in found
    )


def union(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """The covered time, as disjoint intervals `(start, end)`."""
    merged: list[tuple[float, float]] = []
    for start, end, *_ in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds in which operations of both ran."""
    return sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
        for a in union(first)
        for b in union(second)
    )

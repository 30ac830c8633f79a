"""What do many workers on one machine take: to meet, to call each other, and to end?

So many processes as `JDIST_BENCHMARK_WORKERS` says, 16 without it, each a worker, not
pinned. Each calls every other one, first by synchronous calls, one after the other, and
then by asynchronous ones, all at once. How long that takes is mostly how long the cores
take for so many processes, so it is given for each call.

All have imported JAX before the first one joins: that takes a second of a core for each
process, and none of it is jdist's. Times of what all do together begin when the last
one comes to it and end when the last one is through.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks._goals import Figure, Goal
from benchmarks._harness import Case, Timing, timing
from jdist import rpc

WORKERS = int(os.environ.get("JDIST_BENCHMARK_WORKERS", "16"))
ROUNDS = 5
PAUSE = 3.0
"""Seconds without a call after which a worker's threads are counted as at rest."""

THREADS, PER_PEER = 8, 1
JOIN = 10.0
"""Seconds in which up to 64 workers should meet, on two cores."""

JOINED, CALLED, RESTED = "joined", "after the calls", f"{PAUSE:g} s later"
_LIMITS = {
    JOINED: THREADS,
    CALLED: THREADS + PER_PEER * (WORKERS - 1),
    RESTED: THREADS + PER_PEER * (WORKERS - 1),
}


class Usage(NamedTuple):
    """Of one process.

    Attributes:
      threads: Python's, which are jdist's and the main one.
      others: Those of libraries: XLA's pool, gloo's.
      descriptors: Open files.
      private: MiB of memory that no other process shares.
    """

    threads: int
    others: int
    descriptors: int
    private: float


class Report(NamedTuple):
    """One worker's: begin and end of what all do together, calls, and usage."""

    spans: dict[str, list[tuple[float, float]]]
    calls: dict[str, list[float]]
    usage: dict[str, Usage]


def measure() -> list[Case]:
    """Times of the group, times of calls, and what each worker has."""
    begun = time.monotonic()
    with TemporaryDirectory() as folder:
        found = rpc.spawn(_work, args=(folder,), nprocs=WORKERS, timeout=170)
    started = max(report.spans["join"][0][0] for report in found) - begun
    spans = {
        name: _timing(_together([report.spans[name] for report in found]))
        for name in found[0].spans
    }
    calls = {
        name: timing([s for report in found for s in report.calls[name]])
        for name in found[0].calls
    }
    join = Goal(
        "until all have joined", spans["join"], JOIN * max(1, WORKERS / 64), unit=" s"
    )
    states = {
        state: [report.usage[state] for report in found] for state in found[0].usage
    }
    return [
        Case(
            f"{WORKERS} workers together",
            spans,
            note=f"{started:.1f} s before, to start all of them and to import JAX",
            goals=[join],
        ),
        Case(
            f"a call between {WORKERS} workers that all call",
            calls,
            note="; ".join(
                f"{state}: {_shown(all_)}" for state, all_ in states.items()
            ),
            goals=[
                Goal(
                    f"threads of a worker, {state}",
                    _extremes([one.threads for one in states[state]]),
                    limit,
                )
                for state, limit in _LIMITS.items()
            ],
        ),
    ]


def echo(value: Any) -> Any:
    """Gives it back."""
    return value


def usage() -> Usage:
    """That of this process."""
    tasks = len(os.listdir("/proc/self/task"))
    threads = threading.active_count()
    private = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            private += int(line.split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    return Usage(threads, tasks - threads, descriptors, private / 1024)


def _work(rank: int, folder: str) -> Report:
    report = Report({}, {}, {})

    def timed(name: str, act: Callable[[], Any]) -> None:
        begin = time.monotonic()
        act()
        report.spans.setdefault(name, []).append((begin, time.monotonic()))

    _await_all(Path(folder), rank)
    me = f"worker{rank}"
    timed("join", lambda: rpc.init_rpc(me, allow=("benchmarks",)))
    for _ in range(ROUNDS):
        timed("barrier", rpc.barrier)
    report.usage[JOINED] = usage()
    value = np.arange(9.0).reshape(3, 3)
    # Each begins with another one: else all would call the same worker at a time.
    others = [f"worker{(rank + k) % WORKERS}" for k in range(1, WORKERS)]
    for _ in range(ROUNDS):
        rpc.barrier()
        _call(report, "synchronous", others, value)
        rpc.barrier()
        _call(report, "asynchronous", others, value)
    report.usage[CALLED] = usage()
    time.sleep(PAUSE)
    report.usage[RESTED] = usage()
    rpc.barrier()
    timed("shutdown", rpc.shutdown)
    return report


def _call(report: Report, name: str, others: Sequence[str], value: Any) -> None:
    begin = time.monotonic()
    if name == "synchronous":
        for other in others:
            rpc.rpc_sync(other, echo, args=(value,))
    else:
        rpc.wait_all([rpc.rpc_async(other, echo, args=(value,)) for other in others])
    seconds = (time.monotonic() - begin) / len(others)
    report.calls.setdefault(name, []).append(seconds)


def _await_all(folder: Path, rank: int) -> None:
    """Waits for the others' files: before it has joined, a worker has no barrier."""
    (folder / f"{rank}").touch()
    while len(os.listdir(folder)) < WORKERS:
        time.sleep(0.02)


def _together(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Of each round the seconds from the last one's begin to the last one's end."""
    return [
        max(end for _, end in one) - max(begin for begin, _ in one)
        for one in zip(*spans, strict=True)
    ]


def _timing(seconds: list[float]) -> Timing:
    """As `timing`; of a single one itself."""
    if len(seconds) == 1:
        (only,) = seconds
        return Timing(only, only, only, 1)
    return timing(seconds)


def _extremes(counts: Sequence[int]) -> Figure:
    """The most, as what is held to a limit; and the least."""
    return Figure(max(counts), min(counts), max(counts))


def _shown(usages: Sequence[Usage]) -> str:
    """The most of each, of all workers."""
    most = Usage(*map(max, zip(*usages, strict=True)))
    return (
        f"at most {most.threads} threads, {most.others} of libraries, "
        f"{most.descriptors} descriptors, {most.private:.0f} MiB of its own"
    )

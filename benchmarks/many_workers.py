"""What do many workers on one machine take: to meet, to call each other, and to end?

`JDIST_BENCHMARK_WORKERS` processes (16 by default), each a worker and not pinned. Each
calls every other one, first by synchronous calls, one after another, and then by
asynchronous ones, all at once. The duration is mostly that of so many processes on the
cores, so it is given per call.

All have imported JAX before the first one joins: the import takes a second of a core
for each process and is no cost of jdist. Times of collective steps start when the last
worker enters and end when the last one leaves.
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
"""Seconds without a call after which a worker's threads count as idle."""

THREADS, PER_PEER = 8, 1
JOIN = 10.0
"""Seconds within which up to 64 workers should join, on two cores."""

JOINED, CALLED, RESTED = "joined", "after the calls", f"{PAUSE:g} s later"
# Rank 0 has exchanged messages with all others once they have joined.
_LIMIT = THREADS + PER_PEER * (WORKERS - 1)


class Usage(NamedTuple):
    """Resources of one process.

    Attributes:
      threads: Python threads: jdist's and the main one.
      others: Threads of libraries, such as XLA's pool and gloo's.
      descriptors: Open file descriptors.
      private: MiB of memory that no other process shares.
    """

    threads: int
    others: int
    descriptors: int
    private: float


class Report(NamedTuple):
    """A worker's begin and end of collective steps, seconds of calls, and resources."""

    spans: dict[str, list[tuple[float, float]]]
    calls: dict[str, list[float]]
    usage: dict[str, Usage]


def measure() -> list[Case]:
    """Times of the group and of calls, with the resources of each worker."""
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
                    _LIMIT,
                )
                for state in states
            ],
        ),
    ]


def echo(value: Any) -> Any:
    """Returns its argument."""
    return value


def usage() -> Usage:
    """The resources of this process."""
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
    # Each starts with another worker; otherwise all would call the same one at a time.
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
    """Waits for the files of all others; `rpc.barrier` needs a group."""
    (folder / f"{rank}").touch()
    while len(os.listdir(folder)) < WORKERS:
        time.sleep(0.02)


def _together(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """For each round the seconds from the last begin to the last end."""
    return [
        max(end for _, end in one) - max(begin for begin, _ in one)
        for one in zip(*spans, strict=True)
    ]


def _timing(seconds: list[float]) -> Timing:
    """Computes `timing`, also for a single value."""
    if len(seconds) == 1:
        (only,) = seconds
        return Timing(only, only, only, 1)
    return timing(seconds)


def _extremes(counts: Sequence[int]) -> Figure:
    """The maximum as the median, which is held to a limit, and the minimum."""
    return Figure(max(counts), min(counts), max(counts))


def _shown(usages: Sequence[Usage]) -> str:
    """The maximum of each resource over all workers, as text."""
    most = Usage(*map(max, zip(*usages, strict=True)))
    return (
        f"at most {most.threads} threads, {most.others} of libraries, "
        f"{most.descriptors} descriptors, {most.private:.0f} MiB of its own"
    )

"""References: beside torch's, many at once, and through many workers; what grows.

`remote` and `to_here` of a 3x3 array: pairs of processes of jdist and of torch take
turns. Then 10 000 references are created and dropped, and 1000 are passed on through
eight workers, each of which fetches the value. Memory, threads and descriptors of all
workers are read after the first tenth and after the last, when no reference is left.
"""

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from benchmarks import _rref_torch
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Job, Pair, Spent, timed
from benchmarks.rpc_load import usage
from jdist import rpc

GOAL = 0.4
"""Goal for the ratio to torch's time."""
ROUNDS, CALLS = 20, 300
TENTHS = 10
CREATED = 10_000
FORWARDED = 1000
WORKERS = 8
_PATIENCE = 60.0


def measure() -> list[Case]:
    """The three cases that the module's docstring describes."""
    created = rpc.spawn(_create, nprocs=2, pin=1)[0]
    forwarded = rpc.spawn(_forward, nprocs=WORKERS)[0]
    return [_beside_torch(), created, forwarded]


# --- beside torch ---


def _beside_torch() -> Case:
    prepared = {"jdist": _prepare}
    if importlib.util.find_spec("torch") is not None:
        prepared["torch"] = _rref_torch.prepare
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(Pair(prepare, None))
            for name, prepare in prepared.items()
        }
        for pair in pairs.values():
            pair.run("remote, to_here", CALLS)
        for _ in range(ROUNDS):
            for name, pair in pairs.items():
                seconds[name].append(pair.run("remote, to_here", CALLS).elapsed)
    timings = {name: timing(values) for name, values in seconds.items()}
    goals = [
        Goal("of torch's time", ratio(timings["jdist"], timings[other]), GOAL)
        for other in timings.keys() & {"torch"}
    ]
    return Case("remote and to_here of a 3x3 array", timings, goals=goals)


@contextmanager
def _prepare(rank: int) -> Iterator[dict[str, Job]]:
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    x = np.random.default_rng(0).random((3, 3))

    def call() -> Any:
        return rpc.remote("worker1", negative, args=(x,)).to_here()

    def job(calls: int) -> Spent:
        return timed(call, lambda last: None, calls) if rank == 0 else Spent(0.0, 0.0)

    yield {"remote, to_here": job}
    rpc.shutdown()


def negative(x: Any) -> Any:
    """The computation of a value on its owner."""
    return -x


# --- many ---


def _create(rank: int) -> Case | None:
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    case = None
    if rank == 0:
        x = np.random.default_rng(1).random((3, 3))

        def wave(count: int) -> None:
            held = [rpc.remote("worker1", negative, args=(x,)) for _ in range(count)]
            held[-1].to_here()

        case = _waves(f"{CREATED} references created and dropped", CREATED, wave)
    rpc.shutdown()
    return case


def _forward(rank: int) -> Case | None:
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    case = None
    if rank == 0:
        x = np.random.default_rng(2).random((3, 3))
        path = [f"worker{number}" for number in range(1, WORKERS)]

        def wave(count: int) -> None:
            made = (rpc.remote(path[0], negative, args=(x,)) for _ in range(count))
            arrived = [_hand_on(rref, path) for rref in made]
            for total in rpc.wait_all(arrived):
                np.testing.assert_allclose(total, -x.sum() * len(path))

        name = f"{FORWARDED} references handed on through {WORKERS} workers"
        case = _waves(name, FORWARDED, wave)
    rpc.barrier()
    rpc.shutdown()
    return case


def _hand_on(rref: rpc.RRef[Any], path: list[str]) -> rpc.Future[Any]:
    return rpc.rpc_async(path[0], relay, args=(rref, path[1:]))


@rpc.async_execution
def relay(rref: rpc.RRef[Any], path: list[str]) -> rpc.Future[Any]:
    """Fetches the value and passes the reference on; returns the sum over the path."""
    total = rref.to_here().sum()
    if path:
        return _hand_on(rref, path).then(lambda further: total + further.value())
    last: rpc.Future[Any] = rpc.Future()
    last.set_result(total)
    return last


def _waves(name: str, count: int, wave: Callable[[int], None]) -> Case:
    everybody = [info.name for info in rpc.get_worker_infos()]
    seconds, seen = [], []
    for tenth in range(TENTHS + 1):
        start = time.perf_counter()
        wave(count // TENTHS)
        for worker in everybody:
            rpc.rpc_sync(worker, settle)
        if tenth:  # the first tenth is a warm-up
            seconds.append((time.perf_counter() - start) / (count // TENTHS))
        if tenth in (1, TENTHS):
            seen.append([rpc.rpc_sync(worker, usage) for worker in everybody])
    grown = [
        f"{what} {sum(one[what] for one in seen[0])} -> "
        f"{sum(one[what] for one in seen[1])}"
        for what in seen[0][0]
    ]
    timings: dict[str, Timing] = {"per reference, until all is freed": timing(seconds)}
    note = f"of all workers, after the first and the last tenth: {', '.join(grown)}"
    return Case(name, timings, note=note)


def settle() -> None:
    """Waits until this worker owns no remote references and holds none.

    Raises:
      AssertionError: References are left after the timeout.
    """
    until, pause = time.monotonic() + _PATIENCE, threading.Event()
    while any(_counts().values()):
        if time.monotonic() > until:
            raise AssertionError(f"{os.getpid()} still has references: {_counts()}")
        pause.wait(0.002)


def _counts() -> dict[str, int]:
    told = rpc.debug_info()
    return {name: told[name] for name in told if name.startswith("num_")}

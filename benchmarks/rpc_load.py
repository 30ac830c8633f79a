"""100 000 calls between two processes: speed first and last, and what grows.

Half of them are synchronous, half asynchronous in waves of a thousand, with NumPy
arrays, JAX arrays and occasional exceptions. Memory, threads and descriptors of both
workers are read after the first tenth and after the last.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks._harness import Case, timing
from jdist import rpc

CALLS = 100_000
WAVE = 1000


def measure() -> list[Case]:
    """One case for each kind of call, with the growth of resources in the note."""
    return rpc.spawn(_drive, nprocs=2, pin=1)[0]


def echo(value: Any) -> Any:
    """Returns its argument."""
    return value


def fail(value: Any) -> Any:
    """Raises the error that the caller must receive."""
    raise ValueError(f"asked to fail: {value}")


def usage() -> dict[str, int]:
    """Resident KiB, threads and descriptors of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "resident KiB": pages * os.sysconf("SC_PAGESIZE") // 1024,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _drive(rank: int) -> list[Case]:
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    cases = []
    if rank == 0:
        rng = np.random.default_rng(0)
        values = [rng.random((3, 3)), jnp.asarray(rng.random(7)), {"n": 1, "s": "two"}]
        cases = [
            _case("synchronous", values, _one),
            _case("asynchronous", values, _wave),
        ]
    rpc.shutdown()
    return cases


def _case(name: str, values: list[Any], calls: Callable[[list[Any]], None]) -> Case:
    waves = CALLS // 2 // WAVE
    seconds, seen = [], []
    for wave in range(waves):
        start = time.perf_counter()
        calls(values)
        seconds.append((time.perf_counter() - start) / WAVE)
        if wave in (waves // 10, waves - 1):
            seen.append((usage(), rpc.rpc_sync("worker1", usage)))
    grown = [
        f"{worker} {what} {first[what]} -> {last[what]}"
        for worker, first, last in zip(("caller", "callee"), *seen, strict=True)
        for what in first
    ]
    tenth = waves // 10
    timings = {
        "last tenth, per call": timing(seconds[-tenth:]),
        "first tenth, per call": timing(seconds[:tenth]),
    }
    return Case(f"{waves * WAVE} {name} calls", timings, note="; ".join(grown))


def _one(values: list[Any]) -> None:
    for number in range(WAVE):
        rpc.rpc_sync("worker1", echo, args=(values[number % len(values)],))
    _failing(lambda: rpc.rpc_sync("worker1", fail, args=(3,)))


def _wave(values: list[Any]) -> None:
    futures = [
        rpc.rpc_async("worker1", echo, args=(values[number % len(values)],))
        for number in range(WAVE)
    ]
    failing = rpc.rpc_async("worker1", fail, args=(3,))
    for future in futures:
        future.wait()
    _failing(failing.wait)


def _failing(call: Callable[[], Any]) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError("the callee's exception did not arrive")

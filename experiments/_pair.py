"""Two processes on one machine, each pinned to its own core: where figures mean more.

Several CPU devices of one process share its threads, so that neither a speed-up nor the
cost of a collective can be measured there. Here each process is one device, and
collectives use gloo.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

DEADLINE = 900


def run_pair(module: str, job: Mapping[str, Any]) -> Any:
    """Runs `python -m module` twice with a job; returns what rank 0 prints, from JSON.

    Raises:
      RuntimeError: A process failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [worker.communicate(timeout=DEADLINE) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, worker in enumerate(workers):
        if worker.returncode:
            raise RuntimeError(f"process {rank} failed:\n{outputs[rank][1]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def can_pin(processes: int = 2) -> str:
    """The reason why `processes` cannot be pinned here; empty if they can."""
    if not hasattr(os, "sched_getaffinity"):
        return "this system cannot pin a process to a core"
    cores = len(os.sched_getaffinity(0))
    if cores >= processes:
        return ""
    if cores == 1:
        return "there is one core only"
    return f"there are {cores} cores for {processes} processes"


def join(arguments: Sequence[str]) -> tuple[int, Any]:
    """Pins this process and joins the other; returns the rank and the job.

    Must be called first in each process: the settings must be made before JAX starts.
    """
    rank, port, job = int(arguments[0]), arguments[1], json.loads(arguments[2])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank]})
    # Batch scheduling spares gloo a scheduler tick in each call.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Keeping freed memory spares large buffers their page faults.
    _keep_freed_memory()
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    return rank, job


def _keep_freed_memory() -> None:
    """Sets glibc's mallopt; other C libraries are left alone."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    mmap_threshold, trim_threshold, arena_max = -3, -1, -8
    library.mallopt(mmap_threshold, 1 << 30)
    library.mallopt(trim_threshold, 2**31 - 1)
    library.mallopt(arena_max, 1)

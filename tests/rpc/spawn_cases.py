"""What the tests let spawned processes do; without JAX, so that they start fast."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from tests.rpc.process_watch import pause, report_with_child

_FIGURES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")
_FIGURES += ("fsmblks", "uordblks", "fordblks", "keepcost")


def environment(rank, *names):
    """Its rank and its variables."""
    return rank, {name: os.environ.get(name) for name in names}


def join_jax(rank, port):
    """How many processes JAX sees at this port's coordinator."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
    try:
        return jax.process_count()
    finally:
        jax.distributed.shutdown()


def echo(rank, value):
    """A value there and back, and what came through standard input."""
    return rank, value, sys.stdin.read()


def classes_of_a_worker(rank, first):
    """The scheduling classes of its threads, by who started them; who did so first."""
    import jax

    from jdist import data_parallel, pipeline, rpc

    def threads():
        return set(map(int, os.listdir("/proc/self/task")))

    def classes_of(numbers):
        found = set()
        for thread in numbers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                found.add(os.sched_getscheduler(thread))
        return found

    def started_by(name):
        before = threads()
        acts[name]()
        # Python's threads are rpc's, whose pool starts some at any time.
        pythons = {thread.native_id for thread in threading.enumerate()}
        started = threads() - before
        own = started & pythons if name == "rpc" else started - pythons
        return classes_of(own)

    def compute():
        with data_parallel.process_group():
            jax.block_until_ready(jax.numpy.zeros(3) + 1)

    def work():
        rpc.init_rpc("worker", rank=0, world_size=1)

    acts = {"jax": compute, "rpc": work}
    seen = {"begun": {os.sched_getscheduler(0)}}
    for name in sorted(acts, key=lambda name: name != first):
        seen[name] = started_by(name)
    seen["main"] = {os.sched_getscheduler(0)}
    pipeline.Pipeline(
        [pipeline.Stage(lambda params, x: params * x)],
        lambda outputs, batch: outputs,
        pipeline.gpipe(1, 1),
        pipeline.Workers(["worker"]),
    )
    seen["pipeline"] = classes_of(threads())
    rpc.shutdown()
    return seen


def raise_beside(rank, port, gate):
    """Rank 1 raises when the test opens the gate; rank 0 would go on for ever."""
    report_with_child(port, f"rank{rank}")
    if rank == 0:
        pause()
    Path(gate).read_text()
    _deeper(rank)


def _deeper(rank):
    raise LookupError(f"rank {rank} found nothing")


def die_by(rank, port, gate, number):
    """As `raise_beside`, by a signal."""
    report_with_child(port, f"rank{rank}")
    if rank == 0:
        pause()
    Path(gate).read_text()
    os.kill(os.getpid(), number)
    pause()


def complain_after(rank, gate):
    """Rank 0 raises first and ends last; its peer's complaint arrives before it."""
    if rank == 0:
        atexit.register(_open_and_wait, gate)
        raise LookupError("the cause")
    Path(gate).read_text()
    raise ConnectionError("rank 0 is gone")


def _open_and_wait(gate):
    Path(gate).write_text("go")
    pause()


def leave(rank, how):
    """Ends in ways other than returning something that can be carried."""
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(0)
    if how == "late":
        atexit.register(os._exit, 7)
        return None
    return lambda: rank


def refuse_to_end(rank, port, gate):
    """Rank 0 ignores SIGTERM; rank 1 fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise_beside(rank, port, gate)


def tidy_up(rank, port, gate, note):
    """Rank 0 uses the grace period; rank 1 fails."""
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: (_write(note), sys.exit(0)))
    raise_beside(rank, port, gate)


def _write(note):
    Path(note).write_text("tidy")


def leave_a_child(rank, port):
    """Returns, but not all that it started does."""
    report_with_child(port, f"rank{rank}")
    return rank


def wait_for_ever(rank, port):
    """Reports, with a child, and goes on."""
    report_with_child(port, f"rank{rank}")
    pause()


def settings(rank):
    """What is in force in this process, as the system tells it."""
    loaded = "jax" in sys.modules
    names = ("PJRT_NPROC", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX")
    return {
        "class": os.sched_getscheduler(0),
        "cores": os.sched_getaffinity(0),
        "variables": {name: os.environ.get(name) for name in names},
        "mapped apart": mapped_apart(),
        "begun in batches": "JDIST_BATCH_CLASS" in os.environ,
        "jax first": loaded,
    }


def mapped_apart():
    """Whether the allocator gives a 64 MiB block a mapping of its own."""

    class Figures(ctypes.Structure):
        """`struct mallinfo2` of glibc."""

        _fields_ = [(name, ctypes.c_size_t) for name in _FIGURES]

    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Figures
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    before = library.mallinfo2().hblks
    block = library.malloc(2**26)
    apart = library.mallinfo2().hblks - before
    library.free(block)
    return bool(apart)


def asks_for_large_pages(rank):
    """Whether the mapping of a 64 MiB block is one that should have large pages."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    block = library.malloc(2**26)
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
            within = begin <= block + 2**25 < end
        elif within and name == "VmFlags:":
            library.free(block)
            return "hg" in rest
    raise LookupError("the block lies in no mapping")


def bytes_of_products(rank):
    """Of intermediate results at a time, in a program of eight products."""
    import jax
    import jax.numpy as jnp

    def add(sums, factors):
        return [a + x.T @ x for a, x in zip(sums, factors, strict=True)]

    sums = [jnp.zeros((256, 256), jnp.float32)] * 8
    factors = [jnp.ones((4, 256), jnp.float32)] * 8
    compiled = jax.jit(add, donate_argnums=0).lower(sums, factors).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def callback_with_large_argument(rank):
    """On one core, without room in XLA's pool, this never returns."""
    import jax
    import numpy as np

    def total(x):
        return np.float32(np.asarray(x).sum())

    @jax.jit
    def program(x):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return jax.experimental.io_callback(total, shape, x * 2)

    x = np.arange(2**16, dtype=np.float32) % 7
    return float(program(x)), float(total(x * 2))


def serve_the_parent(rank):
    from jdist import rpc  # the other cases begin without JAX

    rpc.init_rpc(f"worker{rank}", world_size=3, allow=["tests"])
    rpc.shutdown()
    return rank

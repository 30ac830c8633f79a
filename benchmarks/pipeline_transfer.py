"""How does a value get from the mesh of one process to that of another one?

A message is gathered by its sender, divided by its receiver, and answered. The
alternative is a program over the devices of both meshes, which sends each part to the
device that needs it, by gloo; both processes have to enter it at the same time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks._harness import Case, timing
from benchmarks._pair import Job, Pair, idle, timed
from jdist import data_parallel, rpc

ROUNDS, WARMUP, CALLS = 15, 2, 5
ROWS = 64
SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
MESSAGE, PROGRAM = "a message", "a program over both meshes"
EACH = 2  # devices of each process


def measure() -> list[Case]:
    """A case for each size, with the contenders in turn."""
    with Pair(prepare, None, pin=0) as pair:
        spent: dict[str, list[float]] = {job: [] for job in pair.jobs}
        for turn in range(WARMUP + ROUNDS):
            for job in pair.jobs:
                found = pair.run(job, CALLS)
                if turn >= WARMUP:
                    spent[job].append(found.elapsed)
    return [
        Case(size, {way: timing(spent[f"{size}, {way}"]) for way in (MESSAGE, PROGRAM)})
        for size in SIZES
    ]


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """The jobs of one of two processes, each with a mesh of its own."""
    jax.config.update("jax_num_cpu_devices", EACH)
    # The processes are stopped during the turns of others and send no heartbeats.
    options = rpc.RpcOptions(heartbeat_timeout=3600)
    with data_parallel.process_group(heartbeat=3600):
        rpc.init_rpc(f"worker{rank}", options=options, allow=["benchmarks"])
        jobs: dict[str, Job] = {}
        for size, count in SIZES.items():
            value = np.ones((ROWS, count // 4 // ROWS), np.float32)
            send = partial(timed, sending(value), jax.block_until_ready)
            jobs[f"{size}, {MESSAGE}"] = send if rank == 0 else idle
            step = permuting(value)
            jobs[f"{size}, {PROGRAM}"] = partial(timed, step, jax.block_until_ready)
        yield jobs
        rpc.shutdown()


def sending(value: np.ndarray) -> Callable[[], None]:
    """Sends from a mesh of this process to the other's, in a message."""
    held = jax.device_put(value, by_rows())
    return lambda: rpc.rpc_sync("worker1", take, (held,))


def take(value: jax.Array) -> None:
    """Divides the value over this process's devices again."""
    jax.block_until_ready(jax.device_put(value, by_rows()))


def by_rows() -> NamedSharding:
    """The sharding by rows over the devices of this process."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def permuting(value: np.ndarray) -> Callable[[], jax.Array]:
    """Sends by a program that both processes run."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, EACH), ("stage", "data"))
    place = NamedSharding(mesh, PartitionSpec(("stage", "data")))
    both = np.concatenate([value, np.zeros_like(value)])
    held = jax.make_array_from_callback(both.shape, place, lambda part: both[part])
    move = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, "stage", [(0, 1)]),
            mesh=mesh,
            in_specs=place.spec,
            out_specs=place.spec,
        )
    )

    def step() -> jax.Array:
        # Waits each time, as the contender does for its answer.
        return jax.block_until_ready(move(held))

    return step

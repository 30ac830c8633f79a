"""What does a pipeline cost as one SPMD program, beside a process per stage?

Two processes, each pinned to one core, have one of two equal stages each: 6 layers of
1024 x 1024, a batch of 512, in micro-batches. The process executor sends values by rpc
while it computes; the SPMD program exchanges them at the clocks of its table, by
gloo. Both pairs live at once and take turns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks._harness import Case, timing
from benchmarks._pair import Job, Pair, Spent, timed
from jdist import data_parallel, pipeline, rpc
from jdist.rpc import ProcessSettings

WIDTH, LAYERS, EXAMPLES = 1024, 6, 512
MICRO_BATCHES = (2, 4, 8, 16)
FAMILIES = {
    "1F1B": pipeline.one_f_one_b,
    "GPipe": pipeline.gpipe,
    "ZB-H1": pipeline.zero_bubble,
}
SETTINGS = ProcessSettings(callback_threads=0)
ROUNDS, WARMUP = 10, 2
GOAL = 1.15


def measure() -> list[Case]:
    """A case for each number of micro-batches."""
    with (
        Pair(prepare_workers, SETTINGS) as workers,
        Pair(prepare_program, SETTINGS) as program,
    ):
        contenders = [(workers, "process executor", "1F1B")]
        contenders += [(program, "one program", family) for family in FAMILIES]
        return [_case(contenders, m) for m in MICRO_BATCHES]


def _case(contenders: list[tuple[Pair, str, str]], m: int) -> Case:
    spent: dict[str, list[float]] = {}
    for turn in range(WARMUP + ROUNDS):
        for pair, name, family in contenders:
            found = pair.run(f"{family} {m}", 1)
            if turn >= WARMUP:
                spent.setdefault(f"{name}, {family}", []).append(found.elapsed)
    timings = {name: timing(seconds) for name, seconds in spent.items()}
    note = f"goal: the best of one program within {GOAL} of the process executor"
    return Case(f"2 stages of {LAYERS} layers, m = {m}", timings, note=note)


# --- in the processes ---


@contextmanager
def prepare_workers(rank: int) -> Iterator[dict[str, Job]]:
    """One worker of rpc in each process."""
    rpc.init_rpc(f"worker{rank}")
    yield _jobs(["worker0", "worker1"], {"1F1B": FAMILIES["1F1B"]}, rpc.barrier)
    rpc.shutdown()


@contextmanager
def prepare_program(rank: int) -> Iterator[dict[str, Job]]:
    """One device of a mesh in each process."""
    with data_parallel.process_group(axis="stage") as mesh:
        yield _jobs(mesh, FAMILIES, _barrier(mesh))


def _jobs(places: Any, families: Any, together: Callable[[], Any]) -> dict[str, Job]:
    params, batch = _problem()
    jobs: dict[str, Job] = {}
    for name, family in families.items():
        for m in MICRO_BATCHES:
            pipe = pipeline.Pipeline(_stages(), _losses, family(2, m), places)
            call = partial(pipe.value_and_grad, pipe.place(params), batch)
            jobs[f"{name} {m}"] = partial(_timed, together, call)
    return jobs


def _timed(together: Callable[[], Any], call: Callable[[], Any], calls: int) -> Spent:
    together()
    return timed(call, jax.block_until_ready, calls)


def _barrier(mesh: Mesh) -> Callable[[], Any]:
    """Nobody starts before all are there."""
    batch, weights = data_parallel.shard_batch(
        np.ones((1, 1), np.float32), mesh, rows=1, axis="stage"
    )
    summed = data_parallel.value_and_grad(lambda w, x: x @ w, mesh, axis="stage")
    w = np.ones(1, np.float32)
    return lambda: jax.block_until_ready(summed(w, batch, weights))


def _stages() -> list[pipeline.Stage]:
    names = ("x", "h", "y")
    return [
        pipeline.Stage(_layers, names[j : j + 1], names[j + 1 : j + 2]) for j in (0, 1)
    ]


def _layers(params: Any, x: jax.Array) -> jax.Array:
    for matrix, offset in params:
        x = jax.nn.relu(x @ matrix + offset)
    return x


def _losses(y: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((y - batch["target"]) ** 2, axis=1)


def _problem() -> tuple[list[Any], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=WIDTH**-0.5).astype(np.float32)

    params = [
        [(normal(WIDTH, WIDTH), normal(WIDTH)) for _ in range(LAYERS)] for _ in (0, 1)
    ]
    return params, {"x": normal(EXAMPLES, WIDTH), "target": normal(EXAMPLES, WIDTH)}

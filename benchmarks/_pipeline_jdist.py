"""Jobs of a pair of jdist processes: a pipeline's steps, and the same work unsplit."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _pipeline_models as models
from benchmarks._pair import Job, Spent, idle, timed
from jdist import pipeline, rpc

WORKERS = ["worker0", "worker1"]
FAMILIES = {"1F1B": pipeline.one_f_one_b, "ZB-H1": pipeline.zero_bubble}


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Every schedule with every number of micro-batches, and one core's work."""
    rpc.init_rpc(f"worker{rank}")
    yield _jobs(rank, models.SMALL, FAMILIES)
    rpc.shutdown()


def _jobs(rank: int, count: int, families: Any) -> dict[str, Job]:
    params, batch = stage_params(), examples(count)
    jobs: dict[str, Job] = {}
    alone: dict[str, Callable[[], Any]] = {models.WHOLE: _whole(count)}
    for m in models.MICRO_BATCHES:
        one = pipeline.Pipeline(stages(), losses, pipeline.gpipe(2, m))
        alone[models.unsplit(m)] = functools.partial(one.value_and_grad, params, batch)
        for name, family in families.items():
            pipe = pipeline.Pipeline(stages(), losses, family(2, m), WORKERS)
            own = pipe.place(params)
            both = functools.partial(pipe.value_and_grad, own, batch)
            jobs[models.piped(name, m)] = functools.partial(_together, both)
    for job, call in alone.items():
        done = functools.partial(timed, call, jax.block_until_ready)
        jobs[job] = done if rank == 0 else idle
    return jobs


def _together(call: Callable[[], Any], calls: int) -> Spent:
    rpc.barrier()
    return timed(call, jax.block_until_ready, calls)


def layers(params: Any, x: jax.Array) -> jax.Array:
    """A part of the stack."""
    for matrix, offset in params:
        x = jax.nn.relu(x @ matrix + offset)
    return x


def losses(y: jax.Array, batch: Any) -> jax.Array:
    """One for each example."""
    return jnp.mean((y - batch["target"]) ** 2, axis=1)


def stages() -> list[pipeline.Stage]:
    """Two halves of the stack."""
    names = ("x", "h", "y")
    return [
        pipeline.Stage(layers, names[j : j + 1], names[j + 1 : j + 2]) for j in (0, 1)
    ]


def stage_params() -> list[Any]:
    """Of both stages."""
    found = jax.device_put(models.weights())
    return [found[: models.LAYERS // 2], found[models.LAYERS // 2 :]]


def examples(count: int) -> dict[str, jax.Array]:
    """The batch."""
    x, y = models.examples(count)
    return {"x": jnp.asarray(x), "target": jnp.asarray(y)}


def _whole(count: int) -> Callable[[], Any]:
    gradient = jax.jit(
        jax.value_and_grad(lambda p, b: losses(layers(p, b["x"]), b).mean())
    )
    return functools.partial(
        gradient, jax.device_put(models.weights()), examples(count)
    )

"""Jobs of a pair of jdist processes: a pipeline's steps, and the same work unsplit."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _pipeline_models as models
from benchmarks._pair import Job, Spent, idle, timed
from jdist import pipeline, rpc

Family = Callable[[int, int], pipeline.Schedule]
WORKERS = ["worker0", "worker1"]
FAMILIES: dict[str, Family] = {
    "1F1B": pipeline.one_f_one_b,
    "ZB-H1": pipeline.zero_bubble,
}


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Every schedule with every number of micro-batches, and one core's work."""
    rpc.init_rpc(f"worker{rank}")
    params, batch = stage_params(), examples(models.SMALL)
    jobs = _piped(models.SMALL, FAMILIES) | _alone(rank, _unsplit(params, batch))
    for m in models.MICRO_BATCHES:
        pipe = pipeline.Pipeline(stages(), losses, pipeline.one_f_one_b(2, m), WORKERS)
        step = functools.partial(pipe.value_and_grad, pipe.place(params), batch)
        jobs[models.predicted(m)] = functools.partial(_predicted, pipe, step)
    yield jobs | _empty(rank)
    rpc.shutdown()


@contextmanager
def prepare_large(rank: int) -> Iterator[dict[str, Job]]:
    """1F1B of a large batch, and the whole of it on one core."""
    rpc.init_rpc(f"worker{rank}")
    family = {"1F1B": FAMILIES["1F1B"]}
    whole = {models.WHOLE: _whole(models.LARGE)}
    yield _piped(models.LARGE, family) | _alone(rank, whole)
    rpc.shutdown()


def _piped(count: int, families: Mapping[str, Family]) -> dict[str, Job]:
    params, batch = stage_params(), examples(count)
    jobs: dict[str, Job] = {}
    for name, family in families.items():
        for m in models.MICRO_BATCHES:
            pipe = pipeline.Pipeline(stages(), losses, family(2, m), WORKERS)
            step = functools.partial(pipe.value_and_grad, pipe.place(params), batch)
            jobs[models.piped(name, m)] = functools.partial(_together, step)
    return jobs


def _unsplit(params: Any, batch: Any) -> dict[str, Callable[[], Any]]:
    """The same compiled stages with the same micro-batches, one after another."""
    calls: dict[str, Callable[[], Any]] = {models.WHOLE: _whole(models.SMALL)}
    for m in models.MICRO_BATCHES:
        pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(2, m))
        calls[models.unsplit(m)] = functools.partial(pipe.value_and_grad, params, batch)
    return calls


def _alone(rank: int, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Job]:
    """What one process does while the other waits."""
    wait = jax.block_until_ready
    return {
        name: functools.partial(timed, call, wait) if rank == 0 else idle
        for name, call in calls.items()
    }


def _together(call: Callable[[], Any], calls: int) -> Spent:
    rpc.barrier()
    return timed(call, jax.block_until_ready, calls)


def _predicted(pipe: pipeline.Pipeline, step: Callable[[], Any], calls: int) -> Spent:
    rpc.barrier()
    _, run = pipeline.timed(pipe, step)
    costs = pipeline.Costs.measured(run)
    return Spent(pipeline.simulate(pipe.schedule, costs).makespan, 0.0)


def _empty(rank: int) -> dict[str, Job]:
    """Stages that pass on what they are given, in one process and in two."""
    names, m = ("x", "h", "y"), models.MICRO_BATCHES[-1]
    passing = [
        pipeline.Stage(nothing, names[j : j + 1], names[j + 1 : j + 2]) for j in (0, 1)
    ]
    batch = {"x": jnp.ones((m, 1))}
    params = [jnp.ones(1), jnp.ones(1)]
    jobs: dict[str, Job] = {}
    for name, places in ((models.EMPTY, None), (models.EMPTY_PIPED, WORKERS)):
        pipe = pipeline.Pipeline(
            passing, lambda y, batch: y[:, 0], pipeline.one_f_one_b(2, m), places
        )
        actions = 2 * m * (2 if places is None else 1)
        step = functools.partial(pipe.value_and_grad, pipe.place(params), batch)
        jobs[name] = functools.partial(_per_action, step, actions)
    if rank:
        jobs[models.EMPTY] = idle
    return jobs


def nothing(w: jax.Array, x: jax.Array) -> jax.Array:
    """As little as a stage can do that has a gradient."""
    return x + w


def _per_action(step: Callable[[], Any], actions: int, calls: int) -> Spent:
    steps = 20
    spent = timed(step, jax.block_until_ready, calls * steps)
    return Spent(*(seconds / actions for seconds in spent))


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

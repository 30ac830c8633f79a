"""Jobs of a pair of jdist processes: a pipeline's steps, and the same work unsplit."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _pipeline_models as models
from benchmarks._pair import Job, Spent, idle, timed
from jdist import pipeline, rpc

WORKERS = pipeline.Workers(["worker0", "worker1"])
FAMILIES = {
    models.ONE_F_ONE_B: pipeline.one_f_one_b,
    models.SPLIT_DRAIN: lambda n, m: pipeline.split_drain(pipeline.one_f_one_b(n, m)),
    models.ZERO_BUBBLE: pipeline.zero_bubble,
    models.GPIPE: pipeline.gpipe,
}


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Every schedule with every number of micro-batches, and one core's work."""
    rpc.init_rpc(f"worker{rank}")
    params, batch = stage_params(), examples(models.SMALL)
    jobs = piped(models.SMALL, models.OWN) | _alone(rank, _unsplit(params, batch))
    for m in models.MICRO_BATCHES:
        pipe, step = _pipe(models.ONE_F_ONE_B, m, WORKERS, params, batch)
        jobs[models.predicted(m)] = functools.partial(_predicted, pipe, step)
    yield jobs | _empty(rank)
    rpc.shutdown()


@contextmanager
def prepare_one(rank: int) -> Iterator[dict[str, Job]]:
    """1F1B alone."""
    rpc.init_rpc(f"worker{rank}")
    yield piped(models.SMALL, [models.ONE_F_ONE_B])
    rpc.shutdown()


@contextmanager
def prepare_large(rank: int) -> Iterator[dict[str, Job]]:
    """1F1B of a large batch, as it is and split; the whole batch on one core."""
    rpc.init_rpc(f"worker{rank}")
    whole = {models.WHOLE: _whole(models.LARGE)}
    kinds = models.ONE_F_ONE_B, models.SPLIT_DRAIN
    yield piped(models.LARGE, kinds) | _alone(rank, whole)
    rpc.shutdown()


@contextmanager
def prepare_unequal(rank: int) -> Iterator[dict[str, Job]]:
    """Families and what is found, for layers 1 : 2 and for attention and a head."""
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    weights, cut = jax.device_put(models.weights()), models.UNEQUAL[0]
    jobs = _searched(
        "", stages(), losses, [weights[:cut], weights[cut:]], examples(512)
    )
    way = [
        pipeline.Stage(layers, ("x",), ("h",)),
        pipeline.Stage(attended, ("h",), ("y",)),
    ]
    jobs |= _searched(f"{models.HEADED}, ", way, errors, *headed())
    yield jobs
    rpc.shutdown()


FOUND: dict[str, str] = {}
"""What the first process has found, as CSV text."""


def found_text(name: str) -> str:
    """The schedule of a job, for the other process."""
    return FOUND[name]


def _searched(
    name: str, own: Sequence[pipeline.Stage], loss: Any, params: Any, batch: Any
) -> dict[str, Job]:
    """1F1B, ZB-H1 and what is found from the costs of both, with their simulations."""
    m, rank = models.UNEQUAL_STEP, rpc.get_worker_info().id

    def made(schedule: pipeline.Schedule) -> tuple[pipeline.Pipeline, Any]:
        pipe = pipeline.Pipeline(own, loss, schedule, WORKERS)
        return pipe, functools.partial(pipe.value_and_grad, pipe.place(params), batch)

    kinds = {
        models.ONE_F_ONE_B: pipeline.one_f_one_b(2, m),
        models.ZERO_BUBBLE: pipeline.zero_bubble(2, m),
    }
    runs = {}
    for kind, schedule in kinds.items():
        pipe, step = made(schedule)
        jax.block_until_ready(step())
        runs[kind] = pipeline.timed(pipe, step)[1]
    whole = pipeline.Costs.measured(runs[models.ONE_F_ONE_B]).backward
    costs = pipeline.Costs.measured(runs[models.ZERO_BUBBLE], backward=whole)
    if rank == 0:
        limits = pipeline.simulate(kinds[models.ZERO_BUBBLE], costs).peak_bytes
        made_for = functools.partial(pipeline.synthesize, costs, workers=2)
        found = made_for(micro_batches=m, memory=limits, seconds=30.0)
        FOUND[name] = found.schedule.to_csv()
    rpc.barrier()
    text = rpc.rpc_sync("worker0", found_text, args=(name,))
    kinds[models.FOUND] = pipeline.Schedule.from_csv(text, name=models.FOUND)
    jobs: dict[str, Job] = {}
    for kind, schedule in kinds.items():
        pipe, step = made(schedule)
        jobs[name + kind] = functools.partial(_together, rpc.barrier, step)
        jobs[f"{name}simulated, {kind}"] = functools.partial(_predicted, pipe, step)
    return jobs


def piped(
    count: int,
    kinds: Sequence[str],
    places: Any = WORKERS,
    together: Callable[[], Any] = rpc.barrier,
) -> dict[str, Job]:
    """A step of each kind with every number of micro-batches.

    Args:
      count: Examples in a batch.
      kinds: Keys of `FAMILIES`.
      places: The places of the pipelines.
      together: A barrier of all processes.
    """
    params, batch = stage_params(), examples(count)
    return {
        models.piped(kind, m): functools.partial(
            _together, together, _pipe(kind, m, places, params, batch)[1]
        )
        for kind in kinds
        for m in models.MICRO_BATCHES
    }


def _pipe(
    kind: str, m: int, places: Any, params: Any, batch: Any
) -> tuple[pipeline.Pipeline, Callable[[], Any]]:
    """A pipeline and its step."""
    pipe = pipeline.Pipeline(stages(), losses, FAMILIES[kind](2, m), places)
    return pipe, functools.partial(pipe.value_and_grad, pipe.place(params), batch)


def _unsplit(params: Any, batch: Any) -> dict[str, Callable[[], Any]]:
    """The same compiled stages and micro-batches, one after another in one process."""
    calls: dict[str, Callable[[], Any]] = {models.WHOLE: _whole(models.SMALL)}
    for m in models.MICRO_BATCHES:
        calls[models.unsplit(m)] = _pipe(models.GPIPE, m, None, params, batch)[1]
    return calls


def _alone(rank: int, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Job]:
    """Jobs of the first process while the other waits."""
    wait = jax.block_until_ready
    return {
        name: functools.partial(timed, call, wait) if rank == 0 else idle
        for name, call in calls.items()
    }


def _together(
    together: Callable[[], Any], call: Callable[[], Any], calls: int
) -> Spent:
    together()
    return timed(call, jax.block_until_ready, calls)


def _predicted(pipe: pipeline.Pipeline, step: Callable[[], Any], calls: int) -> Spent:
    rpc.barrier()
    _, run = pipeline.timed(pipe, step)
    costs = pipeline.Costs.measured(run)
    return Spent(pipeline.simulate(pipe.schedule, costs).makespan, 0.0)


def _empty(rank: int) -> dict[str, Job]:
    """Stages that return their input, in one process and in two."""
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
    """The least computation of a stage that has a gradient."""
    return x + w


def _per_action(step: Callable[[], Any], actions: int, calls: int) -> Spent:
    # Single steps are too short for the clock.
    steps = 20
    spent = timed(step, jax.block_until_ready, calls * steps)
    return Spent(*(seconds / actions for seconds in spent))


def layers(params: Any, x: jax.Array) -> jax.Array:
    """Computes a part of the stack."""
    for matrix, offset in params:
        x = jax.nn.relu(x @ matrix + offset)
    return x


def attended(params: Any, x: jax.Array) -> jax.Array:
    """Layers of attention over sequences, `(examples, length, width)`, and a head."""
    *blocks, head = params
    for queries, keys, values in blocks:
        scores = (x @ queries) @ jnp.swapaxes(x @ keys, -1, -2)
        x = x + jax.nn.softmax(scores / x.shape[-1] ** 0.5) @ (x @ values)
    return x @ head


def errors(y: jax.Array, batch: Any) -> jax.Array:
    """The cross entropy of each example, `(examples,)`."""
    chosen = jnp.take_along_axis(y, batch["target"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(y, axis=-1) - chosen, axis=-1)


def headed() -> tuple[list[Any], dict[str, jax.Array]]:
    """Parameters of four layers, then attention and a head of 4096; 32 sequences."""
    rng, width, words = np.random.default_rng(2), 512, 4096

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=shape[0] ** -0.5), jnp.float32)

    first = [(normal(width, width), jnp.zeros(width)) for _ in range(4)]
    blocks = [tuple(normal(width, width) for _ in range(3)) for _ in range(2)]
    batch = {
        "x": normal(32, 128, width),
        "target": jnp.asarray(rng.integers(0, words, (32, 128))),
    }
    return [first, [*blocks, normal(width, words)]], batch


def losses(y: jax.Array, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    return jnp.mean((y - batch["target"]) ** 2, axis=1)


def stages() -> list[pipeline.Stage]:
    """The two halves of the stack as stages."""
    ways = ("x", "h"), ("h", "y")
    return [pipeline.Stage(layers, (a,), (b,)) for a, b in ways]


def stage_params() -> list[Any]:
    """The parameters of both stages."""
    found = jax.device_put(models.weights())
    return [found[: models.LAYERS // 2], found[models.LAYERS // 2 :]]


def examples(count: int) -> dict[str, jax.Array]:
    """A batch of `count` examples."""
    x, y = models.examples(count)
    return {"x": jnp.asarray(x), "target": jnp.asarray(y)}


def _whole(count: int) -> Callable[[], Any]:
    gradient = jax.jit(
        jax.value_and_grad(lambda p, b: losses(layers(p, b["x"]), b).mean())
    )
    return functools.partial(
        gradient, jax.device_put(models.weights()), examples(count)
    )

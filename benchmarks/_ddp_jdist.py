"""Jobs of a pair of jdist processes: steps, and their two parts alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks._ddp_models import MODELS, RATE, Model
from benchmarks._pair import Job, Spent, timed
from jdist import data_parallel, optim
from jdist.data_parallel.gradient.communication import Communication
from jdist.reduction import Partial


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """For each model the training step, and its computation and communication alone."""
    with data_parallel.process_group() as mesh:
        together = _barrier(mesh)
        yield {
            f"{model.name}: {name}": partial(_timed, together, call)
            for model in MODELS
            for name, call in _parts(model, mesh, rank).items()
        }


def _timed(together: Callable[[], Any], call: Callable[[], Any], calls: int) -> Spent:
    # Rounds start together; otherwise one process would measure the other's delay.
    together()
    return timed(call, jax.block_until_ready, calls)


def _barrier(mesh: Mesh) -> Callable[[], Any]:
    each = PartitionSpec("data")
    summed = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=mesh,
            in_specs=each,
            out_specs=PartitionSpec(),
        )
    )
    place = NamedSharding(mesh, each)
    ones = jax.make_array_from_process_local_data(place, np.ones(1, np.float32))
    return lambda: jax.block_until_ready(summed(ones))


def losses(params: Any, batch: Any) -> jax.Array:
    """The squared error of each example after all layers, `(examples,)`."""
    x, y = batch
    *hidden, (last, bias) = params
    for matrix, offset in hidden:
        x = jax.nn.relu(x @ matrix + offset)
    return jnp.mean((x @ last + bias - y) ** 2, axis=1)


def plain_step(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """A training step of one device in plain JAX, with its state donated."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean(losses(p, batch)))(
            params
        )
        return *optimizer.step(params, gradient, state), loss

    return step


def _parts(model: Model, mesh: Mesh, rank: int) -> dict[str, Callable[[], Any]]:
    optimizer = optim.sgd(lr=RATE)
    return {
        "step": _step(model, mesh, rank, optimizer),
        "computation": _computation(model, rank, optimizer),
        "communication": _communication(model, mesh),
    }


def _step(
    model: Model, mesh: Mesh, rank: int, optimizer: optim.Optimizer
) -> Callable[[], Any]:
    step = data_parallel.train_step(losses, optimizer, mesh)
    state = step.init(model.weights())
    rows = model.batch
    batch, weights = data_parallel.shard_batch(model.examples(rank), mesh, rows=rows)

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, batch, weights)
        return state, metrics

    return call


def _computation(
    model: Model, rank: int, optimizer: optim.Optimizer
) -> Callable[[], Any]:
    step = plain_step(optimizer)
    params = jax.device_put(model.weights())
    state = optimizer.init(params)
    batch = jax.device_put(model.examples(rank))

    def call() -> Any:
        nonlocal params, state
        params, state, loss = step(params, state, batch)
        return params, state, loss

    return call


def _communication(model: Model, mesh: Mesh) -> Callable[[], Any]:
    """The exchange of a step alone: one gradient, summed and divided."""
    communication = Communication("benchmark", "data")
    one = jnp.float32(1)

    def on_replica(gradient: Any) -> Any:
        # As in the backward pass, the last layer is ready first.
        layers = range(len(gradient), 0, -1)
        ready = [(layer, layer) for layer in layers]
        part, when = (Partial(one, tree, one) for tree in (gradient, ready))
        return communication(part, when, gradient)[1]

    same = PartitionSpec()
    summed = jax.jit(
        jax.shard_map(
            on_replica, mesh=mesh, in_specs=same, out_specs=same, check_vma=False
        ),
        donate_argnums=0,
    )
    gradient = data_parallel.replicate(model.weights(), mesh)

    def call() -> Any:
        nonlocal gradient
        gradient = summed(gradient)
        return gradient

    return call

"""Evaluation: the loss of a batch over replicas, by forward passes alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdist import reduction as reductions
from jdist._fit import Metrics
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.loss import Loss
from jdist.data_parallel.replicas.mapping import EACH, over_replicas
from jdist.data_parallel.step.train_state import TrainState
from jdist.reduction import Partial


def evaluation(
    loss: Loss,
    in_evaluation: Callable[..., Any] | None,
    mesh: Mesh | int,
    axis: str,
    reduction: str,
) -> Callable[..., Any]:
    """The compiled `(state, batch, weights) -> Metrics`.

    Args:
      loss: What training calls.
      in_evaluation: What is called instead, `in_evaluation(params, batch)`, with
        `states=` where there is one; it returns no new state and takes no key.
        None for the loss itself, whose new state is dropped.
      mesh: The devices; or a number of replicas on one device.
      axis: The mesh axis that counts replicas.
      reduction: That of the training step.
    """
    communication = Communication("evaluate", axis, reduction)
    rows = PartitionSpec(axis)

    def losses_of(state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        if in_evaluation is not None:
            kept = state.states
            named = {} if kept is None else {"states": kept}
            alone = Loss(lambda p, b: in_evaluation(p, b, **named), loss.has_aux)
            losses, (_, aux) = alone(state.params, batch)
            return losses, aux
        key = state.key
        if key is not None:
            key = jax.random.fold_in(key, state.step)
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        losses, (_, aux) = loss(state.params, batch, key, state.states)
        return losses, aux

    def on_replica(state: TrainState, batch: Any, weights: Any) -> tuple[Any, Any]:
        entering = communication.weights_of(batch, weights)
        losses, aux = losses_of(state, batch)
        reductions.check_losses(losses, entering.shape)
        value, _, weight = reductions.seeds(losses, entering, reduction)
        part = Partial(value, {}, weight)
        found, *_ = communication(part, part, {})
        given = jnp.ones(entering.shape, jnp.float32) if weights is None else weights
        wide = reductions.wide_weights(given)
        own = jnp.sum(wide > 0), jnp.sum(wide)
        counts = tuple(jax.lax.psum(x, axis) for x in own)
        aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
        return (found, *counts), aux

    mapped = over_replicas(on_replica, mesh, axis, (EACH, rows, rows), (EACH, rows))

    def evaluate(state: TrainState, batch: Any, weights: Any) -> Metrics:
        (value, examples, weight), aux = mapped(state, batch, weights)
        return Metrics(value, examples, weight, aux=aux)

    return jax.jit(evaluate)

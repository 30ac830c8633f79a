"""Gradient accumulation: a replica's rows in one pass, or in micro-batches.

As with `no_sync` in PyTorch, k backward passes share one reduction. The micro-batches'
*partials* are summed (see `jdist.reduction`), not their means, so that a micro-batch
counts by the weight of its examples: the mean of k means differs if the counts do.

    rows of one replica, k = 3:   [a b][c d][e .]     . has weight 0
    partial = (a + b + c + d + e) / 5                 seeds of 1 / 5; one reduction
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import reduction as reductions
from jdist._compat import fast_in_loops
from jdist._tree import PyTree, is_inexact, path_of
from jdist.data_parallel.replicas.mapping import as_row, in_parts, own_row
from jdist.reduction import Partial

LossCall = Callable[..., tuple[jax.Array, tuple[PyTree, PyTree]]]
"""`Loss`, or it with a loss scale: `(params, batch, key, states)`."""


class ReplicaBatch(NamedTuple):
    """A replica's inputs of one step; None where the model has no such input."""

    batch: PyTree
    """Pytree of arrays `(examples, ...)`, this replica's own."""

    weights: jax.Array
    """`(examples,)`."""

    key: jax.Array | None = None
    """A PRNG key of this replica and step; micro-batch j gets `fold_in(key, j)`."""

    states: PyTree = None
    """The state before the step; each micro-batch's goes to the next."""


def accumulated(
    loss: LossCall,
    params: PyTree,
    share: ReplicaBatch,
    reduction: str,
    count: int,
    axis_name: str,
) -> tuple[Partial, PyTree, PyTree]:
    """Forward and backward passes over one replica's share, summed.

    Args:
      loss: As `jdist.data_parallel.gradient.loss.Loss`.
      params: The parameters.
      share: The replica's examples; their number is a multiple of `count`.
      reduction: One of `jdist.reduction.REDUCTIONS`.
      count: Number of micro-batches.
      axis_name: The axis of replicas.

    Returns:
      The partial, with None as gradient of a parameter that no loss depends on; the
      new model state; and the auxiliary outputs with a leading axis of micro-batches.
      A micro-batch without examples (all weights 0) leaves the state as it was.
    """
    # Filled while the backward pass is traced, before `only` reads it.
    used: set[str] = set()

    def one(state: PyTree, index: Any, batch: PyTree, weights: jax.Array) -> PyTree:
        key = None if share.key is None else jax.random.fold_in(share.key, index)

        def losses_of(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
            return loss(watched(params, used), batch, key, state)

        part, (new_states, aux) = reductions.partial_with_aux(
            losses_of,
            params,
            batch,
            weights,
            reduction,
            # The extreme of several micro-batches is known after the last one.
            axis_name if count == 1 else None,
        )
        # Padding repeats examples: alone it must not move the statistics.
        some = jnp.any(weights > 0)
        new_states = jax.tree.map(
            lambda new, old: jnp.where(some, new, old), new_states, state
        )
        return part._replace(gradient=only(part.gradient, used)), new_states, aux

    if count == 1:
        # Index 0, so that keys are folded in the same way for every number of them.
        part, state, aux = one(share.states, 0, share.batch, share.weights)
        # With a leading axis of one micro-batch, as for several.
        return part, state, as_row(aux)

    indices = jnp.arange(count, dtype=jnp.int32)
    rows = in_parts((share.batch, share.weights), count)
    first = own_row((indices, *rows))
    # `scan` needs the structure of its carry; a trace shows which gradients are None.
    shapes, *_ = jax.eval_shape(one, share.states, *first)

    def body(carry: tuple[Partial, PyTree], micro: PyTree) -> tuple[PyTree, PyTree]:
        so_far, state = carry
        part, state, aux = one(state, *micro)
        return (reductions.combine(so_far, part, reduction), state), aux

    start = (reductions.empty(shapes, reduction), share.states)
    # Not unrolled: activations of one micro-batch at a time, one compiled body.
    scan = fast_in_loops(partial(jax.lax.scan, body))
    (part, state), aux = scan(start, (indices, *rows))
    return part, state, aux


# --- parameters that no loss depends on: their gradient is None, not zero ---

# An optimizer treats the two differently. A zero gradient still decays the weight,
# moves it by its momentum, and counts as a step; None leaves parameter, state and count
# unchanged. PyTorch's `DistributedDataParallel` searches its graph for such parameters
# after every forward pass and agrees on them with all ranks. Here they are known once,
# when the program is compiled: JAX does not propagate a cotangent that it knows to be
# zero, so a parameter whose backward rule is never traced is unused.
#
# A dependence decided by *values* (a branch of `lax.cond` that no example takes) is a
# part of the program: its gradient is zero, not None.


def watched(params: PyTree, used: set[str]) -> PyTree:
    """Marks parameters, so that the paths of those with a cotangent enter `used`.

    Args:
      params: Pytree, the argument of the loss function.
      used: Receives the paths of leaves, while the backward pass is traced.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: (
            _marked(leaf, path_of(keys), used) if is_inexact(leaf) else leaf
        ),
        params,
    )


def only(tree: PyTree, used: set[str]) -> PyTree:
    """The tree with None in the place of every leaf that is not in `used`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: leaf if path_of(keys) in used else None, tree
    )


def _marked(leaf: jax.Array, path: str, used: set[str]) -> jax.Array:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        # Traced only if a cotangent arrives: JAX prunes symbolic zeros before.
        used.add(path)
        return (cotangent,)

    identity.defvjp(forward, backward)
    return identity(leaf)

"""The programs of one replica: a training step's gradients, and an evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import reduction as reductions
from jdist._fit import Metrics
from jdist._tree import PyTree, map_some, wide_dtype
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.gradient_order import with_gradient_order
from jdist.data_parallel.gradient.loss import Loss
from jdist.data_parallel.replicas.mapping import EACH, as_row, over_replicas, own_row
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.step.accumulation import LossCall, ReplicaBatch, accumulated
from jdist.data_parallel.step.model_state import synchronized
from jdist.data_parallel.step.train_state import TrainState
from jdist.reduction import Partial
from jdist.segment.internal import GuardedJit


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """The part of a training step that runs on every replica, where the axis is bound.

    Attributes:
      loss: The loss function.
      communication: The sum of gradients.
      accumulate: Number of micro-batches.
      rule: The rule for model state, see `synchronized`.
      wide: Whether 16-bit parameters get gradients in float32, for master weights.
    """

    loss: Loss
    communication: Communication
    accumulate: int
    rule: str
    wide: bool = False

    def step(
        self,
        state: TrainState,
        hook_state: PyTree,
        scale: jax.Array | None,
        batch: PyTree,
        weights: jax.Array | None,
    ) -> tuple[PyTree, ...]:
        """Computes this replica's gradient and sums it with the others'.

        Args:
          state: The training state; the optimizer's part is not used.
          hook_state: This replica's row of the hook's state.
          scale: The loss scale, or None.
          batch: This replica's rows.
          weights: Theirs, or None for 1 each.

        Returns:
          Loss, gradient, model state, the hook's new row, and auxiliary outputs.
        """
        weights = self.communication.weights_of(batch, weights, state.params)
        (part, states, aux), ready = self._own(state, scale, batch, weights)
        axis = self.communication.axis
        # Shares serve as well: only their proportions matter.
        states = synchronized(states, jnp.sum(weights), axis, self.rule)
        # Arrays with the dtypes of the finished gradient.
        like = map_some(
            lambda _, p: p.astype(wide_dtype(p.dtype)) if self.wide else p,
            part.gradient,
            state.params,
        )
        kept = own_row(hook_state)
        # Only the part of `ready` for the partial: states and aux are not in buckets.
        loss, grads, kept = self.communication(part, ready[0], like, kept or ())
        row = as_row(kept) if self.communication.stateful else None
        return loss, grads, states, row, aux

    def start(
        self, state: TrainState, batch: PyTree, weights: jax.Array | None
    ) -> tuple[PyTree]:
        """This replica's row of the hook's first state."""
        weights = self.communication.weights_of(batch, weights, state.params)
        (part, *_), ready = self._own(state, None, batch, weights)
        kept = self.communication.start(part, ready[0])
        return (as_row(kept),)

    def _own(
        self,
        state: TrainState,
        scale: jax.Array | None,
        batch: PyTree,
        weights: jax.Array,
    ) -> PyTree:
        """This replica's partial, model state and aux, and when each is final."""
        axis = self.communication.axis
        fn = partial(
            accumulated,
            _scaled(self.loss, scale),
            reduction=self.communication.reduction,
            count=self.accumulate,
            axis_name=axis,
        )
        key = _key_of_replica(state, axis)
        share = ReplicaBatch(batch, weights, key, state.states)
        return with_gradient_order(fn, state.params, share)


def _key_of_replica(state: TrainState, axis: str) -> jax.Array | None:
    """A key for this replica and step, folded from the key of the run."""
    if state.key is None:
        return None
    rank = jax.lax.axis_index(axis)
    return jax.random.fold_in(jax.random.fold_in(state.key, state.step), rank)


def _scaled(loss: Loss, scale: jax.Array | None) -> LossCall:
    """Multiplies losses by the loss scale of a mixed-precision optimizer.

    A scaled loss is only differentiated; `Metrics` has it without the scale.
    """
    if scale is None:
        return loss

    def scaled(*arguments: PyTree) -> PyTree:
        losses, rest = loss(*arguments)
        # In float32 at least: scaled losses overflow float16.
        wide = losses.astype(wide_dtype(losses.dtype))
        return wide * scale.astype(wide.dtype), rest

    return scaled


def evaluation(
    loss: Loss,
    in_evaluation: Callable[..., PyTree] | None,
    placement: Placement,
    reduction: str,
) -> Callable[..., PyTree]:
    """The compiled `(state, batch, weights) -> Metrics`.

    Args:
      loss: What training calls.
      in_evaluation: What is called instead, `in_evaluation(params, batch)`, with
        `states=` where there is one; it returns no new state and takes no key.
        None for the loss itself, whose new state is dropped.
      placement: The replicas.
      reduction: That of the training step.
    """
    # Without hook or buckets, which are for gradients.
    axis = placement.axis
    communication = Communication("evaluate", axis, reduction)
    rows = PartitionSpec(axis)

    def losses_of(state: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        if in_evaluation is not None:
            kept = state.states
            named = {} if kept is None else {"states": kept}
            alone = Loss(lambda p, b: in_evaluation(p, b, **named), loss.has_aux)
            losses, (_, aux) = alone(state.params, batch)
            return losses, aux
        key = _key_of_replica(state, axis)
        losses, (_, aux) = loss(state.params, batch, key, state.states)
        return losses, aux

    def on_replica(
        state: TrainState, batch: PyTree, weights: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        entering = communication.weights_of(batch, weights, state.params)
        losses, aux = losses_of(state, batch)
        reductions.check_losses(losses, entering.shape)
        value, _, weight = reductions.seeds(losses, entering, reduction)
        # A partial without gradients, so that losses are joined as in a training step.
        part = Partial(value, {}, weight)
        found, *_ = communication(part, part, {})
        # Counted from the weights as given, since `entering` has shares.
        given = jnp.ones(entering.shape, jnp.float32) if weights is None else weights
        wide = reductions.wide_weights(given)
        own = jnp.sum(wide > 0), jnp.sum(wide)
        counts = tuple(jax.lax.psum(x, axis) for x in own)
        return (found, *counts), as_row(aux)

    mapped = over_replicas(on_replica, placement, (EACH, rows, rows), (EACH, rows))

    def evaluate(
        state: TrainState, batch: PyTree, weights: jax.Array | None
    ) -> Metrics:
        (value, examples, weight), aux = mapped(state, batch, weights)
        return Metrics(value, examples, weight, aux=aux)

    called = loss.fn if in_evaluation is None else in_evaluation
    return GuardedJit(evaluate, "evaluate", {"loss_fn": called})

"""One replica's part of a training step: its own gradient, then the communication."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist._tree import is_none, wide_dtype
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.gradient_order import with_gradient_order
from jdist.data_parallel.gradient.loss import Loss
from jdist.data_parallel.step.accumulation import ReplicaBatch, accumulated
from jdist.data_parallel.step.model_state import synchronized
from jdist.data_parallel.step.train_state import TrainState


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """The part of a training step that runs on every replica, with the axis bound.

    Attributes:
      loss: The loss function.
      communication: How gradients are joined.
      accumulate: Number of micro-batches.
      rule: How model state is joined.
      wide: Whether 16-bit parameters get gradients in float32, for their masters.
    """

    loss: Loss
    communication: Communication
    accumulate: int
    rule: str
    wide: bool = False

    def step(
        self, state: TrainState, hook_state: Any, scale: Any, batch: Any, weights: Any
    ) -> tuple[Any, ...]:
        """Own gradient, then everybody's.

        Args:
          state: The training state; the optimizer's is not looked at.
          hook_state: This replica's row of what the hook keeps.
          scale: The loss scale, or None.
          batch: This replica's rows.
          weights: Theirs, or None for 1 each.

        Returns:
          Loss, gradient, model state, the hook's new row, auxiliary outputs, and the
          replicas' checksums of the gradient, or None.
        """
        weights = self.communication.weights_of(batch, weights)
        (part, states, aux), ready = self._own(state, scale, batch, weights)
        axis = self.communication.axis
        states = synchronized(states, jnp.sum(weights), axis, self.rule)
        like = jax.tree.map(self._like, part.gradient, state.params, is_leaf=is_none)
        # A hook's state has one row for each replica.
        kept = jax.tree.map(lambda x: x[0], hook_state)
        loss, grads, kept = self.communication(part, ready[0], like, kept or ())
        row = None
        if self.communication.stateful:
            row = jax.tree.map(lambda x: jnp.asarray(x)[None], kept)
        return loss, grads, states, row, aux, self.communication.checksums(grads)

    def _like(self, gradient: Any, param: Any) -> Any:
        """An array of the dtype in which a finished gradient is handed over."""
        if gradient is None or not self.wide:
            return None if gradient is None else param
        return param.astype(wide_dtype(param.dtype))

    def start(self, state: TrainState, batch: Any, weights: Any) -> tuple[Any]:
        """This replica's row of what the hook keeps, before the first step."""
        weights = self.communication.weights_of(batch, weights)
        (part, *_), ready = self._own(state, None, batch, weights)
        kept = self.communication.start(part, ready[0])
        return (jax.tree.map(lambda x: jnp.asarray(x)[None], kept),)

    def _own(self, state: TrainState, scale: Any, batch: Any, weights: Any) -> Any:
        """This replica's partial, model state and aux; and when each is ready."""
        key = state.key
        if key is not None:
            rank = jax.lax.axis_index(self.communication.axis)
            key = jax.random.fold_in(jax.random.fold_in(key, state.step), rank)
        loss = _scaled(self.loss, scale)

        def fn(params: Any, share: ReplicaBatch) -> Any:
            return accumulated(
                loss, params, share, self.communication.reduction, self.accumulate
            )

        share = ReplicaBatch(batch, weights, key, state.states)
        return with_gradient_order(fn, state.params, share)


def _scaled(loss: Loss, scale: jax.Array | None) -> Callable[..., Any]:
    """Losses times the loss scale of a mixed-precision optimizer, in float32 at least.

    A scaled loss is only differentiated; `Metrics` has it without the scale.
    """
    if scale is None:
        return loss

    def scaled(*arguments: Any) -> Any:
        losses, rest = loss(*arguments)
        wide = losses.astype(wide_dtype(losses.dtype))
        return wide * scale.astype(wide.dtype), rest

    return scaled

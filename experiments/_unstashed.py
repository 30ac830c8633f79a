"""Asynchronous updates without weight stashing, as a control, on one device.

The actions are those of PipeDream's schedule. A backward pass uses the newest weights
of its stage with activations that older weights produced, which is not the gradient of
any function. A pipeline never does so, and a segment raises; here it is forced.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import optim, pipeline, segment


class State(NamedTuple):
    """Parameters and optimizer states of each stage."""

    params: list[Any]
    opt_states: list[Any]


class Losses(NamedTuple):
    """The loss of each micro-batch at the weights that it met, `(micro-batches,)`."""

    losses: np.ndarray


class Unstashed:
    """A chain of stages that update after each of their backward passes.

    Args:
      stages: Stages of one input and one output; the batch has the first input.
      loss_fn: As for `pipeline.Pipeline`.
      optimizer: The optimizer of every stage.
    """

    def __init__(
        self,
        stages: Sequence[pipeline.Stage],
        loss_fn: Callable[..., jax.Array],
        optimizer: optim.Optimizer,
    ) -> None:
        self._input = stages[0].inputs[0]
        self._segments = [segment.segment(stage.fn) for stage in stages]
        self._optimizer = optimizer
        self._step = jax.jit(optimizer.step)
        self._loss = jax.jit(
            jax.value_and_grad(lambda y, batch: loss_fn(y, batch).mean())
        )

    def init(self, params: Sequence[Any]) -> State:
        """The state before the first epoch."""
        return State(list(params), [self._optimizer.init(own) for own in params])

    def train_epoch(
        self, state: State, batches: Sequence[dict[str, Any]]
    ) -> tuple[State, Losses]:
        """Trains one pass over the batches; returns the new state and the losses."""
        last = len(self._segments) - 1
        schedule = pipeline.pipedream(last + 1, len(batches))
        left = [deque(schedule.actions(j)) for j in range(last + 1)]
        params, opt_states = map(list, state)
        values = {(0, i): batch[self._input] for i, batch in enumerate(batches)}
        cotangents: dict[tuple[int, int], Any] = {}
        kept: dict[tuple[int, int], Any] = {}
        losses: dict[int, Any] = {}
        # Each stage runs its actions in order until one lacks its value or cotangent.
        while any(left):
            for j, actions in enumerate(left):
                while actions:
                    kind, _, i = actions[0]
                    if (j, i) not in (values if kind == "F" else cotangents):
                        break
                    actions.popleft()
                    if kind == "F":
                        value = values.pop((j, i))
                        y, kept[j, i] = self._segments[j].forward(params[j], value)
                        values[j + 1, i] = y
                        if j == last:
                            found = self._loss(values.pop((j + 1, i)), batches[i])
                            losses[i], cotangents[j, i] = found
                        continue
                    # A rebuilt tree loses the identity of its weights, which `backward`
                    # would check.
                    residuals = jax.tree.map(lambda x: x, kept.pop((j, i)))
                    d_params, (d_value,) = self._segments[j].backward(
                        params[j], residuals, cotangents.pop((j, i))
                    )
                    if j:
                        cotangents[j - 1, i] = d_value
                    given = params[j], d_params, opt_states[j]
                    params[j], opt_states[j] = self._step(*given)
        in_order = [np.asarray(losses[i]) for i in range(len(batches))]
        return State(params, opt_states), Losses(np.stack(in_order))

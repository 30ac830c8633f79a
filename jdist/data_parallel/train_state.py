"""What a training step is given and returns: its state, and its metrics.

Everything that lasts from step to step is one tree, the `TrainState`: what is saved
and restored, and what makes a run repeat bit for bit.
"""

from typing import Any, NamedTuple

import jax

from jdist._errors import requirement


class TrainState(NamedTuple):
    """All that one step hands to the next; made by `TrainStep.init`."""

    step: jax.Array
    """Steps taken, int32 scalar."""

    params: Any
    """The parameters, the same on every replica."""

    opt_state: Any
    """The optimizer's state."""

    model_state: Any = None
    """State that no gradient reaches, such as batch-norm statistics, or None."""

    key: Any = None
    """The PRNG key of the whole run, which does not change, or None."""

    hook_state: Any = None
    """What a communication hook keeps, a row for each replica, or None."""


def check_state(call: str, state: object) -> None:
    """Refuses what is not the state of a training run, such as the parameters alone.

    Raises:
      TypeError: It is anything else.
    """
    if not isinstance(state, TrainState):
        rule = "must be a TrainState"
        remedy = (
            "`state = step.init(params)` makes one, and each step returns the next."
        )
        raise TypeError(requirement(call, rule, f"a {type(state).__name__}", remedy))


class Metrics(NamedTuple):
    """What a step found out, before it moved the parameters."""

    loss: jax.Array
    """The whole batch's loss, scalar, the same on every replica."""

    grad_norm: jax.Array | None = None
    """Global norm of the gradient before clipping, or None without clipping."""

    aux: Any = None
    """Auxiliary outputs, each with a new first axis of `replicas * accumulate`: an
    entry for each call of the loss function, in the order of the batch's rows."""

    examples: Any = None
    """How many examples have a weight above 0, as `fit` counts them; else None."""

    weight: Any = None
    """The sum of their weights, as `fit` counts it; else None."""

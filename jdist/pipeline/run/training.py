"""What a pipeline's training step hands to the next, and what it says."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdist._errors import requirement
from jdist.optim import Optimizer, check_optimizer


class PipelineState(NamedTuple):
    """All that one step hands to the next; made by `Pipeline.init`.

    Every field but `step` and `key` has one entry per stage, None for those that run in
    other processes.
    """

    step: int
    """Steps taken."""

    params: list[Any]
    """The parameters of each stage, on its device."""

    opt_states: list[Any]
    """The state of each stage's optimizer."""

    states: list[Any]
    """What stateful stages keep; None for the others."""

    key: Any = None
    """The PRNG key of the whole run, which does not change, or None."""


def check_state(call: str, state: object) -> None:
    """Refuses what is not the state of a training run, such as the parameters alone.

    Raises:
      TypeError: It is anything else.
    """
    if not isinstance(state, PipelineState):
        rule = "must be a PipelineState"
        remedy = (
            "`state = pipe.init(params)` makes one, and each step returns the next."
        )
        raise TypeError(requirement(call, rule, f"a {type(state).__name__}", remedy))


class Metrics(NamedTuple):
    """What a step found out, before it moved the parameters."""

    loss: jax.Array
    """The whole batch's loss, scalar, the same on every worker."""

    grad_norm: jax.Array | None = None
    """Norm of the gradient over all stages before clipping, without the loss scale;
    infinite or NaN where it overflowed. None without clipping."""

    examples: int = 0
    """How many examples the batch has."""

    weight: float = 0.0
    """The sum of their weights."""

    aux: Any = None
    """Auxiliary outputs of the loss function, the same on every worker: each with a new
    first axis, an entry for each micro-batch in the order of the batch's rows."""


def optimizers_for(
    optimizer: Optimizer | Sequence[Optimizer] | None,
    stages: int,
    call: str = "Pipeline(optimizer=...)",
) -> list[Optimizer]:
    """One optimizer for each stage; `call` is who asks, for the error's text.

    Raises:
      ValueError: None was given, or not one for each stage.
      TypeError: Something is no optimizer.
    """
    if optimizer is None:
        rule = "must be given for training"
        raise ValueError(requirement(call, rule, "None"))
    found: list[Any] = [optimizer] * stages
    # An optax transformation is a tuple, of two functions.
    if isinstance(optimizer, Sequence) and not hasattr(optimizer, "update"):
        found = list(optimizer)
    else:
        check_optimizer(call, optimizer)
    if len(found) != stages:
        rule = f"must be one optimizer, or one for each of the {stages} stages"
        raise ValueError(requirement(call, rule, f"{len(found)} of them"))
    for one in found:
        check_optimizer(call, one)
    return found

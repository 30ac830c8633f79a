"""A pipeline's training state, and the optimizers of its stages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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

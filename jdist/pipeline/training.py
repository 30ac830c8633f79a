"""What a pipeline's training step hands to the next, and what it says."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jdist._errors import requirement
from jdist.optim import Optimizer
from jdist.reduction import check_reduction


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


class Epoch(NamedTuple):
    """What the steps or evaluations of an epoch found out together."""

    loss: float
    """As if all examples were one batch; for steps each at its own parameters."""

    examples: int
    """How many there were."""

    weight: float
    """The sum of their weights."""


class _Counted(Protocol):
    """`Metrics`, or an `Evaluation`."""

    @property
    def loss(self) -> Any: ...

    @property
    def examples(self) -> int: ...

    @property
    def weight(self) -> float: ...


def over_epoch(found: Sequence[_Counted], reduction: str = "mean") -> Epoch:
    """Joins the losses of batches, each by its weight; waits until they are computed.

    Args:
      found: `Metrics` of training steps, or `Evaluation`s.
      reduction: That of the pipeline.

    Raises:
      ValueError: There are none, or `reduction` is unknown.

    Example:
      >>> parts = [Metrics(2.0, None, 3, 3.0), Metrics(6.0, None, 1, 1.0)]
      >>> over_epoch(parts)
      Epoch(loss=3.0, examples=4, weight=4.0)
    """
    check_reduction("over_epoch", reduction)
    if not found:
        rule = "must have one entry at least"
        raise ValueError(requirement("over_epoch(found)", rule, "none"))
    weight = sum(part.weight for part in found)
    losses = [float(part.loss) for part in found]
    if reduction == "mean":
        pairs = zip(found, losses, strict=True)
        loss = sum(part.weight * loss for part, loss in pairs) / weight
    else:
        joins: dict[str, Callable[[list[float]], float]]
        joins = {"sum": sum, "max": max, "min": min}
        loss = joins[reduction](losses)
    return Epoch(loss, sum(part.examples for part in found), weight)


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
    found = (
        [optimizer] * stages if isinstance(optimizer, Optimizer) else list(optimizer)
    )
    if len(found) != stages:
        rule = f"must be one optimizer, or one for each of the {stages} stages"
        raise ValueError(requirement(call, rule, f"{len(found)} of them"))
    strangers = [type(one).__name__ for one in found if not isinstance(one, Optimizer)]
    if strangers:
        rule = "must be made by jdist.optim"
        raise TypeError(requirement(call, rule, f"a {strangers[0]}"))
    return found

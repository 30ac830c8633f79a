"""Training over many batches: a step for each, saved now and then, with a bar.

And what batches give together: the loss of an epoch as if it were one batch.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jdist._errors import requirement
from jdist.reduction import check_reduction

State = TypeVar("State")


class Saves(Protocol):
    """A folder of checkpoints."""

    def save(self, state: Any) -> None:
        """Writes the state under its step."""
        ...


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
    def examples(self) -> Any: ...

    @property
    def weight(self) -> Any: ...


def over_epoch(found: Sequence[_Counted], reduction: str = "mean") -> Epoch:
    """Joins the losses of batches, each by its weight; waits until they are computed.

    Args:
      found: `Metrics` of training steps, or `Evaluation`s.
      reduction: That of the steps.

    Raises:
      ValueError: There are none, one does not say its weight, or `reduction` is
        unknown.

    Example:
      >>> from jdist.pipeline import Metrics
      >>> parts = [Metrics(2.0, None, 3, 3.0), Metrics(6.0, None, 1, 1.0)]
      >>> over_epoch(parts)
      Epoch(loss=3.0, examples=4, weight=4.0)
    """
    check_reduction("over_epoch", reduction)
    if not found:
        rule = "must have one entry at least"
        raise ValueError(requirement("over_epoch(found)", rule, "none"))
    if any(part.weight is None for part in found):
        rule = "must say how many examples each batch has"
        remedy = "`fit` and `evaluate` count them."
        raise ValueError(requirement("over_epoch(found)", rule, None, remedy))
    weights = [float(part.weight) for part in found]
    losses = [float(part.loss) for part in found]
    if reduction == "mean":
        pairs = zip(weights, losses, strict=True)
        loss = sum(weight * loss for weight, loss in pairs) / sum(weights)
    else:
        joins: dict[str, Callable[[list[float]], float]]
        joins = {"sum": sum, "max": max, "min": min}
        loss = joins[reduction](losses)
    return Epoch(loss, sum(int(part.examples) for part in found), sum(weights))


def check_save_every(save_every: int) -> None:
    """Refuses a number of steps below 1."""
    if save_every < 1:
        call = "fit(save_every=...)"
        raise ValueError(requirement(call, "must be 1 at least", save_every))


def fitted(
    step: Callable[[State, Any, Any], tuple[State, Any]],
    state: State,
    pairs: Iterable[tuple[Any, Any]],
    number: int,
    *,
    total: int | None,
    checkpoints: Saves | None,
    save_every: int,
    console: Console | None,
) -> tuple[State, list[Any]]:
    """A step for each batch; the last state, and the metrics of every step.

    Args:
      step: `step(state, batch, weights) -> (state, metrics)`.
      state: The first.
      pairs: Batches and their weights.
      number: Steps taken before. The state's own count may be on a device, where to
        read it would wait for the step.
      total: How many batches there are, if that is known.
      checkpoints: Where the state is saved, or None.
      save_every: After how many steps of the whole run; and at the end.
      console: Where a bar shows the step and its loss; None for none.
    """
    metrics: list[Any] = []
    with progress(console, total, "training") as bar:
        for batch, weights in pairs:
            state, found = step(state, batch, weights)
            number += 1
            # The loss before: that of this step may still be computed.
            bar.advance(f"step {number}", metrics[-1] if metrics else None)
            metrics.append(found)
            if checkpoints is not None and number % save_every == 0:
                checkpoints.save(state)
    if checkpoints is not None and metrics and number % save_every:
        checkpoints.save(state)
    return state, metrics


def pair(given: Any) -> tuple[Any, Any]:
    """A batch and its weights, of which a plain batch has none."""
    batch, weights = given if isinstance(given, tuple) else (given, None)
    return batch, weights


class Bar:
    """A bar of rich's, or none."""

    def __init__(self, shown: Progress | None, total: int | None, text: str) -> None:
        self._shown = shown
        if shown is not None:
            self._task = shown.add_task(text, total=total, loss="")

    def advance(self, text: str, before: Any) -> None:
        """Another batch is done; `before` is what was found for one, if any."""
        if self._shown is not None:
            loss = "" if before is None else f"loss {float(before.loss):.4g}"
            self._shown.update(self._task, advance=1, description=text, loss=loss)


@contextlib.contextmanager
def progress(console: Console | None, total: int | None, text: str) -> Iterator[Bar]:
    """A bar while batches are gone through.

    Args:
      console: Where it is shown; None for none.
      total: How many batches there are, if that is known.
      text: What is done, until the first batch is.
    """
    if console is None:
        yield Bar(None, total, text)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as shown:
        yield Bar(shown, total, text)

"""Training over many batches: metrics, the loop and its checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jdist._checkpoint import Checkpoints
from jdist._errors import (
    check_at_least,
    check_sequence,
    check_type,
    type_error,
    value_error,
)
from jdist._tree import PyTree, owned, type_name
from jdist.reduction import check_reduction

State = TypeVar("State")


class Metrics(NamedTuple):
    """Results of a step, an evaluation or an epoch; None for what was not measured.

    Those of a step belong to the parameters before its update.
    """

    loss: Any
    """The loss of all examples, scalar, the same on every replica and worker."""

    examples: Any = None
    """Number of examples with a weight above 0, which padding has not. Data-parallel
    steps leave the count to `fit`."""

    weight: Any = None
    """The sum of the examples' weights."""

    grad_norm: Any = None
    """With `max_norm`: the gradient's global norm before clipping, without the loss
    scale; infinite or NaN where it overflowed."""

    aux: PyTree = None
    """Auxiliary outputs of the loss function, each with a new first axis: an entry for
    each call, in the order of the batch's rows (replicas, then micro-batches)."""

    outputs: PyTree = None
    """The inputs of a pipeline's loss, in an evaluation that asks for them: all
    examples in order, one value or a dict by name. None where the loss did not run. For
    a last stage with several workers in other processes, this process's
    micro-batches."""

    losses: Any = None
    """The loss of each micro-batch of an asynchronous epoch with the weights that it
    met, `(micro_batches,)`; NaN for the mean of one whose weights are all 0."""

    skipped: list[int | None] | None = None
    """The number of updates that each stage skipped because they overflowed, in an
    asynchronous epoch with a loss scale; None for stages of other processes."""

    @staticmethod
    def combine(found: "Sequence[Metrics]", reduction: str = "mean") -> "Metrics":
        """Combines the metrics of batches as if they were one; waits for the devices.

        Args:
          found: Metrics of training steps, each at its own parameters, or of
            evaluations.
          reduction: The reduction of the steps.

        Returns:
          Loss, examples and weight, as Python numbers.

        Raises:
          TypeError: `found` is no list of metrics.
          ValueError: There are none, one does not say its weight, or `reduction` is
            unknown.

        Example:
          >>> total = Metrics.combine([Metrics(2.0, 3, 3.0), Metrics(6.0, 1, 1.0)])
          >>> total.loss, total.examples, total.weight
          (3.0, 4, 4.0)
        """
        check_reduction("Metrics.combine", reduction)
        rule = "must be a list of metrics, as `fit` returns it"
        check_sequence("Metrics.combine(found)", found, Metrics, rule)
        if not found:
            rule = "must have one entry at least"
            raise value_error("Metrics.combine(found)", rule, "none")
        if any(part.weight is None for part in found):
            rule = "must say how many examples each batch has"
            remedy = "`fit` and `evaluate` count them."
            raise value_error("Metrics.combine(found)", rule, None, remedy)
        weights = [float(part.weight) for part in found]
        losses = [float(part.loss) for part in found]
        if reduction == "mean":
            # Each loss is a mean over its batch: the weights make it the mean over all.
            pairs = zip(weights, losses, strict=True)
            loss = sum(weight * loss for weight, loss in pairs) / sum(weights)
        else:
            joins: dict[str, Callable[[list[float]], float]]
            joins = {"sum": sum, "max": max, "min": min}
            loss = joins[reduction](losses)
        return Metrics(loss, sum(int(part.examples) for part in found), sum(weights))


def check_saving(
    checkpoints: object, save_every: object, kind: type[Checkpoints[Any]] = Checkpoints
) -> None:
    """Checks the arguments of `fit` about checkpoints, before the first step.

    Raises:
      TypeError: `checkpoints` are not of the kind, or `save_every` is no integer.
      ValueError: `save_every` is less than 1.
    """
    check_at_least("fit(save_every=...)", save_every, 1)
    if checkpoints is not None:
        rule = f"must be a {kind.__name__}, or None"
        check_type("fit(checkpoints=...)", checkpoints, kind, rule)


def check_batches(call: str, batches: object) -> None:
    """Checks what a loop over batches is given, before the first, and not when used.

    Args:
      call: `"fit"` or `"evaluate"`, whose argument it is.
      batches: The batches.

    Raises:
      TypeError: They are none.
    """
    # What has `__getitem__` alone can be read from too, as torch's data sets can.
    several = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    # NumPy's scalars and classes of sequences have the method, and nothing to read.
    empty = getattr(batches, "ndim", 1) == 0 or isinstance(batches, type)
    # One batch by names, which would be taken for a list of its names.
    if not several or empty or isinstance(batches, str | bytes | Mapping):
        rule = "must be batches, one after the other"
        remedy = "Wrap a single batch in a list."
        raise type_error(f"{call}(batches)", rule, type_name(batches), remedy)


def fitted(
    step: Callable[[State, PyTree, Any], tuple[State, Metrics]],
    state: State,
    pairs: Iterable[tuple[PyTree, Any]],
    number: int,
    *,
    checkpoints: Checkpoints[State] | None,
    save_every: int,
) -> tuple[State, list[Metrics]]:
    """Runs one step for each batch; returns the last state and all metrics.

    Args:
      step: `step(state, batch, weights) -> (state, metrics)`.
      state: The first state.
      pairs: Batches and their weights.
      number: Steps taken before.
      checkpoints: Where the state is saved, or None.
      save_every: Steps of the whole run between checkpoints; the last state is saved
        too.
    """
    metrics: list[Metrics] = []
    for batch, weights in pairs:
        state, found = step(state, batch, weights)
        # Counted on the host: the state's own count may be on a device, and reading it
        # would wait for the step.
        number += 1
        metrics.append(found)
        if checkpoints is not None and number % save_every == 0:
            checkpoints.save(state)
    # The last state, unless the loop has saved it just now.
    if checkpoints is not None and metrics and number % save_every:
        checkpoints.save(state)
    return state, metrics


def pair(given: PyTree) -> tuple[PyTree, Any]:
    """A batch and its weights, None for those of a plain batch; NumPy arrays copied.

    Loaders fill a buffer again for the next batch, while a step still reads the last.

    Raises:
      ValueError: A tuple that is no pair.
    """
    if not isinstance(given, tuple):
        return owned(given), None
    if len(given) != 2:
        rule = "must be batches, or pairs of a batch and its weights"
        remedy = "Put a batch that is a tuple in a pair: `(batch, None)`."
        raise value_error("batches", rule, f"a tuple of {len(given)}", remedy)
    batch, weights = owned(given)
    return batch, weights

"""Training and evaluation over many batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jdist._checkpoint import Checkpoints
from jdist._errors import check_type, value_error
from jdist._fit import (
    Metrics,
    check_batches,
    check_saving,
    fitted,
    pair,
)
from jdist._tree import PyTree, check_state, examples_in, shapes_of
from jdist.data_parallel.replicas.shards import Weights, are_issued, unbound
from jdist.data_parallel.step.train_state import TrainState
from jdist.data_parallel.step.train_step import TrainStep
from jdist.reduction import wide_weights


def fit(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    checkpoints: Checkpoints[TrainState] | None = None,
    save_every: int = 1000,
) -> tuple[TrainState, list[Metrics]]:
    """Trains on a sequence of batches.

    If the mesh spans several processes, each calls it with the same number of batches,
    as from `Sampler.batches` and `Join`.

    Args:
      step: From `train_step`.
      state: From `TrainStep.init`, or restored; its arrays are donated.
      batches: Pairs of a batch and its weights, as from `Sampler.batches`, `Join` and
        `shard_batch`; or batches that are no tuples, whose examples count 1 each. Wrap
        a batch that is itself a tuple in a pair: `(batch, None)`. NumPy arrays are
        copied before the next batch is asked for. For a resumed run, the batches after
        the first `state.step`.
      checkpoints: Where the state is saved: after each `save_every` steps of the whole
        run, and at the end.
      save_every: Steps between checkpoints.

    Returns:
      The last state, and the metrics of every step; see `Metrics.combine`.

    Raises:
      TypeError: An argument is of another type.
      ValueError: `save_every` is less than 1; the first batch is a pair that the loss
        function takes as one batch, or `batches` are arrays that it takes so.
      Exception: What the step, `TrainCheckpoints.save` and `batches` raise.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> opt = optim.sgd(lr=0.1)
      >>> step = data_parallel.train_step(lambda w, x: (w * x) ** 2, opt, replicas=2)
      >>> sampler = data_parallel.Sampler(examples=3, batch=2, shuffle=False)
      >>> batches = sampler.batches(jnp.array([1.0, 2.0, 0.5]), replicas=2)
      >>> state, found = data_parallel.fit(step, step.init(jnp.array(3.0)), batches)
      >>> int(state.step), data_parallel.Metrics.combine(found)[:3]
      (2, (15.1875, 3, 3.0))
    """
    _check("fit", step, state, batches)
    check_saving(checkpoints, save_every)

    def counted(state: TrainState, batch: PyTree, weights: Weights) -> PyTree:
        examples, weight = _counts(batch, weights)
        state, found = step(state, batch, weights)
        return state, found._replace(examples=examples, weight=weight)

    return fitted(
        counted,
        state,
        # Lazily, so that a batch is prepared while the device computes the last step.
        _pairs("fit", step, state, batches),
        # Read once: in the loop it would wait for the device at every step.
        int(state.step),
        checkpoints=checkpoints,
        save_every=save_every,
    )


def evaluate(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[PyTree],
) -> Metrics:
    """The loss of many batches as if they were one; see `TrainStep.evaluate`.

    Args:
      step: From `train_step`.
      state: Training state; nothing is changed by it.
      batches: As for `fit`.

    Raises:
      TypeError: An argument is of another type.
      ValueError: There are no batches; a pair as for `fit`; and what
        `TrainStep.evaluate` refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> opt = optim.sgd()
      >>> step = data_parallel.train_step(lambda w, x: (w * x) ** 2, opt, replicas=2)
      >>> sampler = data_parallel.Sampler(examples=3, batch=2, shuffle=False)
      >>> batches = sampler.batches(jnp.array([1.0, 2.0, 3.0]), replicas=2)
      >>> data_parallel.evaluate(step, step.init(jnp.array(3.0)), batches).loss
      42.0
    """
    _check("evaluate", step, state, batches)
    # Auxiliary outputs of all batches may be as large as the data set.
    found = [
        step.evaluate(state, batch, weights)._replace(aux=None)
        for batch, weights in _pairs("evaluate", step, state, batches)
    ]
    return Metrics.combine(found, step.reduction)


def _check(call: str, step: object, state: object, batches: object) -> None:
    """Checks what `fit` and `evaluate` have in common."""
    rule = "must be a TrainStep, as `train_step` makes it"
    check_type(f"{call}(step)", step, TrainStep, rule)
    check_state(f"{call}(state)", state, TrainState, "step")
    check_batches(call, batches)


def _pairs(
    call: str, step: TrainStep, state: TrainState, batches: Iterable[PyTree]
) -> Iterator[tuple[PyTree, Weights]]:
    """The batches and their weights; checks the first pair."""
    shapes = shapes_of(state)
    arrays = isinstance(batches, tuple | list) and all(
        hasattr(x, "dtype") for x in batches
    )
    # `(x, y)` in place of `[(x, y)]`.
    if (
        arrays
        and _takes(step, shapes, tuple(batches))
        and not all(_takes(step, shapes, batch) for batch in batches)
    ):
        rule = "must be batches, one after the other"
        got = "one batch, arrays that the loss function takes together"
        remedy = "Wrap a single batch in a list, and what is a tuple in a pair: "
        remedy += "`[(batch, None)]`."
        raise value_error(f"{call}(batches)", rule, got, remedy)
    for number, given in enumerate(batches):
        batch, weights = pair(given)
        if not number and weights is not None and not are_issued(weights):
            _check_pair(call, step, shapes, (batch, weights))
        yield batch, weights


def _check_pair(
    call: str, step: TrainStep, state: TrainState, given: tuple[PyTree, Weights]
) -> None:
    """Refuses a pair such as `(inputs, targets)`, whose targets would be weights."""
    # A pair of a batch and weights has another structure than a batch.
    if not _takes(step, state, given):
        return
    rule = "must be batches that are no tuples, or pairs of a batch and its weights"
    got = "a pair that the loss function takes as one batch"
    remedy = (
        "Give `(batch, None)` for a batch that is a pair, `((inputs, targets), None)`."
    )
    raise value_error(f"{call}(batches)", rule, got, remedy)


def _takes(step: TrainStep, state: TrainState, batch: PyTree) -> bool:
    """Whether the loss function can be traced with a batch."""
    try:
        jax.eval_shape(step.evaluate, state, batch)
    except Exception:  # noqa: BLE001 - by any error the loss function refuses it
        return False
    return True


def _counts(batch: PyTree, weights: Weights) -> tuple[PyTree, PyTree]:
    """Number of examples with a weight above 0, and the sum of the weights."""
    if weights is None:
        count = examples_in(batch, "fit(batches)")
        return count, float(count)
    weights = unbound(weights)
    if isinstance(weights, jax.Array):
        # Counted there: reading them would wait for the device at every step.
        return _counts_there(weights)
    weights = np.asarray(weights)
    return int(np.sum(weights > 0)), float(np.sum(weights, dtype=np.float64))


@jax.jit
def _counts_there(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = wide_weights(weights)
    return jnp.sum(wide > 0), jnp.sum(wide)

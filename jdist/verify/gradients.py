"""The judge: is what a candidate returns the gradient of this loss?"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._errors import requirement
from jdist._tree import PyTree, examples_in, named_leaves
from jdist.verify.compare import compare_leaves
from jdist.verify.measure import Measured, measurer
from jdist.verify.oracle import REDUCERS, LossFn, differentiated, reduced
from jdist.verify.report import LeafReport, Report, looseness

LOSS = "(loss)"

Candidate = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]
"""`candidate(params, batch) -> (loss, gradient)`."""

# By how much the draws are multiplied before anything is condemned.
SECOND_LOOK = 16


def gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidates: Mapping[str, Candidate],
    *,
    weights: Any = None,
    reduction: str = "mean",
    seed: int | None = 0,
    accumulation: DTypeLike | None = None,
) -> Report:
    """Judges ways to compute a loss and its gradient against `jax.value_and_grad`.

    The reference is computed on one device over the whole batch. How far a right answer
    may be from it is derived from the number of examples, and from the magnitudes and
    the rounding of each example's own gradient, which are measured here (see
    `jdist.verify.bound`). The reference itself is held against a finite difference.

    Args:
      loss_fn: `loss_fn(params, batch)`: one loss per example, `(examples,)`, or a
        scalar. With a scalar the examples' own gradients cannot be seen: the bound then
        rests on the batch's gradient as a whole.
      params: Pytree; leaves that are not floating must have None as gradient.
      batch: Pytree; for losses per example each leaf is `(examples, ...)`.
      candidates: Name to `fn(params, batch) -> (loss, gradient)`.
      weights: `(examples,)`, at least 0, as in `data_parallel`. None for 1 each.
      reduction: "mean", "sum", "max" or "min".
      seed: Of the finite differences that the reference itself is held against; None
        leaves them out.
      accumulation: The dtype in which programs accumulate sums of 16-bit numbers. None
        for float32, as XLA's reductions and dot products do; the numbers' own dtype
        for programs that add them up one by one.

    Returns:
      A `Report` with a row for the loss and for each leaf of each candidate. A leaf
      whose every digit may be lost to rounding is *not judged*, and the report not ok.

    Raises:
      ValueError: No candidates; an unknown reduction; an accumulation that is no
        floating dtype; weights with a scalar loss, of the wrong shape, negative, not
        finite or all 0; a batch whose leaves differ in length.
      TypeError: A candidate returned something else than a pair.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 3
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([0.3, 0.4])
      >>> def half_and_rest(w, x):                       # 2 examples, then 1
      ...     f = jax.value_and_grad(lambda w, x: loss(w, x).mean())
      ...     (a, da), (b, db) = f(w, x[:2]), f(w, x[2:])
      ...     return (2 * a + b) / 3, (2 * da + db) / 3
      >>> gradients(loss, w, x, {"split": half_and_rest}).ok
      True

    References:
      The bound: `jdist.verify.bound`. Chex's `assert_numerical_grads` and torch's
      `gradcheck` compare with finite differences only.
    """
    judged = judge(loss_fn, reduction=reduction, accumulation=accumulation)
    return judged(params, batch, candidates, weights=weights, seed=seed)


def judge(
    loss_fn: LossFn,
    *,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
) -> Callable[..., Report]:
    """A judge of one loss that can be called again and again, compiled once.

    For judging every step of a training run. What it returns is called like
    `gradients`, without the first argument:

        judged(params, batch, candidates, *, weights=None, seed=0) -> Report

    With `seed=None` the finite difference is left out: pin the oracle once, not at
    every step.

    Args:
      loss_fn: As in `gradients`.
      reduction: As in `gradients`.
      accumulation: As in `gradients`.

    Raises:
      ValueError: An unknown reduction or accumulation. On calling: as `gradients`.
      TypeError: On calling: as `gradients`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> judged = judge(lambda w, x: (x - w) ** 2)
      >>> x, w = jnp.array([1.0, 2.0, 4.0]), jnp.array(0.5)
      >>> right = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).mean())
      >>> wrong = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).sum())
      >>> judged(w, x, {"right": right}).ok, judged(w, x, {"wrong": wrong}).ok
      (True, False)
    """
    check_options(reduction, accumulation)
    reference = jax.jit(differentiated(reduced(loss_fn, reduction)))
    # Compiled parts are kept in the closure, for every step of a run.
    measure = measurer(loss_fn, reduction, accumulation)

    def judged(
        params: PyTree,
        batch: PyTree,
        candidates: Mapping[str, Candidate],
        *,
        weights: Any = None,
        seed: int | None = 0,
    ) -> Report:
        """Judges candidates at these parameters on this batch."""
        check_arguments(loss_fn, params, batch, candidates, weights, reduction)
        expected = reference(params, batch, weights)
        measured = measure(params, batch, weights, seed)
        found = {
            name: _call(name, candidate, params, batch)
            for name, candidate in candidates.items()
        }
        rows = _rows(expected, found, measured)
        if any(row.ratio > 1 for row in rows):
            # Nothing is condemned by the luck of a few draws.
            again = measure(params, batch, weights, None, SECOND_LOOK)
            rows = _rows(expected, found, again)
        return Report(rows, measured.oracle, measured.notes + looseness(rows))

    return judged


def check_options(reduction: str, accumulation: DTypeLike | None) -> None:
    """Refuses unknown ones."""
    if reduction not in REDUCERS:
        rule = f"must be one of {', '.join(map(repr, REDUCERS))}"
        got = repr(reduction)
        raise ValueError(requirement("gradients(reduction=...)", rule, got))
    if accumulation is not None and not _is_floating(accumulation):
        rule = "must be a floating dtype or None"
        got = repr(accumulation)
        raise ValueError(requirement("gradients(accumulation=...)", rule, got))


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _rows(
    expected: tuple[Any, Any], found: Mapping[str, tuple[Any, Any]], measured: Measured
) -> tuple[LeafReport, ...]:
    """A row for the loss and for each leaf of each candidate."""
    value, wanted = np.asarray(expected[0]), named_leaves(expected[1])
    rows: tuple[LeafReport, ...] = ()
    for name, (loss, gradient) in found.items():
        own = np.asarray(loss)
        # The loss may come in a wider dtype than the reference's; it is judged in that.
        if jnp.issubdtype(own.dtype, jnp.floating) and own.shape == ():
            own = own.astype(value.dtype)
        limits = {LOSS: measured.loss_limit}
        rows += compare_leaves(name, {LOSS: value}, {LOSS: own}, limits)
        rows += compare_leaves(name, wanted, named_leaves(gradient), measured.limits)
    return rows


def _call(
    name: str, candidate: Candidate, params: PyTree, batch: PyTree
) -> tuple[Any, Any]:
    try:
        result: Any = candidate(params, batch)
    except Exception as error:
        error.add_note(f"raised by the candidate {name!r} of verify.gradients")
        raise
    if not isinstance(result, tuple) or len(result) != 2:
        rule = "must return (loss, gradient)"
        got = f"a {type(result).__name__}"
        raise TypeError(requirement(f"candidates[{name!r}](params, batch)", rule, got))
    return result


def check_arguments(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidates: Mapping[str, Any],
    weights: Any,
    reduction: str,
) -> None:
    """Refuses what cannot be judged."""
    if not candidates:
        rule = "must name at least one function"
        raise ValueError(requirement("gradients(candidates=...)", rule, candidates))
    shape = jax.eval_shape(loss_fn, params, batch).shape
    if shape == ():
        if weights is not None or reduction != "mean":
            rule = "need one loss per example"
            raise ValueError(
                requirement(
                    "gradients(weights=..., reduction=...)",
                    rule,
                    "a scalar loss",
                    "Return the losses before their mean.",
                )
            )
        return
    count = examples_in(batch, "gradients(batch=...)")
    if weights is None:
        return
    if np.shape(weights) != (count,):
        rule = f"must be one per example, shape ({count},)"
        got = f"shape {np.shape(weights)}"
        raise ValueError(requirement("gradients(weights=...)", rule, got))
    values = np.asarray(weights, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        rule = "must be finite, at least 0, and not all 0"
        raise ValueError(requirement("gradients(weights=...)", rule, values.tolist()))

"""The judge of whole optimizer steps: are these the parameters after the update?

A gradient that is read off a step, (p - q) / lr, carries the rounding of p divided by
lr: at a small learning rate that is more than the gradient. So a trainer that shows
only its new parameters is judged by these.

The reference is composed: the one-device gradient of each batch, then the optimizer's
update. How far two right trainers may be apart is found by following other right ones
in float64, in lockstep with it (`lockstep`). At every step their gradient is moved by
the gradient's own bound, up or down at random in each entry, and every equation of the
update by its rounding; what the first step moved, the next gradient is taken at. With
D their largest distance from the unmoved one, R what the reference's own rounding did
to it, and s the step:

    bound = sqrt(2) D + 2 R + lambda u (|p| + sqrt(2 EXTRA) |s|)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from jdist._compat import double_precision
from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.bound import EXTRA, Limit, confidence, unit_roundoff
from jdist.verify.compare import compare_leaves
from jdist.verify.diagnosis import diagnose
from jdist.verify.gradients import check_arguments, check_options
from jdist.verify.lockstep import Perturbation, PrecisionPair, run, wide_of
from jdist.verify.measure import measurer
from jdist.verify.oracle import LossFn, differentiated, reduced
from jdist.verify.report import LeafReport, Report

# How many other right trainers are followed.
FOLLOWED = 16

State = tuple[Any, Any]
"""Parameters and the optimizer's state."""


def step(
    loss_fn: LossFn,
    update: Callable[[Any, Any, Any], State],
    state: State,
    batches: Sequence[Any],
    candidates: Mapping[str, Callable[[Any, Any, Any], State]],
    *,
    weights: Sequence[Any] | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
) -> Report:
    """Judges trainers by their parameters after one or several optimizer steps.

    Args:
      loss_fn: As in `verify.gradients`.
      update: `update(params, gradient, opt_state) -> (params, opt_state)`, such as
        `optim.sgd(lr=0.1).step`. It is traced, and must have no Python side effects.
      state: Where training starts: `(params, opt_state)`, such as
        `(params, optim.sgd(lr=0.1).init(params))`.
      batches: One batch for each step, all of the same shapes.
      candidates: Name to `fn(params, opt_state, batch) -> (params, opt_state)`. Each is
        called once per batch, with what it returned before. None in place of its
        optimizer state: only its parameters are judged, and it gets None back.
      weights: One array `(examples,)` for each batch; None for 1 each.
      reduction: As in `verify.gradients`.
      accumulation: As in `verify.gradients`.

    Returns:
      A `Report` with a row for each leaf of each candidate's parameters and state. A
      failing row tells what became of the leaf's *step*, the new value minus the old.
      A leaf is "not judged" where no step at all would pass as well.

    Raises:
      ValueError: No batches or candidates; as many weights as batches are needed; and
        as `verify.gradients`.
      TypeError: A candidate returned something else than a pair.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 2
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.array([0.3, 0.4])
      >>> sgd = lambda w, g, s: (w - 0.01 * g, s)
      >>> def summed(w, s, x):                        # the sum for the mean
      ...     return w - 0.01 * jax.grad(lambda w: loss(w, x).sum())(w), s
      >>> report = step(loss, sgd, (w, ()), [x], {"mine": summed})
      >>> report.failures[0].problem.rpartition("; ")[2]
      'it is 2 times the reference'
    """
    check_options(reduction, accumulation)
    given = _weighted(batches, weights)
    for batch, own in given:
        check_arguments(loss_fn, state[0], batch, candidates, own, reduction)
    gradient_of = jax.jit(differentiated(reduced(loss_fn, reduction)))
    measure = measurer(loss_fn, reduction, accumulation)
    updated = jax.jit(update)
    start = state = jax.tree.map(jnp.asarray, state)
    others = _followed(start)
    for t, (batch, own) in enumerate(given):
        # At the reference's parameters: the others are moved in lockstep with it.
        gradient = gradient_of(state[0], batch, own)[1]
        limits = measure(state[0], batch, own, None).limits
        bounds = [limit.bound for limit in limits.values() if limit is not None]
        taken = _Taken(state, gradient, (batch, own), bounds)
        traced = (
            gradient_of.trace(state[0], batch, own).jaxpr,
            updated.trace(state[0], gradient, state[1]).jaxpr,
        )
        others = _move(traced, taken, others, t)
        state = updated(state[0], gradient, state[1])
    wanted, before = _named(state), _named(start)
    limits, steps = _limits(wanted, before, others, len(given))
    rows: tuple[LeafReport, ...] = ()
    notes: tuple[str, ...] = ()
    for name, candidate in candidates.items():
        found = _trained(name, candidate, start, [batch for batch, _ in given])
        own = _rows(name, wanted, before, found, limits, steps)
        rows, notes = rows + own, notes + _equalities(name, own)
    return Report(rows, notes=notes)


class _Taken(NamedTuple):
    """The start of one of the reference's steps."""

    state: State
    gradient: Any
    batch: Any
    bounds: list[Any]
    """Of each floating leaf of the gradient."""


def _weighted(
    batches: Sequence[Any], weights: Sequence[Any] | None
) -> list[tuple[Any, Any]]:
    if not isinstance(batches, list | tuple) or not batches:
        rule = "must be a list or tuple of batches, one for each step"
        got = "none" if isinstance(batches, list | tuple) else type(batches).__name__
        raise ValueError(requirement("step(batches=...)", rule, got))
    own = [None] * len(batches) if weights is None else list(weights)
    if len(own) != len(batches):
        rule = f"must be one array for each of {len(batches)} batches"
        raise ValueError(requirement("step(weights=...)", rule, f"{len(own)}"))
    return list(zip(batches, own, strict=True))


# --- the trainers that are followed ---


def _followed(start: State) -> list[np.ndarray]:
    """The floating leaves of the state in float64, for each trainer; 0 is unmoved."""
    leaves = [x for x in jax.tree.leaves(start) if is_inexact(x)]
    return [
        np.broadcast_to(np.asarray(x, wide_of(x.dtype)), (FOLLOWED + 1, *x.shape))
        for x in leaves
    ]


def _move(
    programs: tuple[ClosedJaxpr, ClosedJaxpr],
    taken: _Taken,
    others: list[np.ndarray],
    seed: int,
) -> list[np.ndarray]:
    """One step of each of them."""
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        moved = _moved(programs, taken, others, jnp.uint32(seed))
        return [np.asarray(x) for x in moved]


@partial(jax.jit, static_argnums=0)
def _moved(
    programs: tuple[ClosedJaxpr, ClosedJaxpr], taken: _Taken, others: PyTree, seed: Any
) -> list[jax.Array]:
    differentiate, update = programs
    state_leaves = jax.tree.leaves(taken.state)
    count = len(jax.tree.leaves(taken.state[0]))
    entries = sum(x.size for x in jax.tree.leaves(taken.gradient))

    def one(each: Any) -> list[jax.Array]:
        number, wide = each
        moving = jnp.where(number == 0, 0.0, confidence(entries))
        own = seed * jnp.uint32(FOLLOWED + 1) + number.astype(jnp.uint32)
        values = iter(wide)
        state = [
            PrecisionPair(x, next(values)) if is_inexact(x) else x for x in state_leaves
        ]
        exact = Perturbation(None, own, None, set())
        # The reference's own order of leaves: the loss, then the gradient.
        _, *slopes = run(
            differentiate, [*state[:count], *jax.tree.leaves(taken.batch)], exact
        )
        gradient = _shifted(taken, slopes, own, number != 0)
        rounding = Perturbation(moving, own, None, set())
        found = run(update, [*state[:count], *gradient, *state[count:]], rounding)
        return [x.wide for x in found if is_inexact(x.rounded)]

    return jax.lax.map(one, (jnp.arange(FOLLOWED + 1), others))


def _shifted(
    taken: _Taken, slopes: list[PrecisionPair], seed: jax.Array, moving: jax.Array
) -> list[PrecisionPair]:
    """The gradient, each entry up or down by its bound."""
    leaves = jax.tree.leaves(taken.gradient)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), max(len(leaves), 1))
    shifted = []
    for key, own, slope, width in zip(keys, leaves, slopes, taken.bounds, strict=False):
        sign = jax.random.rademacher(key, own.shape, jnp.float64)
        shifted.append(
            PrecisionPair(own, slope.wide + jnp.where(moving, sign * width, 0))
        )
    return shifted


# --- what is judged ---


def _named(state: State) -> dict[str, Any]:
    return named_leaves({"params": state[0], "state": state[1]})


def _limits(
    wanted: Mapping[str, Any],
    before: Mapping[str, Any],
    others: list[np.ndarray],
    steps: int,
) -> tuple[dict[str, Limit | None], dict[str, np.ndarray]]:
    """The limit of each leaf, and its exact step."""
    values = iter(others)
    limits: dict[str, Limit | None] = {}
    moves: dict[str, np.ndarray] = {}
    for path, leaf in wanted.items():
        if leaf is None or not is_inexact(leaf):
            limits[path] = None
            continue
        wide = next(values)
        exact, own = wide[0], np.asarray(leaf).astype(wide.dtype)
        old = np.asarray(before[path]).astype(wide.dtype)
        apart = np.max(np.abs(wide[1:] - exact), axis=0, initial=0)
        moves[path] = exact - old
        roundings = np.abs(own) + math.sqrt(2 * EXTRA) * np.abs(moves[path])
        width = confidence(leaf.size) * math.sqrt(steps) * unit_roundoff(leaf.dtype)
        allowed = math.sqrt(2) * apart + 2 * np.abs(own - exact) + width * roundings
        tiny = float(jnp.finfo(leaf.dtype).smallest_normal)
        limits[path] = Limit(allowed + EXTRA * tiny, np.abs(own))
    return limits, moves


def _trained(
    name: str,
    candidate: Callable[[Any, Any, Any], State],
    start: State,
    batches: Sequence[Any],
) -> dict[str, Any]:
    """The candidate's leaves after all batches; without a state, its parameters."""
    params, state = start
    for batch in batches:
        try:
            result: Any = candidate(params, state, batch)
        except Exception as error:
            error.add_note(f"raised by the candidate {name!r} of verify.step")
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            call = f"candidates[{name!r}](params, opt_state, batch)"
            rule, got = "must return (params, opt_state)", f"a {type(result).__name__}"
            raise TypeError(requirement(call, rule, got))
        params, state = result
    return named_leaves({"params": params}) if state is None else _named(result)


def _rows(
    name: str,
    wanted: Mapping[str, Any],
    before: Mapping[str, Any],
    found: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
    steps: Mapping[str, np.ndarray],
) -> tuple[LeafReport, ...]:
    judged = dict(wanted)
    if not any(path.startswith("state") for path in found):
        judged = {p: x for p, x in wanted.items() if not p.startswith("state")}
    rows = compare_leaves(name, judged, found, limits)
    return tuple(_of_step(row, before, found, limits, steps) for row in rows)


def _of_step(
    row: LeafReport,
    before: Mapping[str, Any],
    found: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
    steps: Mapping[str, np.ndarray],
) -> LeafReport:
    """The row in terms of the leaf's step, where it was compared in numbers."""
    limit = limits.get(row.path)
    if limit is None or np.isnan(row.max_ulp) or row.path not in steps:
        return row
    own = steps[row.path]
    if not row.problem:
        hidden = own.any() and (np.abs(own) <= limit.bound).all()
        if not hidden or row.bit_equal:
            return row
        text = (
            f"its largest step is {np.max(np.abs(own)):.1e} and rounding explains "
            f"{np.max(limit.bound):.1e}: no step at all would pass too"
        )
        return replace(row, unjudged=text)
    got = np.asarray(found[row.path]).astype(own.dtype)
    took = got - np.asarray(before[row.path]).astype(own.dtype)
    if not np.isfinite(took).all() or (np.abs(took - own) <= limit.bound).all():
        return row
    ratio = np.abs(took - own) / np.broadcast_to(limit.bound, own.shape)
    return replace(row, problem=f"its step: {diagnose(row.path, steps, took, ratio)}")


def _equalities(name: str, rows: Sequence[LeafReport]) -> tuple[str, ...]:
    """Says where no bit differs."""
    params = [row for row in rows if row.path.startswith("params")]
    if all(row.bit_equal for row in params):
        return (f"{name}: every parameter is bit-equal to the reference's",)
    equal = [row.path for row in params if row.bit_equal]
    return (f"{name}: bit-equal in {', '.join(equal)}",) if equal else ()

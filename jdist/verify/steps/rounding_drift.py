"""Drift of an optimizer alone, by rounding, over many steps with given gradients.

One step in 16-bit numbers is mostly rounding, so that `step` cannot judge it. Over many
steps roundings that err as often up as down add up as a random walk, while a state that
always loses the same part drifts: a second moment in bfloat16 that decays by a
thousandth in each step never decays, because that is less than half of its spacing.

The update is run in float64 (`piecewise`), all runs of a step together: once exactly,
`DRAWS` times with roundings that are random in every step, from which the bound on a
right leaf follows as on a gradient (`bound`, 3.), and `LASTING` times with roundings
that are the same in every step. The largest distance of the latter is added for leaves
of 32 bits and more, where it is harmless. In 16 bits it is what is looked for.

In 16 bits rounding may explain all of an entry's way, though not that of a leaf, whose
entries are rounded apart. So its share of the reference's way is judged, by projection.
The same draws show how far rounding scatters it; entries that go the same way count
once. A last rounding, which may be the same for all entries, moves it by at most
sum |w| u |x| / sum w^2, for ways w to values x and the rounding unit u. And as rounding
to nearest leans, by up to half of a spacing in every step, half of the way may be lost,
or added. Where scatter and last rounding are below the other half, no way at all, the
opposite one and the double one are told from the right one. A step that is always less
than half of the spacing goes no way at all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import double_precision
from jdist._errors import check_function, quoted, requirement
from jdist._tree import PyTree, is_inexact
from jdist.verify.arguments import check_references
from jdist.verify.bound import (
    Limit,
    Sums,
    accumulated,
    confidence,
    in_double,
    measured_bound,
    unit_roundoff,
)
from jdist.verify.comparison import compare_leaves
from jdist.verify.evaluation.decisions import Choice
from jdist.verify.evaluation.lockstep import paired
from jdist.verify.evaluation.piecewise import Pieces
from jdist.verify.measure import Choices, choices_in, magnified
from jdist.verify.processes.one_device import brought, on_one_device
from jdist.verify.report import LeafReport, Report
from jdist.verify.steps.trajectory import changed, named, on_host, run_together

DRAWS = 32
LASTING = 8
LEANING = 0.5
"""The share of a leaf's way that rounding to nearest may take or add."""
RUNS = 1 + DRAWS + LASTING

Update = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`update(params, gradient, opt_state) -> (params, opt_state)`."""


def drift(
    update: Update,
    state: tuple[PyTree, PyTree],
    gradients: Sequence[PyTree],
    candidates: Mapping[str, tuple[Update, tuple[PyTree, PyTree]]] | None = None,
) -> Report:
    """Judges what rounding does to an optimizer over many steps.

    The update itself, in its own precision, and the candidates are compared, after
    every step, with the update in float64. Take enough steps for the slowest average,
    such as 2000 for a decay of 0.999. Gradients of a real run, or random ones that
    become smaller, reveal most.

    Args:
      update: `update(params, gradient, opt_state) -> (params, opt_state)`, with the
        claimed dtypes: for an optimizer that is said to keep its moments in float32,
        one that does. It must be pure.
      state: The start: `(params, opt_state)`.
      gradients: A gradient for each step, all of the same shapes and dtypes.
      candidates: Name to `(update, state)`, each an update like `update` with a state
        of its own, of the same paths and shapes but any floating dtypes.

    Returns:
      A `Report` with a row for each leaf of "update" and of each candidate: after the
      first step that is wrong, or else the last. A leaf is "not judged" where no step
      at all would pass as well.

    Raises:
      ValueError: No gradients; a candidate named "update"; a state that is no pair; an
        update with `jax.new_ref`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def average(w, g, m):                       # of squares, as Adam's second
      ...     m = (0.99 * m + 0.01 * g**2).astype(m.dtype)
      ...     return w - g, m
      >>> fading = [jnp.full(3, 0.97**t) for t in range(200)]
      >>> w, m = jnp.ones(3), jnp.zeros(3)
      >>> half = average, (w, m.astype(jnp.bfloat16))
      >>> report = drift(average, (w, m), fading, {"half": half})
      >>> report.of("update").ok, [row.path for row in report.failures]
      (True, ['state'])
    """
    runs = {"update": (update, state)} | dict(candidates or {})
    _check(runs, gradients, candidates or {})
    with on_one_device(state, gradients):

        def arrays(tree: PyTree) -> PyTree:
            # Before x64 is enabled, which would give NumPy arrays wider dtypes.
            return brought(jax.tree.map(jnp.asarray, tree))

        live = {k: _Run(k, own, arrays(start)) for k, (own, start) in runs.items()}
        own = live["update"]
        exact = _Exact(own, arrays(gradients[0]))
        references = dict.fromkeys(live, exact)
        for t, gradient in enumerate(map(arrays, gradients), 1):
            # The update goes on where it is wrong: it decides for the others.
            for reference in dict.fromkeys((exact, *references.values())):
                reference.step(gradient, t)
            for name, each in live.items():
                if each is not own and not each.ended():
                    each.step(gradient)
                if not each.ended():
                    when = f"{t} of {len(gradients)}"
                    references[name] = each.judged(references[name], when)
    rows = tuple(row for each in live.values() for row in each.rows)
    return Report(rows, notes=tuple(x for own in live.values() for x in own.notes))


def _check(
    runs: Mapping[str, Any], gradients: Sequence[PyTree], others: Mapping[str, Any]
) -> None:
    if "update" in others:
        rule = "must have other names than that of the reference"
        raise ValueError(requirement("drift(candidates=...)", rule, "'update'"))
    if not isinstance(gradients, list | tuple) or not gradients:
        rule = "must be a list or tuple, one for each step"
        got = "none" if isinstance(gradients, list | tuple) else repr(type(gradients))
        raise ValueError(requirement("drift(gradients=...)", rule, got))
    for name, own in runs.items():
        whose = "update, state" if name == "update" else f"candidates[{name!r}]"
        if not isinstance(own, tuple) or len(own) != 2:
            rule = "must be (update, state)"
            raise ValueError(requirement(f"drift({whose})", rule, quoted(type(own))))
        check_function(f"drift({whose})", own[0])
        if not isinstance(own[1], tuple | list) or len(own[1]) != 2:
            rule = "must have a state of (params, opt_state)"
            raise ValueError(requirement(f"drift({whose})", rule, quoted(type(own[1]))))


class _Run:
    """An optimizer in its own precision, and its rows so far."""

    def __init__(self, name: str, update: Update, state: tuple[PyTree, PyTree]) -> None:
        self.name, self.update, self.state = name, jax.jit(update), tuple(state)
        self.rows: tuple[LeafReport, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._moved = dict[str, np.ndarray]()
        self._steps = 0

    def ended(self) -> bool:
        """Whether it differed after a step."""
        return any(row.problem or row.ratio > 1 for row in self.rows)

    def leaves(self) -> dict[str, Any]:
        """Its parameters and state by path, on the host."""
        params, opt_state = self.state
        return on_host(named(params, opt_state, ()))

    def step(self, gradient: PyTree) -> None:
        """Takes a step, and notes which entries move."""
        before = self.leaves()
        params, opt_state = self.state
        self.state = self.update(params, gradient, opt_state)
        self._steps += 1
        self._moved = dict(self._moved)
        for path, new in self.leaves().items():
            if path in before and np.shape(new) == np.shape(before[path]):
                last = self._moved.get(path, np.zeros(np.shape(new), int))
                self._moved[path] = np.where(new != before[path], self._steps, last)

    def judged(self, reference: "_Exact", when: str) -> "_Exact":
        """Makes the rows after this step; returns its reference from now on."""
        wanted, limits = reference.limits()
        self._compare(wanted, limits, reference, when)
        if not self.ended() or self is reference.own:
            return reference
        choices, results = reference.choices(), list(reference.dtypes)
        if taken := choices.read_off(results, wanted, self.leaves(), limits):
            other = reference.changed(taken[1])
            self._compare(*other.limits(), other, when)
            if not self.ended():
                self.notes += (f"{self.name}: after step {when}: {taken[0]}",)
                return other
        if choices.examples:
            limits = choices.of_leaves(limits, results)
            self._compare(wanted, limits, reference, when)
            self.notes += (f"{self.name}: after step {when}: {choices.note}",)
        return reference

    def _compare(
        self, wanted: Mapping[str, Any], limits: Any, reference: "_Exact", when: str
    ) -> None:
        """Makes the rows after this step."""
        leaves = self.leaves()
        found = {p: in_double(x) if is_inexact(x) else x for p, x in leaves.items()}
        rows = compare_leaves(self.name, wanted, found, limits)
        self.rows = tuple(self._told(r, leaves, reference, when) for r in rows)

    def _told(
        self, row: LeafReport, leaves: Mapping[str, Any], own: "_Exact", when: str
    ) -> LeafReport:
        leaf = leaves.get(row.path)
        dtype = jnp.dtype(own.dtypes.get(row.path, row.dtype))
        if is_inexact(np.zeros(0, dtype)):
            # They were compared in float64.
            ulp = row.max_ulp * float(jnp.finfo(row.dtype).eps / jnp.finfo(dtype).eps)
            row = replace(row, dtype=str(dtype), max_ulp=ulp)
        row = own.along(row, leaf) if row.ok else row
        if row.ok and own.hidden.get(row.path):
            return replace(row, unjudged=own.hidden[row.path])
        if not row.problem or leaf is None:
            return row
        words = f"after step {when}: {row.problem}"
        if str(leaf.dtype) != row.dtype:
            words += f"; it is kept in {leaf.dtype}"
        last = self._moved.get(row.path, np.zeros(0, int))
        if still := int(np.sum(last <= self._steps // 2)):
            words += f"; {still} of {last.size} entries did not move in the second half"
        return replace(row, problem=words)


class _Exact:
    """The update in float64, exact and perturbed.

    Attributes:
      own: The update in its own precision.
      dtypes: The dtype of each of its own leaves.
      hidden: Why a leaf says nothing after the last step, by path.
      ways: The way of some entries of a leaf in 16 bits, which these are, and by how
        much of it a right leaf may differ.
    """

    def __init__(self, own: _Run, gradient: PyTree) -> None:
        self.own, (params, opt_state) = own, own.state
        program = own.update.trace(params, gradient, opt_state).jaxpr
        check_references("drift(update=...)", program)
        self.pieces, self.factor = Pieces(program, None, {}), magnified(program)
        leaves = own.leaves()
        self.dtypes = {p: str(x.dtype) for p, x in leaves.items() if x is not None}
        self.hidden: dict[str, str] = {}
        self.ways: dict[str, tuple[np.ndarray, np.ndarray, float]] = {}
        self.start = {p: in_double(x) for p, x in leaves.items() if is_inexact(x)}
        self.wide = [np.stack([x] * RUNS) for x in self.start.values()]

    def step(self, gradient: PyTree, t: int) -> None:
        """Takes a step, exactly and in its own precision."""
        own = self.own
        self._before = own.state, self.wide, (gradient,)
        params, opt_state = own.state
        count = sum(map(is_inexact, jax.tree.leaves(params)))
        slopes = (in_double(x) for x in jax.tree.leaves(gradient) if is_inexact(x))
        exact = [np.broadcast_to(x, (RUNS, *x.shape)) for x in slopes]
        wide = [*self.wide[:count], *exact, *self.wide[count:]]
        given = paired(jax.tree.leaves((params, gradient, opt_state)), wide)
        numbers = np.arange(RUNS)
        lasting = numbers > DRAWS
        # Uniform in twice the unit, whose mean size is a whole rounding unit.
        amplitude = np.where(lasting, 2.0, np.sign(numbers)) * self.factor
        seeds = numbers + np.where(lasting, 0, t << 6)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            self.wide, _ = run_together(self.pieces, given, amplitude, seeds)
        own.step(gradient)

    def choices(self) -> Choices:
        """Decisions within rounding in the last step: changes of its leaves."""
        update = self.own.update
        return choices_in(
            lambda state, gradient: update(state[0], gradient, state[1]),
            *self._before,
            None,
        )

    def changed(self, change: Choice) -> "_Exact":
        """Another one, whose leaves have changed by their numbers."""
        other = copy(self)
        other.own, other.hidden, other.ways = copy(self.own), {}, {}
        other.own.state, other.wide = changed(self.own.state, self.wide, change)
        return other

    def limits(self) -> tuple[dict[str, Any], dict[str, Limit | None]]:
        """The leaves after a step and their limits."""
        wanted = self.own.leaves()
        values = dict(zip(self.start, self.wide, strict=True))
        limits = {p: self._limit(p, values[p]) if p in values else None for p in wanted}
        return {**wanted, **{p: x[0] for p, x in values.items()}}, limits

    def _limit(self, path: str, wide: np.ndarray) -> Limit:
        dtype, exact = jnp.dtype(self.dtypes[path]), wide[0]
        apart = np.abs(wide - exact) / self.factor
        size = np.abs(exact)
        variance = np.mean(apart[1 : 1 + DRAWS] ** 2, axis=0)
        sums = Sums(exact, size, size**2, np.zeros_like(size), variance)
        draws, adding = (DRAWS, DRAWS), accumulated(dtype, None)
        limit = measured_bound(dtype, sums, 1, draws, adding)
        if jnp.finfo(dtype).bits >= 32:
            lasting = math.sqrt(2) * apart[1 + DRAWS :].max(axis=0, initial=0)
            limit = limit._replace(bound=limit.bound + lasting)
        way = np.abs(exact - self.start[path])
        self.hidden[path], judged = "", False
        if jnp.finfo(dtype).bits < 32 and way.any():
            judged = self._goes(path, wide, unit_roundoff(dtype))
        if way.any() and (way <= limit.bound).all() and not judged:
            self.hidden[path] = (
                f"it has moved by {way.max():.1e} and rounding in {dtype} explains "
                f"{np.max(limit.bound):.1e}: no step at all would pass too. Take more "
                "steps, or gradients of which more are alike"
            )
        return limit

    def _goes(self, path: str, wide: np.ndarray, unit: float) -> bool:
        """Notes the way of a leaf; returns whether it tells of a right one."""
        start, runs = self.start[path].ravel(), wide.reshape(len(wide), -1)
        # Equal entries are rounded alike.
        _, own = np.unique(np.stack([start, runs[0]]), axis=1, return_index=True)
        ways = runs[: 1 + DRAWS, own] - start[own]
        way = ways[0] / (ways[0] @ ways[0])
        scatter = np.sqrt(np.mean(((ways[1:] - ways[0]) @ way) ** 2)) / self.factor
        last = unit * np.abs(runs[0, own]) @ np.abs(way)
        # The reference itself is exact.
        may = last + confidence(1, DRAWS) * scatter
        self.ways[path] = way, own, LEANING + may
        return bool(may < LEANING)

    def along(self, row: LeafReport, leaf: Any) -> LeafReport:
        """The row of a leaf with its share of the reference's way."""
        way, own, most = self.ways.get(row.path, (None, None, 0.0))
        if way is None or most >= 2 * LEANING:
            return row
        share = (in_double(leaf).ravel() - self.start[row.path].ravel())[own] @ way
        if abs(share - 1) <= most:
            return row
        words = f"it has gone {share:.3g} of the reference's way"
        return replace(row, ratio=abs(share - 1) / most, problem=words)

"""Right values and cotangents at all taps of the reference, with their bounds.

The reference's gradient program is run on the whole batch, piece by piece
(`piecewise`): once in lockstep with itself in float64, and `DRAWS` times perturbed as
rounding would. Every tap shows its value. The entries of one example are a row, and
each row has a bound like a leaf's (`bound`), of a sum of one term.

Where rounding may decide (`evaluation.decisions`), the program also runs free with
random errors, and then exactly with what it decided there. Rows that this changes are
not compared; cotangents of others, which a loss over the batch changes, have as much
wider bounds.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from jdist._compat import double_precision, equations_in
from jdist._tree import PyTree, is_inexact
from jdist.verify.bound import BLIND, Sums, accumulated, measured_bound
from jdist.verify.evaluation.decisions import errors
from jdist.verify.evaluation.lockstep import Position, PrecisionPair
from jdist.verify.evaluation.piecewise import BOTH, EXACT, Pieces, Recording, drawn_form
from jdist.verify.measure import Counted, magnified
from jdist.verify.oracle import LossFn, differentiated, reduced
from jdist.verify.progress import progress
from jdist.verify.tracing.layout import (
    Layout,
    Shape,
    finite_part,
    infinities,
    layouts,
)
from jdist.verify.tracing.primitive import show
from jdist.verify.tracing.recording import TapRecording, labels

DRAWS = 32

APART = 0.25
"""Less than half of the distance of two integers: they are right or wrong."""

HEADS = 4
"""Maximum number of scalar values whose share of each cotangent is found: each costs a
run of the reference more."""


class Rows(NamedTuple):
    """One tapped value by example: `(examples, entries)` each.

    Attributes:
      values: The values that the reference computes, in float64 or complex128.
      bounds: The largest differences that rounding explains.
    """

    values: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One passage of the reference through a tap.

    Attributes:
      name: Name of the tap.
      label: The name, with its number, such as `block[3]`, if there are several
        passages.
      layout: Layout of the value.
      forward: Rows of the value.
      backward: Rows of the cotangent; None if none flows.
      through: The part of those rows that comes through each scalar value behind this
        one, such as an auxiliary loss, by its name.
      undecided: The rows that rounding may decide about, by direction.
    """

    name: str
    label: str
    layout: Layout
    forward: Rows
    backward: Rows | None
    through: Mapping[str, np.ndarray] = field(default_factory=dict)
    undecided: Mapping[str, frozenset[int]] = field(default_factory=dict)


class TracedReference(NamedTuple):
    """What the taps of the reference show: all passages, in the program's order."""

    passages: list[Passage]

    undecided: Callable[[], list[Passage]]
    """Those with what other choices explain."""


def traced(
    loss_fn: LossFn,
    params: PyTree,
    whole: Counted,
    reduction: str,
    accumulation: DTypeLike | None,
    examples: int | None,
) -> TracedReference:
    """Runs the reference.

    Args:
      loss_fn: With taps.
      params: Its parameters.
      whole: The whole batch, with the numbers of the examples that count.
      reduction: A key of `oracle.REDUCERS`.
      accumulation: The dtype in which sums are accumulated.
      examples: How many the whole batch has; None if that is not known, and all values
        are compared as wholes.
    """
    options = reduction, accumulation, examples
    found = _of_batch(loss_fn, params, whole, *options)
    flowing = [x.backward.values for x in found.passages if x.backward is not None]
    if whole.rows is None or all(np.isfinite(x).all() for x in flowing):
        return found
    # An example that does not count may have a cotangent of 0 / 0. As in padding, a
    # copy of one that counts takes its place.
    assert whole.weights is not None, "some do not count"
    rows = np.full(np.shape(whole.weights), whole.rows[0])
    rows[whole.rows] = whole.rows
    batch = jax.tree.map(lambda x: jnp.asarray(x)[rows], whole.batch)
    others = _of_batch(loss_fn, params, whole._replace(batch=batch), *options)

    def joined(passages: list[Passage]) -> list[Passage]:
        pairs = zip(passages, others.passages, strict=True)
        return [
            replace(x, backward=x.backward and y.backward, through=y.through)
            for x, y in pairs
        ]

    own = joined(found.passages)
    return TracedReference(own, lambda: joined(found.undecided()))


def _of_batch(
    loss_fn: LossFn,
    params: PyTree,
    counted: Counted,
    reduction: str,
    accumulation: DTypeLike | None,
    examples: int | None,
) -> TracedReference:
    """That of one batch."""
    # Converted before x64 is enabled, which would give NumPy arrays wider dtypes.
    params, batch, weights = jax.tree.map(jnp.asarray, (params, *counted[:2]))
    value_and_gradient = differentiated(reduced(loss_fn, reduction))
    # Taps are part of a program only if it is traced during a recording.
    with TapRecording():
        program = jax.make_jaxpr(value_and_gradient)(params, batch, weights)
        where = {} if examples is None else layouts(loss_fn, params, batch, examples)
    seen = _Seen(magnified(program), _heads(program, where))
    pieces, decided = Pieces(program, accumulation, {}, seen.observe), Recording()
    run = partial(pieces.run, jax.tree.leaves((params, batch, weights)))
    drawn = drawn_form(program)
    # Exactly, perturbed, and exactly without the cotangent of each of `seen.heads`.
    forms = [BOTH, *[drawn] * DRAWS, *[EXACT] * len(seen.heads)]
    with (
        double_precision(),
        jax.numpy_dtype_promotion("standard"),
        progress("tracing the reference", 0 if pieces.tiny else len(forms)) as advance,
    ):
        for number, form in enumerate(forms):
            recording = None if number else decided
            run(
                form,
                amplitude=seen.factor,
                seed=number,
                recording=recording,
                replay=decided,
            )
            advance()
    own = seen.passages(where, accumulation)

    @cache
    def undecided() -> list[Passage]:
        made = [decided]
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            for amplitude, seed in errors(0) if pieces.decisions else ():
                made.append(Recording())
                # Numbers below 0 are of runs whose taps do not count.
                run(
                    drawn,
                    amplitude=amplitude,
                    seed=-seed,
                    recording=made[-1],
                    replay=decided,
                    free=True,
                )
            for number, other in enumerate(made, len(forms)):
                run(EXACT, seed=number, replay={**decided, **other})
        return seen.undecided(own, len(forms))

    return TracedReference(own, undecided)


def _heads(
    program: ClosedJaxpr, where: Mapping[tuple[str, Shape], Layout]
) -> tuple[str, ...]:
    """The tapped values that are one number for the batch or for each part of it."""
    names = []
    for each in equations_in(program):
        # A cotangent has its value beside it.
        if each.primitive.name == "tap" and len(each.invars) == 1:
            name, value = each.params["name"], cast(ShapedArray, each.invars[0].aval)
            own = Layout(value.shape, None, 1)
            layout = where.get((name, value.shape), own)
            single = layout.axis is None and math.prod(layout.shape) == 1
            if single and is_inexact(value):
                names.append(name)
    return tuple(dict.fromkeys(names))[:HEADS]


class _Seen:
    """Collects what the reference's taps show; those in loops on XLA's threads.

    Run 0 shows both sides, the others the wide one.
    """

    def __init__(self, factor: float, heads: tuple[str, ...]) -> None:
        self.factor = factor
        self.heads = heads
        self._lock = threading.Lock()
        self._first: dict[Any, list[np.ndarray]] = {}
        self._squares: dict[Any, np.ndarray] = {}
        self._later: dict[Any, dict[int, np.ndarray]] = defaultdict(dict)

    def observe(
        self, name: str, position: Position, given: Sequence[PrecisionPair]
    ) -> PrecisionPair:
        """Passes a tap on: a value, or a cotangent and its value."""
        number, *place = position
        own = given[0]
        # Both sides of each, in every run: in a loop a value without sides of its own
        # has two beside others that have one.
        sides = [
            side
            for x in given
            for side in (x.wide if x.rounded is None else x.rounded, x.wide)
        ]
        at = jnp.stack([jnp.asarray(x, jnp.int32) for x in place])
        run = jnp.asarray(number, jnp.int32)
        shown = show(*sides, at, run, name=name, receive=self.receive)
        found = replace(own, wide=shown)
        if own.rounded is not None:
            # Whichever side is used further on, the tap is kept.
            rounded, wide = jax.lax.optimization_barrier((shown, own.wide))
            found = replace(own, rounded=rounded, wide=wide)
        if len(given) > 1 and name in self.heads:
            kept = number != DRAWS + 1 + self.heads.index(name)
            found = _where(kept, found)
        return found

    def receive(self, name: str, axes: int, arrays: Sequence[np.ndarray]) -> None:
        """Stores one passage of a run."""
        del axes
        *sides, place, run = arrays
        key, number = (tuple(place.tolist()), name, len(sides) > 2), int(run)
        wide = sides[1]
        with self._lock:
            if number == 0:
                self._first[key] = sides
                self._squares[key] = np.zeros_like(np.abs(wide))
            elif number > DRAWS:
                self._later[key][number] = wide
            elif number > 0 and is_inexact(wide):
                exact = self._first[key][1]
                error = finite_part(wide).astype(exact.dtype) - finite_part(exact)
                self._squares[key] += np.abs(error) ** 2

    def passages(
        self,
        where: dict[tuple[str, Shape], Layout],
        accumulation: DTypeLike | None,
    ) -> list[Passage]:
        """Makes the passages: values with bounds, and cotangents beside them."""
        pairs, found = self._pairs(), []
        names = labels([name for (_, name, _), _ in pairs])
        for label, (key, cotangent) in zip(names, pairs, strict=True):
            name, value = key[1], self._first[key][0]
            layout = where.get((name, value.shape), Layout(value.shape, None, 1))
            rows = self._rows(key, layout, accumulation)
            theirs = cotangent and self._rows(cotangent, layout, accumulation)
            through = self._through(cotangent, layout) if cotangent else {}
            found.append(Passage(name, label, layout, rows, theirs, through))
        return found

    def undecided(self, passages: Sequence[Passage], first: int) -> list[Passage]:
        """The passages with what runs from the first on change; that one is usual."""
        found = []
        for own, keys in zip(passages, self._pairs(), strict=True):
            free: frozenset[int] = frozenset()
            for side, key in zip(("forward", "backward"), keys, strict=True):
                rows: Rows | None = getattr(own, side)
                # A loop may end sooner, by another choice.
                shown = [x for n, x in sorted(self._later[key].items()) if n >= first]
                if rows is None or not shown:
                    continue
                dtype = rows.values.dtype
                usual, *_ = each = [_split(own.layout, x).astype(dtype) for x in shown]
                change = 2 * np.max([_change(x, usual) for x in each], axis=0)
                most = rows.bounds
                if side == "backward":
                    size = np.linalg.norm(usual, axis=1, keepdims=True)
                    most = np.maximum(most, BLIND * size)
                large = (change > most).any(1)
                free |= {*np.flatnonzero(large).tolist()}
                bounds = rows.bounds + np.where(large[:, None], 0, change)
                undecided = {**own.undecided, side: free}
                wider: Any = {side: Rows(rows.values, bounds)}
                own = replace(own, **wider, undecided=undecided)
            found.append(own)
        return found

    def _through(self, key: Any, layout: Layout) -> dict[str, np.ndarray]:
        """The part of a cotangent that comes through each of the heads."""
        exact, heads = self._first[key][1], enumerate(self.heads, DRAWS + 1)
        parts = {head: exact - self._later[key][number] for number, head in heads}
        return {head: _split(layout, x) for head, x in parts.items() if x.any()}

    def _pairs(self) -> list[tuple[Any, Any]]:
        """The keys of all values in order, each with that of its cotangent or None."""
        # By position, because XLA's threads show taps in any order.
        keys = sorted(self._first)
        backward = {key: self._first[key][2] for key in keys if key[2]}
        values: dict[str, list[np.ndarray]] = defaultdict(list)
        found = []
        for key in keys:
            if key[2]:
                continue
            name, value = key[1], self._first[key][0]
            cotangent = _of_value(name, value, backward)
            # `jax.checkpoint` shows a value a second time, without a cotangent of its
            # own.
            if cotangent is None and any(_same(value, x) for x in values[name]):
                continue
            values[name].append(value)
            found.append((key, cotangent))
        return found

    def _rows(self, key: Any, layout: Layout, accumulation: DTypeLike | None) -> Rows:
        """The rows of the first value at a position, over all draws."""
        shown = self._first[key][0]
        if not is_inexact(shown):
            rows = _split(layout, shown).astype(float)
            return Rows(rows, np.full_like(rows, APART))
        rounded, exact = map(finite_part, self._first[key][:2])
        squares = self._squares[key]
        drift = rounded.astype(exact.dtype) - exact
        # Either estimate alone may be too small by chance, as in `measure`.
        variance = np.maximum(abs(drift) ** 2, squares / (self.factor**2 * DRAWS))
        parts = [_split(layout, x) for x in (exact, abs(exact), drift, variance, shown)]
        adding = accumulated(rounded.dtype, accumulation)
        bounds = [
            measured_bound(
                rounded.dtype,
                Sums(total, size, size**2, error, spread),
                1,
                (DRAWS, DRAWS),
                adding,
            ).bound
            for total, size, error, spread, _ in zip(*parts, strict=True)
        ]
        return Rows(parts[-1].astype(exact.dtype), np.stack(bounds))


def _change(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    same = infinities(first) == infinities(second)
    apart = np.abs(finite_part(first) - finite_part(second))
    return np.where(same, np.nan_to_num(apart), np.inf)


def _where(kept: bool | jax.Array, pair: PrecisionPair) -> PrecisionPair:
    """The value where it is kept, and else 0, on each side that it has."""

    def one(side: jax.Array) -> jax.Array:
        return jnp.where(kept, side, jnp.zeros_like(side))

    rounded = None if pair.rounded is None else one(pair.rounded)
    return replace(pair, rounded=rounded, wide=one(pair.wide))


def _split(layout: Layout, array: np.ndarray) -> np.ndarray:
    rows = layout.rows(array, array.ndim - len(layout.shape))
    assert rows is not None, (layout, array.shape)
    return rows


def _of_value(name: str, value: np.ndarray, backward: dict[Any, np.ndarray]) -> Any:
    """The key of the cotangent of a value; it is taken from those that are left."""
    for key, other in backward.items():
        if key[1] == name and _same(value, other):
            # Taken once: equal values at several passages have a cotangent each.
            del backward[key]
            return key
    return None


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    return np.array_equal(first, second, equal_nan=True)

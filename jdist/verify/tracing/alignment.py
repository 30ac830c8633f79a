"""Assigns the rows of a candidate's taps to examples, by their values.

A candidate's micro-batches, shards and workers pass a tap in any order, pad with copies
and run bubbles on arbitrary values. So a row belongs to the passage and the example of
the reference to whose value it is nearest, if it is within that value's bound; other
rows belong to none. Examples of equal values at a tap are one class there: their rows
cannot be told apart, and are judged together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jdist.verify.tracing.layout import Layout, finite_part, infinities
from jdist.verify.tracing.mesh_parts import WHOLE, ValuePart
from jdist.verify.tracing.recording import TapRecord, in_program_order
from jdist.verify.tracing.reference import Passage

NONE = -1


# Not comparable, because arrays have no single truth value.
@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """All records of one tap in one direction, row after row.

    Attributes:
      values: `(rows, entries)`.
      cotangents: Cotangents, of the same shape; None in the forward pass.
      found: The class of each row; `NONE` for a row of no example.
      seen: Whether some row is within the bound of each row of the reference.
      calls: Number of rows of each record.
      devices: The coordinates of each record's device in the mesh.
    """

    values: np.ndarray
    cotangents: np.ndarray | None
    found: np.ndarray
    seen: np.ndarray
    calls: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]

    def rows_by_call(self) -> Iterator[np.ndarray]:
        """The rows of each record."""
        for end, count in zip(np.cumsum(self.calls), self.calls, strict=True):
            yield np.arange(end - count, end)


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """All records of one part of a tap, beside the reference's passages of that tap.

    A row of the reference is `examples * k + e`: example e at passage k of these.

    Attributes:
      places: Positions of these passages among all.
      examples: Number of rows of a passage.
      label: The class of each row of the reference: the first row that is equal.
      forward: The candidate's values.
      backward: The candidate's cotangents, and the values beside them.
      passages: The reference's passages, of this part.
      part: The part of the value that these devices have.
    """

    places: tuple[int, ...]
    examples: int
    label: np.ndarray
    forward: Passed
    backward: Passed
    passages: tuple[Passage, ...]
    part: ValuePart

    def passage_at(self, place: int) -> Passage:
        """The reference's passage at a place, of this part."""
        return self.passages[self.places.index(place)]

    def classes_at(self, place: int) -> np.ndarray:
        """The class of each example at a passage."""
        start = self.places.index(place) * self.examples
        found: np.ndarray = self.label[start : start + self.examples]
        return found

    @property
    def shown(self) -> Passed:
        """The records whose values are compared: those of the backward pass alone,
        where a worker has sent no others."""
        return self.forward if len(self.forward.found) else self.backward

    def seen_at(self, place: int) -> np.ndarray:
        """Whether a row of the candidate is that of each example at a passage."""
        start = self.places.index(place) * self.examples
        found: np.ndarray = self.shown.seen[start : start + self.examples]
        return found

    def members(self, label: int) -> list[tuple[int, int]]:
        """The place and the example of each row of a class."""
        rows = np.flatnonzero(self.label == label)
        return [(self.places[r // self.examples], int(r % self.examples)) for r in rows]


def align(
    places: Sequence[int],
    passages: Sequence[Passage],
    records: Sequence[TapRecord],
    part: ValuePart = WHOLE,
) -> Aligned:
    """Aligns all records of one part of a tap with the reference's passages.

    Args:
      places: The positions of these passages among all.
      passages: The passages, of one layout.
      records: The candidate's records, in any order, all of that layout and part.
      part: The part of the value that they show.
    """
    passages = tuple(map(part.of, passages))
    expected = np.concatenate([p.forward.values for p in passages])
    bounds = np.concatenate([p.forward.bounds for p in passages])
    label = _classes(expected, bounds)
    layout = passages[0].layout
    # The rows of a call that arrived late are told apart from those before it.
    ordered = in_program_order(records)

    def passed(backward: bool) -> Passed:
        own = [r for r in ordered if (r.cotangent is not None) == backward]
        values = [_rows(layout, r.value, r.axes) for r in own]
        theirs = [
            _rows(layout, r.cotangent, r.axes) for r in own if r.cotangent is not None
        ]
        stacked = _stacked(values, expected)
        found, seen = _matched(stacked, expected, bounds, label)
        calls = tuple(map(len, values))
        cotangents = _stacked(theirs, expected) if backward else None
        devices = tuple(r.place for r in own)
        return Passed(stacked, cotangents, found, seen, calls, devices)

    examples = len(passages[0].forward.values)
    sides = passed(False), passed(True)
    return Aligned(tuple(places), examples, label, *sides, passages, part)


def _rows(layout: Layout, array: np.ndarray, axes: int) -> np.ndarray:
    rows = layout.rows(array, axes)
    assert rows is not None, (layout, array.shape)
    return rows


def _stacked(parts: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    # The empty part sets shape and dtype where there is no record.
    empty = np.zeros((0, like.shape[1]), like.dtype)
    return np.concatenate([empty, *parts]).astype(like.dtype)


def _matched(
    found: np.ndarray, expected: np.ndarray, bounds: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The class of each row, and which rows of the reference are seen.

    Classes of many rows that are near to each other may reach far: there a row within
    one bound is not within all.
    """
    near = _near((found, np.zeros_like(bounds[:1])), (expected, bounds))
    classes = np.full(len(found), NONE)
    seen = np.zeros(len(expected), bool)
    for row, close in enumerate(near.T):
        rows = np.flatnonzero(close)
        same = rows[within(found[rows], expected[row], bounds[row])]
        seen[row] = len(same) > 0
        # Rows of several classes' bounds are none: such classes are one.
        classes[same] = np.where(classes[same] == NONE, label[row], classes[same])
    return classes, seen


def within(found: np.ndarray, expected: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Whether each row has the same infinities, and else is within the bound."""
    # Infinite bounds hide no NaN, which is no example's.
    apart = np.abs(finite_part(found) - finite_part(expected))
    same = infinities(found) == infinities(expected)
    close: np.ndarray = (same & (apart <= bounds)).all(axis=-1)
    return close


def _classes(expected: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The first row that each row is equal to, within both bounds."""
    label = np.arange(len(expected))
    near = _near((expected, bounds), (expected, bounds))
    for i, j in np.argwhere(np.triu(near, 1)):
        if within(expected[i], expected[j], bounds[i] + bounds[j]):
            # Two classes become one where a row is equal to rows of both.
            first, second = sorted((label[i], label[j]))
            label[label == second] = first
    return label


def units(array: np.ndarray) -> np.ndarray:
    """The scale of each entry of rows: its largest finite magnitude, or 1."""
    # Each entry by itself: scores that are masked by -1e9 would hide all others.
    largest = np.max(np.abs(np.nan_to_num(finite_part(array))), axis=0, initial=0)
    return np.where((largest > 0) & np.isfinite(largest), largest, 1.0)


def _near(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Which rows may be equal within both bounds, by a product of matrices.

    A cheap filter: no pair that is equal is left out. The entries themselves decide.
    """
    unit = units(second[0])
    # Rows that are far from all may overflow, and NaN is near to all.
    with np.errstate(over="ignore", invalid="ignore"):
        rows = [finite_part(x) / unit for x, _ in (first, second)]
        reach = [np.linalg.norm(x / unit, axis=1) for _, x in (first, second)]
        powers = [(np.abs(x) ** 2).sum(axis=1) for x in rows]
        total = powers[0][:, None] + powers[1]
        squares = total - 2 * (rows[0] @ rows[1].conj().T).real
        # Products cancel where rows are close.
        limit = 2 * (reach[0][:, None] + reach[1]) ** 2 + 1e-12 * total
        return ~(squares > limit)

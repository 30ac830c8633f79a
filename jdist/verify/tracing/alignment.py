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
from jdist.verify.tracing.recording import TapRecord
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
      calls: Number of rows of each record.
    """

    values: np.ndarray
    cotangents: np.ndarray | None
    found: np.ndarray
    calls: tuple[int, ...]

    def rows_by_call(self) -> Iterator[np.ndarray]:
        """The rows of each record."""
        for end, count in zip(np.cumsum(self.calls), self.calls, strict=True):
            yield np.arange(end - count, end)


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """All records of one tap, beside the reference's passages of that tap.

    A row of the reference is `examples * k + e`: example e at passage k of these.

    Attributes:
      places: Positions of these passages among all.
      examples: Number of rows of a passage.
      label: The class of each row of the reference: the first row that is equal.
      forward: The candidate's values.
      backward: The candidate's cotangents, and the values beside them.
    """

    places: tuple[int, ...]
    examples: int
    label: np.ndarray
    forward: Passed
    backward: Passed

    def classes_at(self, place: int) -> np.ndarray:
        """The class of each example at a passage."""
        start = self.places.index(place) * self.examples
        found: np.ndarray = self.label[start : start + self.examples]
        return found

    def members(self, label: int) -> list[tuple[int, int]]:
        """The place and the example of each row of a class."""
        rows = np.flatnonzero(self.label == label)
        return [(self.places[r // self.examples], int(r % self.examples)) for r in rows]


def align(
    places: Sequence[int], passages: Sequence[Passage], records: Sequence[TapRecord]
) -> Aligned:
    """Aligns all records of one tap with the reference's passages.

    Args:
      places: Where these passages stand among all.
      passages: The passages, of one layout.
      records: The candidate's, in any order, all of that layout.
    """
    expected = np.concatenate([p.forward.values for p in passages])
    bounds = np.concatenate([p.forward.bounds for p in passages])
    label = _classes(expected, bounds)
    layout = passages[0].layout

    def passed(backward: bool) -> Passed:
        own = [r for r in records if (r.cotangent is not None) == backward]
        values = [_rows(layout, r.value, r.axes) for r in own]
        theirs = [
            _rows(layout, r.cotangent, r.axes) for r in own if r.cotangent is not None
        ]
        stacked = _stacked(values, expected)
        found = _matched(stacked, expected, bounds, label)
        calls = tuple(map(len, values))
        return Passed(
            stacked, _stacked(theirs, expected) if backward else None, found, calls
        )

    examples = len(passages[0].forward.values)
    return Aligned(tuple(places), examples, label, passed(False), passed(True))


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
) -> np.ndarray:
    """The class of each row."""
    # A row with NaN matches no example; as 0 it does not disturb the distances.
    numbers = ~np.isnan(found).any(axis=1)
    known = np.where(numbers[:, None], found, 0)
    unit = _unit(expected)
    # The distance of a row that is far from all may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = _distances(known / unit, expected / unit).argmin(axis=1)
    near = numbers & _within(known, expected[nearest], bounds[nearest])
    return np.where(near, label[nearest], NONE)


def _within(found: np.ndarray, expected: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Whether each row has the same infinities, and else is within the bound."""
    apart = np.abs(finite_part(found) - finite_part(expected))
    same = infinities(found) == infinities(expected)
    close: np.ndarray = (same & (apart <= bounds)).all(axis=-1)
    return close


def _classes(expected: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The first row that each row is equal to, within both bounds."""
    label = np.arange(len(expected))
    unit = _unit(expected)
    reach, rows = np.linalg.norm(bounds / unit, axis=1), expected / unit
    squares = _distances(rows, rows)
    # Products cancel where rows are close: none that is equal must be left out.
    slack = 1e-12 * (np.abs(finite_part(rows)) ** 2).sum(axis=1)
    # A cheap filter by distance; the entries themselves decide below.
    near = squares <= 2 * (reach[:, None] + reach) ** 2 + slack[:, None] + slack
    for i, j in np.argwhere(np.triu(near, 1)):
        if _within(expected[i], expected[j], bounds[i] + bounds[j]):
            # Two classes become one where a row is equal to rows of both.
            first, second = sorted((label[i], label[j]))
            label[label == second] = first
    return label


def _unit(array: np.ndarray) -> float:
    """The scale of an array: its largest finite magnitude, or 1."""
    # Squares of values in this unit neither underflow nor overflow.
    largest = float(np.max(np.abs(finite_part(array)), initial=0))
    return largest if largest > 0 and np.isfinite(largest) else 1.0


def _distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squares of the distances between rows; infinite where infinities differ."""
    whole = [finite_part(x) for x in (first, second)]
    powers = [(np.abs(x) ** 2).sum(axis=1) for x in whole]
    squares: np.ndarray = powers[0][:, None] + powers[1]
    squares = squares - 2 * (whole[0] @ whole[1].conj().T).real
    signs = [infinities(x) for x in (first, second)]
    if not any(x.any() for x in signs):
        return squares
    # Of two rows of -1, 0 and 1: the square of their distance, 0 where they are equal.
    counts = [(x**2).sum(axis=1) for x in signs]
    differ = counts[0][:, None] + counts[1] - 2 * (signs[0] @ signs[1].T)
    return np.where(differ > 0, np.inf, squares)

"""Covering arrays: few layouts in which all pairs of values of two axes occur.

A fault that an interaction of two axes causes shows in a layout with these two values,
whatever the others are. A covering array of strength t has each combination of the
values of any t axes in at least one of its rows. How many rows it needs grows with the
logarithm of the number of axes, where the number of layouts grows exponentially.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from jdist._errors import check_at_least
from jdist.verify.fuzzing.layout_grid import Layout, LayoutGrid, layout_grid

SAMPLE = 4096
"""Most rows that are compared before the next one is chosen."""


def covering_array(
    axes: Mapping[str, Sequence[Any]],
    *,
    valid: Callable[[Layout], bool] | None = None,
    strength: int = 2,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Layouts in which each combination of the values of any two axes occurs.

    Args:
      axes: The values of each axis, by its name; the simplest value first.
      valid: `valid(layout) -> bool`: which layouts are allowed; None for all.
        Combinations that occur in no allowed layout are left out.
      strength: The number of axes whose values are combined: 2 for pairs.
      seed: Seed of the choice among equally good layouts; the same seed gives the same
        list.

    Returns:
      The layouts, each a dict with a value for every axis. The first is the simplest
      one that is allowed.

    Raises:
      ValueError: No axes; an axis without values, or with one twice; a strength below 1
        or above the number of axes; more than 262144 combinations; `valid` allows none.
      TypeError: An argument is of another type, or a value cannot be hashed.

    Example:
      >>> axes = {"dp": (1, 2), "tp": (1, 2), "mask": (False, True)}
      >>> for layout in covering_array(axes, valid=lambda c: c["dp"] * c["tp"] < 4):
      ...     print(layout)
      {'dp': 1, 'tp': 1, 'mask': False}
      {'dp': 1, 'tp': 2, 'mask': True}
      {'dp': 2, 'tp': 1, 'mask': True}
      {'dp': 1, 'tp': 2, 'mask': False}
      {'dp': 2, 'tp': 1, 'mask': False}

    References:
      Cohen, Dalal, Fredman and Patton, The AETG System, IEEE Transactions on Software
      Engineering 23(7), 1997: the greedy choice of the next row.
    """
    check_at_least("covering_array(seed=...)", seed, 0)
    grid = layout_grid("covering_array", axes, valid, strength)
    chosen = covering_rows(grid.rows, strength, seed)
    return [grid.layout(number) for number in chosen]


def covering_rows(rows: np.ndarray, strength: int, seed: int) -> list[int]:
    """Few rows in which all combinations occur.

    Args:
      rows: The allowed layouts, `(layouts, axes)`, as positions of values.
      strength: The number of axes whose values are combined.
      seed: Seed of the choice among equally good rows.

    Returns:
      Places in `rows`, in the order of their choice.
    """
    # The simplest row comes first: all have as many combinations.
    chosen = [0]
    numbers, missing = _missing(rows, strength, chosen)
    draw = np.random.default_rng(seed)
    while (left := np.flatnonzero(missing)).size:
        few = np.arange(len(rows))
        if len(few) > SAMPLE:
            # Rows with a missing combination, so that each choice is progress.
            few = np.flatnonzero((numbers == draw.choice(left)).any(axis=1))
            few = draw.permutation(few)[:SAMPLE]
        gains = missing[numbers[few]].sum(axis=1)
        # The first of the best is the simplest one.
        best = int(few[np.argmax(gains)])
        missing[numbers[best]] = False
        chosen.append(best)
    return chosen


def isolating_rows(
    rows: np.ndarray, strength: int, usable: np.ndarray, covered: Sequence[int]
) -> list[int]:
    """Rows with the missing combinations, each beside as few others as can be.

    For combinations that occur in refused layouts only: one of them is the reason, and
    the others are to be tried without it.

    Args:
      rows: As in `covering_rows`.
      strength: As in `covering_rows`.
      usable: Which rows may be chosen, `(layouts,)`.
      covered: The rows whose combinations occur already.

    Returns:
      Places in `rows`; at most one for each missing combination.
    """
    allowed = np.flatnonzero(usable)
    numbers, missing = _missing(rows, strength, covered, allowed)
    others = missing[numbers[allowed]].sum(axis=1)
    chosen: list[int] = []
    for one in np.flatnonzero(missing):
        having = (numbers[allowed] == one).any(axis=1)
        chosen.append(int(allowed[np.argmin(np.where(having, others, np.inf))]))
    return list(dict.fromkeys(chosen))


def uncovered(
    grid: LayoutGrid, strength: int, covered: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The combinations that occur in an allowed layout, but in none of these rows.

    Args:
      grid: The allowed layouts.
      strength: The number of axes whose values are combined.
      covered: Places of rows.
    """
    numbers, missing = _missing(grid.rows, strength, covered)
    for own, subset in zip(numbers.T, combinations(grid.axes, strength), strict=True):
        _, firsts = np.unique(own, return_index=True)
        for row in firsts[missing[own[firsts]]]:
            layout = grid.layout(row)
            yield {axis: layout[axis] for axis in subset}


def _missing(
    rows: np.ndarray,
    strength: int,
    covered: Sequence[int],
    allowed: np.ndarray | slice = slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the combinations in each row, and which of them are missing.

    A combination is missing if it occurs in an allowed row and in no covered one.
    """
    sizes = rows.max(axis=0, initial=0) + 1
    columns, count = [], 0
    for subset in map(list, combinations(range(rows.shape[1]), strength)):
        number = np.ravel_multi_index(tuple(rows[:, subset].T), tuple(sizes[subset]))
        columns.append((count + number).astype(np.int32))
        count += int(np.prod(sizes[subset]))
    numbers, missing = np.stack(columns, axis=1), np.zeros(count, bool)
    missing[numbers[allowed]] = True
    missing[numbers[list(covered)]] = False
    return numbers, missing

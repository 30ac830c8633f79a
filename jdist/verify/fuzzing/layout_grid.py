"""All allowed layouts: a grid of the axes' values, less what `valid` excludes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from jdist._errors import (
    check_function,
    check_number,
    check_type,
    quoted,
    requirement,
)

Layout = Mapping[str, Any]
"""The value of each axis, by the axis's name."""

LARGEST = 2**18
"""Largest number of combinations, each of which `valid` is asked about."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutGrid:
    """The layouts that are allowed, as positions of values.

    Attributes:
      axes: The values of each axis.
      rows: The position of each axis's value, `(layouts, axes)`, in lexical order.
    """

    axes: Mapping[str, Sequence[Any]]
    rows: np.ndarray

    def layout(self, row: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """The layout of these positions."""
        values = zip(self.axes.items(), row, strict=True)
        return {name: own[int(place)] for (name, own), place in values}


def layout_grid(
    call: str,
    axes: Mapping[str, Sequence[Any]],
    valid: Callable[[Layout], bool] | None,
    strength: int,
) -> LayoutGrid:
    """The grid of these axes.

    Args:
      call: The public function that asks, for the errors' text.
      axes: The values of each axis.
      valid: Which layouts are allowed; None for all.
      strength: The number of axes whose values are combined; it is checked here.

    Raises:
      TypeError: An argument is of another type.
      ValueError: There is nothing to combine, or too much.
    """
    argument = f"{call}(axes=...)"
    check_type(argument, axes, Mapping, "must be a mapping from names to values")
    if not axes:
        raise ValueError(requirement(argument, "must have at least one axis", "none"))
    for name, values in axes.items():
        _check_axis(f"{call}(axes={{{name!r}: ...}})", name, values)
    rule = f"must be from 1 to {len(axes)}, the number of axes"
    strength_argument = f"{call}(strength=...)"
    holds = range(1, len(axes) + 1).__contains__
    check_number(strength_argument, strength, rule, holds, whole=True)
    count = prod(map(len, axes.values()))
    if count > LARGEST:
        rule = f"must have at most {LARGEST} combinations of values"
        remedy = "Leave values out, or fix an axis."
        raise ValueError(requirement(argument, rule, count, remedy))
    if valid is not None:
        check_function(f"{call}(valid=...)", valid, "must be a function of a layout")
    grid = LayoutGrid(axes, np.empty((0, len(axes)), int))
    places = product(*(range(len(values)) for values in axes.values()))
    rows = [row for row in places if valid is None or valid(grid.layout(row))]
    if not rows:
        rule = "must allow at least one layout"
        raise ValueError(requirement(f"{call}(valid=...)", rule, f"none of {count}"))
    return LayoutGrid(axes, np.array(rows))


def _check_axis(argument: str, name: object, values: Any) -> None:
    """Raises unless an axis has a name, and different values in an order."""
    check_type(argument, name, str, "must be named by a string")
    sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    rule = "must be a sequence of values, the simplest first"
    if not sequence:
        raise TypeError(requirement(argument, rule, quoted(values)))
    if not values:
        raise ValueError(requirement(argument, "must have at least one value", "none"))
    if not all(isinstance(value, Hashable) for value in values):
        rule = "must be numbers, strings or other values that can be hashed"
        raise TypeError(requirement(argument, rule, values))
    if len(set(values)) < len(values):
        # In Python True is equal to 1.
        raise ValueError(requirement(argument, "must be different values", values))


def named(layout: Layout) -> str:
    """A layout in a line, such as `dp=2, mask=True`."""
    return ", ".join(f"{axis}={value}" for axis, value in layout.items())

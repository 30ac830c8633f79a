"""All allowed layouts: a grid of the axes' values, less what `valid` excludes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from jdist._errors import (
    check_function,
    check_number,
    check_sequence,
    check_type,
    value_error,
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
      valid: Whether a layout of these values is allowed.
      rows: The position of each axis's value, `(layouts, axes)`, in lexical order.
    """

    axes: Mapping[str, Sequence[Any]]
    valid: Callable[[Layout], bool]
    rows: np.ndarray

    def layout(self, number: int) -> dict[str, Any]:
        """The layout of one of the rows."""
        values = zip(self.axes.items(), self.rows[number], strict=True)
        return {name: own[place] for (name, own), place in values}

    def moved(self, layout: Layout) -> dict[str, Any]:
        """The axes that are not at their first values, with their values."""
        return {a: value for a, value in layout.items() if value != self.axes[a][0]}


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
    rule = "must be a sequence of different values that can be hashed, at least one"
    for name, values in axes.items():
        own = f"{call}(axes={{{name!r}: ...}})"
        check_type(own, name, str, "must be named by a string")
        check_sequence(own, values, Hashable, rule)
        # In Python True is equal to 1.
        if not 0 < len(values) == len(set(values)):
            raise value_error(own, rule, values)
    count = prod(map(len, axes.values()))
    if not axes or count > LARGEST:
        rule = f"must have at least one axis, and at most {LARGEST} combinations"
        got = f"{len(axes)} axes with {count}"
        raise value_error(argument, rule, got, "Leave values out, or fix an axis.")
    rule = f"must be from 1 to {len(axes)}, the number of axes"
    holds = range(1, len(axes) + 1).__contains__
    check_number(f"{call}(strength=...)", strength, rule, holds, whole=True)
    if valid is not None:
        check_function(f"{call}(valid=...)", valid, "must be a function of a layout")
    places = np.array(list(product(*(range(len(own)) for own in axes.values()))))
    every = LayoutGrid(axes, valid or (lambda layout: True), places)
    allowed = np.array([bool(every.valid(every.layout(n))) for n in range(count)])
    if not allowed.any():
        rule = "must allow at least one layout"
        raise value_error(f"{call}(valid=...)", rule, f"none of {count}")
    return replace(every, rows=places[allowed])


def named(layout: Layout) -> str:
    """A layout in a line, such as `dp=2, mask=True`."""
    return ", ".join(f"{axis}={value}" for axis, value in layout.items())

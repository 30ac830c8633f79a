"""Shrinking: a failing layout, with as many axes as can be at their first values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jdist.verify.fuzzing.layout_grid import Layout


def shrink(
    layout: Layout,
    axes: Mapping[str, Sequence[Any]],
    valid: Callable[[Layout], bool],
    fails: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """The layout with each axis as near to its first value as it fails with.

    Args:
      layout: A layout that fails.
      axes: The values of each axis, the simplest first; those to go first, first.
      valid: Which layouts are allowed.
      fails: Whether a layout fails for the same reason. It is asked about allowed
        layouts only, about some of them again.

    Returns:
      A layout that fails, and does not with any one axis at an earlier value.

    Example:
      >>> axes = {"dp": (1, 2, 4), "tp": (1, 2), "mask": (False, True)}
      >>> found = {"dp": 4, "tp": 2, "mask": True}
      >>> shrink(found, axes, lambda c: True, lambda c: c["dp"] > 1 and c["mask"])
      {'dp': 2, 'tp': 1, 'mask': True}

    References:
      Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
      Transactions on Software Engineering 28(2), 2002: the result is 1-minimal.
    """

    def works(simpler: dict[str, Any]) -> bool:
        return valid(simpler) and fails(simpler)

    now, before = dict(layout), None
    while now != before:
        before = now
        for axis in axes:
            now = next(filter(works, _earlier(now, axis, axes)), now)
        if now == before:
            now = next(filter(works, _two_earlier(now, axes, valid)), now)
    return now


def _two_earlier(
    layout: dict[str, Any],
    axes: Mapping[str, Sequence[Any]],
    valid: Callable[[Layout], bool],
) -> Iterator[dict[str, Any]]:
    """The layouts with two axes at earlier values, of which one alone is not allowed.

    Such as a number of micro-batches that the number of stages has to divide.
    """
    for axis in axes:
        for one in _earlier(layout, axis, axes):
            if not valid(one):
                for other in axes:
                    if other != axis:
                        yield from _earlier(one, other, axes)


def _earlier(
    layout: dict[str, Any], axis: str, axes: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """The layouts with an axis at each earlier value, the first value first."""
    values = list(axes[axis])
    for value in values[: values.index(layout[axis])]:
        yield {**layout, axis: value}

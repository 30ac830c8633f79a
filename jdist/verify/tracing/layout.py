"""The axis of examples of a tapped value, found by tracing a larger batch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import equations_in
from jdist._tree import PyTree

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """The arrangement of a batch's examples in one value.

    Attributes:
      shape: Shape of the value for the whole batch; of one part of it, where the loss
        is of parts by `vmap`.
      axis: The axis along which the examples follow each other; None if there is none
        and the value is compared as a whole, or that of each part as a whole.
      each: Number of entries along it for each example.
    """

    shape: Shape
    axis: int | None
    each: int

    def rows(self, array: np.ndarray, axes: int = 0) -> np.ndarray | None:
        """The array's examples, `(rows, entries)`; None if it has another shape.

        Args:
          array: For any number of examples.
          axes: How many leading axes `vmap` gave it: their rows follow each other.
            Below them a value of a single example may lack the axis.
        """
        outer, own = array.shape[:axes], array.shape[axes:]
        for dims in self.dimensions(len(own)):
            sizes = dict(zip(dims, own, strict=True))
            full = tuple(sizes.get(d, 1) for d in range(len(self.shape)))
            if self.axis is None:
                if full == self.shape:
                    return array.reshape(int(np.prod(outer)), -1)
                continue
            others = self._others(self.shape)
            if self._others(full) != others or (
                self.axis not in dims and self.each > 1
            ):
                continue
            if full[self.axis] % self.each:
                continue
            inner = np.moveaxis(array.reshape(*outer, *full), axes + self.axis, axes)
            count = int(np.prod(outer)) * (full[self.axis] // self.each)
            return inner.reshape(count, self.each * int(np.prod(others)))
        return None

    def dimensions(self, ndim: int) -> Iterator[tuple[int, ...]]:
        """The dimensions that a value of `ndim` dimensions may have of the shape.

        `vmap` over single examples takes the axis away, and leaves dimensions of size 1
        where the examples were.
        """
        every = range(len(self.shape))
        ones = {d for d in every if self.shape[d] == 1 and d != self.axis}
        axis = set() if self.axis is None else {self.axis}
        for absent in (set(), axis, ones, axis | ones):
            kept = tuple(d for d in every if d not in absent)
            if len(kept) == ndim:
                yield kept

    def _others(self, shape: Shape) -> Shape:
        assert self.axis is not None, "a value without examples is compared as a whole"
        return shape[: self.axis] + shape[self.axis + 1 :]

    def row_shape(self) -> Shape:
        """The shape of one example's part, for words."""
        if self.axis is None:
            return self.shape
        own = (self.each,) if self.each > 1 else ()
        return own + self._others(self.shape)


def finite_part(array: np.ndarray) -> np.ndarray:
    """The array with 0 in the place of infinities, which are compared by themselves."""
    return np.where(np.isinf(array), 0, array)


def infinities(array: np.ndarray) -> np.ndarray:
    """1 or -1 where the array is infinite, 0 elsewhere."""
    return np.where(np.isinf(array), np.sign(np.nan_to_num(array.real)), 0)


def layouts(
    loss_fn: Callable[[Any, Any], Any], params: PyTree, batch: PyTree, examples: int
) -> dict[tuple[str, Shape], Layout]:
    """The layout of every tapped value by its name and shape; for use in a recording.

    A value whose size does not change with the number of examples has no axis of them.
    """
    own = _tapped(loss_fn, params, batch)
    # A loss that divides its batch into equal parts takes twice as many, not one more.
    for more in (1, examples):
        larger = jax.tree.map(
            lambda x, more=more: jnp.concatenate([x, x[-more:]]), batch
        )
        # For another size the loss may raise, or be another program: nothing is learnt
        # from it.
        with contextlib.suppress(Exception):
            found = _tapped(loss_fn, params, larger)
            # The same taps in the same order, so that their shapes can be paired.
            if [name for name, _, _ in own] == [name for name, _, _ in found]:
                return {
                    (name, shape): _layout(shape, other, axes, examples, more)
                    for (name, shape, axes), (_, other, _) in zip(
                        own, found, strict=True
                    )
                }
    return {}


def _layout(
    shape: Shape, larger: Shape, outer: int, examples: int, more: int
) -> Layout:
    if shape == larger:
        # A value of each part of the batch, or of the whole if nothing is in parts.
        return Layout(shape[outer:], None, 1)
    axes = [i for i, (a, b) in enumerate(zip(shape, larger, strict=False)) if a != b]
    if len(shape) != len(larger) or len(axes) != 1:
        return Layout(shape, None, 1)
    (axis,) = axes
    each, rest = divmod(larger[axis] - shape[axis], more)
    # The axis has to hold the examples and nothing else, such as a class token.
    if not rest and each * examples == shape[axis]:
        return Layout(shape, axis, each)
    # Parts of the batch, along axes of `vmap`: they follow each other.
    parts = int(np.prod(shape[:axis]))
    each, rest = divmod(parts * (larger[axis] - shape[axis]), more)
    if not rest and each * examples == parts * shape[axis] and axis <= outer:
        return Layout(shape[axis:], 0, each)
    return Layout(shape, None, 1)


def _tapped(
    loss_fn: Callable[[Any, Any], Any], params: PyTree, batch: PyTree
) -> list[tuple[str, Shape, int]]:
    program = jax.make_jaxpr(loss_fn)(params, batch)
    taps = [x for x in equations_in(program) if x.primitive.name == "tap"]
    values: list[Any] = [each.invars[0].aval for each in taps]
    return [
        (x.params["name"], y.shape, x.params["axes"])
        for x, y in zip(taps, values, strict=True)
    ]

"""The part of a value that a device of a mesh has, and the reference's rows of it."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jdist.verify.tracing.layout import Layout
from jdist.verify.tracing.recording import TapRecord
from jdist.verify.tracing.reference import Passage, Rows

Division = Mapping[str, int | None]
"""Maps mesh axes to the dimension of the value that is divided; to None for copies."""


COPIES = -1


class Cut(NamedTuple):
    """A device's place along one axis of the mesh.

    Attributes:
      axis: Name of the axis.
      place: The device's coordinate.
      size: Number of devices.
      dim: The dimension of the layout's shape that is divided; `COPIES` if none is.
    """

    axis: str
    place: int
    size: int
    dim: int


class ValuePart(NamedTuple):
    """A block of a value: a slice for each axis that divides it, in turn."""

    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{cut.axis}={cut.place}" for cut in self.cuts)

    def neighbours(self) -> Iterator["ValuePart"]:
        """The other parts along each axis that divides the value."""
        for i, cut in enumerate(self.cuts):
            for place in range(cut.size if cut.dim != COPIES else 0):
                if place != cut.place:
                    other = cut._replace(place=place)
                    yield ValuePart((*self.cuts[:i], other, *self.cuts[i + 1 :]))

    def block(self) -> "ValuePart":
        """The part without the axes along which there are copies of it."""
        return ValuePart(tuple(cut for cut in self.cuts if cut.dim != COPIES))

    def layout(self, whole: Layout) -> Layout | None:
        """The layout of a part; None if the value cannot be divided so."""
        shape = list(whole.shape)
        for cut in self.block().cuts:
            shape[cut.dim], rest = divmod(shape[cut.dim], cut.size)
            if rest:
                return None
        return whole._replace(shape=tuple(shape))

    def columns(self, whole: Layout) -> np.ndarray:
        """The entries of a row of the whole that are the part's, in its own shape."""
        shape = whole.row_shape()
        entries = np.arange(int(np.prod(shape))).reshape(shape)
        for cut in self.block().cuts:
            # In a row the axis of examples comes first, or is gone.
            moved = whole.axis is not None and cut.dim < whole.axis
            dim = cut.dim if whole.axis is None else cut.dim + moved - (whole.each == 1)
            entries = np.split(entries, cut.size, dim)[cut.place]
        return entries

    def of(self, passage: Passage) -> Passage:
        """The part of a passage of the reference."""
        layout = self.layout(passage.layout)
        if not self.block().cuts or layout is None:
            return passage
        entries = self.columns(passage.layout).ravel()

        def own(rows: Rows) -> Rows:
            return Rows(*(x[:, entries] for x in rows))

        backward = passage.backward and own(passage.backward)
        forward = own(passage.forward)
        through = {name: x[:, entries] for name, x in passage.through.items()}
        return replace(
            passage, layout=layout, forward=forward, backward=backward, through=through
        )


WHOLE = ValuePart()


def part_of(layout: Layout, record: TapRecord, division: Division) -> ValuePart | None:
    """The part that a record shows; None if its shape is another one."""
    inner = record.value.shape[record.axes :]
    places = {
        axis.name: (i, axis.size)
        for axis, i in zip(record.mesh, record.place, strict=True)
    }
    for dims in layout.dimensions(len(inner)):
        where = {a: COPIES if d is None else dims[d] for a, d in division.items()}
        # Parts of the batch are told by their values, wherever they are.
        part = ValuePart(tuple(
            Cut(axis, *places[axis], dim)
            for axis, dim in where.items()
            if dim != layout.axis
        ))  # fmt: skip
        own = part.layout(layout)
        if own is not None and own.rows(record.value, record.axes) is not None:
            return part
    return None


def declared(record: TapRecord) -> dict[str, int | None]:
    """The division that the tap declares."""
    return {axis.name: axis.dim for axis in record.mesh if axis.declared}


def divisions(layout: Layout, record: TapRecord) -> Iterator[Division]:
    """The divisions over axes that the tap does not mention, by its shape."""
    inner, known = record.value.shape[record.axes :], declared(record)
    if len(inner) != len(layout.shape):
        return
    own = list(inner)
    for axis in record.mesh:
        if axis.dim is not None:
            own[axis.dim] *= axis.size
    smaller = {
        d: layout.shape[d] // n
        for d, n in enumerate(own)
        if d != layout.axis and n and layout.shape[d] % n == 0 and layout.shape[d] > n
    }
    free = [axis for axis in record.mesh if not axis.declared]
    for axes in itertools.permutations(free, len(smaller)):
        sizes = [axis.size for axis in axes]
        if smaller and sizes == list(smaller.values()):
            yield {**known, **dict(zip([a.name for a in axes], smaller, strict=True))}

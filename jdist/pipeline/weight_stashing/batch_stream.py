"""The batches of an epoch, read one by one when a pass first needs them.

Each batch is a micro-batch. It is kept from when it is read until its first backward
pass in this process: by then all forward passes and the loss have had what they take.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from typing import Any

from numpy.typing import ArrayLike

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.pipeline.run.identity import chained
from jdist.pipeline.run.micro_batch import (
    MicroBatch,
    check_sum,
    exponent_of,
    micro_batch_of,
    scaled_down,
)

# Nothing that an iterator could yield.
_END = object()


class Supply:
    """Batches and their weights, and whether there is another one.

    Args:
      batches: Batches, or pairs of a batch and its weights.
      weights: Of each batch, if they are not in pairs; None: 1 for each example.
      call: The public function that asks, for the errors' text.

    Raises:
      TypeError: `batches` or `weights` cannot be iterated over.
      ValueError: Both say how many they are, and differ.

    Attributes:
      count: How many they say that they are; None for an iterator.
      first: The first micro-batch that counts, without its batch; by its weights all
        others are normalised.
    """

    def __init__(
        self, batches: Iterable[PyTree], weights: Iterable[PyTree] | None, call: str
    ) -> None:
        self.count = len(batches) if isinstance(batches, Sized) else None
        self.first: MicroBatch | None = None
        self._call = call
        self._read = 0
        self._batches = _iterator(batches, f"{call}(batches)")
        self._weights: Iterator[PyTree] | None = None
        if weights is not None:
            self._weights = _iterator(weights, f"{call}(weights=...)")
            if self.count is not None and isinstance(weights, Sized):
                self._check_count(len(weights), self.count)
        self._next: Any = None

    def more(self) -> bool:
        """Whether there is another batch, which is read now if it has not been.

        Raises:
          Exception: What the iterators raise, with the number of the batch in a note.
          ValueError: There are more batches than weights, or fewer.
        """
        # One batch ahead: only the iterator knows whether there is another.
        if self._next is None:
            self._next = self._pair()
        return self._next is not _END

    def take(self) -> tuple[PyTree, ArrayLike | None]:
        """The next batch and its weights; there is one."""
        found, self._next = self._next, None
        self._read += 1
        batch, weights = found
        return batch, weights

    def _pair(self) -> PyTree:
        try:
            batch = next(self._batches, _END)
            own = _END if self._weights is None else next(self._weights, _END)
        except BaseException as error:
            error.add_note(f"It was raised when batch {self._read} was read.")
            raise
        if batch is _END and (own is _END or self._weights is None):
            return _END
        if self._weights is not None:
            numbers = [self._read + (each is not _END) for each in (own, batch)]
            self._check_count(*numbers)
        if not isinstance(batch, tuple):
            return batch, None if self._weights is None else own
        if self._weights is not None:
            rule = "must be None where batches are pairs with weights of their own"
            raise ValueError(requirement(f"{self._call}(weights=...)", rule, "both"))
        if len(batch) != 2:
            rule = "must be batches, or pairs of a batch and its weights"
            got = f"a tuple of {len(batch)}"
            raise TypeError(requirement(f"{self._call}(batches)", rule, got))
        return batch

    def _check_count(self, found: int, batches: int) -> None:
        if found != batches:
            rule = f"must be one array for each of the {batches} batches"
            raise ValueError(requirement(f"{self._call}(weights=...)", rule, found))


class BatchStream:
    """A part of an epoch: micro-batches that are numbered from 0.

    Args:
      supply: Where they come from.
      limit: How many there are at most; None: all that are left.
      kind: The reduction, "mean" or "sum".
      groups: Numbers of consecutive micro-batches that make an update. Each of these
        has to have an example that counts.
      kept: Whether this process has a pass for a micro-batch.
      compared: Whether other processes read the same batches, so that checksums are
        needed.
      call: The public function that asks, for the errors' text.

    Attributes:
      length: How many there are; None as long as that is not known.
      totals: Of the micro-batches that were read, the sums of their weights.
      checksums: Of all that was read, if they are needed.
    """

    def __init__(
        self,
        supply: Supply,
        limit: int | None,
        kind: str,
        groups: Collection[int],
        kept: Callable[[int], bool],
        compared: bool,
        call: str,
    ) -> None:
        self.length: int | None = None
        self.totals: list[float] = []
        self.checksums: dict[str, int] = {}
        self._supply = supply
        self._limit = limit
        self._kind = kind
        self._open = dict.fromkeys(groups, 0.0)
        self._kept = kept
        self._compared = compared
        self._call = call
        self._parts: dict[int, MicroBatch] = {}

    def reaches(self, micro: int) -> bool:
        """Whether there is a micro-batch of that number; reads what comes before it.

        Raises:
          Exception: What the iterator raises.
          ValueError, TypeError: A batch or its weights break a rule.
        """
        while self.length is None and len(self.totals) <= micro:
            if len(self.totals) == self._limit or not self._supply.more():
                self._end()
            else:
                self._read()
        return micro < len(self.totals)

    def __getitem__(self, micro: int) -> MicroBatch:
        """A micro-batch that was read and is not forgotten."""
        return self._parts[micro]

    def forget(self, micro: int) -> None:
        """All forward passes of a micro-batch are done."""
        self._parts.pop(micro, None)

    def _read(self) -> None:
        number = len(self.totals)
        part = micro_batch_of(number, *self._supply.take(), self._call)
        if self._compared:
            self.checksums = chained(self.checksums, part)
        part = self._normalized(part)
        self.totals.append(part.total)
        for size in self._open:
            self._open[size] += part.total
            if (number + 1) % size == 0:
                self._check_update(size)
        if self._kept(number):
            self._parts[number] = part

    def _end(self) -> None:
        self.length = len(self.totals)
        if not self.length:
            rule = "must have one batch at least"
            raise ValueError(requirement(f"{self._call}(batches)", rule, "none"))
        for size in self._open:
            if self.length % size:
                self._check_update(size)

    def _check_update(self, size: int) -> None:
        total, self._open[size] = self._open[size], 0.0
        # The gradient of such an update would be 0 / 0.
        if total == 0:
            last = len(self.totals) - 1
            first = last // size * size
            rule = "must not all be zero in the micro-batches of an update"
            got = f"zeros in the batches {first} to {last}" if last > first else ""
            got = got or f"zeros in batch {last}"
            raise ValueError(requirement(f"{self._call}(weights=...)", rule, got))

    def _normalized(self, part: MicroBatch) -> MicroBatch:
        """With weights that single precision can add up; see `normalized`.

        By the power of two of the first that counts: the largest is not known yet. It
        is one for all parts of an epoch, whose losses are joined.
        """
        if self._kind == "sum":
            check_sum([part.weights], self._call)
            return part
        # It has no exponent, and no other part depends on it.
        if not part.weights.any():
            return part
        first = self._supply.first or part._replace(batch={})
        self._supply.first = first
        exponent = exponent_of([first])
        if abs(exponent_of([part]) - exponent) > 64:
            rule = "must have totals within a factor of 2^64 of the first one's"
            got = f"totals of {first.given:.3g} in batch {first.number} and "
            got += f"{part.given:.3g} in batch {part.number}"
            raise ValueError(requirement(f"{self._call}(weights=...)", rule, got))
        return scaled_down(part, exponent)


def _iterator(given: Iterable[PyTree], argument: str) -> Iterator[PyTree]:
    try:
        return iter(given)
    except TypeError as error:
        rule = "must be an iterable with an entry for each micro-batch"
        got = f"a {type(given).__name__}"
        raise TypeError(requirement(argument, rule, got)) from error

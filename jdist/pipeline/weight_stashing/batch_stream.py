"""The batches of an epoch, each read when a pass first needs it.

Each batch is a micro-batch. It is kept until its first backward pass in this process,
which comes after all forward passes and the loss of that micro-batch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from typing import Any

from numpy.typing import ArrayLike

from jdist._errors import requirement
from jdist._tree import PyTree, owned, type_name
from jdist.pipeline.run.identity import chained
from jdist.pipeline.run.micro_batch import MicroBatch, in_epoch, micro_batch_of

# A sentinel, because an iterator may yield None.
_END = object()


class Supply:
    """An iterator over batches and their weights that reads one batch ahead.

    Args:
      batches: Batches, or pairs of a batch and its weights.
      weights: Weights of each batch, if not in pairs; None: 1 for each example.
      call: The public function, for the errors' text.

    Raises:
      TypeError: `batches` or `weights` cannot be iterated over.
      ValueError: Both have lengths, which differ.

    Attributes:
      count: The length of `batches`; None for an iterator.
      first: The first micro-batch with a positive weight, without its batch; the total
        of its weights decides the unit of all totals.
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
        """Whether there is another batch; reads it if need be.

        Raises:
          Exception: What the iterators raise, with the number of the batch in a note.
          ValueError: There are more batches than weights, or fewer.
        """
        # Reading one batch ahead is the only way to find the end of an iterator.
        if self._next is None:
            self._next = self._pair()
        return self._next is not _END

    def take(self) -> tuple[PyTree, ArrayLike | None]:
        """The next batch and its weights, after `more` has returned True."""
        # No reference is kept, so that the batch is freed after its passes.
        found, self._next = self._next, None
        self._read += 1
        batch, weights = found
        return batch, weights

    def _pair(self) -> PyTree:
        try:
            # Copied, since the next is read before the passes of this one.
            batch = owned(next(self._batches, _END))
            # Also after the end of the batches, to find weights that are left over.
            own = _END if self._weights is None else owned(next(self._weights, _END))
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
    """The micro-batches of a part of an epoch, numbered from 0.

    Args:
      supply: The source of the batches.
      limit: The largest number of micro-batches; None: all that are left.
      kind: The reduction, "mean" or "sum".
      groups: Sizes of groups of consecutive micro-batches that make an update. Each
        group must have an example with a positive weight.
      kept: Whether this process has a pass for a micro-batch.
      compared: Whether other processes read the same batches, so that checksums are
        needed.
      call: The public function, for the errors' text.

    Attributes:
      length: The number of micro-batches; None until the end has been read.
      totals: The `total` of each micro-batch that was read.
      checksums: Checksums of all batches that were read, if they are needed.
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
        self._unweighted: MicroBatch | None = None

    def reaches(self, micro: int) -> bool:
        """Whether there is a micro-batch of a number; reads all up to it.

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
        """A micro-batch that was read and not removed by `forget`."""
        return self._parts[micro]

    def forget(self, micro: int) -> None:
        """Removes a micro-batch whose forward passes are done."""
        self._parts.pop(micro, None)

    def _read(self) -> None:
        number = len(self.totals)
        batch, weights = self._supply.take()
        part = micro_batch_of(number, batch, weights, self._call)
        # The data as the user gave it, before normalisation.
        if self._compared:
            self.checksums = chained(self.checksums, part)
        # Most batches have no weights, and as many examples as those before them: to
        # normalise takes three times as long as all else here.
        like = self._unweighted if weights is None else None
        if like is not None and len(like.weights) == len(part.weights):
            part = like._replace(number=number, batch=part.batch)
        else:
            part = self._normalized(part)
            if weights is None:
                self._unweighted = part._replace(batch={})
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
        # The last update of an epoch may have fewer micro-batches than the others.
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
        """Normalises the weights of a micro-batch; see `in_epoch`."""
        first = self._supply.first or part._replace(batch={})
        # All parts of an epoch share it, whose losses are joined.
        if part.weights.any():
            self._supply.first = first
        return in_epoch(part, self._kind, first, self._call)


def _iterator(given: Iterable[PyTree], argument: str) -> Iterator[PyTree]:
    try:
        return iter(given)
    except TypeError as error:
        rule = "must be an iterable with an entry for each micro-batch"
        got = type_name(given)
        raise TypeError(requirement(argument, rule, got)) from error

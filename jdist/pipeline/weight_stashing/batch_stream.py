"""The batches of an epoch, each read when a pass first needs it.

Each batch is a micro-batch. It is kept until its first backward pass in this process,
which comes after all forward passes and the loss of that micro-batch.
"""

from collections.abc import Callable, Collection, Iterable, Sized
from dataclasses import dataclass

from jdist._errors import check_at_least, requirement
from jdist._fit import check_batches, pair
from jdist._tree import PyTree
from jdist.pipeline.run.identity import chained
from jdist.pipeline.run.micro_batch import MicroBatch, in_epoch, micro_batch_of

# A sentinel, because an iterator may yield None.
_END = object()


@dataclass(eq=False, repr=False)
class BatchStream:
    """The micro-batches of an epoch, numbered from 0.

    Args:
      batches: Batches, or pairs of a batch and its weights.
      total: Their number; None: that of `batches`, which has a length.
      kind: The reduction, "mean" or "sum".
      groups: Sizes of groups of consecutive micro-batches that make an update. Each
        group must have an example with a positive weight.
      kept: Whether this process has a pass for a micro-batch.
      compared: Whether other processes read the same batches, so that checksums are
        needed.
      call: The public function, for the errors' text.

    Raises:
      TypeError: `batches` are no batches.
      ValueError: Their number is 0, or not known.

    Attributes:
      length: The number of micro-batches.
      totals: The `total` of each micro-batch that was read.
      checksums: Checksums of all batches that were read, if they are needed.
    """

    batches: Iterable[PyTree]
    total: int | None
    kind: str
    groups: Collection[int]
    kept: Callable[[int], bool]
    compared: bool
    call: str

    def __post_init__(self) -> None:
        """Begins before the first batch."""
        check_batches(self.call, self.batches)
        self.length = _length(self.call, self.batches, self.total)
        self.totals: list[float] = []
        self.checksums: dict[str, int] = {}
        self._left = iter(self.batches)
        self._parts: dict[int, MicroBatch] = {}
        self._unweighted: MicroBatch | None = None
        # The first micro-batch with a positive weight, without its batch: the total of
        # its weights decides the unit of all totals.
        self._first: MicroBatch | None = None

    def read(self, micro: int) -> None:
        """Reads all micro-batches up to a number, if they are not read yet.

        Raises:
          Exception: What the iterator raises, with the number of the batch in a note.
          ValueError, TypeError: A batch or its weights break a rule, or there are
            fewer batches.
        """
        while len(self.totals) <= micro:
            self._read()

    def __getitem__(self, micro: int) -> MicroBatch:
        """A micro-batch that was read and not removed by `forget`."""
        return self._parts[micro]

    def forget(self, micro: int) -> None:
        """Removes a micro-batch whose forward passes are done."""
        self._parts.pop(micro, None)

    def _read(self) -> None:
        number = len(self.totals)
        try:
            given = next(self._left, _END)
        except BaseException as error:
            error.add_note(f"It was raised when batch {number} was read.")
            raise
        if given is _END:
            rule = f"must be the {self.length} batches of the epoch"
            raise ValueError(requirement(f"{self.call}(batches)", rule, f"{number}"))
        batch, weights = pair(given)
        part = micro_batch_of(number, batch, weights, self.call)
        # The data as the user gave it, before normalisation.
        if self.compared:
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
        for size in self.groups:
            # The last update of an epoch may have fewer micro-batches than the others.
            if (number + 1) % size == 0 or number + 1 == self.length:
                self._check_update(size)
        if self.kept(number):
            self._parts[number] = part

    def _check_update(self, size: int) -> None:
        last = len(self.totals) - 1
        first = last // size * size
        # The gradient of such an update would be 0 / 0.
        if not any(self.totals[first:]):
            rule = "must not all be zero in the micro-batches of an update"
            got = f"zeros in the batches {first} to {last}" if last > first else ""
            got = got or f"zeros in batch {last}"
            raise ValueError(requirement(f"{self.call}(weights=...)", rule, got))

    def _normalized(self, part: MicroBatch) -> MicroBatch:
        """Normalises the weights of a micro-batch; see `in_epoch`."""
        first = self._first or part._replace(batch={})
        if part.weights.any():
            self._first = first
        return in_epoch(part, self.kind, first, self.call)


def _length(call: str, batches: Iterable[PyTree], total: int | None) -> int:
    """The number of batches, which an epoch's schedule is made for."""
    if total is None:
        if not isinstance(batches, Sized):
            rule = "must be given where the batches have no length"
            remedy = "Say how many there are, or give a list."
            raise ValueError(requirement(f"{call}(total=...)", rule, "None", remedy))
        total = len(batches)
    check_at_least(f"{call}(total=...)", total, 0)
    if not total:
        rule = "must have one batch at least"
        raise ValueError(requirement(f"{call}(batches)", rule, "none"))
    return total

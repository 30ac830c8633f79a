"""Deduplication of numbered messages, with a low-water mark that bounds its memory."""

import collections

__all__ = ["DedupWindow", "UnsettledNumbers"]


class DedupWindow:
    """The receiver's record of the message numbers of one sender.

    Numbers rise, in steps of any size, and may arrive in any order and more than once.
    With every number the sender tells its *low-water mark*: all numbers below it are
    settled between the two and count as seen. So only those in flight are remembered.

    Example:
      >>> window = DedupWindow()
      >>> [window.take(number, low_water_mark=0) for number in (3, 7, 3)]
      [True, True, False]
      >>> window.take(8, low_water_mark=6), window.seen(5), window.seen(9)
      (True, True, False)
    """

    __slots__ = ("_limit", "_low_water_mark", "_seen")

    def __init__(self) -> None:
        self._low_water_mark = 0
        self._seen: set[int] = set()
        self._limit = 32

    def take(self, number: int, low_water_mark: int) -> bool:
        """Records a number; returns whether it comes for the first time."""
        if low_water_mark > self._low_water_mark:
            self._low_water_mark = low_water_mark
        if self.seen(number):
            return False
        self._seen.add(number)
        # Pruned when the set has doubled, so that the amortised cost is constant.
        if len(self._seen) > self._limit:
            self._seen = {n for n in self._seen if n >= self._low_water_mark}
            self._limit = 2 * len(self._seen) + 32
        return True

    def seen(self, number: int) -> bool:
        """Whether the number has come, or is below the low-water mark."""
        return number < self._low_water_mark or number in self._seen


class UnsettledNumbers:
    """The sender's side of a window: its unsettled numbers.

    Example:
      >>> under_way = UnsettledNumbers()
      >>> for number in (3, 7, 8):
      ...     under_way.begin(number)
      >>> under_way.end(3)
      >>> under_way.low_water_mark
      7
    """

    __slots__ = ("_numbers", "_past")

    def __init__(self) -> None:
        # A plain dict takes long to find its first item after deletions.
        self._numbers: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._past = 0

    def begin(self, number: int) -> None:
        """Adds a number, which must be higher than all before."""
        self._numbers[number] = None
        self._past = number + 1

    def end(self, number: int) -> None:
        """Settles a number; idempotent."""
        self._numbers.pop(number, None)

    @property
    def low_water_mark(self) -> int:
        """The lowest unsettled number; all below it are settled."""
        return next(iter(self._numbers), self._past)

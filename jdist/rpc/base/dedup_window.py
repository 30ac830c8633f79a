"""Deduplication of numbered messages, with a low-water mark that bounds its memory."""

import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class DedupWindow:
    """The receiver's record of the message numbers of one sender.

    Numbers rise, in steps of any size, and may arrive in any order and more than once.
    All below the *low-water mark* count as seen. It rises past numbers that have come
    without a gap, and to what the sender tells with a number: that all below it are
    settled between the two. So only numbers beyond a gap are remembered.

    Args:
      first: The first number of the sender.

    Example:
      >>> window = DedupWindow()
      >>> [window.take(number) for number in (3, 7, 3)]
      [True, True, False]
      >>> window.take(8, low_water_mark=6), window.seen(5), window.seen(9)
      (True, True, False)
    """

    __slots__ = ("_beyond", "_limit", "_low_water_mark")

    def __init__(self, first: int = 0) -> None:
        self._low_water_mark = first
        self._beyond: set[int] = set()
        self._limit = 32

    def take(self, number: int, low_water_mark: int = 0) -> bool:
        """Records a number; returns whether it comes for the first time."""
        if low_water_mark > self._low_water_mark:
            self._low_water_mark = low_water_mark
            # Pruned when the set has doubled, so that the amortised cost is constant.
            if len(self._beyond) > self._limit:
                self._beyond = {n for n in self._beyond if n >= low_water_mark}
                self._limit = 2 * len(self._beyond) + 32
        if self.seen(number):
            return False
        if number > self._low_water_mark:
            self._beyond.add(number)
            return True
        self._low_water_mark += 1
        while self._low_water_mark in self._beyond:
            self._beyond.discard(self._low_water_mark)
            self._low_water_mark += 1
        return True

    def seen(self, number: int) -> bool:
        """Whether the number has come, or is below the low-water mark."""
        return number < self._low_water_mark or number in self._beyond


class Unsettled(Generic[T]):
    """The sender's side of a window: what is under way, by rising numbers.

    Example:
      >>> under_way = Unsettled()
      >>> for number in (3, 7, 8):
      ...     under_way.begin(number, str(number))
      >>> under_way.end(3), under_way.end(3), under_way.low_water_mark
      ('3', None, 7)
    """

    __slots__ = ("_items", "_past")

    def __init__(self) -> None:
        # A plain dict takes long to find its first item after deletions.
        self._items: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._past = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def get(self, number: int) -> T | None:
        """What is under way by this number; None if it was settled."""
        return self._items.get(number)

    def begin(self, number: int, item: T) -> None:
        """Adds what is under way; its number must be higher than all before."""
        self._items[number] = item
        self._past = number + 1

    def end(self, number: int) -> T | None:
        """Settles a number and returns what had it; None if it was settled."""
        return self._items.pop(number, None)

    def clear(self) -> list[T]:
        """Settles all numbers and returns what had them."""
        items = list(self._items.values())
        self._items.clear()
        return items

    @property
    def low_water_mark(self) -> int:
        """The lowest unsettled number; all below it are settled."""
        return next(iter(self._items), self._past)

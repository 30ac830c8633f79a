"""A bounded, thread-safe map that evicts the least recently used entry."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry")


class LRUCache(Generic[Key, Entry]):
    """At most `size` entries by key, in the order of their last use.

    Args:
      size: Largest number of entries.

    Example:
      >>> cache = LRUCache(2)
      >>> for name in ("a", "b"):
      ...     cache.put(name, name.upper())
      >>> cache.get("a"), cache.get_or_make("c", lambda: "C"), cache.get("b")
      ('A', 'C', None)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Entry | None:
        """Returns the entry of a key and marks it as used; None if there is none."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: Key, entry: Entry) -> None:
        """Sets the entry of a key; evicts the least recently used one if full."""
        with self._lock:
            self._put(key, entry)

    def get_or_make(self, key: Key, make: Callable[[], Entry]) -> Entry:
        """Returns the entry of a key; `make()` creates it if there is none."""
        # Created under the lock, so that concurrent callers share one entry.
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
            return self._put(key, make())

    def pop(self, key: Key) -> Entry | None:
        """Removes and returns the entry of a key; None if there is none."""
        with self._lock:
            return self._entries.pop(key, None)

    def clear(self) -> None:
        """Removes all entries."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __contains__(self, key: object) -> bool:
        # Without the lock: a look-up in a dict is atomic.
        return key in self._entries

    def _put(self, key: Key, entry: Entry) -> Entry:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return entry

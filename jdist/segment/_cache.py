"""Compiled functions, found again by what a function *is*, not by which object it is.

A lambda written in a loop is a new object in each turn, and `jax.jit` compiles each new
object. Here the key is the function's code object together with the contents of all
that its code refers to (`contents`): its closure, its defaults, the globals it reads.
Equal keys mean equal programs, so the lambda is compiled once; and a lambda whose
closure did change is never mistaken for the old one.

Where the closure changes in each turn every turn compiles, which costs a thousand
times the call. The third version of one code object therefore warns, once, and names
what changed. The cache holds a bounded number of entries and drops the one that was not
used for longest; what was handed out stays valid.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jdist.segment._contents import Contents, contents_of

Entry = TypeVar("Entry")
PATIENCE = 3


class RecompilationWarning(UserWarning):
    """One piece of code is compiled over and over: what it refers to changes."""


@dataclass(slots=True)
class _History:
    """How many versions of one code object there were, and the contents of the last."""

    versions: int
    last: Contents


class Cache(Generic[Entry]):
    """A bounded map from functions to what was compiled for them; safe in threads.

    Args:
      user: Name of the public function that compiles, for the warning.
      size: How many entries are held.

    Example:
      >>> cache = Cache("apply", size=2)
      >>> made = [cache.get(lambda x: x + 1, (), object) for _ in range(3)]
      >>> made[0] is made[1] is made[2]
      True
      >>> len(cache)
      1
    """

    def __init__(self, user: str, size: int) -> None:
        self._user = user
        self._size = size
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._histories: OrderedDict[Hashable, _History] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, fn: Callable[..., Any], options: Hashable, build: Callable[[], Entry]
    ) -> Entry:
        """The entry of a function and options; `build()` makes it if there is none.

        Raises:
          TypeError: `fn` refers to a traced value.
        """
        contents = contents_of(fn, self._user)
        key = (contents, options)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
            entry = self._entries[key] = build()
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
            warning = self._note(contents, options)
        if warning:
            warnings.warn(warning, RecompilationWarning, stacklevel=3)
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets all entries; what was handed out stays valid."""
        with self._lock:
            self._entries.clear()
            self._histories.clear()

    def _note(self, contents: Contents, options: Hashable) -> str:
        """Counts a version of a code object; the warning, if it is the one too many."""
        key = (contents.code, options)
        before = self._histories.pop(key, None)
        versions = 1 if before is None else before.versions + 1
        self._histories[key] = _History(versions, contents)
        if len(self._histories) > self._size:
            self._histories.popitem(last=False)
        if before is None or versions != PATIENCE:
            return ""
        changed = "; ".join(contents.changes_since(before.last))
        return (
            f"{self._user} compiles {contents.name} for the {PATIENCE}rd time, because "
            f"what it refers to changed: {changed}. Each version costs a compilation. "
            f"Pass what changes as an input, or write the function outside the loop."
        )

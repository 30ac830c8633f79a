"""Compiled functions found again: by the function itself, or by its program.

A lambda written in a loop is a new object in each iteration, and `jax.jit` compiles
each new object. Here compiled functions are found in two ways:

1. `FunctionCache`: the same function, which reads the same values (`contents`), is not
   traced again.
2. `ProgramVersions`: any other function is traced, and is compiled only if its program
   is a new one (`program_key`). A trace costs a thousandth of a compilation and cannot
   be wrong, since the program contains all that the trace has read. Neither a value
   that cannot be read nor a change of one that the function does not use causes a
   recompilation.

If the program changes in each iteration, each iteration compiles, which costs a
thousand times the call. The third version of one code object therefore causes one
warning, which names the change; for stages and losses of pipelines it is the sixteenth,
because programs build several models on purpose. So does the eighth size of one
dimension, of any function: ragged data compile in each iteration as well. Both caches
are bounded and drop the least recently used entry; entries handed out stay valid.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax

from jdist._lru_cache import LRUCache
from jdist._tree import Shaped, abbreviated
from jdist.segment._lookup.contents import (
    FIXED_PACKAGES,
    Contents,
    SameObject,
    contents_of,
)

Entry = TypeVar("Entry", bound="Compiled")
Shapes = tuple[tuple[int, ...], ...]
PATIENCE = 3
"""Number of versions of one code object at which a recompilation warning is issued."""

PATIENCE_WITH_MODELS = 16
"""The same for parts of models, several of which a program may build on purpose."""


PATIENCE_WITH_SIZES = 8
"""Number of sizes of one dimension at which a recompilation warning is issued."""

_MOST_SHAPES = 63
"""Number of earlier shapes kept besides the newest, for later comparisons."""


class RecompilationWarning(UserWarning):
    """One function is compiled repeatedly, for changed values or changed sizes."""


@dataclass(slots=True)
class _History:
    """The number of versions of one code object, and the contents of the last one."""

    versions: int
    last: Contents


class Compiled(Protocol):
    """What is compiled of a function, by what the function read at its last trace."""

    @property
    def contents(self) -> Contents:
        """What the function read."""


class FunctionCache(Generic[Entry]):
    """A bounded, thread-safe map from functions to entries built for them.

    Args:
      user: Name of the public function that compiles, for error messages.
      size: Largest number of entries.
    """

    def __init__(self, user: str, size: int) -> None:
        self.user = user
        self._entries: LRUCache[Hashable, Entry] = LRUCache(size)
        # By function object, with its latest contents: to check its guards is cheaper
        # than to read it. An entry that is used is never evicted from here.
        self._latest: LRUCache[Hashable, Entry] = LRUCache(size)

    def get(
        self,
        fn: object,
        options: Hashable,
        build: Callable[[Contents], Entry],
    ) -> Entry:
        """The entry of a function and options; `build(contents)` makes a new one.

        In place of a function, a tuple of values may be given, a function the first. A
        function is the same if all that it reads has equal values, and is held by the
        same objects: one that changes, changes for all who have found it. A function
        that cannot be read completely gets a new entry each time.

        Raises:
          TypeError: `fn` refers to a traced value.
        """
        this = SameObject(fn), options
        found = self._latest.get(this)
        if found is not None and found.contents.complete and found.contents.hold():
            return found
        contents = contents_of(fn, self.user)
        if not contents.complete:
            return build(contents)
        key = contents, contents.places, options
        found = self._entries.get(key)
        # It may have been traced first after a change.
        if found is None or found.contents != contents:
            found = build(contents)
            self._entries.put(key, found)
        self._latest.put(this, found)
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all entries; those handed out stay valid."""
        self._entries.clear()
        self._latest.clear()


class _Sizes:
    """The shapes for which one function was compiled.

    Attributes:
      seen: The shapes of all arguments, one entry for each compilation, oldest first.
      warned: Whether the warning has been issued.
    """

    def __init__(self) -> None:
        self.seen: list[Shapes] = []
        self.warned = False

    def along_one_axis(self, shapes: Shapes) -> list[Shapes]:
        """The largest group of seen shapes that differ from these in one same axis."""
        by_axis: dict[int, list[Shapes]] = {}
        # By axis: a ragged batch varies along one axis, a model of several sizes along
        # many.
        for other in self.seen:
            pairs = zip(shapes, other, strict=True)
            axes = {
                axis
                for one, two in pairs
                for axis in range(len(one))
                if one[axis] != two[axis]
            }
            if len(axes) == 1:
                by_axis.setdefault(axes.pop(), []).append(other)
        return max(by_axis.values(), key=len, default=[])


class ProgramVersions:
    """A bounded, thread-safe map from programs to entries compiled for them.

    Args:
      size: Largest number of programs.
    """

    def __init__(self, size: int) -> None:
        self._entries: LRUCache[Hashable, Any] = LRUCache(size)
        self._histories: LRUCache[Hashable, _History] = LRUCache(size)
        self._sizes: LRUCache[Hashable, _Sizes] = LRUCache(size)
        # Makes counting atomic; each map has a lock of its own.
        self._lock = threading.Lock()

    def get(
        self,
        user: str,
        contents: Contents,
        case: Hashable,
        program: Hashable,
        entry: object,
        patience: int = PATIENCE,
    ) -> Any:
        """The entry of a program; `entry` is stored if there is none.

        Args:
          user: Name of the public function that compiles.
          contents: The contents of the function that was traced.
          case: The shapes of its arguments, and all options.
          program: The key of the traced program.
          entry: The new entry, about to be compiled.
          patience: See `note`.
        """
        key = (user, contents.code, case, program)
        # `get_or_make` does not say whether it has made something.
        compiles: list[Any] = []

        def new() -> Any:
            compiles.append(entry)
            return entry

        found = self._entries.get_or_make(key, new)
        if compiles:
            self.note(user, contents, case, patience)
        return found

    def note(
        self, user: str, contents: Contents, case: Hashable, patience: int = PATIENCE
    ) -> None:
        """Counts a compilation of a code object; warns once there are `patience`."""
        key = (user, contents.code, case)
        with self._lock:
            # Removed and put back, so that the code object compiled now is the last to
            # be evicted.
            before = self._histories.pop(key)
            versions = 1 if before is None else before.versions + 1
            self._histories.put(key, _History(versions, contents))
        # Once, at the limit, and not at every version after it.
        if before is None or versions != patience:
            return
        changed = "; ".join(contents.changes_since(before.last))
        warning = (
            f"{user} compiles {contents.name} for the {_ordinal(patience)} time, "
            f"because what it refers to changed: {changed}. Each version costs a "
            f"compilation. "
            f"Pass what changes as an input, or write the function outside the loop."
        )
        warnings.warn(warning, RecompilationWarning, stacklevel=_users_level())

    def note_sizes(
        self, user: str, contents: Contents, label: Hashable, arrays: Sequence[Any]
    ) -> None:
        """Counts the sizes of a dimension for which a function is compiled; may warn.

        Args:
          user: Name of the public function that compiles.
          contents: The contents of the function.
          label: Further part of the key; see `segment`.
          arrays: Shapes and dtypes of its arguments.
        """
        kinds = tuple((str(x.dtype), len(x.shape)) for x in arrays)
        shapes = tuple(tuple(x.shape) for x in arrays)
        key = (user, contents.code, label, kinds)
        with self._lock:
            sizes = self._sizes.get_or_make(key, _Sizes)
            # A program that was evicted is compiled again for sizes already counted.
            if sizes.warned or shapes in sizes.seen:
                return
            others = sizes.along_one_axis(shapes)
            sizes.seen = [*sizes.seen[-_MOST_SHAPES:], shapes]
            sizes.warned = len(others) + 1 >= PATIENCE_WITH_SIZES
            if not sizes.warned:
                return
        differ = [i for i, shape in enumerate(shapes) if shape != others[-1][i]]
        told = " then ".join(
            ", ".join(_size(arrays[i], each[i]) for i in differ)
            for each in (*others[-2:], shapes)
        )
        warning = (
            f"{user} compiles {contents.name} for the {_ordinal(PATIENCE_WITH_SIZES)} "
            f"size of one dimension: {told}. Each size costs a compilation. Pad it to "
            "a few sizes, and give what is added no weight in the loss."
        )
        warnings.warn(warning, RecompilationWarning, stacklevel=_users_level())

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all entries; those handed out stay valid."""
        for each in (self._entries, self._histories, self._sizes):
            each.clear()


VERSIONS = ProgramVersions(size=256)
"""The programs of all functions that segments, autograd and pipelines compile."""


def _size(array: Shaped, shape: tuple[int, ...]) -> str:
    return abbreviated(jax.ShapeDtypeStruct(shape, array.dtype))


def _ordinal(number: int) -> str:
    return f"{number}{'rd' if number == 3 else 'th'}"


def _users_level() -> int:
    """The `stacklevel` at which a warning points to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        # Frames of jdist, JAX and Flax stand between the warning and the user's line.
        if package not in FIXED_PACKAGES:
            break
        level, frame = level + 1, frame.f_back
    return level

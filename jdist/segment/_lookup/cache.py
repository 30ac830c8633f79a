"""Compiled functions found again: by the function itself, or by its program.

A lambda written in a loop is a new object in each iteration, and `jax.jit` compiles
each new object. Here compiled functions are found in two ways:

1. `FunctionCache`: the same function, of which nothing that it reads has been replaced
   (`contents`), is not traced again.
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
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax

from jdist._lru_cache import LRUCache
from jdist._tree import Shaped, abbreviated
from jdist.segment._lookup.contents import (
    FIXED_PACKAGES,
    Contents,
    SameObject,
    contents_of,
    key_of,
)

Entry = TypeVar("Entry", bound="Compiled")
PATIENCE = 3
"""Number of versions of one code object at which a recompilation warning is issued."""

PATIENCE_WITH_MODELS = 16
"""The same for parts of models, several of which a program may build on purpose."""

PATIENCE_WITH_SIZES = 8
"""Number of sizes of one dimension at which a recompilation warning is issued."""


class RecompilationWarning(UserWarning):
    """One function is compiled repeatedly, for changed values or changed sizes."""


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

    def get(
        self,
        fn: object,
        options: Hashable,
        build: Callable[[Contents], Entry],
    ) -> Entry:
        """The entry of a function and options; `build(contents)` makes a new one.

        In place of a function, a tuple of values may be given, a function the first. A
        function of which something that it reads was replaced, or cannot be read, gets
        a new entry.

        Raises:
          TypeError: `fn` refers to a traced value.
        """
        key = _same(fn), options
        found = self._entries.get(key)
        if found is None or not (found.contents.complete and found.contents.hold()):
            found = build(contents_of(fn, self.user))
            self._entries.put(key, found)
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all entries; those handed out stay valid."""
        self._entries.clear()


def _same(fn: object) -> Hashable:
    """A key of a function by identity; methods and tuples are made anew each time."""
    if isinstance(fn, types.MethodType):
        return _same(fn.__func__), SameObject(fn.__self__)
    if type(fn) is tuple:
        return tuple(map(_same, fn))
    return SameObject(fn) if callable(fn) else key_of(fn)


class ProgramVersions:
    """A bounded, thread-safe map from programs to entries compiled for them.

    Args:
      size: Largest number of programs.
    """

    def __init__(self, size: int) -> None:
        self._entries: LRUCache[Hashable, Any] = LRUCache(size)
        # By code, the number of versions, and what the last one read.
        self._histories: LRUCache[Hashable, tuple[int, Contents]] = LRUCache(size)
        # By code, and by shapes but for one axis, all these shapes.
        self._sizes: LRUCache[Hashable, list[Any]] = LRUCache(4 * size)
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
        stored: list[Any] = []

        def new() -> Any:
            stored.append(entry)
            return entry

        found = self._entries.get_or_make((user, contents.code, case, program), new)
        # Another thread may have stored the same entry: that is one compilation.
        if stored:
            self.note(user, contents, case, patience)
        return found

    def note(
        self, user: str, contents: Contents, case: Hashable, patience: int = PATIENCE
    ) -> None:
        """Counts a compilation of a code object; warns once there are `patience`."""
        key = (user, contents.code, case)
        with self._lock:
            versions, before = self._histories.get(key) or (0, contents)
            self._histories.put(key, (versions + 1, contents))
        # Once, at the limit, and not at every version after it.
        if versions + 1 == patience:
            changed = "; ".join(contents.changes_since(before))
            _warn(
                f"{user} compiles {contents.name} for the {_ordinal(patience)} time, "
                f"because what it refers to changed: {changed}. Each version costs a "
                "compilation. Pass what changes as an input, or write the function "
                "outside the loop."
            )

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
        shapes = [x.shape for x in arrays]
        # By axis: a ragged batch varies along one axis, a model of several sizes along
        # many.
        for axis in range(max(map(len, shapes), default=0)):
            rest = tuple([(str(x.dtype), _without(axis, x.shape)) for x in arrays])
            key = (user, contents.code, label, axis, rest)
            with self._lock:
                seen = self._sizes.get_or_make(key, list)
                # A program that was evicted is compiled again for sizes already
                # counted. Once, at the limit, and not at every size after it.
                if shapes in seen or len(seen) >= PATIENCE_WITH_SIZES:
                    continue
                seen.append(shapes)
            if len(seen) == PATIENCE_WITH_SIZES:
                differ = [i for i, x in enumerate(shapes) if x != seen[-2][i]]
                told = " then ".join(
                    ", ".join(_size(arrays[i], each[i]) for i in differ)
                    for each in seen[-3:]
                )
                _warn(
                    f"{user} compiles {contents.name} for the "
                    f"{_ordinal(PATIENCE_WITH_SIZES)} size of one dimension: {told}. "
                    "Each size costs a compilation. Pad it to a few sizes, and give "
                    "what is added no weight in the loss."
                )

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Removes all entries; those handed out stay valid."""
        for each in (self._entries, self._histories, self._sizes):
            each.clear()


VERSIONS = ProgramVersions(size=256)
"""The programs of all functions that segments, autograd and pipelines compile."""


def _without(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (len(shape), *shape[:axis], *shape[axis + 1 :])


def _size(array: Shaped, shape: tuple[int, ...]) -> str:
    return abbreviated(jax.ShapeDtypeStruct(shape, array.dtype))


def _ordinal(number: int) -> str:
    return f"{number}{'rd' if number == 3 else 'th'}"


def _warn(message: str) -> None:
    """Issues a warning at the user's line."""
    level, frame = 1, sys._getframe()
    # Frames of jdist, JAX and Flax stand between the warning and the user's line.
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in FIXED_PACKAGES:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RecompilationWarning, stacklevel=level)

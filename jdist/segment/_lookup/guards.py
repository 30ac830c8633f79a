"""Guards: a cheap check that nothing has changed of what a function reads.

To read all that in every call would take longer than a small step. Where it is read
once, each thing that may change is noted with what was found there. The check reads
these things again and compares by identity; NumPy arrays, which can be written to, by
their bytes.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import numpy as np

Read = Callable[[Any], tuple[Any, ...]]
"""Finds all that a function can read at one thing."""

MISSING = object()
"""What is found where there is nothing."""


class Guards:
    """What was found at each thing that may change."""

    __slots__ = ("_arrays", "_cells", "_functions", "_names", "_things")

    def __init__(self) -> None:
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._functions: list[tuple[Any, ...]] = []
        self._things: list[tuple[Read, Any, tuple[Any, ...]]] = []
        self._arrays: list[tuple[np.ndarray, tuple[Any, ...]]] = []

    def see_name(self, space: Mapping[str, Any], name: str) -> Any:
        """Notes and returns a global variable, or one of a module."""
        found = space.get(name, MISSING)
        self._names.append((space, name, found))
        return found

    def see_cell(self, cell: types.CellType) -> Any:
        """Notes and returns the value of a closure's variable."""
        found = _in_cell(cell)
        self._cells.append((cell, found))
        return found

    def see_function(self, fn: types.FunctionType) -> None:
        """Notes code, defaults (not those of keywords, in a dict) and attributes."""
        fixed = fn.__code__, fn.__defaults__, fn.__kwdefaults__
        self._functions.append((fn, *fixed, _attributes(fn)))

    def see(self, read: Read, thing: Any) -> tuple[Any, ...]:
        """Notes and returns what `read(thing)` finds."""
        found = read(thing)
        self._things.append((read, thing, found))
        return found

    def see_array(self, array: np.ndarray) -> None:
        """Notes the bytes of an array."""
        self._arrays.append((array, _bytes_of(array)))

    def hold(self) -> bool:
        """Whether the same objects, and arrays of the same bytes, are still there."""
        # Plain loops, without a list or a call where that can be: after a program has
        # run, all that Python does takes several times as long as in a loop of its own.
        for space, name, found in self._names:
            if space.get(name, MISSING) is not found:
                return False
        for cell, found in self._cells:
            if _in_cell(cell) is not found:
                return False
        for fn, code, defaults, keywords, own in self._functions:
            if (
                fn.__code__ is not code
                or fn.__defaults__ is not defaults
                or fn.__kwdefaults__ is not keywords
                or ((own or fn.__dict__) and not _same(_attributes(fn), own))
            ):
                return False
        for read, thing, found in self._things:
            if not _same(read(thing), found):
                return False
        # Most functions read none, and a generator would cost as much as all the rest.
        return not self._arrays or all(_bytes_of(x) == was for x, was in self._arrays)


def _same(now: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    return len(now) == len(found) and all(map(is_, now, found))


def _bytes_of(array: np.ndarray) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


# --- what can be read at a thing ---


def in_cells(cells: Iterable[types.CellType]) -> list[Any]:
    """The values of closures' variables."""
    return list(map(_in_cell, cells))


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # A variable that is not assigned.
        return MISSING


def _attributes(fn: types.FunctionType) -> tuple[Any, ...]:
    return *fn.__dict__, *fn.__dict__.values()


def at_name(named: tuple[object, str]) -> tuple[Any, ...]:
    """An attribute: in the object, and in its class."""
    value, name = named
    kind = type(value)
    raw = in_class(kind, name)
    own = getattr(value, "__dict__", {}).get(name, MISSING)
    if isinstance(raw, types.MemberDescriptorType):
        return kind, raw, own, in_slot(raw, value)
    return kind, raw, own


def in_class_body(kind: type) -> tuple[Any, ...]:
    """The names and values of a class, without those of its bases; and these."""
    return kind.__mro__, *vars(kind), *vars(kind).values()


def in_mapping(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What makes missing values, keys, and values."""
    return getattr(value, "default_factory", None), *value, *value.values()


def in_deque(value: "deque[Any]") -> tuple[Any, ...]:
    """What it drops next depends on its length."""
    return value.maxlen, *value


def in_partial(fn: "functools.partial[Any]") -> tuple[Any, ...]:
    """Its function and arguments."""
    return fn.func, *fn.args, *fn.keywords, *fn.keywords.values()


def in_reference(value: "weakref.ref[Any]") -> tuple[Any, ...]:
    """What a weak reference leads to."""
    return (value(),)


def in_object(value: Any) -> tuple[Any, ...]:
    """Attributes of an object, by name, and what it holds as a container."""
    kind: Any = type(value)
    own = getattr(value, "__dict__", {})
    slots = [in_slot(slot, value) for slot in _slots(kind).values()]
    found = kind, *own, *own.values(), *slots
    if isinstance(value, dict):
        return *found, *value, *dict.values(value)
    inside = isinstance(value, list | tuple | set | frozenset)
    return (*found, *value) if inside else found


def state_of(value: object) -> dict[str, Any]:
    """The attributes that an object has: those in its dict and in its slots."""
    kind: Any = type(value)
    slots = {name: in_slot(slot, value) for name, slot in _slots(kind).items()}
    found = {name: x for name, x in slots.items() if x is not MISSING}
    return {**found, **getattr(value, "__dict__", {})}


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> dict[str, Any]:
    return {
        name: raw
        for each in reversed(kind.__mro__)
        for name, raw in vars(each).items()
        if isinstance(raw, types.MemberDescriptorType)
    }


def in_slot(slot: types.MemberDescriptorType, value: object) -> object:
    """The value in a slot."""
    try:
        return slot.__get__(value)
    except AttributeError:  # It is not assigned yet.
        return MISSING


def in_class(kind: type, name: str) -> object:
    """An attribute in the `__dict__` of a class or a base; no descriptor is invoked."""
    for each in kind.__mro__:
        found = vars(each).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING

"""Guards: a cheap check that nothing has changed of what a function reads.

To read the contents of a function in every call would take longer than a small step.
Where they are read, each thing that may change is noted with what was found there. The
check compares by identity, in some 0.4 us for each thing, and NumPy arrays, which can
be written to, by their bytes. If it fails, the contents say whether a value changed.
"""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import numpy as np

Read = Callable[[Any], tuple[Any, ...]]
"""Finds all that a function can read at one thing."""

MISSING = object()
"""What is found where there is nothing."""


class Guards:
    """What was found at each thing that may change."""

    __slots__ = ("_arrays", "_found", "_names", "_things")

    def __init__(self) -> None:
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._things: list[tuple[Read, Any]] = []
        self._found: list[Any] = []
        self._arrays: list[tuple[np.ndarray, tuple[Any, ...]]] = []

    def see(self, read: Read, owner: Any) -> None:
        """Notes what `read` finds at `owner`."""
        self._things.append((read, owner))
        self._found += read(owner)

    def see_name(self, namespace: Mapping[str, Any], name: str) -> None:
        """Notes the value of a global variable, or of a module's."""
        self._names.append((namespace, name, namespace.get(name, MISSING)))

    def see_array(self, array: np.ndarray) -> None:
        """Notes the bytes of an array."""
        self._arrays.append((array, _bytes_of(array)))

    def hold(self) -> bool:
        """Whether the same objects, and arrays of the same bytes, are still there."""
        # The most frequent kind, in a third of the time.
        for namespace, name, value in self._names:
            if namespace.get(name, MISSING) is not value:
                return False
        now = [x for read, owner in self._things for x in read(owner)]
        if len(now) != len(self._found) or not all(map(is_, now, self._found)):
            return False
        return all(_bytes_of(array) == found for array, found in self._arrays)


def _bytes_of(array: np.ndarray) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


# --- what can be read at a thing ---


def in_function(fn: types.FunctionType) -> tuple[Any, ...]:
    """Its code, defaults (not those of keywords, in a dict) and attributes."""
    return fn.__code__, fn.__defaults__, fn.__kwdefaults__, *fn.__dict__.values()


def in_partial(fn: "functools.partial[Any]") -> tuple[Any, ...]:
    """Its function and arguments."""
    return fn.func, *fn.args, *fn.keywords, *fn.keywords.values()


def in_cell(cell: types.CellType) -> tuple[Any, ...]:
    """The value of a closure's variable."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # A variable that is not assigned.
        return (MISSING,)


def at_name(named: tuple[object, str]) -> tuple[Any, ...]:
    """An attribute: in the object, and in its class."""
    value, name = named
    kind = type(value)
    raw = in_class(kind, name)
    own = getattr(value, "__dict__", {}).get(name, MISSING)
    if isinstance(raw, types.MemberDescriptorType):
        return kind, raw, own, in_slot(raw, value)
    return kind, raw, own


def in_class_at_name(named: tuple[type, str]) -> tuple[Any, ...]:
    """An attribute of a class."""
    return (in_class(*named),)


def in_class_body(kind: type) -> tuple[Any, ...]:
    """The names and values of a class, without those of its bases; and these."""
    return kind.__mro__, *vars(kind), *vars(kind).values()


def in_mapping(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Keys, values, and what makes missing values."""
    return getattr(value, "default_factory", None), *value, *value.values()


def in_reference(value: "weakref.ref[Any]") -> tuple[Any, ...]:
    """What a weak reference leads to."""
    return (value(),)


def in_object(value: Any) -> Read:
    """Finds the class and attributes of an object, and what it holds as a container."""
    kind: Any = type(value)
    if _slots(kind) or isinstance(value, dict | list | set):
        return _in_any_object
    return _in_attributes


def _in_attributes(value: Any) -> tuple[Any, ...]:
    # Most objects, and in a quarter of the time.
    own = getattr(value, "__dict__", {})
    return type(value), *own, *own.values()


def _in_any_object(value: Any) -> tuple[Any, ...]:
    kind: Any = type(value)
    found = *_in_attributes(value), *[in_slot(x, value) for _, x in _slots(kind)]
    if isinstance(value, dict):
        return *found, *value, *dict.values(value)
    return (*found, *value) if isinstance(value, list | set) else found


def state_of(value: object) -> list[tuple[str, Any]]:
    """The attributes that an object has: those in its dict and in its slots."""
    found = list(getattr(value, "__dict__", {}).copy().items())
    kind: Any = type(value)
    slots = [(name, in_slot(slot, value)) for name, slot in _slots(kind)]
    return found + [each for each in slots if each[1] is not MISSING]


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, raw)
        for each in kind.__mro__
        for name, raw in vars(each).items()
        if isinstance(raw, types.MemberDescriptorType)
    ]


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

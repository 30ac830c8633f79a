"""Guards: a cheap check that nothing has changed of what a function reads.

To read all that in every call would take longer than a small step. Where it is read
once, each thing that may change is noted with what was found there. The check finds it
again and compares by identity; NumPy arrays, which can be written to, by their bytes.
"""

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter, is_
from typing import Any

import jax
import numpy as np

Read = Callable[[Any], tuple[Any, ...]]
"""Finds all that a function can read at one thing."""

MISSING = object()
"""What is found where there is nothing."""

JITTED: Any = type(jax.jit(abs))
BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque)
IN_C = (
    slice, types.MappingProxyType, functools.partial, staticmethod, classmethod,
    property, *BOUND, *CONTAINERS,
)  # fmt: skip
"""Types written in C of which the garbage collector sees all that they refer to."""


class Guards:
    """What was found at each thing that may change."""

    __slots__ = ("_arrays", "_names", "_things")

    def __init__(self) -> None:
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._things: list[tuple[Read, Any, tuple[Any, ...]]] = []
        self._arrays: list[tuple[np.ndarray, tuple[Any, ...]]] = []

    def see_name(self, space: Mapping[str, Any], name: str) -> Any:
        """Notes and returns a global variable, or one of a module."""
        found = space.get(name, MISSING)
        self._names.append((space, name, found))
        return found

    def see(self, read: Read, thing: Any) -> tuple[Any, ...]:
        """Notes and returns what `read(thing)` finds."""
        found = read(thing)
        self._things.append((read, thing, found))
        return found

    def see_array(self, array: Any) -> tuple[Any, ...]:
        """Notes and returns the shape, dtype and bytes of an array or a scalar."""
        self._arrays.append((array, _bytes_of(array)))
        return self._arrays[-1][1]

    def hold(self) -> bool:
        """Whether the same objects, and arrays of the same bytes, are still there."""
        # Plain loops, without a list or a call where that can be: after a program has
        # run, all that Python does takes several times as long as in a loop of its own.
        for space, name, found in self._names:
            if space.get(name, MISSING) is not found:
                return False
        for read, thing, was in self._things:
            now = read(thing)
            if len(now) != len(was) or not all(map(is_, now, was)):
                return False
        # Most functions read none, and a generator would cost as much as all the rest.
        return not self._arrays or all(_bytes_of(x) == was for x, was in self._arrays)


def _bytes_of(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


# --- what can be read at a thing ---


def in_function(fn: types.FunctionType) -> tuple[Any, ...]:
    """Code, defaults, variables of closures, and attributes."""
    own, keywords = fn.__dict__, fn.__kwdefaults__
    if not (own or keywords or fn.__closure__):
        return fn.__code__, fn.__defaults__
    found = [fn.__code__, fn.__defaults__, *in_cells(fn)]
    for named in (keywords, own):
        if named:
            found += named
            found += named.values()
    return tuple(found)


def in_cells(fn: types.FunctionType) -> list[Any]:
    """The values of the variables of a closure."""
    found = []
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # A variable that is not assigned.
            found.append(MISSING)
    return found


def at_name(named: tuple[object, str]) -> tuple[Any, ...]:
    """An attribute: in its class, in the object, and in a slot."""
    value, name = named
    kind = type(value)
    raw = in_class(kind, name)
    own = getattr(value, "__dict__", {}).get(name, MISSING)
    slot = in_slot(raw, value) if isinstance(raw, types.MemberDescriptorType) else None
    return kind, raw, own, slot


def in_class_body(kind: type) -> tuple[Any, ...]:
    """The names and values of a class, without those of its bases; and these."""
    return kind.__mro__, *vars(kind), *vars(kind).values()


def in_attributes(value: Any) -> tuple[Any, ...]:
    """The class of an object, and its attributes."""
    own = value.__dict__
    return type(value), *own, *own.values()


def in_object(value: Any) -> tuple[Any, ...]:
    """The class of an object, its attributes, and what it holds as a container."""
    kind: Any = type(value)
    own = getattr(value, "__dict__", {})
    slots = [in_slot(slot, value) for slot in _slots(kind)]
    found = [kind, *own, *own.values(), *slots]
    if issubclass(kind, dict):
        found += value
    if issubclass(kind, IN_C):
        found += [x for x in gc.get_referents(value) if x is not own and x is not kind]
    return tuple(found)


_READERS: dict[type, Read] = {
    dict: lambda mapping: (*mapping, *mapping.values()),
    **dict.fromkeys((list, tuple, set, frozenset, collections.deque), tuple),
    functools.partial: attrgetter("func", "args", "keywords", "__dict__"),
    # Without caches, and without callbacks.
    JITTED: lambda fn: (fn.__wrapped__,),
    weakref.ReferenceType: lambda reference: (reference(),),
}


@functools.lru_cache(maxsize=4096)
def reader_of(kind: type) -> Read:
    """How to find all that values of a type refer to."""
    plain = kind.__dictoffset__ and not _slots(kind) and not issubclass(kind, IN_C)
    return _READERS.get(kind, in_attributes if plain else in_object)


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> list[types.MemberDescriptorType]:
    bodies = [vars(x) for x in kind.__mro__ if "__slots__" in vars(x)]
    raws = [raw for body in bodies for raw in body.values()]
    return [raw for raw in raws if isinstance(raw, types.MemberDescriptorType)]


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

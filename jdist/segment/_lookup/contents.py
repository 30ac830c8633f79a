"""What a function reads besides its arguments: noted completely, or known to be not.

Code alone does not make a function. A lambda in a loop at the top of a script reads the
loop's variable as a *global*, one inside a function as a *closure*; both count. So do
defaults, attributes of the function, the `self` of a method, the arguments of a
`functools.partial`, and, to any depth, the functions among these. While JAX traces,
Python can only find values by these ways, and each of them is looked at. Each place
whose value can be replaced (a closure's variable, a global, an attribute, an element)
is guarded; see `guards`. As long as all guards hold, the function is the same.

Nothing else can change a traced program unseen, because everything else is listed in
`Contents.unread`: objects of C extensions, files, locks, iterators; `globals()`,
`open`, an `import` inside; a module that is passed on; and all that is too large to be
read in every call. A function of which something is unread is traced, and its program
is compared.

Contents hold a reference to each object compared by identity, so that no other object
can reuse its address.
"""

import collections
import functools
import re
import types
import weakref
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from os.path import basename
from typing import Any, Generic

import jax
import numpy as np

from jdist._errors import type_error
from jdist.segment._lookup import guards
from jdist.segment._lookup.bytecode import Path, Reads, reads_of
from jdist.segment._lookup.guards import (
    BOUND,
    CONTAINERS,
    IN_C,
    JITTED,
    MISSING,
    in_class,
)

FIXED_PACKAGES = frozenset((
    "jdist", "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "flax", "optax", "orbax",
    "chex", "einops",
    "abc", "_abc", "argparse", "builtins", "cmath", "collections", "_collections",
    "_collections_abc", "contextlib", "copy", "copyreg", "dataclasses", "enum",
    "functools", "_functools", "inspect", "itertools", "logging", "math", "numbers",
    "operator", "_operator", "pathlib", "re", "statistics", "string", "textwrap",
    "types", "typing", "warnings", "weakref",
))  # fmt: skip
"""Packages whose functions, classes and modules do not change while a program runs."""

READS = "__jdist_reads__"
"""The attribute by which a function of jdist's says which values of users it reads; all
others in its closure are its own and do not change."""

MOST_VALUES = 2000
"""Largest number of objects read at once; reading more takes longer than a trace."""

MOST_BYTES = 1 << 20
"""Largest number of bytes of NumPy arrays read at once."""

_PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...)}
# These never change, and refer to nothing that does.
_FINAL = (
    jax.Array, jax.Device, jax.ShapeDtypeStruct, jax.tree_util.PyTreeDef,
    jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec, np.dtype,
    np.ufunc, range, re.Pattern, types.MemberDescriptorType,
    types.GetSetDescriptorType, types.CodeType,
    type(vars(collections.namedtuple("_Pair", "first second"))["first"]),
)  # fmt: skip
_CONSTANT = {
    tuple, frozenset, slice, staticmethod, classmethod, property, JITTED, *BOUND,
}  # fmt: skip
# All state of these is seen by `guards.in_object`.
_TRANSPARENT = {
    object, int, float, str, types.SimpleNamespace, Generic, JITTED,
    collections.OrderedDict, defaultdict, weakref.ReferenceType, *IN_C,
}  # fmt: skip
# Not compared by their identity.
_ALIKE = {types.FunctionType, *_TRANSPARENT} - {object, JITTED, *BOUND[1:]}
_OF_C = (
    types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.BuiltinFunctionType,
)  # fmt: skip
_DATA = {"__set__", "__delete__"}
# Builtins that read or do things which the bytecode does not show.
_BEYOND = frozenset({"globals", "eval", "exec", "__import__", "open", "input"})
_ABOUT_CLASS = frozenset((
    "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__",
    "__dataclass_params__", "__parameters__", "_abc_impl", "__orig_bases__",
))  # fmt: skip
_JDIST = __file__.removesuffix("segment/_lookup/contents.py")


@dataclass(frozen=True, slots=True, eq=False)
class SameObject:
    """Equal to another only if both hold the same object; keeps that object alive."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"{type(self.held).__name__} at {id(self.held):#x}"


class Contents:
    """What functions and other values read.

    Args:
      reads: The values by name, the function that names the whole first.
      user: Name of the public function that compiles, for error messages.
      takes_traced: Whether values that are being traced may be read.

    Attributes:
      code: The code object of the first function, or itself if it has none.
      name: Its name and place, for messages.
      unread: References that could not be read.

    Raises:
      TypeError: A value that is being traced is read: a compiled function would hold it
        beyond its life, and its derivative would be lost.
    """

    def __init__(
        self, reads: Mapping[str, Any], user: str, takes_traced: bool = False
    ) -> None:
        self._user, self._takes_traced = user, takes_traced
        # What stands for an object where it is met again: a number or, if its identity
        # counts, itself.
        self._met: dict[Hashable, Hashable] = {}
        self._left, self._bytes = MOST_VALUES, MOST_BYTES
        # What was found, by what the outermost function calls it.
        self._found: list[tuple[str, tuple[Any, ...]]] = []
        self.unread: list[str] = []
        self._guards = guards.Guards()
        # Whether the object that is being read, and its containers, never change.
        self._settled = False
        self.hold = self._guards.hold
        """Tells whether nothing of what was read has been replaced; cheap."""
        self.code = _code_of(next(iter(reads.values())))
        for part, value in reads.items():
            self._outermost(part, value)

    @property
    def complete(self) -> bool:
        """Whether all that is read is guarded."""
        return not self.unread

    @property
    def name(self) -> str:
        """Name and place of the function, for messages."""
        # Inside a wrapper of jdist's own, the user's function is to be named.
        for code in [self.code, *[found[0] for _, found in self._found if found]]:
            is_code = isinstance(code, types.CodeType)
            if is_code and not code.co_filename.startswith(_JDIST):
                return _shown(code)
        return _shown(self.code)

    def key(self) -> Hashable:
        """Equal for functions that behave alike, if both are complete."""
        return tuple([(part, self._noted(found)) for part, found in self._found])

    def changes_since(self, before: "Contents") -> list[str]:
        """The differences, such as "closure variable `scale` from 1 to 2"."""
        changes: dict[str, str] = {}
        for (was_at, old), (part, new) in zip(before._found, self._found, strict=False):
            if was_at != part:  # Something appeared or went: the others do not align.
                changes.setdefault(part, part)
                break
            pairs = zip(before._noted(old), self._noted(new), strict=False)
            for was, now in pairs:
                if was != now:
                    change = f"{part} from {_shown(was)} to {_shown(now)}"
                    changes.setdefault(part, change)
        # Equal values, and yet compiled anew: what could not be read must have changed.
        return [*changes.values()] or [f"something within {x}" for x in self.unread]

    def _noted(self, found: tuple[Any, ...]) -> tuple[Hashable, ...]:
        """Keys of values that were found."""
        return tuple([self._met.get(id(x)) or key_of(x) for x in found])

    def _outermost(self, part: str, value: Any) -> None:
        """Reads a function or another value; `part` names it."""
        call = in_class(type(value), "__call__")
        if isinstance(call, types.FunctionType) and not of_library(call):
            # Only what the code of a called object reads of `self`.
            self._guards.see(guards.at_name, (value, "__call__"))
            self._function(part, call, value)
        else:
            self._named(part, value)

    def _not_read(self, part: str, value: object) -> None:
        self.unread.append(f"{part} (a {type(value).__name__})")

    # --- functions ---

    def _function(
        self, part: str, fn: types.FunctionType, first: object = MISSING
    ) -> None:
        """Reads a function, and what it reads of its first argument if it is bound."""
        code, reads, fixed = fn.__code__, reads_of(fn.__code__), of_library(fn)
        self._found.append((part, (code,)))
        if fixed and READS in vars(fn):
            self._named("what it reads", vars(fn)[READS])
            return
        if not fixed:
            # Before it is read: what another thread replaces meanwhile is seen later.
            self._guards.see(guards.in_function, fn)
        for name, value in _defaults(fn).items():
            self._named(f"default of `{name}`", value)
        # A library may read its variables in ways that its code does not show.
        whole: set[Path] = {()}
        local = defaultdict(lambda: whole) if fixed else reads.local
        for name, value in zip(code.co_freevars, guards.in_cells(fn), strict=True):
            self._variable("closure variable", name, value, local[name])
        if first is not MISSING:
            own = local[code.co_varnames[0]] if code.co_argcount else whole
            self._variable("the object", "self", first, own)
        if not fixed:
            self._globals(fn, reads)
            # `functools.wraps` puts the wrapped function there, which the closure has
            # too.
            for name, value in {**vars(fn), "__wrapped__": None}.items():
                self._named(f"attribute `{name}`", value)

    def _globals(self, fn: types.FunctionType, reads: Reads) -> None:
        """Reads the globals that code names; notes what it reads beside them."""
        for name, paths in reads.names.items():
            value = self._guards.see_name(fn.__globals__, name)
            if value is MISSING and name in _BEYOND:
                self.unread.append(f"what `{name}` gives")
            self._variable("global", name, value, paths)
        for name in reads.imports:
            if not _in_library(name):
                self.unread.append(f"the import of `{name}`")

    def _variable(self, kind: str, name: str, value: Any, paths: set[Path]) -> None:
        """Reads a variable: as a whole, or at some attributes."""
        plain = _has_plain_attributes(value) and () not in paths
        for path in sorted(paths) if plain else [()]:
            self._attribute(f"{kind} `{'.'.join((name, *path))}`", value, path)

    def _attribute(self, part: str, value: Any, path: Path) -> None:
        """Reads `value.a.b`, without running code of the user's."""
        if not path or not _has_plain_attributes(value):
            self._named(part, value)
            return
        name, rest = path[0], path[1:]
        if isinstance(value, types.ModuleType):
            found = self._guards.see_name(vars(value), name)
            missing = found is MISSING  # It may be computed, from all of the module.
            self._attribute(part, *((value, ()) if missing else (found, rest)))
            return
        _, raw, own, slot = self._guards.see(guards.at_name, (value, name))
        code: Any = raw.fget if isinstance(raw, property) else raw
        if isinstance(code, types.FunctionType) and own is MISSING:
            self._bound(part, code, value)
        elif slot is not None:
            self._attribute(part, slot, rest)
        elif own is not MISSING and not _DATA & {*dir(type(raw))}:
            self._attribute(part, own, rest)
        elif raw is MISSING or hasattr(type(raw), "__get__"):
            # What a descriptor or `__getattr__` computes may come from all of it.
            self._named(part, value)
        else:
            self._attribute(part, raw, rest)

    def _bound(self, part: str, fn: Any, first: object) -> None:
        """Reads a function and what it reads of its first argument."""
        met = id(fn), id(first)
        if not isinstance(fn, types.FunctionType):
            self._not_read(part, fn)
        elif met not in self._met:
            self._met[met] = len(self._met)
            self._function(part, fn, first)

    # --- values ---

    def _named(self, part: str, value: Any) -> None:
        """Reads and notes a value; `part` is how the outermost function calls it."""
        self._found.append((part, (value,)))
        self._value(part, value)

    def _value(self, part: str, value: Any) -> None:
        kind: Any = type(value)
        if _is_final(kind) or id(value) in self._met or value is MISSING:
            return
        if isinstance(value, jax.core.Tracer):
            self._refuse_traced(part, value)
            return
        # Before it is read, so that a reference cycle ends.
        own = in_class(kind, "__eq__") is not vars(object)["__eq__"]
        alike = kind in _ALIKE or (own and not isinstance(value, type))
        number = "met", len(self._met)
        self._met[id(value)] = number if alike else SameObject(value)
        before, self._left = self._settled, self._left - 1
        if kind not in CONTAINERS:
            self._settled = _is_settled(value)
        if self._left < 0:
            self._not_read(part, value)
        elif kind is np.ndarray or isinstance(value, np.generic):
            self._array(part, value)
        else:
            self._structure(part, value)
        self._settled = before

    def _structure(self, part: str, value: Any) -> None:
        """Reads a value that refers to other values."""
        kind: Any = type(value)
        if kind is types.MethodType:
            self._bound(part, value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType | type) and is_fixed(value):
            self._met[id(value)] = SameObject(value)
        elif kind is types.FunctionType:
            self._function(part, value)
        elif isinstance(value, type):
            self._class(part, value)
        elif kind is types.ModuleType or (kind in BOUND and not is_method(value)):
            if not of_library(value):
                self._not_read(part, value)
        elif _in_python(kind):
            self._object(part, value)
        else:
            self._not_read(part, value)

    def _object(self, part: str, value: Any) -> None:
        """Reads an object: its class, all of its attributes and elements."""
        kind: Any = type(value)
        constant = self._settled or kind in _CONSTANT or _is_frozen(kind)
        read = guards.reader_of(kind)
        inside = read(value) if constant else self._guards.see(read, value)
        self._left -= len(inside)
        if self._left < 0:
            self._not_read(part, value)
            return
        if isinstance(value, int | float | str):  # Of a subclass.
            inside += (repr(value),)
        self._found.append((part, (kind, *inside)))
        for each in inside:
            self._value(part, each)

    def _class(self, part: str, kind: type) -> None:
        """Reads a class: all that its code, and that of its bases, refers to."""
        # A metaclass of the user's may change what a class does.
        if not of_library(type(kind)) or not _in_python(kind):
            self._not_read(part, kind)
            return
        for each in kind.__mro__:
            if not of_library(each):
                self._guards.see(guards.in_class_body, each)
                for name, raw in vars(each).copy().items():
                    if name not in _ABOUT_CLASS:
                        self._named(f"{part}, attribute `{name}`", raw)

    def _refuse_traced(self, part: str, value: object) -> None:
        if not self._takes_traced:
            rule = f"must not refer to values that are being traced; {part} is one"
            remedy = (
                "Pass it as an input; only inputs and parameters are differentiated."
            )
            raise type_error(f"{self._user}(fn)", rule, str(value), remedy)

    def _array(self, part: str, value: Any) -> None:
        # Bytes, because the caller may write to the array between two calls.
        self._bytes -= value.nbytes
        if value.dtype.hasobject or self._bytes < 0:
            self._not_read(part, value)
            return
        self._met[id(value)] = type(value), self._guards.see_array(value)


class Watched:
    """What functions and other values read, and whether it is still the same.

    Args:
      reads: The values by name, the function that names the whole first.
      user: Name of the public function that compiles, for error messages.

    Attributes:
      contents: What they read when it was last noted; None before that.
    """

    def __init__(self, reads: Mapping[str, object], user: str) -> None:
        self._reads, self._user = reads, user
        self.contents: Contents | None = None

    def holds(self) -> bool:
        """Whether it was noted, and nothing that can be read has changed since."""
        if self.contents is None or self.contents.hold():
            return self.contents is not None
        # Another object may have the same value.
        now = self.read()
        if not now.complete or now.key() != self.contents.key():
            return False
        self.contents = now
        return True

    def note(self) -> Contents:
        """Notes what they read now; values that are being traced count by identity."""
        self.contents = self.read()
        return self.contents

    def read(self) -> Contents:
        """What they read now."""
        return Contents(self._reads, self._user, takes_traced=True)


def contents_of(fn: object, user: str) -> Contents:
    """The contents of a function or another value.

    Args:
      fn: Any callable or value; a tuple of values is named by its first.
      user: Name of the public function that compiles, for error messages.

    Raises:
      TypeError: `fn` refers to a value that is being traced: a compiled function would
        hold it beyond its life, and its derivative would be lost.

    Example:
      >>> make = lambda scale: lambda x: x * scale
      >>> contents_of(make(2), "f").key() == contents_of(make(2), "f").key()
      True
      >>> contents_of(make(3), "f").changes_since(contents_of(make(2), "f"))
      ['closure variable `scale` from 2 to 3']
    """
    return Contents({"the function": fn}, user)


def is_fixed(fn: Any) -> bool:
    """Whether a function or class is a library's and has no closure."""
    fn = fn.__wrapped__ if isinstance(fn, JITTED) else fn
    return of_library(fn) and getattr(fn, "__closure__", None) is None


def is_method(fn: Any) -> bool:
    """Whether a function of C's is a method of an object."""
    return not isinstance(fn.__self__, types.ModuleType | type(None))


def _code_of(fn: Any) -> Hashable:
    """The code of a callable, by which its versions are counted and named."""
    if isinstance(fn, tuple) and fn:
        return _code_of(fn[0])
    if isinstance(fn, functools.partial | types.MethodType | JITTED):
        inner = [getattr(fn, x, None) for x in ("func", "__func__", "__wrapped__")]
        return _code_of(next(x for x in inner if x))
    call = in_class(type(fn), "__call__")
    if isinstance(call, types.FunctionType) and not of_library(call):
        fn = call
    return fn.__code__ if isinstance(fn, types.FunctionType) else SameObject(fn)


def _defaults(fn: types.FunctionType) -> dict[str, Any]:
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    named = dict(zip(positional[::-1], defaults[::-1], strict=False))
    return {**named, **(fn.__kwdefaults__ or {})}


def _has_plain_attributes(value: object) -> bool:
    """Whether code that reads attributes of an object reads nothing else of it."""
    kind: Any = type(value)
    if kind is types.ModuleType:
        return not of_library(value)
    known = kind in _TRANSPARENT and kind is not types.SimpleNamespace
    if known or isinstance(value, type) or not _in_python(kind):
        return False
    plain = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
    return kind.__getattribute__ in plain


@functools.lru_cache(maxsize=4096)
def _is_final(kind: type) -> bool:
    return kind in _PLAIN or issubclass(kind, _FINAL)


@functools.lru_cache(maxsize=4096)
def _in_python(kind: type) -> bool:
    """Whether all state of instances is seen: no other base is written in C."""
    return all(
        each in _TRANSPARENT or _written_in_python(each) for each in kind.__mro__
    )


def _written_in_python(kind: type) -> bool:
    raws: list[Any] = [x for x in vars(kind).values() if isinstance(x, _OF_C)]
    owners = [getattr(x, "__objclass__", None) or x.__self__ for x in raws]
    return "__module__" in vars(kind) and kind not in owners


def _is_settled(value: object) -> bool:
    """Whether an object of a library, and the containers in it, do not change."""
    kind = type(value)
    if kind in BOUND or not of_library(kind):
        return False
    if kind.__module__.startswith("jdist."):
        return _is_frozen(kind)
    # What is hashed by its value, as Flax's definitions of graphs, does not.
    by_value = in_class(kind, "__hash__") is not vars(object)["__hash__"]
    return by_value and _hash(value) not in (None, id(value), object.__hash__(value))


def _is_frozen(kind: type) -> bool:
    """Whether the attributes of instances are set once."""
    # The class's own: a subclass that is no frozen dataclass may have others.
    return getattr(vars(kind).get("__dataclass_params__"), "frozen", False)


def of_library(thing: object) -> bool:
    """Whether a function, class or module belongs to `FIXED_PACKAGES`."""
    if isinstance(thing, types.FunctionType):  # `functools.wraps` renames its module.
        return _in_library(thing.__globals__.get("__name__"))
    name = "__name__" if isinstance(thing, types.ModuleType) else "__module__"
    return _in_library(getattr(thing, name, None))


def _in_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in FIXED_PACKAGES


def _hash(value: object) -> int | None:
    try:
        return hash(value)
    except (TypeError, ValueError):  # Such as a view of writable memory.
        return None


def key_of(value: Any) -> Hashable:
    """A key of a constant by its value; of all else by its identity."""
    kind: Any = type(value)
    if kind in (float, complex):
        # It distinguishes -0.0 from 0.0, and makes NaN equal to NaN.
        return kind, repr(value)
    by_value = _is_final(kind) and _hash(value) is not None
    return (kind, value) if by_value else SameObject(value)


def _shown(value: Any) -> str:
    """A value that was read, for a message."""
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        value = value[-1]
    if isinstance(value, types.CodeType):
        file = basename(value.co_filename)
        return f"{value.co_qualname} ({file}:{value.co_firstlineno})"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

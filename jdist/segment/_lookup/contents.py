"""The contents of a function as a key: equal keys, equal behaviour.

Code alone is not enough. A lambda in a loop at the top of a script reads the loop's
variable as a *global*, one inside a function as a *closure*; both must count. So do
defaults, the `self` of a method, the arguments of a `functools.partial`, and, to any
depth, the functions among these.

A key is complete, or says what could not be read. It is complete where everything that
the code can reach is of these kinds:

- numbers, strings, and what is made of them in lists, tuples, sets, dicts and deques:
  by value, and type (1 is not 1.0 is not True);
- JAX arrays, which never change: by identity (to compare values would wait for them);
- NumPy arrays, which can be written to: by their bytes;
- functions and classes: by their code and all that it refers to, module by module;
- functions, classes and modules of `FIXED_PACKAGES`: by identity;
- objects of classes written in Python: by their attributes and their class, and by
  identity unless the class defines an equality.
  Where code reads an object at attributes only (`config.scale`, `self.width`), by these
  attributes alone, so that others may change;
- modules: by the attributes that code reads of them.

Everything else (objects of C extensions, files, locks, iterators; `globals()`, `open`,
an `import` inside), and everything too large to be read in every call, is listed in
`Contents.unread`: such a function is never looked up by its key.

The key holds a reference to each object compared by identity, so that no other object
can reuse its address.
"""

import collections
import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic

import jax
import numpy as np

from jdist._errors import requirement
from jdist.segment._lookup import guards
from jdist.segment._lookup.bytecode import Path, reads_of
from jdist.segment._lookup.guards import MISSING, Guards, Read, in_class, in_slot

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

MOST_VALUES = 1000
"""Largest number of objects read per lookup; reading more takes longer than a trace."""

READS = "__jdist_reads__"
"""The attribute by which a function of jdist's says which values of users it reads; all
others in its closure are its own and do not change."""

MOST_BYTES = 1 << 20
"""Largest number of bytes of NumPy arrays and strings read per lookup."""

_EXACT = (bool, int, str, bytes, type(None), type(...), type(NotImplemented))
_BY_EQUALITY = (
    range, slice, np.dtype, jax.ShapeDtypeStruct, jax.tree_util.PyTreeDef,
    jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec,
)  # fmt: skip
_BY_IDENTITY = (jax.Array, jax.Device, np.ufunc)
_ATTRIBUTE_OF_C = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    type(vars(collections.namedtuple("_Pair", "first second"))["first"]),
)
_METHOD_OF_C = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_TRANSPARENT = (
    object, dict, list, tuple, set, frozenset, int, float, str,
    collections.OrderedDict, types.SimpleNamespace, Generic,
)  # fmt: skip
_JITTED: Any = type(jax.jit(abs))
# Builtins that read or do things which the bytecode does not show.
_BEYOND = frozenset({"globals", "eval", "exec", "__import__", "open", "input"})
_ABOUT_CLASS = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__",
    "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__parameters__",
    "__match_args__", "__abstractmethods__", "_abc_impl", "__orig_bases__",
    "__firstlineno__", "__static_attributes__",
))  # fmt: skip
_NO_EQUALITY = vars(object)["__eq__"]
_IDENTITY_HASH = vars(object)["__hash__"]
Part = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class Contents:
    """A function's code and the contents of all that it refers to.

    Attributes:
      code: The code object, or the key of the callable if it has none.
      parts: Pairs of a reference (such as "closure variable `scale`") and the key of
        its value.
      unread: References that could not be read; if any, equal keys prove nothing.
    """

    code: Hashable
    parts: tuple[Part, ...]
    unread: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether functions of equal contents behave alike."""
        return not self.unread

    @property
    def name(self) -> str:
        """Name and place of the function, for messages."""
        if not isinstance(self.code, types.CodeType):
            return _shown(self.code)
        # Inside a wrapper of jdist's own, the user's function is to be named.
        for _, key in self.parts if "jdist" in self.code.co_filename else ():
            if isinstance(key, Contents) and isinstance(key.code, types.CodeType):
                return key.name
        file = FilePath(self.code.co_filename).name
        return f"{self.code.co_qualname} ({file}:{self.code.co_firstlineno})"

    def changes_since(self, before: "Contents") -> list[str]:
        """The differences, such as "closure variable `scale` from 1 to 2"."""
        old, new = dict(before.parts), dict(self.parts)
        changes = []
        for part in dict.fromkeys([*old, *new]):
            was, now = old.get(part), new.get(part)
            if was == now:
                continue
            if isinstance(was, Contents) and isinstance(now, Contents):
                changes += now.changes_since(was)
            else:
                was, now = _innermost(was, now)
                changes.append(f"{part} from {_shown(was)} to {_shown(now)}")
        # Equal parts, and yet compiled anew: what could not be read must have changed.
        return changes or [f"something within {part}" for part in self.unread]


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


def contents_of(
    fn: Callable[..., Any], user: str, found: Guards | None = None
) -> Contents:
    """The contents of a function.

    Args:
      fn: Any callable.
      user: Name of the public function that compiles, for error messages.
      found: Is told what is read of things that may change, if given.

    Raises:
      TypeError: `fn` refers to a value that is being traced: a compiled function would
        hold it beyond its life, and its derivative would be lost.

    Example:
      >>> make = lambda scale: lambda x: x * scale
      >>> contents_of(make(2), "f") == contents_of(make(2), "f")
      True
      >>> contents_of(make(3), "f").changes_since(contents_of(make(2), "f"))
      ['closure variable `scale` from 2 to 3']
    """
    reader = _ContentsReader(user, found)
    own = reader.callable("the function", fn)
    return Contents(own.code, own.parts, tuple(dict.fromkeys(reader.unread)))


def value_of(value: object, user: str) -> Contents:
    """The contents of a static argument; errors as those of `contents_of`."""
    reader = _ContentsReader(user)
    part = "the argument"
    key = reader.key(part, value)
    return Contents(key, ((part, key),), tuple(dict.fromkeys(reader.unread)))


def guarded(reads: Mapping[str, object], user: str) -> tuple[Contents, Guards]:
    """The contents of functions and other values, and guards over them.

    Args:
      reads: The values by name, the function that names the whole first.
      user: Name of the public function that compiles, for error messages.

    A value that is being traced is compared by identity.
    """
    found = Guards()
    # A function that JAX jits may read what is being traced: it is found nowhere else.
    reader = _ContentsReader(user, found, traced=True)
    parts: list[Part] = []
    for name, value in reads.items():
        read = reader.callable if callable(value) else reader.key
        parts.append((f"`{name}`", read(f"`{name}`", value)))  # type: ignore[arg-type]
    first = parts[0][1]
    code = first.code if isinstance(first, Contents) else first
    unread = tuple(dict.fromkeys(reader.unread))
    return Contents(code, tuple(parts), unread), found


class GuardedContents:
    """What functions and other values read, and whether it is still the same.

    Args:
      reads: As for `guarded`.
      user: As for `guarded`.
    """

    def __init__(self, reads: Mapping[str, object], user: str) -> None:
        self._reads, self._user = reads, user
        self._contents: Contents | None = None
        self._guards: Guards | None = None

    @property
    def taken(self) -> bool:
        """Whether it was taken."""
        return self._guards is not None

    def holds(self) -> bool:
        """Whether it was taken, and nothing that can be read has changed since."""
        if self._guards is None:
            return False
        if self._guards.hold():
            return True
        contents, found = guarded(self._reads, self._user)
        same = contents.complete and contents == self._contents
        if same:
            self._guards = found
        return same

    def take(self) -> None:
        """Notes what they read now."""
        self._contents, self._guards = guarded(self._reads, self._user)


def is_fixed(fn: Callable[..., Any]) -> bool:
    """Whether a function is a library's and has no closure."""
    if isinstance(fn, _JITTED):
        return is_fixed(fn.__wrapped__)
    return _fixed(fn) and getattr(fn, "__closure__", None) is None


class _ContentsReader:
    """Reads the contents of one function, and of all that it refers to.

    Args:
      user: Name of the public function that compiles, for error messages.
      found: Is told what is read of things that may change, if given.
      traced: Whether values that are being traced may be read, by identity.

    Attributes:
      unread: References that could not be read so far.
    """

    def __init__(
        self, user: str, found: Guards | None = None, traced: bool = False
    ) -> None:
        self._user = user
        self._guards = found
        self._takes_traced = traced
        # Whether what is read belongs to a value that does not change.
        self._settled = False
        self._met: dict[Any, tuple[int, Any]] = {}
        self._values = MOST_VALUES
        self._bytes = MOST_BYTES
        self.unread: list[str] = []

    def _see(self, read: Read, owner: Any) -> None:
        """Guards what `read` finds at a thing that may change."""
        if self._guards is not None and not self._settled:
            self._guards.see(read, owner)

    # --- functions ---

    def callable(self, part: str, fn: Callable[..., Any]) -> Contents:
        """The contents of a callable of any kind."""
        if isinstance(fn, types.FunctionType):
            return self._function(fn)
        if isinstance(fn, types.MethodType):
            return self._method(fn)
        if isinstance(fn, functools.partial):
            self._see(guards.in_partial, fn)
            # The code is that of the inner function, by which versions are counted and
            # named.
            own = self.callable(part, fn.func)
            given: dict[Any, Any] = {**dict(enumerate(fn.args)), **fn.keywords}
            names = {f"argument {name} of partial": x for name, x in given.items()}
            return Contents(own.code, (*own.parts, *self._named(names)))
        if isinstance(fn, _JITTED):
            own = self.callable(part, fn.__wrapped__)
            return Contents(
                own.code, (*own.parts, ("the jitted function", SameObject(fn)))
            )
        self._see(guards.at_name, (fn, "__call__"))
        call = in_class(type(fn), "__call__")
        if isinstance(call, types.FunctionType) and not _fixed(call):
            return self._function(call, first=fn)
        return Contents(self.key(part, fn), ())

    def _method(self, fn: types.MethodType) -> Contents:
        if not isinstance(fn.__func__, types.FunctionType):
            own = self.callable("the method", fn.__func__)
            bound = ("the object `self`", self.key("the object `self`", fn.__self__))
            return Contents(own.code, (*own.parts, bound))
        return self._function(fn.__func__, first=fn.__self__)

    def _function(self, fn: types.FunctionType, first: object = MISSING) -> Contents:
        outer, self._settled = self._settled, False
        found = Contents(fn.__code__, tuple(self._parts(fn, first)))
        self._settled = outer
        return found

    def _parts(self, fn: types.FunctionType, first: object) -> Iterator[Part]:
        code, reads, fixed = fn.__code__, reads_of(fn.__code__), _fixed(fn)
        if fixed and READS in vars(fn):
            yield from self._named({"what it reads": vars(fn)[READS]})
            return
        if not fixed:
            self._see(guards.in_function, fn)
            if fn.__kwdefaults__:
                self._see(guards.in_mapping, fn.__kwdefaults__)
        positional = code.co_varnames[: code.co_argcount]
        defaults = fn.__defaults__ or ()
        named = dict(zip(positional[::-1], defaults[::-1], strict=False))
        named.update(fn.__kwdefaults__ or {})
        yield from self._named({f"default of `{name}`": x for name, x in named.items()})
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            if not fixed:
                self._see(guards.in_cell, cell)
            (value,) = guards.in_cell(cell)
            if value is MISSING:  # A variable that is not assigned yet.
                continue
            # A library may read its variables in ways that its code does not show.
            paths = frozenset([()]) if fixed else reads.free.get(name, frozenset())
            yield from self._at(f"closure variable `{name}`", f"{name}", value, paths)
        if first is not MISSING:
            paths = frozenset([()]) if fixed else reads.first
            yield from self._at("the object `self`", "self", first, paths)
        if not fixed:
            yield from self._surroundings(fn)

    def _surroundings(self, fn: types.FunctionType) -> Iterator[Part]:
        """Globals and attributes of the function itself; notes what cannot be read."""
        reads = reads_of(fn.__code__)
        for name, paths in reads.names.items():
            if self._guards is not None:
                self._guards.see_name(fn.__globals__, name)
            if name in fn.__globals__:
                value = fn.__globals__[name]
                yield from self._at(f"global `{name}`", name, value, paths)
            elif name in _BEYOND:
                self.unread.append(f"what `{name}` gives")
        for module in reads.imports:
            if not _fixed_name(module):
                self.unread.append(f"the import of `{module}`")
        for name, value in vars(fn).copy().items():
            # `functools.wraps` puts the wrapped function there, which the closure has
            # too.
            if name != "__wrapped__":
                yield f"attribute `{name}`", self.key(f"attribute `{name}`", value)

    def _named(self, values: dict[str, Any]) -> Iterator[Part]:
        for name, value in values.items():
            yield name, self.key(name, value)

    # --- what code reads of a variable ---

    def _at(
        self, part: str, name: str, value: object, paths: frozenset[Path]
    ) -> Iterator[Part]:
        """Parts for a variable that is read at some attributes, or as a whole."""
        if () in paths or self._whole(value):
            yield part, self.key(part, value)
            return
        kind = part.removesuffix(f"`{name}`")
        for path in sorted(paths):
            shown = f"{kind}`{'.'.join((name, *path))}`"
            yield shown, self._attribute(shown, value, path)

    def _whole(self, value: object) -> bool:
        """Whether a value must be read as a whole, not only at the attributes used."""
        if isinstance(value, types.ModuleType | type):
            return _fixed(value)
        kind: Any = type(value)
        plain = kind.__getattribute__ in _PLAIN_ACCESS
        return not plain or not _in_python(kind) or _is_known(value)

    def _attribute(self, part: str, value: object, path: Path) -> Hashable:
        """The key of `value.a.b`, found without running code of the user's."""
        if not path or self._whole(value):
            return self.key(part, value)
        if isinstance(value, types.ModuleType):
            if self._guards is not None:
                self._guards.see_name(vars(value), path[0])
            if path[0] not in vars(value):
                return self._not_read(part, value)
            return self._attribute(part, vars(value)[path[0]], path[1:])
        if isinstance(value, type):
            return self._of_class(part, value, path)
        return self._of_object(part, value, path)

    def _of_object(self, part: str, value: object, path: Path) -> Hashable:
        name, rest = path[0], path[1:]
        self._see(guards.at_name, (value, name))
        kind, own = type(value), getattr(value, "__dict__", {})
        raw = in_class(kind, name)
        # The order in which Python itself looks: data descriptors before the object's
        # dict.
        if name in own and not _is_data_descriptor(raw):
            return self._attribute(part, own[name], rest)
        if raw is MISSING:
            # A `__getattr__` may compute its result from anything in the object.
            computed = in_class(kind, "__getattr__") is not MISSING
            return self.key(part, value) if computed else "missing"
        code = _code_behind(raw)
        if code is not None:
            return self._bound(part, code, value)
        if isinstance(raw, types.MemberDescriptorType):
            return self._attribute(part, in_slot(raw, value), rest)
        return self._of_entry(part, value, kind, raw, rest)

    def _of_class(self, part: str, kind: type, path: Path) -> Hashable:
        self._see(guards.in_class_at_name, (kind, path[0]))
        raw = in_class(kind, path[0])
        if type(kind) is not type or raw is MISSING:
            return self.key(part, kind)  # The metaclass may have it.
        if isinstance(raw, types.FunctionType):
            return self._attribute(part, raw, path[1:])
        return self._of_entry(part, kind, kind, raw, path[1:])

    def _of_entry(
        self, part: str, owner: object, kind: type, raw: object, rest: Path
    ) -> Hashable:
        """The key of a class attribute, accessed through an object or the class."""
        if isinstance(raw, staticmethod):
            return self._attribute(part, raw.__func__, rest)
        if isinstance(raw, classmethod):
            return self._bound(part, raw.__func__, kind)
        # A descriptor runs code that is not read here, and may read all of its owner.
        if hasattr(type(raw), "__get__"):
            return self.key(part, owner)
        return self._attribute(part, raw, rest)

    def _bound(self, part: str, fn: object, first: object) -> Hashable:
        """The key of a function and of what it reads of its first argument."""
        if not isinstance(fn, types.FunctionType):
            return self._not_read(part, fn)
        return self._once(
            ("bound", id(fn), id(first)), (fn, first), lambda: self._function(fn, first)
        )

    # --- values ---

    def key(self, part: str, value: object) -> Hashable:
        """The key of a value; `part` is how the outermost function refers to it."""
        self._values -= 1
        kind: Any = type(value)
        if kind in _EXACT:
            if isinstance(value, str | bytes):
                self._bytes -= len(value)
            return kind, value
        # Beyond these bounds a lookup takes longer than the trace that it saves.
        if self._values < 0 or self._bytes < 0:
            return self._not_read(part, value)
        read = _SIMPLE.get(_sort(kind))
        if read is not None:
            return read(self, part, value)
        return self._once(id(value), value, lambda: self._structure(part, value))

    def _traced(self, part: str, value: object) -> Hashable:
        if self._takes_traced:
            return SameObject(value)
        rule = f"must not refer to values that are being traced; {part} is one"
        remedy = "Pass it as an input; only inputs and parameters are differentiated."
        call = f"{self._user}(fn)"
        raise TypeError(requirement(call, rule, str(value), remedy))

    def _array(self, part: str, value: object) -> Hashable:
        # Bytes, because the caller may write to the array between two calls.
        array = np.asarray(value)
        self._bytes -= array.nbytes
        if array.dtype.hasobject or self._bytes < 0:
            return self._not_read(part, value)
        if self._guards is not None and isinstance(value, np.ndarray):
            self._guards.see_array(value)
        digest = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        return array.dtype.str, array.shape, digest

    def _equal(self, part: str, value: object) -> Hashable:
        return (type(value), value) if _hashable(value) else self._not_read(part, value)

    def _once(
        self, met: object, held: object, read: Callable[[], Hashable]
    ) -> Hashable:
        """Reads a value the first time; afterwards its number stands for it."""
        # Numbered before it is read, so that a reference cycle ends.
        if met in self._met:
            return "met", self._met[met][0]
        self._met[met] = len(self._met), held
        return read()

    def _structure(self, part: str, value: object) -> Hashable:
        """The key of a value that refers to other values."""
        kind = type(value)
        read = _CONTAINERS.get(kind)
        if read is None:
            read = next(read for kinds, read in _OTHERS if isinstance(value, kinds))
        return read(self, part, value)

    def _mapping(self, part: str, value: Mapping[object, object]) -> Hashable:
        self._see(guards.in_mapping, value)
        # A defaultdict calls it for missing keys.
        factory = self.key(part, getattr(value, "default_factory", None))
        return type(value), factory, self._items(part, value)

    def _sequence(self, part: str, value: Collection[object]) -> Hashable:
        if type(value) is not tuple:
            self._see(tuple, value)
        # Two deques of the same elements differ by what they drop next.
        length = getattr(value, "maxlen", None)
        return type(value), length, self._keys(part, value)

    def _set(self, part: str, value: Collection[object]) -> Hashable:
        if type(value) is not frozenset:
            self._see(tuple, value)
        keys = self._keys(part, value)
        return type(value), frozenset(keys) if isinstance(keys, tuple) else keys

    def _keys(self, part: str, values: Collection[object]) -> Hashable:
        if len(values) > self._values:
            return self._not_read(part, values)
        # `list` copies at once: another thread may be changing the container.
        return tuple([self.key(part, value) for value in list(values)])

    def _items(self, part: str, values: Mapping[object, object]) -> Hashable:
        if len(values) > self._values:
            return self._not_read(part, values)
        pairs = zip(list(values), list(values.values()), strict=False)
        return self._keys(part, [x for pair in pairs for x in pair])

    def _plain_function(self, part: str, fn: types.FunctionType) -> Hashable:
        return SameObject(fn) if is_fixed(fn) else self._function(fn)

    def _reference(self, part: str, value: weakref.ref[Any]) -> Hashable:
        self._see(guards.in_reference, value)
        return weakref.ReferenceType, self.key(part, value())

    def _module(self, part: str, module: object) -> Hashable:
        return SameObject(module) if _fixed(module) else self._not_read(part, module)

    def _member(self, part: str, value: enum.Enum) -> Hashable:
        return (
            SameObject(value),
            self.key(part, value._value_),
            self.key(part, type(value)),
        )

    def _builtin(self, part: str, fn: types.BuiltinFunctionType) -> Hashable:
        owner = fn.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            fixed = _fixed_name(getattr(fn, "__module__", None) or "")
            return SameObject(fn) if fixed else self._not_read(part, fn)
        return fn.__name__, self.key(part, owner)

    def _class(self, part: str, kind: type) -> Hashable:
        """The key of a class: all that its code, and that of its bases, refers to."""
        if _fixed(kind):
            return SameObject(kind)
        # A metaclass of the user's may change what a class does.
        if not _fixed(type(kind)):
            self._not_read(part, type(kind))
        if not _in_python(kind):
            return self._not_read(part, kind)
        outer, self._settled = self._settled, False
        for each in kind.__mro__:
            if not _fixed(each):
                self._see(guards.in_class_body, each)
        entries = tuple(
            (name, self._entry(f"{part}, attribute `{name}`", raw))
            for each in kind.__mro__
            if not _fixed(each)
            for name, raw in vars(each).copy().items()
            if name not in _ABOUT_CLASS
        )
        self._settled = outer
        return SameObject(kind), entries

    def _entry(self, part: str, raw: object) -> Hashable:
        if isinstance(raw, staticmethod | classmethod):
            return type(raw), self.key(part, raw.__func__)
        if isinstance(raw, property):
            return property, self._keys(part, [raw.fget, raw.fset, raw.fdel])
        if isinstance(raw, functools.cached_property):
            return functools.cached_property, self.key(part, raw.func)
        # Such as an `object()` that serves as a marker: there is nothing in it to read.
        inert = _fixed(type(raw)) and not guards.state_of(raw) and not callable(raw)
        if isinstance(raw, _ATTRIBUTE_OF_C) or inert:
            return SameObject(raw)
        return self.key(part, raw)

    def _object(self, part: str, value: object) -> Hashable:
        """The key of an object: all of its attributes, and its class."""
        kind: Any = type(value)
        if not _in_python(kind):
            return self._not_read(part, value)
        outer, self._settled = self._settled, _is_settled(value)
        if not _is_frozen(kind):
            self._see(guards.in_object(value), value)
        attributes = tuple(
            (name, self.key(f"{part}, attribute `{name}`", x))
            for name, x in guards.state_of(value)
        )
        inside: Hashable = ()
        if isinstance(value, dict):
            inside = self._items(part, value)
        elif isinstance(value, list | tuple | set | frozenset):
            inside = self._keys(part, value)
        elif isinstance(value, int | float | str):
            inside = repr(value)
        self._settled = outer
        # With an `__eq__` of their own, objects of equal state behave alike. Without
        # one, code may distinguish them by identity.
        which = SameObject(value) if in_class(kind, "__eq__") is _NO_EQUALITY else ()
        made_of = SameObject(kind) if _fixed(kind) else self.key(part, kind)
        return which, attributes, inside, made_of

    def _not_read(self, part: str, value: object) -> Hashable:
        self.unread.append(f"{part} (a {type(value).__name__})")
        return SameObject(value)


_PLAIN_ACCESS: tuple[Any, ...] = (
    object.__getattribute__,
    types.SimpleNamespace.__getattribute__,
)
_Read = Callable[[_ContentsReader, str, Any], Hashable]

_SIMPLE: dict[str, _Read] = {
    "traced": _ContentsReader._traced,
    "array": _ContentsReader._array,
    # `repr` distinguishes -0.0 from 0.0, and makes NaN equal to NaN.
    "number": lambda _, __, value: (type(value), repr(value)),
    "identity": lambda _, __, value: SameObject(value),
    "equality": _ContentsReader._equal,
}

_CONTAINERS: dict[type, _Read] = {
    dict: _ContentsReader._mapping,
    collections.OrderedDict: _ContentsReader._mapping,
    collections.defaultdict: _ContentsReader._mapping,
    types.MappingProxyType: _ContentsReader._mapping,
    list: _ContentsReader._sequence,
    tuple: _ContentsReader._sequence,
    collections.deque: _ContentsReader._sequence,
    set: _ContentsReader._set,
    frozenset: _ContentsReader._set,
}

_CALLABLE = (types.MethodType, functools.partial, _JITTED)
_OTHERS: tuple[tuple[Any, _Read], ...] = (
    (types.FunctionType, _ContentsReader._plain_function),
    (_CALLABLE, _ContentsReader.callable),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _ContentsReader._builtin),
    (weakref.ReferenceType, _ContentsReader._reference),
    (types.ModuleType, _ContentsReader._module),
    (type, _ContentsReader._class),
    (enum.Enum, _ContentsReader._member),
    (object, _ContentsReader._object),
)


@functools.lru_cache(maxsize=4096)
def _sort(kind: type) -> str:
    """The key in `_SIMPLE` for values of a type; "" if the type is not simple."""
    if issubclass(kind, jax.core.Tracer):
        return "traced"
    if issubclass(kind, np.ndarray | np.generic):
        return "array"
    if kind in (float, complex):
        return "number"
    if issubclass(kind, _BY_IDENTITY):
        return "identity"
    return "equality" if issubclass(kind, _BY_EQUALITY) else ""


def _is_known(value: object) -> bool:
    """Whether a value is of a kind that is always read as a whole."""
    kind: Any = type(value)
    if kind in _EXACT or _sort(kind):
        return True
    return isinstance(value, (types.FunctionType, *_CALLABLE, enum.Enum))


def _code_behind(raw: object) -> Callable[..., object] | None:
    """The function behind a method or property found in a class; else None."""
    if isinstance(raw, property):
        return raw.fget
    if isinstance(raw, functools.cached_property):
        return raw.func
    return raw if isinstance(raw, types.FunctionType) else None


def _is_data_descriptor(raw: object) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")


@functools.lru_cache(maxsize=4096)
def _in_python(kind: type) -> bool:
    """Whether all state of instances is in attributes: no base is written in C."""
    return all(
        each in _TRANSPARENT or _written_in_python(each) for each in kind.__mro__
    )


def _written_in_python(kind: type) -> bool:
    entries = vars(kind)
    return "__module__" in entries and not any(
        (isinstance(raw, _METHOD_OF_C) and raw.__objclass__ is kind)
        or (isinstance(raw, types.BuiltinFunctionType) and raw.__self__ is kind)
        for raw in entries.values()
    )


def _is_settled(value: object) -> bool:
    """Whether an object of a library, and the containers in it, do not change."""
    kind = type(value)
    if not _fixed(kind):
        return False
    if kind.__module__.startswith("jdist."):
        return _is_frozen(kind)
    # What is hashed by its value, as Flax's definitions of graphs, does not.
    own = in_class(kind, "__hash__") is not _IDENTITY_HASH and _hashable(value)
    return own and hash(value) not in (id(value), object.__hash__(value))


def _is_frozen(kind: type) -> bool:
    """Whether the attributes of instances are set once."""
    # Of its own: a subclass that is no frozen dataclass may have others.
    settings = vars(kind).get("__dataclass_params__")
    return settings is not None and settings.frozen


def _fixed(thing: object) -> bool:
    """Whether a function, class or module belongs to `FIXED_PACKAGES`."""
    if isinstance(thing, types.FunctionType):  # `functools.wraps` renames its module.
        return _fixed_name(thing.__globals__.get("__name__") or "")
    if isinstance(thing, types.ModuleType):
        return _fixed_name(thing.__name__)
    return _fixed_name(getattr(thing, "__module__", None) or "")


def _fixed_name(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in FIXED_PACKAGES


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _innermost(was: object, now: object) -> tuple[Any, Any]:
    """The innermost pair of parts in which two keys differ first."""
    if isinstance(was, Contents) and isinstance(now, Contents) and was.code == now.code:
        was, now = was.parts, now.parts
    if isinstance(was, tuple) and isinstance(now, tuple) and 0 < len(was) == len(now):
        pairs = zip(was, now, strict=True)
        return next(_innermost(a, b) for a, b in pairs if a != b)
    return was, now


def _shown(key: Hashable) -> str:
    """A key as text for a message: the value, if the key holds one."""
    if isinstance(key, Contents):
        return key.name
    if isinstance(key, tuple) and key and isinstance(key[0], type):
        key = key[-1]
    text = key if isinstance(key, str) else repr(key)
    return text if len(text) <= 60 else text[:57] + "..."

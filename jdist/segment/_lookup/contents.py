"""What a function reads besides its arguments: noted completely, or known to be not.

Code alone does not make a function. A lambda in a loop at the top of a script reads the
loop's variable as a *global*, one inside a function as a *closure*; both count. So do
defaults, attributes of the function, the `self` of a method, the arguments of a
`functools.partial`, and, to any depth, the functions among these. While JAX traces,
Python can only find values by these ways, and each of them is looked at:

- numbers, strings and other constants: by value and type (1 is not 1.0 is not True);
- JAX arrays, which never change: by identity (to compare values would wait for them);
- NumPy arrays, which can be written to: by their bytes;
- functions: by their code, and all that it names: variables of closures, globals,
  builtins' absence among the globals, defaults;
- classes: by their body and that of their bases, function by function;
- functions, classes and modules of `FIXED_PACKAGES`: by identity;
- dicts, lists, sets, deques, tuples: by their elements;
- objects of classes written in Python: by their attributes and their class, and by
  identity unless the class defines an equality. Where code reads an object at
  attributes only (`config.scale`, `self.width`), by these attributes alone, so that
  others may change;
- modules: by the attributes that code reads of them.

Nothing else can change a traced program unseen, because everything else is listed in
`Contents.unread`: objects of C extensions, files, locks, iterators; `globals()`,
`open`, an `import` inside; a module that is passed on; and all that is too large to be
read in every call. A function of which something is unread is never found again: it is
traced, and its program is compared.

Each place whose value can be replaced (a closure's variable, a global, an attribute, an
element) is guarded; see `guards`. Contents hold a reference to each object compared by
identity, so that no other object can reuse its address.
"""

import collections
import functools
import hashlib
import re
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from os.path import basename
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

READS = "__jdist_reads__"
"""The attribute by which a function of jdist's says which values of users it reads; all
others in its closure are its own and do not change."""

MOST_VALUES = 1000
"""Largest number of objects read at once; reading more takes longer than a trace."""

MOST_BYTES = 1 << 20
"""Largest number of bytes of NumPy arrays and strings read at once."""

_EXACT = (bool, int, str, bytes, type(None), type(...), type(NotImplemented))
_BY_EQUALITY = (
    range, slice, np.dtype, jax.ShapeDtypeStruct, jax.tree_util.PyTreeDef,
    jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.PartitionSpec,
)  # fmt: skip
_BY_IDENTITY = (
    jax.Array, jax.Device, np.ufunc, re.Pattern,
    types.MemberDescriptorType, types.GetSetDescriptorType,
    type(vars(collections.namedtuple("_Pair", "first second"))["first"]),
)  # fmt: skip
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
_JDIST = __file__.removesuffix("segment/_lookup/contents.py")
_NO_EQUALITY = vars(object)["__eq__"]
_IDENTITY_HASH = vars(object)["__hash__"]


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


@dataclass(frozen=True, slots=True)
class Contents:
    """What functions and other values read; equal contents have equal values.

    Attributes:
      code: The code object of the first function, or itself if it has none.
      values: Pairs of a reference (such as "closure variable `scale`") and a value
        found there, in the order of the reading.
      places: The objects in which one of these values can be replaced. Functions of
        equal values and places are one function.
      unread: References that could not be read; if any, equal contents prove nothing.
      hold: Tells whether nothing of what was read has been replaced; cheap.
    """

    code: Hashable
    values: tuple[tuple[str, Hashable], ...]
    places: tuple[SameObject, ...] = field(compare=False)
    unread: tuple[str, ...] = field(compare=False)
    hold: Callable[[], bool] = field(compare=False, repr=False)

    @property
    def complete(self) -> bool:
        """Whether functions of equal contents behave alike."""
        return not self.unread

    @property
    def name(self) -> str:
        """Name and place of the function, for messages."""
        codes = [self.code, *[x for _, x in self.values]]
        # Inside a wrapper of jdist's own, the user's function is to be named.
        users = (
            code
            for code in codes
            if isinstance(code, types.CodeType)
            and not code.co_filename.startswith(_JDIST)
        )
        return _shown(next(users, self.code))

    def changes_since(self, before: "Contents") -> list[str]:
        """The differences, such as "closure variable `scale` from 1 to 2"."""
        changes: dict[str, str] = {}
        for (was_at, was), (part, now) in zip(before.values, self.values, strict=False):
            if was_at != part:  # Something appeared or went: the others do not align.
                changes.setdefault(part, part)
                break
            if was != now:
                change = f"{part} from {_shown(was)} to {_shown(now)}"
                changes.setdefault(part, change)
        # Equal values, and yet compiled anew: what could not be read must have changed.
        return [*changes.values()] or [f"something within {x}" for x in self.unread]


class Watched:
    """What functions and other values read, and whether it is still the same.

    Values that are being traced may be among it, and count by identity.

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
        contents = self.contents
        if contents is None:
            return False
        if contents.hold():
            return True
        # Another object may have the same value.
        now = self.read()
        if not now.complete or now != contents:
            return False
        self.contents = now
        return True

    def note(self) -> Contents:
        """Notes what they read now."""
        self.contents = self.read()
        return self.contents

    def read(self) -> Contents:
        """What they read now."""
        return _read(self._reads, self._user, traced=True)


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
      >>> contents_of(make(2), "f") == contents_of(make(2), "f")
      True
      >>> contents_of(make(3), "f").changes_since(contents_of(make(2), "f"))
      ['closure variable `scale` from 2 to 3']
    """
    return _read({"the function": fn}, user, traced=False)


def _read(reads: Mapping[str, object], user: str, traced: bool) -> Contents:
    reader = _Reader(user, traced)
    for name, value in reads.items():
        reader.outermost(name, value)
    code = _code_of(next(iter(reads.values())))
    unread = tuple(dict.fromkeys(reader.unread))
    return Contents(
        code, tuple(reader.values), tuple(reader.places), unread, reader.guards.hold
    )


def is_fixed(fn: Callable[..., Any]) -> bool:
    """Whether a function is a library's and has no closure."""
    if isinstance(fn, _JITTED):
        return is_fixed(fn.__wrapped__)
    return _fixed(fn) and getattr(fn, "__closure__", None) is None


class _Reader:
    """Reads functions and values, and all that they refer to.

    Args:
      user: Name of the public function that compiles, for error messages.
      traced: Whether values that are being traced may be read.
    """

    def __init__(self, user: str, traced: bool) -> None:
        self._user, self._takes_traced = user, traced
        # With a reference to each object, or another could get its id.
        self._met: dict[Hashable, tuple[int, Any]] = {}
        # Whether the object that is being read, and its containers, never change.
        self._settled = False
        self._left, self._bytes = MOST_VALUES, MOST_BYTES
        self.values: list[tuple[str, Hashable]] = []
        self.places: list[SameObject] = []
        self.unread: list[str] = []
        self.guards = Guards()

    def outermost(self, part: str, value: object) -> None:
        """Reads a function or another value; `part` names it."""
        call = in_class(type(value), "__call__")
        if isinstance(call, types.FunctionType) and not _fixed(call):
            # Only what the code of a called object reads of `self`.
            self._see(guards.at_name, (value, "__call__"))
            self._function(part, call, value)
        else:
            self._value(part, value)

    def _found(self, part: str, value: Hashable) -> None:
        self.values.append((part, value))

    def _not_read(self, part: str, value: object) -> None:
        self.unread.append(f"{part} (a {type(value).__name__})")
        self._found(part, SameObject(value))

    def _see(self, read: Read, thing: Any) -> Iterable[Any]:
        """Finds and guards what can be replaced at a thing."""
        if self._settled:
            return read(thing)
        self.places.append(SameObject(thing[0] if type(thing) is tuple else thing))
        return self.guards.see(read, thing)

    def _first_time(self, part: str, met: Hashable, held: object) -> bool:
        """Whether it was not met yet; later its number stands for it."""
        # Numbered before it is read, so that a reference cycle ends.
        if met in self._met:
            self._found(part, ("met", self._met[met][0]))
            return False
        self._met[met] = len(self._met), held
        return True

    # --- functions ---

    def _function(
        self, part: str, fn: types.FunctionType, first: object = MISSING
    ) -> None:
        """Reads a function, and what it reads of its first argument if it is bound."""
        code, reads, fixed = fn.__code__, reads_of(fn.__code__), _fixed(fn)
        self._found(part, code)
        if fixed and READS in vars(fn):
            self._value("what it reads", vars(fn)[READS])
            return
        outer, self._settled = self._settled, False
        cells = fn.__closure__ or ()
        if not fixed:
            self.places.append(SameObject(fn))
            self.guards.see_function(fn)
            if fn.__kwdefaults__:
                self._see(guards.in_mapping, fn.__kwdefaults__)
            self._globals(fn)
            for cell in cells:
                self.guards.see_cell(cell)
        whole: set[Path] = {()}
        for name, value in _defaults(fn).items():
            self._value(f"default of `{name}`", value)
        for name, value in zip(
            code.co_freevars, guards.in_cells([*cells]), strict=True
        ):
            # A library may read its variables in ways that its code does not show.
            paths = whole if fixed else reads.free.get(name, set())
            self._variable("closure variable", name, value, paths)
        if first is not MISSING:
            paths = whole if fixed else reads.first
            self._variable("the object", "self", first, paths)
        for name, value in () if fixed else [*vars(fn).items()]:
            # `functools.wraps` puts the wrapped function there, which the closure has
            # too.
            if name != "__wrapped__":
                self._value(f"attribute `{name}`", value)
        self._settled = outer

    def _globals(self, fn: types.FunctionType) -> None:
        """Reads the globals that code names; notes what it reads beside them."""
        reads, names = reads_of(fn.__code__), fn.__globals__
        for name, paths in reads.names.items():
            value = self.guards.see_name(names, name)
            if value is MISSING and name in _BEYOND:
                self.unread.append(f"what `{name}` gives")
            self._variable("global", name, value, paths)
        for module in reads.imports:
            if not _fixed_name(module):
                self.unread.append(f"the import of `{module}`")

    def _variable(self, kind: str, name: str, value: object, paths: set[Path]) -> None:
        """Reads a variable: as a whole, or at some attributes."""
        if value is MISSING:  # Not assigned yet; or a builtin.
            self._found(f"{kind} `{name}`", "missing")
            return
        at_attributes = () not in paths and (
            isinstance(value, types.ModuleType) or _has_plain_attributes(value)
        )
        for path in sorted(paths) if at_attributes else [()]:
            self._attribute(f"{kind} `{'.'.join((name, *path))}`", value, path)

    # --- attributes ---

    def _attribute(self, part: str, value: object, path: Path) -> None:
        """Reads `value.a.b`, without running code of the user's."""
        if path and isinstance(value, types.ModuleType) and not _fixed(value):
            found = self.guards.see_name(vars(value), path[0])
            if found is MISSING:
                self._not_read(part, value)
            else:
                self._attribute(part, found, path[1:])
        elif path and _has_plain_attributes(value):
            self._of_object(part, value, path[0], path[1:])
        else:
            self._value(part, value)

    def _of_object(self, part: str, value: object, name: str, rest: Path) -> None:
        self._see(guards.at_name, (value, name))
        own = getattr(value, "__dict__", {})
        raw = in_class(type(value), name)
        code = raw.fget if isinstance(raw, property) else raw
        described = type(raw)
        if isinstance(code, types.FunctionType) and name not in own:
            self._bound(part, code, value)
        elif isinstance(raw, types.MemberDescriptorType):
            self._attribute(part, in_slot(raw, value), rest)
        elif name in own and not (
            hasattr(described, "__set__") or hasattr(described, "__delete__")
        ):
            self._attribute(part, own[name], rest)
        elif raw is MISSING or hasattr(described, "__get__"):
            # What a descriptor or `__getattr__` computes may come from all of it.
            self._value(part, value)
        else:
            self._attribute(part, raw, rest)

    def _bound(self, part: str, fn: object, first: object) -> None:
        """Reads a function and what it reads of its first argument."""
        if not isinstance(fn, types.FunctionType):
            self._not_read(part, fn)
        elif self._first_time(part, (id(fn), id(first)), (fn, first)):
            self._function(part, fn, first)

    # --- values ---

    def _value(self, part: str, value: Any) -> None:
        """Reads a value; `part` is how the outermost function refers to it."""
        self._left -= 1
        kind: Any = type(value)
        if kind in _EXACT:
            if isinstance(value, str | bytes):
                self._bytes -= len(value)
            self._found(part, (kind, value))
        # Beyond these bounds reading takes longer than the trace that it saves.
        elif self._left < 0 or self._bytes < 0:
            self._not_read(part, value)
        elif simple := _simple(kind):
            simple(self, part, value)
        elif self._first_time(part, id(value), value):
            self._structure(part, value)

    def _structure(self, part: str, value: Any) -> None:
        """Reads a value that refers to other values."""
        kind = type(value)
        if isinstance(value, types.MethodType):
            self._same(part, kind)
            self._bound(part, value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType) and not is_fixed(value):
            self._function(part, value)
        elif isinstance(value, type) and not _fixed(value):
            self._class(part, value)
        elif isinstance(value, _BY_NAME) and not _is_bound(value):
            self._same(part, value) if _fixed(value) else self._not_read(part, value)
        elif kind in _READERS:
            if kind is _JITTED:
                self._same(part, value)
            read = _READERS[kind]
            inside = read(value) if kind in _CONSTANT else self._see(read, value)
            self._elements(part, value, inside)
        else:
            self._object(part, value)

    def _elements(self, part: str, value: Any, inside: Iterable[Any]) -> None:
        inside = list(inside)
        if len(inside) > self._left:
            self._not_read(part, value)
            return
        self._found(part, (type(value), len(inside)))
        for each in inside:
            self._value(part, each)

    def _object(self, part: str, value: object) -> None:
        """Reads an object: all of its attributes, and its class."""
        kind: Any = type(value)
        if not _in_python(kind):
            self._not_read(part, value)
            return
        outer, self._settled = self._settled, _is_settled(value)
        if not _is_frozen(kind):
            self._see(guards.in_object, value)
        # With an `__eq__` of their own, objects of equal state behave alike. Without
        # one, code may distinguish them by identity.
        alike = in_class(kind, "__eq__") is not _NO_EQUALITY
        attributes = guards.state_of(value)
        self._found(part, (alike or SameObject(value), *attributes))
        for name, x in attributes.items():
            self._value(f"{part}, attribute `{name}`", x)
        if isinstance(value, dict):
            self._elements(part, value, [*value, *dict.values(value)])
        elif isinstance(value, list | tuple | set | frozenset):
            self._elements(part, value, value)
        elif isinstance(value, int | float | str):
            self._found(part, repr(value))
        self._settled = outer
        self._value(part, kind)

    def _class(self, part: str, kind: type) -> None:
        """Reads a class: all that its code, and that of its bases, refers to."""
        self._same(part, kind)
        # A metaclass of the user's may change what a class does.
        if not _fixed(type(kind)) or not _in_python(kind):
            self._not_read(part, kind)
            return
        outer, self._settled = self._settled, False
        for each in kind.__mro__:
            if _fixed(each):
                continue
            self._see(guards.in_class_body, each)
            for name, raw in vars(each).copy().items():
                if name not in _ABOUT_CLASS:
                    self._found(part, name)
                    self._value(f"{part}, attribute `{name}`", raw)
        self._settled = outer

    # --- values that refer to no others ---

    def _tracer(self, part: str, value: object) -> None:
        if self._takes_traced:
            self._same(part, value)
            return
        rule = f"must not refer to values that are being traced; {part} is one"
        remedy = "Pass it as an input; only inputs and parameters are differentiated."
        call = f"{self._user}(fn)"
        raise TypeError(requirement(call, rule, str(value), remedy))

    def _array(self, part: str, value: Any) -> None:
        # Bytes, because the caller may write to the array between two calls.
        array = np.asarray(value)
        self._bytes -= array.nbytes
        if array.dtype.hasobject or self._bytes < 0:
            self._not_read(part, value)
            return
        if isinstance(value, np.ndarray):
            self.places.append(SameObject(value))
            self.guards.see_array(value)
        digest = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        self._found(part, (type(value), array.dtype.str, array.shape, digest))

    def _number(self, part: str, value: object) -> None:
        # `repr` distinguishes -0.0 from 0.0, and makes NaN equal to NaN.
        self._found(part, (type(value), repr(value)))

    def _same(self, part: str, value: object) -> None:
        self._found(part, SameObject(value))

    def _equal(self, part: str, value: Any) -> None:
        if _hashable(value):
            self._found(part, (type(value), value))
        else:
            self._not_read(part, value)


_PLAIN_ACCESS: tuple[Any, ...] = (
    object.__getattribute__,
    types.SimpleNamespace.__getattribute__,
)
_OF_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_BY_NAME = (types.FunctionType, types.ModuleType, type, *_OF_C)
_READERS: dict[Any, Read] = {
    dict: guards.in_mapping,
    collections.OrderedDict: guards.in_mapping,
    collections.defaultdict: guards.in_mapping,
    types.MappingProxyType: guards.in_mapping,
    list: tuple,
    set: tuple,
    tuple: tuple,
    frozenset: tuple,
    collections.deque: guards.in_deque,
    functools.partial: guards.in_partial,
    weakref.ReferenceType: guards.in_reference,
    _JITTED: lambda fn: (fn.__wrapped__,),
    staticmethod: lambda fn: (fn.__func__,),
    classmethod: lambda fn: (fn.__func__,),
    property: lambda x: (x.fget, x.fset, x.fdel),
    **dict.fromkeys(_OF_C, lambda fn: (fn.__name__, fn.__self__)),
}
"""What values of these very types, which are written in C, refer to."""
_CONSTANT = (tuple, frozenset, staticmethod, classmethod, property, _JITTED, *_OF_C)


def _code_of(fn: Any) -> Hashable:
    """The code of a callable, by which its versions are counted and named."""
    if isinstance(fn, tuple) and fn:
        return _code_of(fn[0])
    if isinstance(fn, functools.partial):
        return _code_of(fn.func)
    if isinstance(fn, _JITTED):
        return _code_of(fn.__wrapped__)
    if isinstance(fn, types.MethodType):
        return _code_of(fn.__func__)
    call = in_class(type(fn), "__call__")
    if isinstance(call, types.FunctionType) and not _fixed(call):
        fn = call
    return fn.__code__ if isinstance(fn, types.FunctionType) else SameObject(fn)


def _defaults(fn: types.FunctionType) -> dict[str, Any]:
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    named = dict(zip(positional[::-1], defaults[::-1], strict=False))
    return {**named, **(fn.__kwdefaults__ or {})}


def _is_bound(fn: Any) -> bool:
    """Whether a function of C's is a method of an object."""
    owner = getattr(fn, "__self__", None) if isinstance(fn, _OF_C) else None
    return owner is not None and not isinstance(owner, types.ModuleType)


def _has_plain_attributes(value: object) -> bool:
    """Whether code that reads attributes of an object reads nothing else of it."""
    kind: Any = type(value)
    if (
        not _in_python(kind)
        or isinstance(value, type)
        or _simple(kind)
        or kind in _EXACT
    ):
        return False
    return kind not in _READERS and kind.__getattribute__ in _PLAIN_ACCESS


@functools.lru_cache(maxsize=4096)
def _simple(kind: type) -> Callable[[_Reader, str, Any], None] | None:
    """How to read values of a type that refer to no others; else None."""
    if issubclass(kind, jax.core.Tracer):
        return _Reader._tracer
    if issubclass(kind, np.ndarray | np.generic):
        return _Reader._array
    if kind in (float, complex):
        return _Reader._number
    if issubclass(kind, _BY_IDENTITY):
        return _Reader._same
    return _Reader._equal if issubclass(kind, _BY_EQUALITY) else None


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
    # The class's own: a subclass that is no frozen dataclass may have others.
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


def _shown(value: Any) -> str:
    """A value that was read, for a message."""
    if isinstance(value, types.CodeType):
        file = basename(value.co_filename)
        return f"{value.co_qualname} ({file}:{value.co_firstlineno})"
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        value = value[-1]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

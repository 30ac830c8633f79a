"""What a function is made of, as a key: equal keys, equal behaviour.

Code alone is not enough. A lambda in a loop at the top of a script reads the loop's
variable as a *global*, one inside a function as a *closure*; both must count. So do
defaults, the `self` of a method, the arguments of a `functools.partial`, and, to any
depth, the functions among these.

How a value counts depends on how it can change:

- numbers, strings, and what is made of them in lists, tuples, sets and dicts: by value,
  and type (1 is not 1.0 is not True);
- other pytrees: by structure and leaves;
- functions of the same module, and closures of any: by their own contents;
- NumPy arrays, which can be written to: by their bytes;
- objects with an equality of their own: by that equality;
- objects of a class from the same package: by identity, and by the contents of their
  attributes, which can change;
- all else, such as JAX arrays, modules, types, and functions and objects of libraries:
  by identity. (JAX arrays never change, and to compare values would wait for them.)

Whatever counts by identity is held by the key, so that no other object can take over
its address.
"""

import dis
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdist._compat import is_traced
from jdist._errors import requirement

EXACT = (bool, int, str, bytes, type(None), type(...))
FIXED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, jax.Array)
Part = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class Contents:
    """A function's code and the contents of all that it refers to.

    Attributes:
      code: The code object, or the callable itself where there is none.
      parts: Pairs of what refers (such as "closure variable `scale`") and its key.
    """

    code: Hashable
    parts: tuple[tuple[str, Hashable], ...]

    @property
    def name(self) -> str:
        """Name and place of the function, for messages."""
        if not isinstance(self.code, types.CodeType):
            return repr(self.code)
        file = Path(self.code.co_filename).name
        return f"{self.code.co_qualname} ({file}:{self.code.co_firstlineno})"

    def changes_since(self, before: "Contents") -> list[str]:
        """What differs, such as "closure variable `scale` from 1 to 2"."""
        old, new = dict(before.parts), dict(self.parts)
        return [
            f"{part} from {_shown(old.get(part))} to {_shown(new.get(part))}"
            for part in dict.fromkeys([*old, *new])
            if old.get(part) != new.get(part)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal to another only if both hold the same object; keeps that object alive."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"{type(self.held).__name__} at {id(self.held):#x}"


def contents_of(fn: Callable[..., Any], user: str) -> Contents:
    """The contents of a function.

    Args:
      fn: Any callable.
      user: The public function that asks, for the error's text.

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
    return _Reader(fn, user).contents(fn)


class _Reader:
    """Reads the contents of one function, and of those that it refers to."""

    def __init__(self, root: Callable[..., Any], user: str) -> None:
        while not hasattr(root, "__globals__") and hasattr(root, "func"):
            root = root.func
        self._globals = getattr(root, "__globals__", None)
        self._package = _package(root)
        self._user = user
        self._open: list[object] = []

    def contents(self, fn: Callable[..., Any]) -> Contents:
        """The contents of a callable of any kind."""
        if isinstance(fn, types.FunctionType):
            return Contents(fn.__code__, tuple(self._parts(fn)))
        if isinstance(fn, types.MethodType):
            own = self.contents(fn.__func__)
            bound = ("the object `self`", self._key("the object `self`", fn.__self__))
            return Contents(own.code, (*own.parts, bound))
        if isinstance(fn, functools.partial):
            own = self.contents(fn.func)
            given: dict[Any, Any] = {**dict(enumerate(fn.args)), **fn.keywords}
            names = {f"argument {name} of partial": x for name, x in given.items()}
            return Contents(own.code, (*own.parts, *self._named(names)))
        return Contents(self._key("the function", fn), ())

    def _parts(self, fn: types.FunctionType) -> Iterator[Part]:
        code = fn.__code__
        positional = code.co_varnames[: code.co_argcount]
        defaults = fn.__defaults__ or ()
        named = dict(zip(positional[::-1], defaults[::-1], strict=False))
        named.update(fn.__kwdefaults__ or {})
        yield from self._named({f"default of `{name}`": x for name, x in named.items()})
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # A variable that is not assigned yet.
                continue
            part = f"closure variable `{name}`"
            yield part, self._key(part, value)
        if fn.__globals__ is self._globals:
            read = {
                x: fn.__globals__[x] for x in _globals_read(code) if x in fn.__globals__
            }
            yield from self._named({f"global `{name}`": x for name, x in read.items()})

    def _named(self, values: dict[str, Any]) -> Iterator[Part]:
        for name, value in values.items():
            yield name, self._key(name, value)

    def _key(self, part: str, value: Any) -> Hashable:
        """The key of a value; `part` is how the outermost function refers to it."""
        if is_traced(value):
            raise TypeError(
                requirement(
                    f"{self._user}(fn)",
                    f"must not refer to values that are being traced; {part} is one",
                    str(value),
                    "Pass it as an input; only inputs and parameters are "
                    "differentiated.",
                )
            )
        if any(value is x for x in self._open):
            return "itself"
        self._open.append(value)
        try:
            return self._key_by_kind(part, value)
        finally:
            self._open.pop()

    def _key_by_kind(self, part: str, value: Any) -> Hashable:
        # The first kind that fits: a NumPy scalar may be a float too, a bool is an int.
        kinds: tuple[tuple[Any, Callable[[str, Any], Hashable]], ...] = (
            (FIXED, lambda _, x: _Same(x)),
            (np.ndarray | np.generic, lambda _, x: _array_key(np.asarray(x))),
            (EXACT, lambda _, x: (type(x), x)),
            # Tells -0.0 from 0.0, and one NaN is like another.
            (float | complex, lambda _, x: (type(x), repr(x))),
            (
                dict,
                lambda p, x: (dict, self._keys(p, (y for kv in x.items() for y in kv))),
            ),
            (set | frozenset, lambda p, x: (set, frozenset(self._keys(p, x)))),
            (types.FunctionType, self._function_key),
            (types.MethodType | functools.partial, lambda _, x: self.contents(x)),
        )
        found = (key for kind, key in kinds if isinstance(value, kind))
        return next(found, self._object_key)(part, value)

    def _keys(self, part: str, values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(self._key(part, value) for value in values)

    def _function_key(self, _: str, fn: types.FunctionType) -> Hashable:
        """A library's functions cannot change; the module's own read its globals."""
        local = fn.__closure__ is not None or "<locals>" in fn.__qualname__
        return (
            self.contents(fn) if local or fn.__globals__ is self._globals else _Same(fn)
        )

    def _object_key(self, part: str, value: Any) -> Hashable:
        leaves, structure = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
        if not jax.tree_util.treedef_is_leaf(structure) and _hashable(structure):
            return structure, self._keys(part, leaves)
        hash_of: Any = type(value).__hash__
        own_equality = hash_of is not None and hash_of is not object.__hash__
        if own_equality and _hashable(value):
            return type(value), value
        if _package(type(value)) == self._package and hasattr(value, "__dict__"):
            attributes = (
                (k, self._key(f"{part}, attribute `{k}`", x))
                for k, x in vars(value).items()
            )
            return _Same(value), tuple(attributes)
        return _Same(value)


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _array_key(array: np.ndarray) -> Hashable:
    if array.dtype.hasobject:
        return _Same(array)
    digest = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    return array.dtype.str, array.shape, digest


@functools.lru_cache(maxsize=1024)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that a function, or one written inside it, reads."""
    names = [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _globals_read(constant)
    return tuple(dict.fromkeys(names))


def _shown(key: Hashable) -> str:
    """A key in a message: the value, if the key has it."""
    if isinstance(key, Contents):
        return key.name
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type):
        key = key[1]
    text = key if isinstance(key, str) else repr(key)
    return text if len(text) <= 60 else text[:57] + "..."

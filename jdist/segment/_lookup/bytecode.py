"""The variables and attributes that a function's code can read, by its bytecode.

A variable that is only ever followed by attributes, as in `config.scale`, is read at
those attributes only: other attributes of the object cannot matter. A variable that is
used in any other way (passed on, stored, called) is read as a whole. An unknown
instruction counts as a whole read, so that a later version of Python costs time, never
correctness.
"""

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Path = tuple[str, ...]
"""A chain of attributes: ("a", "b") for `value.a.b`; empty for the whole value."""

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_FREE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# Constants, and instructions that set variables up for nested functions.
_NO_READ = (
    "LOAD_CONST", "RETURN_CONST", "KW_NAMES",
    "MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reads:
    """What a code object, and those nested in it, read from outside.

    Attributes:
      names: Paths read, by name of the global variable.
      free: Paths read, by name of the closure variable.
      first: Paths read of the first argument, which is `self` in a method.
      imports: Names of modules that are imported when it runs.
    """

    names: Mapping[str, frozenset[Path]]
    free: Mapping[str, frozenset[Path]]
    first: frozenset[Path]
    imports: frozenset[str]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object, memoized."""
    found = _CodeReads(code)
    for opname, variable, path in _uses(code):
        found.add(opname, variable, path)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            # A nested function may be called, so that its reads count too.
            found.include(reads_of(inner))
    return found.reads()


class _CodeReads:
    """Collects the reads of one code object."""

    def __init__(self, code: types.CodeType) -> None:
        # In a method that is `self`, of which only some attributes may be read.
        self._first = code.co_varnames[0] if code.co_argcount else None
        self._outside = code.co_freevars
        self._names: dict[str, set[Path]] = {}
        self._free: dict[str, set[Path]] = {}
        self._own: set[Path] = set()
        self._imports: set[str] = set()

    def add(self, opname: str, variable: str, path: Path) -> None:
        """Adds the read of one instruction."""
        if opname == "IMPORT_NAME":
            self._imports.add(variable)
        elif opname in _GLOBAL or "GLOBAL" in opname:  # Also LOAD_FROM_DICT_OR_GLOBALS.
            self._names.setdefault(variable, set()).add(path)
        else:
            self._variable(variable, {path})

    def include(self, inner: Reads) -> None:
        """Adds the reads of a nested function."""
        self._imports |= inner.imports
        for variable, paths in inner.names.items():
            self._names.setdefault(variable, set()).update(paths)
        for variable, paths in inner.free.items():
            self._variable(variable, paths)

    def _variable(self, variable: str, paths: Iterable[Path]) -> None:
        if variable == self._first:
            self._own.update(paths)
        elif variable in self._outside:
            self._free.setdefault(variable, set()).update(paths)

    def reads(self) -> Reads:
        """All reads collected so far."""
        # `super()` reads the first argument without naming it.
        own = {*self._own, ()} if "super" in self._names else self._own
        names, free = _frozen(self._names), _frozen(self._free)
        return Reads(names, free, frozenset(own), frozenset(self._imports))


def _frozen(paths: Mapping[str, set[Path]]) -> dict[str, frozenset[Path]]:
    return {variable: frozenset(found) for variable, found in paths.items()}


def _uses(code: types.CodeType) -> Iterator[tuple[str, str, Path]]:
    """The instructions that name variables, each with the attributes that follow."""
    instructions = list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        opname, named = instruction.opname, instruction.argval
        # Attribute loads are part of the path of the variable before them.
        if opname in _NO_READ or opname in _ATTRIBUTE:
            continue
        if isinstance(named, tuple):  # Two variables in one instruction.
            for variable in named:
                # A following attribute belongs to one of them; that is not resolved,
                # and both count as read as a whole.
                yield opname, variable, ()
        elif isinstance(named, str):
            path = _attributes(instructions, place + 1) if _loads(opname) else ()
            yield opname, named, path


def _loads(opname: str) -> bool:
    return opname in _GLOBAL + _FREE or opname in ("LOAD_FAST", "LOAD_FAST_BORROW")


def _attributes(instructions: list[dis.Instruction], start: int) -> Path:
    path = []
    for instruction in instructions[start:]:
        if instruction.opname not in _ATTRIBUTE:
            break
        path.append(instruction.argval)
    return tuple(path)

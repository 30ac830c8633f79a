"""The variables and attributes that a function's code can read, by its bytecode.

A variable that is only ever followed by attributes, as in `config.scale`, is read at
those attributes and nowhere else: what else the object holds cannot matter. A variable
that is used in any other way (passed on, stored, called) is read as a whole. What is
not understood counts as a whole read, so that an instruction of a later Python costs
time, never correctness.
"""

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Path = tuple[str, ...]
"""Attributes, each of the one before; empty for the whole value."""

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_FREE = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# Constants, and what prepares a variable for functions inside.
_NO_READ = (
    "LOAD_CONST", "RETURN_CONST", "KW_NAMES",
    "MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reads:
    """The reads of a code object, and of those written inside it, from outside.

    Attributes:
      names: Paths by global variable.
      free: Paths by closure variable.
      first: Paths of the first argument, which is `self` in a method.
      imports: Modules that are imported when it runs.
    """

    names: Mapping[str, frozenset[Path]]
    free: Mapping[str, frozenset[Path]]
    first: frozenset[Path]
    imports: frozenset[str]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object; computed once."""
    found = _CodeReads(code)
    for opname, variable, path in _uses(code):
        found.add(opname, variable, path)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            # A function inside may be called, so that what it reads counts as read.
            found.include(reads_of(inner))
    return found.reads()


class _CodeReads:
    """The reads of one code object, as they are collected."""

    def __init__(self, code: types.CodeType) -> None:
        # In a method that is `self`, of which only some attributes may be read.
        self._first = code.co_varnames[0] if code.co_argcount else None
        self._outside = code.co_freevars
        self._names: dict[str, set[Path]] = {}
        self._free: dict[str, set[Path]] = {}
        self._own: set[Path] = set()
        self._imports: set[str] = set()

    def add(self, opname: str, variable: str, path: Path) -> None:
        """Of one instruction."""
        if opname == "IMPORT_NAME":
            self._imports.add(variable)
        elif opname in _GLOBAL or "GLOBAL" in opname:  # Also LOAD_FROM_DICT_OR_GLOBALS.
            self._names.setdefault(variable, set()).add(path)
        else:
            self._variable(variable, {path})

    def include(self, inner: Reads) -> None:
        """Of a function that is written inside this one."""
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
        """All of it."""
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
        # Attributes belong to the variable before them.
        if opname in _NO_READ or opname in _ATTRIBUTE:
            continue
        if isinstance(named, tuple):  # Two variables in one instruction.
            for variable in named:
                # To which of them a following attribute belongs is not worked out: both
                # count as read whole.
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

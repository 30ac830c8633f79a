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
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

Path = tuple[str, ...]
"""A chain of attributes: ("a", "b") for `value.a.b`; empty for the whole value."""

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_LOADS = (
    *_GLOBAL, "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST", "LOAD_FAST_BORROW",
)  # fmt: skip
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# Constants, and instructions that set variables up for nested functions.
_NO_READ = (
    "LOAD_CONST", "RETURN_CONST", "KW_NAMES",
    "MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS",
)  # fmt: skip


class Reads(NamedTuple):
    """What a code object, and those nested in it, read from outside.

    Attributes:
      names: Paths read, by name of the global variable.
      free: Paths read, by name of the closure variable.
      first: Paths read of the first argument, which is `self` in a method.
      imports: Names of modules that are imported when it runs.
    """

    names: dict[str, set[Path]]
    free: dict[str, set[Path]]
    first: set[Path]
    imports: set[str]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object, memoized."""
    found = Reads(defaultdict(set), defaultdict(set), set(), set())
    for opname, variable, path in _uses(code):
        if opname == "IMPORT_NAME":
            found.imports.add(variable)
        elif opname in _GLOBAL or "GLOBAL" in opname:  # Also LOAD_FROM_DICT_OR_GLOBALS.
            found.names[variable].add(path)
        else:
            _add_local(found, code, variable, {path})
    # A nested function may be called, so that its reads count too.
    for inner in code.co_consts:
        nested = reads_of(inner) if isinstance(inner, types.CodeType) else _NOTHING
        found.imports.update(nested.imports)
        for variable, paths in nested.names.items():
            found.names[variable].update(paths)
        for variable, paths in nested.free.items():
            _add_local(found, code, variable, paths)
    if "super" in found.names:  # It reads the first argument without naming it.
        found.first.add(())
    return found


_NOTHING = Reads({}, {}, set(), set())


def _add_local(
    found: Reads, code: types.CodeType, variable: str, paths: set[Path]
) -> None:
    # The first argument is `self` in a method, of which only some attributes may be
    # read.
    if code.co_argcount and variable == code.co_varnames[0]:
        found.first.update(paths)
    elif variable in code.co_freevars:
        found.free[variable].update(paths)


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
            loads = opname in _LOADS
            yield opname, named, _attributes(instructions, place + 1) if loads else ()


def _attributes(instructions: list[dis.Instruction], start: int) -> Path:
    path = []
    for instruction in instructions[start:]:
        if instruction.opname not in _ATTRIBUTE:
            break
        path.append(instruction.argval)
    return tuple(path)

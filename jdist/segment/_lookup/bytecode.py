"""The variables and attributes that a function's code can read, by its bytecode.

A variable that is only ever followed by attributes, as in `config.scale`, is read at
those attributes only: others cannot matter. A variable that is used in any other way
(passed on, stored, called) is read as a whole. An unknown instruction counts as a whole
read, so that a later version of Python costs time, never correctness.
"""

import dis
import functools
import types
from collections import defaultdict
from typing import NamedTuple

Path = tuple[str, ...]
"""A chain of attributes: ("a", "b") for `value.a.b`; empty for the whole value."""

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# Constants, and instructions that set variables up for nested functions.
_NO_READ = (
    "LOAD_CONST", "RETURN_CONST", "KW_NAMES", "MAKE_CELL", "LOAD_CLOSURE",
    "COPY_FREE_VARS",
)  # fmt: skip


class Reads(NamedTuple):
    """What a code object, and those nested in it, read.

    Attributes:
      names: Paths read, by name of the global variable.
      local: Paths read, by name of the variable of this function or of one around it.
      imports: Names of modules that are imported when it runs.
    """

    names: dict[str, set[Path]]
    local: dict[str, set[Path]]
    imports: set[str]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object, memoized."""
    found = Reads(defaultdict(set), defaultdict(set), set())
    path: Path = ()
    for here in reversed(list(dis.get_instructions(code))):
        if here.opname in _ATTRIBUTE:
            path = (here.argval, *path)
            continue
        # The attributes that follow are of what is loaded here; of two variables in one
        # instruction that is not resolved.
        one = here.opname.startswith("LOAD_") and isinstance(here.argval, str)
        read, path = path if one else (), ()
        if here.opname not in _NO_READ:
            _note(found, here, read)
    # A nested function may be called, so that its reads count too.
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            nested = reads_of(inner)
            found.imports.update(nested.imports)
            for name, paths in nested.names.items():
                found.names[name] |= paths
            for name in inner.co_freevars:
                found.local[name] |= nested.local[name]
    # `super()` reads the first argument without naming it.
    if "super" in found.names and code.co_argcount:
        found.local[code.co_varnames[0]].add(())
    return found


def _note(found: Reads, here: dis.Instruction, read: Path) -> None:
    if here.opname == "IMPORT_NAME":
        found.imports.add(here.argval)
    # Also LOAD_FROM_DICT_OR_GLOBALS.
    is_global = here.opname == "LOAD_NAME" or "GLOBAL" in here.opname
    space = found.names if is_global else found.local
    for name in here.argval if isinstance(here.argval, tuple) else (here.argval,):
        space[str(name)].add(read)

"""What `jdist.rpc` shows its users, and `jdist.rpc.extension` other parts."""

import ast
import types
from pathlib import Path

import jdist
from jdist import rpc
from jdist.rpc import extension


def test_users_see_what_they_may_touch_and_nothing_else():
    """No room and no helper, although the rooms have been imported."""
    assert dir(rpc) == sorted(rpc.__all__)
    found = [getattr(rpc, name) for name in dir(rpc)]
    assert not any(isinstance(thing, types.ModuleType) for thing in found)
    assert all(thing.__doc__ for thing in found)


def imported_by_other_parts(module):
    """The names that the library's other parts import from this module."""
    root = Path(jdist.__file__).parent
    files = [path for path in root.rglob("*.py") if root / "rpc" not in path.parents]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }


def test_other_parts_see_what_they_use():
    """Each name is there, and none that no part has a use for any more."""
    assert set(extension.__all__) == imported_by_other_parts("jdist.rpc.extension")
    assert all(hasattr(extension, name) for name in extension.__all__)
    assert not set(extension.__all__) & set(rpc.__all__)
    assert len(extension.__all__) <= 30

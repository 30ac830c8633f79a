"""Flax NNX, which is looked up and never imported; variables of modules, by path.

Flax is an optional dependency, and slow to import. A program that has a module has
imported it.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import KeyPath

from jdist._errors import requirement
from jdist._tree import PyTree, path_of, type_name

if TYPE_CHECKING:
    from flax import nnx


def loaded() -> ModuleType | None:
    """Returns `flax.nnx`, or None if the program has not imported it."""
    found = sys.modules.get("flax.nnx")
    # Another thread may be half-way through importing it.
    return found if hasattr(found, "Module") and hasattr(found, "split") else None


def is_module(value: object) -> bool:
    """Whether a value is a Flax NNX module; no value is, where Flax is not imported."""
    nnx = loaded()
    return nnx is not None and isinstance(value, nnx.Module)


def check_module(argument: str, value: object, remedy: str = "") -> None:
    """Checks that a value is a Flax NNX module.

    Args:
      argument: Function and argument, as for `requirement`.
      value: What was given.
      remedy: As for `requirement`.

    Raises:
      TypeError: It is none.
    """
    if not is_module(value):
        rule = "must be a Flax NNX module"
        raise TypeError(requirement(argument, rule, type_name(value), remedy))


def parameters(module: "nnx.Module") -> dict[str, "nnx.Param[Any]"]:
    """A module's `nnx.Param`s by path, `"layers.0.kernel"`, shared ones once.

    The order is that of the paths, and does not change from run to run.
    """
    from flax import nnx

    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
    }


def other_variables(tree: PyTree) -> dict[str, str]:
    """What a pytree has of Flax beside `nnx.Param`s: the kinds, by path.

    These are variables, by the names of their classes, and arrays of modules.

    Example:
      >>> from flax import nnx
      >>> other_variables({"norm": nnx.BatchNorm(2, rngs=nnx.Rngs(0))})
      {'norm/mean': 'BatchStat', 'norm/var': 'BatchStat'}
    """
    nnx = loaded()
    if nnx is None:
        return {}
    found = {}
    for keys, leaf in _leaves(tree, (nnx.Pytree, nnx.Variable)):
        if isinstance(leaf, nnx.Pytree | nnx.Variable):
            for inner, part in _leaves(leaf, (nnx.Variable,)):
                if not isinstance(part, nnx.Param):
                    kind = type(part).__name__
                    kind = kind if isinstance(part, nnx.Variable) else "array"
                    found[path_of((*keys, *inner))] = kind
    return found


def module_leaves(tree: PyTree) -> list[tuple[str, object]]:
    """Lists the arrays of all modules and random streams in a pytree, by path."""
    nnx = loaded()
    if nnx is None:
        return []
    return [
        (path_of((*keys, *inner)), value)
        for keys, leaf in _leaves(tree, (nnx.Pytree,))
        if isinstance(leaf, nnx.Pytree)
        for inner, value in jax.tree.leaves_with_path(leaf)
    ]


def _leaves(tree: PyTree, kinds: tuple[type, ...]) -> list[tuple[KeyPath, PyTree]]:
    """The leaves of a tree whose subtrees of some classes count as leaves."""
    return jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))

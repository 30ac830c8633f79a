"""The state of Flax NNX modules that are arguments of pure functions.

A pure function is compiled, and gets a copy of a module for each call. What the call
changes in it (a dropout layer's count, batch statistics) is lost with the copy, unless
the function returns it. Both are refused here: state that would never change, and a
change that would be lost. Flax is not imported: a caller that has a module has done so.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
from jax.tree_util import KeyPath

from jdist._errors import requirement
from jdist._tree import PyTree, path_of

_REMEDY = (
    "`autograd.module(module)` keeps its state from call to call. By hand: "
    "`graph, params, rest = nnx.split(module, nnx.Param, ...)`. Make the "
    "variable of `params`, give `rest` to the function as an input, and have it return "
    "the new one as an output: `module = nnx.merge(graph, params, rest)`, and "
    "`nnx.state(module, nnx.Not(nnx.Param))`."
)


def refuse_state(call: str, tree: PyTree) -> None:
    """Refuses a tree with Flax state other than parameters.

    Raises:
      TypeError: A module in it holds more than `nnx.Param`, or something in it is an
        `nnx.Variable` of another kind.
    """
    nnx = _nnx()
    if nnx is None:
        return
    kinds = (_module_class(nnx), nnx.Variable)
    for keys, leaf in _with_paths(tree, kinds):
        if isinstance(leaf, nnx.Variable):
            found = [] if isinstance(leaf, nnx.Param) else [((), leaf)]
        elif isinstance(leaf, kinds):
            found = _with_paths(nnx.split(leaf, nnx.Param, ...)[2], (nnx.Variable,))
        else:
            continue
        if found:
            rule = "must hold no state but nnx.Param: it would never change"
            shown = {
                f"{type(one).__name__} at {path_of((*keys, *k))}" for k, one in found
            }
            raise TypeError(requirement(call, rule, ", ".join(sorted(shown)), _REMEDY))


@contextlib.contextmanager
def state_kept(call: str, arguments: PyTree) -> Iterator[list[PyTree]]:
    """Refuses changes of modules in `arguments` that the function within would lose.

    Yields:
      A list to which to append what the function returns: that is not lost.

    Raises:
      TypeError: The function has changed a module, and does not return the change.
    """
    nnx = _nnx()
    before = [] if nnx is None else _state(_module_class(nnx), arguments)
    returned: list[Any] = []
    yield returned
    if nnx is None or not before:
        return
    # By identity: a module writes a new array where it changes its state.
    kept = {
        id(leaf) for leaf in [*(one for _, one in before), *jax.tree.leaves(returned)]
    }
    after = _state(_module_class(nnx), arguments)
    lost = sorted(path for path, leaf in after if id(leaf) not in kept)
    if lost:
        rule = "must not change a module that it is given: the change would be lost"
        raise TypeError(requirement(call, rule, ", ".join(lost), _REMEDY))


def _nnx() -> ModuleType | None:
    # Not imported: without Flax in the program there is no module to look for.
    found = sys.modules.get("flax.nnx")
    # Another thread may be half-way through importing it.
    return found if hasattr(found, "Module") and hasattr(found, "split") else None


def _module_class(nnx: ModuleType) -> type:
    """The base class of modules and of streams of random numbers."""
    found: type = getattr(nnx, "Pytree", nnx.Module)
    return found


def _with_paths(tree: PyTree, kinds: tuple[type, ...]) -> list[tuple[KeyPath, PyTree]]:
    return jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))


def _state(module: type, tree: PyTree) -> list[tuple[str, object]]:
    """The leaves of all modules in a tree, with their paths."""
    return [
        (path_of((*keys, *inner)), value)
        for keys, leaf in _with_paths(tree, (module,))
        if isinstance(leaf, module)
        for inner, value in jax.tree.leaves_with_path(leaf)
    ]

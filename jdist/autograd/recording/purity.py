"""Pure functions, which are compiled, and eager ones, which run as Python.

A called function with recorded arguments is taken as pure unless it is marked by
`eager`. While a pure function is traced, what it must not do is refused: calls, the
values of variables that are no arguments, and changes of Flax NNX modules. Such a
module is copied for each call. A change by the call (a dropout layer's count,
batch statistics) is lost with the copy, unless the function returns it. Flax is not
imported: a caller that has a module has done so.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import jax
from jax.tree_util import KeyPath

from jdist._errors import requirement
from jdist._tree import PyTree, path_of
from jdist.rpc.extension import is_asynchronous

F = TypeVar("F", bound=Callable[..., object])
_MARK = "__jdist_autograd_eager__"


def eager(fn: F) -> F:
    """Marks a function that runs as Python when it is called with recorded values.

    Without the mark a function so called by another worker is taken as pure: it
    receives arrays and is compiled. One that makes calls itself, holds references, or
    uses variables of its own worker is not: marked, it receives recorded values, and
    records what it does with them by operators and `autograd.apply`.

    Methods, classes and functions marked by `rpc.async_execution` run as Python anyway.

    Args:
      fn: A Python function. It may stand on either side of `staticmethod` and
        `classmethod`.

    Raises:
      TypeError: `fn` is not a Python function.

    Example:
      >>> @eager
      ... def through(x, next_worker):
      ...     return rpc.rpc_sync(next_worker, double, args=(x,))
    """
    inner = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
    try:
        # On the function itself: a wrapper would have another name, by which it
        # travels.
        setattr(inner, _MARK, True)
    except (AttributeError, TypeError):
        rule = "must be a Python function"
        raise TypeError(requirement("eager(fn)", rule, fn)) from None
    return fn


def is_pure(function: Callable[..., object]) -> bool:
    """Whether a call of `function` with recorded values is compiled."""
    # The mark is on the function inside.
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type | types.MethodType):
        return False
    return not getattr(function, _MARK, False) and not is_asynchronous(function)


# The public call that is tracing a pure function in this thread of control.
_tracing: ContextVar[str | None] = ContextVar("jdist.autograd.tracing", default=None)


@contextlib.contextmanager
def tracing(call: str) -> Iterator[None]:
    """Marks the block as the trace of a pure function by `call`."""
    token = _tracing.set(call)
    try:
        yield
    finally:
        _tracing.reset(token)


def refuse_in_pure(what: str, *names: object) -> None:
    """Refuses a side effect in a pure function: it would happen once, at compilation.

    Args:
      what: What is refused, with `{}` for each of the names.
      *names: Formatted into `what`, in the error only.

    Raises:
      TypeError: A pure function is being traced.
    """
    call = _tracing.get()
    if call is not None:
        raise TypeError(
            requirement(
                call,
                "must be a pure function of its arguments: it is compiled",
                what.format(*names),
                "Pass recorded values and variables as arguments, or mark the function "
                "with @autograd.eager: then it runs as Python, with recorded values.",
            )
        )


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
      A list for the function's result: changes that it contains are not lost.

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
    """Returns the base class of modules and of random streams."""
    found: type = getattr(nnx, "Pytree", nnx.Module)
    return found


def _with_paths(tree: PyTree, kinds: tuple[type, ...]) -> list[tuple[KeyPath, PyTree]]:
    return jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))


def _state(module: type, tree: PyTree) -> list[tuple[str, object]]:
    """Lists the leaves of all modules in a tree, with their paths."""
    return [
        (path_of((*keys, *inner)), value)
        for keys, leaf in _with_paths(tree, (module,))
        if isinstance(leaf, module)
        for inner, value in jax.tree.leaves_with_path(leaf)
    ]

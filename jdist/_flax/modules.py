"""Modules split into pytrees, put together again, and called as pure functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jdist._flax.streams import drawn
from jdist._tree import PyTree

if TYPE_CHECKING:
    from flax import nnx


class ModuleParts(NamedTuple):
    """The parts of a Flax module.

    Attributes:
      graph: The module's structure.
      params: The module's `nnx.Param`s.
      streams: The module's random streams.
      rest: All other variables of the module.
    """

    graph: "nnx.GraphDef[Any]"
    params: PyTree
    streams: PyTree
    rest: PyTree


def taken_apart(
    module: "nnx.Module", is_parameter: Callable[[Any], bool] = lambda leaf: True
) -> ModuleParts:
    """Splits a module into parts that do not change when the module does.

    Args:
      module: The module.
      is_parameter: Whether an array of an `nnx.Param` is one; the rest has the others.
    """
    # Imported on use: Flax is an optional dependency.
    from flax import nnx

    def of_params(path: object, value: Any) -> bool:
        leaves = jax.tree.leaves(value)
        return isinstance(value, nnx.Param) and all(map(is_parameter, leaves))

    graph, *states = nnx.split(module, of_params, nnx.RngState, ...)
    # Mapped to new variables: `nnx.split` returns the module's own.
    return ModuleParts(graph, *(jax.tree.map(lambda x: x, state) for state in states))


def put_together(
    graph: "nnx.GraphDef[Any]", *states: PyTree, evaluation: bool = False
) -> "nnx.Module":
    """Builds a module from its structure and the states that it was split into.

    Args:
      graph: The structure.
      *states: The states; they do not change when the module does.
      evaluation: Whether the module is put into evaluation mode, in which dropout is
        off and batch normalisation uses its averages.
    """
    from flax import nnx

    # Copied: a Flax variable can be written only in the trace that created it.
    module = nnx.merge(graph, *states, copy=True)
    if evaluation:
        module.eval()
    return module


class ModuleRun(NamedTuple):
    """The result of a call of a module.

    Attributes:
      output: What the function returned.
      rest: The module's `ModuleParts.rest` after the call.
      drew: Whether the module has drawn from its random streams, which must have begun
        at count 0. The answer may take another call.
    """

    output: PyTree
    rest: PyTree
    drew: Callable[[], bool]


def run(
    function: Callable[["nnx.Module"], PyTree],
    parts: ModuleParts,
    *,
    evaluation: bool = False,
) -> ModuleRun:
    """Calls a function with the module of these parts.

    Args:
      function: `function(module) -> output`, which may change the module.
      parts: Its parts; they are not changed.
      evaluation: As for `put_together`.
    """

    def called(streams: PyTree) -> tuple[PyTree, ModuleParts]:
        given = parts._replace(streams=streams)
        module = put_together(*given, evaluation=evaluation)
        output = function(module)
        return output, taken_apart(module)

    output, after = called(parts.streams)

    def drew() -> bool:
        return drawn(parts.streams, after.streams, lambda new: called(new)[1].streams)

    return ModuleRun(output, after.rest, drew)


def code_of(module: "nnx.Module", plain: tuple[type, ...]) -> list[object]:
    """Lists what a module's behaviour depends on besides its arrays, once each.

    These are the classes of its parts and the values of its attributes, without those
    of the types `plain`.
    """
    from flax import nnx

    found: dict[int, object] = {}
    for path, value in nnx.iter_graph(module):
        of_class = isinstance(value, nnx.Pytree | nnx.Variable)
        thing = type(value) if of_class else value
        # Flax keeps notes of its own on each object.
        own = not path or not str(path[-1]).startswith("_pytree__")
        if own and not isinstance(thing, plain):
            found[id(thing)] = thing
    return list(found.values())

"""The callee's side: compiles and runs functions that other workers call.

A function is described once (`describe`): it is traced here, which gives the caller the
shapes of its results. Calls (`perform`) then bring the function, the transforms and the
arrays. Compiled functions are found again by all that, so that all callers share them,
and compiled again when something changes that the function refers to. Nothing of a call
is kept: a backward pass brings the arguments again.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from jdist._compat import placed
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree
from jdist.autograd.call_primitive.arguments import (
    AbstractArray,
    Structure,
    abstract_of,
    arrays_of,
)
from jdist.autograd.call_primitive.transforms import Transform, transformed
from jdist.autograd.recording.pure import tracing
from jdist.rpc.extension import current, current_agent
from jdist.segment.internal import GuardedJit

# A call within one process may run in the caller's thread, under the caller's mesh.
_NO_MESH = AbstractMesh((), ())


@dataclass(frozen=True, slots=True)
class ServedFunction:
    """A function that others call.

    Attributes:
      function: The function.
      structure: Structure of the arguments, `(args, kwargs)`.
      worker: Name of the worker as which it makes calls itself.
    """

    function: Callable[..., PyTree]
    structure: Structure
    worker: str

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], Structure]:
        """Runs the function; returns the arrays of the result and its structure.

        Raises:
          TypeError: The result is not made of arrays, or the function is not pure.
        """
        name = f"remote_call(fn={getattr(self.function, '__qualname__', 'fn')})"
        args, kwargs = self.structure.tree(arrays)
        # Recorded calls and the values of variables are refused within: they would
        # happen once, at compilation.
        with tracing(name):
            result = self.function(*args, **kwargs)
        return arrays_of(result, name)

    def compiled(self, operations: Sequence[Transform]) -> GuardedJit:
        """The compiled function of arrays, after transforms."""
        function = transformed(lambda *arrays: self.run(arrays)[0], operations)
        reads = {"the function": self.function}
        return GuardedJit(function, "remote_call", reads, retraces_unread=True)


COMPILED: LRUCache[Any, GuardedJit] = LRUCache(256)
"""Compiled functions, by the served function and its transforms."""


def describe(
    function: Callable[..., PyTree], packed: PyTree, kinds: Sequence[AbstractArray]
) -> tuple[Any, list[AbstractArray]]:
    """Traces a function without running it.

    Args:
      function: The function.
      packed: Structure of its arguments `(args, kwargs)`, as it is sent.
      kinds: Shapes and dtypes of the arrays among them.

    Returns:
      The structure of the result, as it is sent, and the kinds of its arrays.

    Raises:
      TypeError: Its result is not made of arrays.
      Exception: Whatever it raises when it is traced.
    """
    served = _served(function, packed)
    found: list[Structure] = []

    def traced(*arrays: jax.Array) -> list[jax.Array]:
        results, structure = served.run(arrays)
        found.append(structure)
        return results

    # Traced on shapes: to be described costs no computation.
    abstract = [AbstractArray(*kind).abstract for kind in kinds]
    with use_abstract_mesh(_NO_MESH):
        results = jax.eval_shape(traced, *abstract)
    return found[0].pack(), [abstract_of(x) for x in results]


def perform(
    function: Callable[..., PyTree],
    packed: PyTree,
    weak: Collection[int],
    operations: tuple[Transform, ...],
    leaves: Sequence[jax.Array],
    host: bool,
) -> list[jax.Array] | list[np.ndarray]:
    """Runs a function after transforms.

    Args:
      function: The function.
      packed: As for `describe`.
      weak: Indices of the arrays whose types are weak.
      operations: The transforms, in order.
      leaves: The arrays.
      host: Whether the results are to be NumPy arrays.

    Raises:
      Exception: Whatever the function raises.
    """
    served, device = _served(function, packed), current_agent().device
    key = served, operations
    run = COMPILED.get_or_make(key, lambda: served.compiled(operations))
    arguments = [
        # NumPy arrays come from jitted calls.
        x if isinstance(x, jax.Array) else placed(x, device, i in weak)
        for i, x in enumerate(leaves)
    ]
    with use_abstract_mesh(_NO_MESH):
        results = run(*arguments)
    # Errors of the computation are this call's, also where arrays are only shared.
    jax.block_until_ready(results)
    return [np.asarray(x) for x in results] if host else list(results)


def _served(function: Callable[..., PyTree], packed: PyTree) -> ServedFunction:
    """Makes a function of what its caller has sent, and names it in debug information.

    Its own name stands there in place of `perform`.
    """
    scope = current.scope.get()
    if scope is not None and scope.execution is not None:
        scope.execution.operation = current.Operation("remote_call", function)
    return ServedFunction(function, Structure.of(packed), current_agent().info.name)

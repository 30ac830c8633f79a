"""The callee's side: compiles and runs functions that other workers call.

A function is described once (`describe`): it is traced here, which gives the caller the
shapes of its results, and gets a number. Calls (`perform`) then carry the number, the
transforms and arrays. Compiled functions are found again by identity or by program, so
that all callers share them, and compiled again when something changes that the function
refers to. Nothing of a call is kept: a backward pass brings the arguments again.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from jdist._compat import evaluate, placed, trace_whole
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree
from jdist.autograd.call_primitive.arguments import (
    AbstractArray,
    Structure,
    abstract_of,
    arrays_of,
)
from jdist.autograd.call_primitive.transforms import (
    Flat,
    Transform,
    transformed,
)
from jdist.autograd.recording.pure import tracing
from jdist.rpc.extension import Agent, current, current_agent
from jdist.segment.internal import (
    VERSIONS,
    Contents,
    FunctionCache,
    identity_of,
    refuse_hidden,
    signature_of,
)

STATE = "jdist.autograd.call_primitive.callee"
"""The key under which a worker keeps the functions that it runs for others."""

_MOST = 4096
# A call within one process may run in the caller's thread, under the caller's mesh.
_NO_MESH = AbstractMesh((), ())


class UnknownFunction(LookupError):
    """The callee does not know, or has forgotten, a number: describe it again."""


@dataclass(frozen=True, slots=True)
class ServedFunction:
    """A function that others call.

    Attributes:
      function: The function.
      structure: Structure of the arguments, `(args, kwargs)`.
      weak: Indices of the arrays among them whose types are weak.
    """

    function: Callable[..., PyTree]
    structure: Structure
    weak: frozenset[int]

    @property
    def name(self) -> str:
        """The call as messages name it."""
        return f"remote_call(fn={getattr(self.function, '__qualname__', 'fn')})"

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], Structure]:
        """Runs the function; returns the arrays of the result and its structure.

        Raises:
          TypeError: The result is not made of arrays, or the function is not pure.
        """
        args, kwargs = self.structure.tree(arrays)
        # Recorded calls and the values of variables are refused within: they would
        # happen once, at compilation.
        with tracing(self.name):
            result = self.function(*args, **kwargs)
        return arrays_of(result, self.name)


ServedFunctions = LRUCache[int, ServedFunction]
"""The functions that one worker runs for others, by number."""

# Random, because a caller may know numbers of a predecessor of this worker.
_numbers = itertools.count(randbits(62))


def install(agent: Agent) -> None:
    """Gives a worker room for the functions that it runs for others."""
    agent.extension_state[STATE] = LRUCache(_MOST)


def describe(
    function: Callable[..., PyTree],
    skeleton: PyTree,
    kinds: Sequence[AbstractArray],
) -> tuple[int, Any, list[AbstractArray]]:
    """Traces a function without running it.

    Args:
      function: The function.
      skeleton: Its arguments `(args, kwargs)`, with places in place of arrays.
      kinds: Shapes and dtypes of these arrays.

    Returns:
      Its number, the result with places in place of arrays, and the kinds of these.

    Raises:
      TypeError: Its result is not made of arrays.
      Exception: Whatever it raises when it is traced.
    """
    agent = current_agent()
    _say(agent, function)
    weak = frozenset(i for i, kind in enumerate(kinds) if kind.weak)
    program = ServedFunction(function, Structure.of(skeleton), weak)
    found: list[Structure] = []

    def traced(*arrays: jax.Array) -> list[jax.Array]:
        results, structure = program.run(arrays)
        found.append(structure)
        return results

    # Traced on shapes: to be described costs no computation.
    abstract = [AbstractArray(*kind).abstract for kind in kinds]
    with use_abstract_mesh(_NO_MESH):
        results = jax.eval_shape(traced, *abstract)
    # After the trace: a function that fails there gets no number.
    number = next(_numbers)
    _programs(agent).put(number, program)
    return number, found[0].skeleton, [abstract_of(x) for x in results]


def perform(
    number: int,
    operations: tuple[Transform, ...],
    leaves: Sequence[jax.Array],
    host: bool,
) -> list[jax.Array] | list[np.ndarray]:
    """Runs a function after transforms.

    Args:
      number: From `describe`.
      operations: In order.
      leaves: The arrays.
      host: Whether the results are to be NumPy arrays.

    Raises:
      UnknownFunction: The number is to be asked for again.
      Exception: Whatever the function raises.
    """
    agent = current_agent()
    program = _programs(agent).get(number)
    if program is None:
        raise UnknownFunction(number)
    _say(agent, program.function)
    # Functions that it calls remotely are called as this worker: hence the name.
    arguments = tuple(
        # NumPy arrays come from jitted calls.
        x if isinstance(x, jax.Array) else placed(x, agent.device, i in program.weak)
        for i, x in enumerate(leaves)
    )
    with use_abstract_mesh(_NO_MESH):
        case = agent.info.name, program.structure, operations, signature_of(arguments)
        compiled = CACHE.get(
            program.function,
            case,
            lambda contents: _compiled(program, operations, contents, case, arguments),
        )
        results = compiled.run(*arguments)
    # Errors of the computation are this call's, also where arrays are only shared.
    jax.block_until_ready(results)
    return [np.asarray(x) for x in results] if host else list(results)


class _Compiled(NamedTuple):
    """The compiled program of a function, and what the function read."""

    contents: Contents
    run: Flat


CACHE: FunctionCache[_Compiled] = FunctionCache("remote_call", size=256)


def _compiled(
    program: ServedFunction,
    operations: tuple[Transform, ...],
    contents: Contents,
    case: Hashable,
    arguments: tuple[PyTree, ...],
) -> _Compiled:
    """Traces a transformed function, and compiles it if its program is new.

    Args:
      program: The function.
      operations: Its transforms.
      contents: Contents of the function.
      case: All else on which the program depends.
      arguments: Arguments of the call.
    """
    function = transformed(lambda *arrays: program.run(arrays)[0], operations)
    closed, _ = trace_whole(function, *arguments)
    refuse_hidden(CACHE.user, closed)
    found = jax.jit(lambda *leaves: evaluate(closed, leaves))
    key = identity_of(closed)
    return _Compiled(contents, VERSIONS.get(CACHE.user, contents, case, key, found))


def _programs(agent: Agent) -> ServedFunctions:
    found: ServedFunctions = agent.extension_state[STATE]
    return found


def _say(agent: Agent, function: Callable[..., PyTree]) -> None:
    """Names the user's function in debug information, in place of `perform`."""
    scope = current.scope.get()
    if scope is not None and scope.execution is not None:
        scope.execution.operation = current.Operation("remote_call", function)

"""The caller's side: descriptions and calls of functions on other workers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from jdist._errors import requirement
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree
from jdist.autograd.call_primitive import callee
from jdist.autograd.call_primitive.arguments import (
    AbstractArray,
    Structure,
    abstract_of,
)
from jdist.autograd.call_primitive.transforms import Transform
from jdist.rpc.extension import Agent, current, current_agent

STATE = "jdist.autograd.call_primitive.caller"
"""The key under which a worker keeps its descriptions of functions on others."""

_MOST = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """All of a remote call but its arrays.

    Attributes:
      caller: Name of the worker that calls.
      to: Name of the worker that is called.
      function: The function.
      structure: Structure of the arguments, `(args, kwargs)`.
      kinds: Shapes and dtypes of the arrays among them.
      timeout: Seconds, as for `rpc_sync`.
    """

    caller: str
    to: str
    function: Callable[..., PyTree]
    structure: Structure
    kinds: tuple[AbstractArray, ...]
    timeout: float

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", None) or repr(self.function)
        return f"remote_call({self.to!r}, {name})"


class Call(NamedTuple):
    """A call of a target after operations, without its arrays.

    Attributes:
      target: The target.
      operations: In order.
      results: Shapes and dtypes of the results.
    """

    target: Target
    operations: tuple[Transform, ...]
    results: tuple[AbstractArray, ...]


class FunctionDescription(NamedTuple):
    """The callee's description of a target.

    Attributes:
      structure: Structure of the result.
      kinds: Shapes and dtypes of the arrays in the result.
    """

    structure: Structure
    kinds: tuple[AbstractArray, ...]


class RemoteFunctions:
    """One worker's descriptions of functions on others.

    Args:
      agent: The worker.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._known: LRUCache[Target, FunctionDescription] = LRUCache(_MOST)

    def known(self, target: Target) -> FunctionDescription:
        """Returns the callee's description of a target, asking for it once.

        Raises: what `describe` and `rpc_sync` raise.
        """
        found = self._known.get(target)
        if found is not None:
            return found
        packed, kinds = self._exchange(target, callee.describe, list(target.kinds))
        found = FunctionDescription(
            Structure.of(packed), tuple(AbstractArray(*kind) for kind in kinds)
        )
        self._known.put(target, found)
        return found

    def make(
        self, call: Call, arrays: Sequence[jax.Array] | Sequence[np.ndarray], host: bool
    ) -> list[jax.Array]:
        """Makes a call with these arrays, in one exchange.

        Args:
          call: The call.
          arrays: Those of the arguments, and those that operations add.
          host: Whether the results are to be NumPy arrays.

        Raises:
          ValueError: The results are of other kinds.
          Exception: What `perform` and `rpc_sync` raise.
        """
        target, operations, expected = call
        weak = [i for i, kind in enumerate(target.kinds) if kind.weak]
        sent = (weak, operations, list(arrays), host)
        results = self._exchange(target, callee.perform, *sent)
        # JAX has compiled for these kinds, and would read other buffers as if they
        # were.
        found = [(x.shape, x.dtype) for x in results]
        if found != [(kind.shape, kind.dtype) for kind in expected]:
            self._known.pop(target)
            raise ValueError(_changed(target, operations, expected, results))
        return results

    def _exchange(
        self, target: Target, what: Callable[..., PyTree], *details: PyTree
    ) -> PyTree:
        # Errors must name the user's function, not `perform`.
        described = current.Operation("remote_call", target.function)
        args = (target.function, target.structure.pack(), *details)
        return self._agent.call_function(
            target.to, what, args, target.timeout, described
        )


def caller_of(agent: Agent) -> RemoteFunctions:
    """Returns a worker's descriptions of functions on others."""
    found: RemoteFunctions = agent.extension_state[STATE]
    return found


@contextmanager
def calling(target: Target) -> Iterator[RemoteFunctions]:
    """Acts as the worker that makes the call, within the block.

    Raises:
      ValueError: That worker is not in this process, or was shut down.
    """
    # A jitted function may run on a thread of XLA, which belongs to no worker.
    with current.use_worker(target.caller):
        yield caller_of(current_agent())


def _changed(
    target: Target,
    operations: Sequence[Transform],
    expected: Sequence[AbstractArray],
    results: Sequence[jax.Array],
) -> str:
    what = "a transformation of the function" if operations else "the function"
    rule = f"must return what it returned when it was traced: {_listed(expected)}"
    got = f"{_listed([abstract_of(x) for x in results])} from {what}"
    remedy = (
        "Something that it refers to has changed on the callee, or the workers differ "
        "in jax_enable_x64. Call again, a jitted caller after `jax.clear_caches()`."
    )
    return requirement(str(target), rule, got, remedy)


def _listed(kinds: Sequence[AbstractArray]) -> str:
    return ", ".join(map(str, kinds)) or "nothing"

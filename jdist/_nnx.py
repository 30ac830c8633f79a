"""Flax NNX modules split into pytrees, and random streams restarted from a key.

A module is an object that changes when it is called. A pure function builds one from
parameters, state and new random streams, calls it, and splits it again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import evaluate, trace, without_unread
from jdist._tree import PyTree, is_key

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["ModuleParts", "RandomStreams", "drawn", "is_module", "taken_apart"]


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


def is_module(value: object) -> bool:
    """Whether a value is a Flax NNX module; no value is, where Flax is not imported."""
    # Another thread may be half-way through importing it.
    module = getattr(sys.modules.get("flax.nnx"), "Module", None)
    return module is not None and isinstance(value, module)


def taken_apart(module: "nnx.Module") -> ModuleParts:
    """Splits a module into parts that do not change when the module does."""
    # Imported on use: Flax is an optional dependency.
    from flax import nnx

    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    # Mapped to new variables: `split` returns the module's own.
    return ModuleParts(graph, *(jax.tree.map(lambda x: x, state) for state in states))


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The structure of a module's random streams, without their values.

    Attributes:
      structure: The tree structure of the streams.
      leaves: For each leaf, whether it is a key (otherwise it is a count), and its
        shape.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[bool, tuple[int, ...]], ...]

    @classmethod
    def of(cls, streams: PyTree) -> "RandomStreams":
        """The structure of `ModuleParts.streams`, which may hold shapes, not arrays."""
        leaves, structure = jax.tree.flatten(streams)
        are_keys = map(is_key, leaves)
        shapes = [tuple(x.shape) for x in leaves]
        return cls(structure, tuple(zip(are_keys, shapes, strict=True)))

    def begun(self, key: jax.Array) -> PyTree:
        """Restarts every stream at count 0, with a key of its own.

        Example:
          >>> from flax import nnx
          >>> parts = taken_apart(nnx.Rngs(dropout=0, noise=1))
          >>> begun = RandomStreams.of(parts.streams).begun(jax.random.key(3))
          >>> [int(stream.count[...]) for stream in begun.values()]
          [0, 0]
        """
        leaves = []
        for number, (is_stream_key, shape) in enumerate(self.leaves):
            if not is_stream_key:
                leaves.append(jnp.zeros(shape, jnp.uint32))
                continue
            own = jax.random.fold_in(key, number)
            # `nnx.split_rngs` leaves several keys in a stream, one for each call.
            leaves.append(jax.random.split(own, shape) if shape else own)
        return jax.tree.unflatten(self.structure, leaves)


def drawn(
    before: PyTree, after: PyTree, again: Callable[[PyTree], ModuleParts]
) -> bool:
    """Whether a module has drawn from its streams.

    Args:
      before: The streams that it was built with, at count 0.
      after: The streams of the module after the call.
      again: Builds the module with other streams, calls it, and splits it.
    """
    # A stream counts its draws: without a draw its arrays are the same objects.
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    if all(one is other for one, other in pairs):
        return False
    # A lifted call such as `nnx.remat` returns new arrays of the same values. A trace
    # from the counts to the counts tells these from draws.
    leaves, structure = jax.tree.flatten(before)
    places = [place for place, leaf in enumerate(leaves) if not is_key(leaf)]

    def counted(*counts: jax.Array) -> list[jax.Array]:
        given = list(leaves)
        for place, count in zip(places, counts, strict=True):
            given[place] = count
        found = jax.tree.leaves(again(jax.tree.unflatten(structure, given)).streams)
        return [found[place] for place in places]

    zeros = [np.zeros(leaves[place].shape, np.uint32) for place in places]
    # The answer is needed at once, also where the step around this is being traced.
    with jax.ensure_compile_time_eval():
        program, _ = without_unread(trace(counted, *zeros)[0], 0)
        return any(map(np.any, evaluate(program, zeros)))

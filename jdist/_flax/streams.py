"""Random streams of Flax modules: restarted from a key, and which calls draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import evaluate, trace, without_unread
from jdist._tree import PyTree, is_key

if TYPE_CHECKING:
    from flax import nnx


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
        return cls(structure, tuple((is_key(x), tuple(x.shape)) for x in leaves))

    def begun(self, key: jax.Array) -> PyTree:
        """Restarts every stream at count 0, with a key of its own.

        Example:
          >>> from flax import nnx
          >>> streams = nnx.state(nnx.Rngs(dropout=0, noise=1))
          >>> begun = RandomStreams.of(streams).begun(jax.random.key(3))
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


def may_draw(module: "nnx.Module") -> bool:
    """Whether a module has random streams besides those of inactive dropouts."""
    from flax import nnx

    # `iter_graph` visits each node once, although several paths may lead to it.
    nodes = list(nnx.iter_graph(module))
    # An inactive dropout holds streams too, but never draws from them.
    idle = [
        path
        for path, node in nodes
        if isinstance(node, nnx.Dropout) and (node.rate == 0 or node.deterministic)
    ]
    return any(
        isinstance(node, nnx.RngState)
        and not any(path[: len(above)] == above for above in idle)
        for path, node in nodes
    )


def drawn(before: PyTree, after: PyTree, again: Callable[[PyTree], PyTree]) -> bool:
    """Whether a module has drawn from its streams.

    Args:
      before: The streams that it was built with, at count 0.
      after: The streams of the module after the call.
      again: Builds the module with other streams, calls it, and returns the streams.
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
        found = jax.tree.leaves(again(jax.tree.unflatten(structure, given)))
        return [found[place] for place in places]

    zeros = [np.zeros(leaves[place].shape, np.uint32) for place in places]
    # The answer is needed at once, also where the step around this is being traced.
    with jax.ensure_compile_time_eval():
        program, _ = without_unread(trace(counted, *zeros)[0], 0)
        return any(map(np.any, evaluate(program, zeros)))

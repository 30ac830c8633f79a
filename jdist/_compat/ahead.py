"""Programs made ahead of the first call, from the shapes of their arguments alone."""

from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding


class Ahead:
    """Traces jitted functions on shapes, and compiles them afterwards.

    What `Traced.lower().compile()` has compiled, JAX finds again when the function is
    called with arguments of the same shapes, dtypes, weak types and places, which JAX
    documents nowhere. Where it does not find it, that call compiles as it would have.

    An argument is an array, a number, or a `jax.ShapeDtypeStruct`: with the sharding
    that the array will be committed to, or without one if it will not be committed.

    Args:
      places: Whether the places of all results are wanted. The compiler chooses those
        on a mesh: a function with an argument there is then compiled at once.

    Attributes:
      traced: What was traced, in order.
      undecided: Whether the compiler will choose the place of some result, so that
        what was traced for its shape without a place would be compiled in vain.
    """

    def __init__(self, *, places: bool = False) -> None:
        self.traced: list[jax.stages.Traced] = []
        self.undecided = False
        self._places = places
        self._left: list[jax.stages.Traced] = []

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """The shapes of the results of `function(*arguments)`, which is not called.

        Args:
          function: What `jax.jit` returned.
          *arguments: Its arguments; static ones as they are.
        """
        traced = function.trace(*arguments)
        self.traced.append(traced)
        places = [x for x in map(_place, jax.tree.leaves(arguments)) if x is not None]
        on_mesh = not all(isinstance(place, SingleDeviceSharding) for place in places)
        if on_mesh and self._places:
            compiled = traced.lower().compile()
            return jax.tree.map(_with_place, traced.out_info, compiled.output_shardings)
        self.undecided |= on_mesh
        self._left.append(traced)
        place = places[0] if places and not on_mesh else None
        return jax.tree.map(lambda x: _with_place(x, place), traced.out_info)

    def compile(self) -> None:
        """Compiles what was traced and is not compiled yet."""
        for traced in self._left:
            traced.lower().compile()
        self._left.clear()


def _with_place(x: Any, place: Sharding | None) -> jax.ShapeDtypeStruct:
    # A function that is told where to put a result does so.
    place = x.sharding if place is None else place
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)


def _place(leaf: Any) -> Sharding | None:
    """The sharding to which an array is committed, or will be."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    if isinstance(leaf, jax.Array) and leaf.committed:
        return leaf.sharding
    return None

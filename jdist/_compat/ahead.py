"""Compilation ahead of the first call, for arguments of which only shapes are known."""

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
    """

    def __init__(self) -> None:
        self._traced: list[Any] = []

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """The shapes of the results of `function(*arguments)`, which is not called.

        Args:
          function: What `jax.jit` returned.
          *arguments: Its arguments; static ones as they are.
        """
        traced = function.trace(*arguments)
        places = [x for x in map(_place, jax.tree.leaves(arguments)) if x is not None]
        one_device = all(isinstance(place, SingleDeviceSharding) for place in places)
        if one_device:
            # Over several devices the compiler chooses where results lie, and what is
            # traced for other places would be compiled in vain.
            self._traced.append(traced)
        place = places[0] if places and one_device else None
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=place, weak_type=x.weak_type
            ),
            traced.out_info,
        )

    def compile(self) -> None:
        """Compiles all that was traced."""
        for traced in self._traced:
            traced.lower().compile()
        self._traced.clear()


def _place(leaf: Any) -> Sharding | None:
    """The sharding to which an array is committed, or will be."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    if isinstance(leaf, jax.Array) and leaf.committed:
        return leaf.sharding
    return None

"""Shapes and dtypes of values, to be compared, described and stood in for."""

import jax
import jax.numpy as jnp

from jdist._tree import PyTree, abbreviated_tree, is_key

__all__ = ["blank", "describe", "specs_of"]


def specs_of(value: PyTree) -> PyTree:
    """The value's tree, with the shape and dtype alone in the place of each array.

    NumPy's arrays have the dtype that `jnp.asarray` would give them: without x64
    float32 for float64.

    Example:
      >>> import numpy as np
      >>> specs_of({"h": np.zeros((3, 5), np.float32)})
      {'h': ShapeDtypeStruct(shape=(3, 5), dtype=float32)}
    """

    def spec(x: jax.Array) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(spec, value)


def blank(
    spec: jax.ShapeDtypeStruct, place: jax.Device | jax.sharding.Sharding | None = None
) -> jax.Array:
    """A placeholder array: zeros, or keys made of zeros."""
    if not is_key(spec):
        return jnp.zeros(spec.shape, spec.dtype, device=place)
    # `jnp.zeros` refuses key dtypes.
    keys = jax.lax.full(spec.shape, 0, spec.dtype)
    return keys if place is None else jax.device_put(keys, place)


def describe(value: PyTree) -> str:
    """Dtypes and shapes of a value, for error messages.

    Example:
      >>> import numpy as np
      >>> describe({"h": np.zeros((3, 5), np.float32)})
      "{'h': float32[3,5]}"
    """
    leaves = jax.tree.leaves(value)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        value = jax.eval_shape(lambda: value)
    return str(abbreviated_tree(value))

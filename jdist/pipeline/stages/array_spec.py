"""Shape and dtype of an array, as a hashable value that can be sent."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import value_error
from jdist._tree import PyTree, abbreviated_tree

__all__ = ["ArraySpec", "describe", "is_spec", "specs_of"]

# JAX has no public list of its generators, and no public function from the name of a
# key dtype to the dtype.
_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")


class ArraySpec(NamedTuple):
    """Shape and dtype of an array on a device.

    Attributes:
      shape: The shape.
      dtype: Name of the dtype; "key<fry>", for example, for PRNG keys.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The spec in JAX's own form."""
        key = _key_like(self.dtype)
        dtype = jnp.dtype(self.dtype) if key is None else key.dtype
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def blank(
        self, device: jax.Device | jax.sharding.Sharding | None = None
    ) -> jax.Array:
        """A placeholder array: zeros, or keys made of zeros."""
        key = _key_like(self.dtype)
        if key is None:
            return jnp.zeros(self.shape, self.dtype, device=device)
        # `jnp.zeros` refuses key dtypes.
        keys = jnp.broadcast_to(jax.random.key(0, impl=key.generator), self.shape)
        return keys if device is None else jax.device_put(keys, device)


def specs_of(value: PyTree) -> PyTree:
    """The value's tree, with an `ArraySpec` in the place of each array.

    NumPy's arrays have the dtype that `jnp.asarray` would give them: without x64
    float32 for float64.

    Example:
      >>> import numpy as np
      >>> specs_of({"h": np.zeros((3, 5), np.float32)})
      {'h': ArraySpec(shape=(3, 5), dtype='float32')}
    """
    return jax.tree.map(lambda x: ArraySpec(x.shape, _name_on_a_device(x.dtype)), value)


def _name_on_a_device(dtype: np.dtype) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


class _KeyLike(NamedTuple):
    generator: str
    dtype: np.dtype


@functools.cache
def _key_like(name: str) -> _KeyLike | None:
    """The generator and dtype of keys by the dtype's name; None for other dtypes."""
    if not name.startswith("key<"):
        return None
    for generator in _GENERATORS:
        # Evaluated abstractly: nothing is compiled or put on a device.
        make = functools.partial(jax.random.key, 0, impl=generator)
        dtype = jax.eval_shape(make).dtype
        if str(dtype) == name:
            return _KeyLike(generator, dtype)
    rule = f"must be keys of one of JAX's generators {_GENERATORS}"
    raise value_error("Pipeline", rule, name)


def is_spec(value: object) -> bool:
    """Whether a value is an `ArraySpec`; for `is_leaf`."""
    # JAX treats a named tuple as a tree.
    return isinstance(value, ArraySpec)


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

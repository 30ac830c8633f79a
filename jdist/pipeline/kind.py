"""What is known of an array without its numbers: hashable, and it can be sent."""

from typing import Any, NamedTuple

import jax


class Kind(NamedTuple):
    """Shape and dtype of an array.

    Attributes:
      shape: Its shape.
      dtype: Name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str


def kinds_of(value: Any) -> Any:
    """The value's tree, with a `Kind` in the place of each array.

    Example:
      >>> import numpy as np
      >>> kinds_of({"h": np.zeros((3, 5), np.float32)})
      {'h': Kind(shape=(3, 5), dtype='float32')}
    """
    return jax.tree.map(lambda x: Kind(x.shape, str(x.dtype)), value)


def is_kind(value: object) -> bool:
    """Whether it is one; for `is_leaf`, because a tuple is a tree to JAX."""
    return isinstance(value, Kind)

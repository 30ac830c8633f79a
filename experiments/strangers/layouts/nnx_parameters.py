"""Our parameters in models of flax's nnx, and out of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Paths = Mapping[str, tuple[Any, ...]]
"""Where a model has each of our parameters."""


def replaced(model: nnx.Module, paths: Paths, params: Any) -> None:
    """Gives a model our parameters, in its own shapes."""
    state = nnx.state(model, nnx.Param)
    own = nnx.to_pure_dict(state)
    for name, value in params.items():
        *way, last = paths[name]
        there = own
        for key in way:
            there = there[key]
        # Not committed to a device, so that the trainer may place it.
        there[last] = jnp.asarray(np.asarray(value)).reshape(there[last].shape)
    nnx.replace_by_pure_dict(state, own)
    nnx.update(model, state)


def named(model: nnx.Module, paths: Paths, params: Any) -> dict[str, jax.Array]:
    """A model's parameters by our names, in our shapes."""
    own = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    found = {}
    for name, like in params.items():
        leaf: Any = own
        for key in paths[name]:
            leaf = leaf[key]
        found[name] = jnp.asarray(np.asarray(leaf).reshape(like.shape))
    return found

"""The roots of a backward pass: which values can be one, and what they begin with."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import beside
from jdist._errors import requirement
from jdist.autograd.engine.local_pass import Root
from jdist.autograd.errors import AutogradError
from jdist.autograd.graph.node import LeafNode
from jdist.autograd.graph.recorded import Recorded
from jdist.autograd.graph.variable import Variable


def roots_of(roots: Sequence[Recorded], cotangents: Sequence[Any] | None) -> list[Root]:
    """The roots and what each begins with.

    Raises:
      TypeError: The arguments are no sequences.
      AutogradError: There is no root, or one that nothing can be differentiated from.
      ValueError: A cotangent does not fit its root.
    """
    call = "backward(roots)"
    if not isinstance(roots, list | tuple):
        rule = "must be a list of recorded values (incompatible function arguments)"
        raise TypeError(requirement(call, rule, roots))
    if not roots:
        rule = "must have a value: No tensors provided for gradient computation"
        raise AutogradError(requirement(call, rule, "none"))
    if cotangents is None:
        return [_one(position, root) for position, root in enumerate(roots)]
    if not isinstance(cotangents, list | tuple):
        rule = "must be a list of arrays, one for each root"
        raise TypeError(requirement("backward(cotangents=...)", rule, cotangents))
    if len(cotangents) != len(roots):
        rule = f"must be {len(roots)} arrays, one for each root"
        raise ValueError(requirement("backward(cotangents=...)", rule, cotangents))
    pairs = enumerate(zip(roots, cotangents, strict=True))
    return [_given(position, root, value) for position, (root, value) in pairs]


def _one(position: int, root: Recorded) -> Root:
    value = _checked(position, root)
    if value.size != 1:
        rule = (
            f"has roots[{position}] that is not a scalar, all roots need to be scalar"
        )
        remedy = "Give cotangents=, one for each root, or take a sum."
        raise AutogradError(
            requirement("backward(roots)", rule, f"shape {value.shape}", remedy)
        )
    ones = _ones(value.shape, value.dtype, value.sharding)
    return Root(root.edge, beside(ones, value))


@functools.lru_cache(maxsize=64)
def _ones(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    # Kept, because to make one takes longer than a small backward pass.
    return jax.device_put(np.ones(shape, dtype), sharding)


def _given(position: int, root: Recorded, cotangent: Any) -> Root:
    value = _checked(position, root)
    if isinstance(cotangent, np.ndarray):
        # A copy, which the caller cannot change; `jnp.array` compiles for each shape.
        cotangent = jax.device_put(np.array(cotangent))
    elif not isinstance(cotangent, jax.Array):
        cotangent = jnp.asarray(cotangent)
    shape, dtype = cotangent.shape, cotangent.dtype
    if (shape, dtype) != (value.shape, value.dtype):
        call = f"backward(cotangents[{position}])"
        rule = f"must be of its root's shape {value.shape} and dtype {value.dtype}"
        raise ValueError(requirement(call, rule, f"{shape} and {dtype}"))
    if cotangent.sharding != value.sharding:
        cotangent = jax.device_put(cotangent, value.sharding)
    return Root(root.edge, beside(cotangent, value))


def _checked(position: int, root: Any) -> Any:
    """The root's value."""
    call = f"backward(roots[{position}])"
    leaf = isinstance(root, Variable) or (
        isinstance(root, Recorded) and isinstance(root.edge.node, LeafNode)
    )
    if leaf:
        rule = "must have been computed: a variable does not have a valid gradient "
        rule += "function"
        raise AutogradError(requirement(call, rule, root))
    if not isinstance(root, Recorded):
        rule = "must be a recorded value: requires_grad not set on it"
        remedy = "It does not depend on a variable, or its history was dropped."
        raise AutogradError(requirement(call, rule, root, remedy))
    return root.value

"""Clipping by the global norm over all leaves and, optionally, over a mesh axis.

    n  =  sqrt(sum over leaves and elements of |g|^2)
    g  <- g * min(1, max_norm / (n + 1e-6))

The 1e-6 is torch's: a gradient of norm exactly max_norm shrinks by a factor of
1 - 1e-6 / max_norm.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jdist._compat import tracks_varying_axes, varying_axes
from jdist._errors import type_error, value_error
from jdist._tree import (
    PyTree,
    check_arrays,
    is_inexact,
    named_leaves,
    type_name,
    wide_dtype,
)
from jdist.optim._hyperparameters import AT_LEAST_0, check_scalar

TORCH_EPS = 1e-6


def clip_by_global_norm(
    grads: PyTree, max_norm: float | jax.Array, axis_name: Hashable | None = None
) -> tuple[PyTree, jax.Array]:
    """Scales all gradients by one factor so that their norm is at most `max_norm`.

    Args:
      grads: Pytree of floating arrays; None stays None and counts as 0.
      max_norm: At least 0.
      axis_name: An axis of shard_map, pmap or vmap, or a tuple of them, over whose
        members the parameters are *divided*: the norm is that of the shards of all
        members, and equal on all. Omit it for gradients that are replicated.

    Returns:
      The gradients, each in its dtype, and their norm before clipping, a scalar in the
      widest precision among the leaves, float32 at least. With an infinite or NaN
      gradient the norm is infinite or NaN and all gradients are 0 or NaN, as in torch.

    Raises:
      ValueError: `max_norm` is negative or an array of several numbers, there is no
        gradient, or a leaf is known to be replicated over `axis_name`.
      TypeError: A leaf is not a floating array, or `max_norm` not a number.

    Example:
      >>> import jax.numpy as jnp
      >>> clipped, norm = clip_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> float(norm)
      5.0

    References:
      `torch.nn.utils.clip_grad_norm_`; Pascanu et al., On the difficulty of training
      recurrent neural networks, ICML 2013.
    """
    call = "clip_by_global_norm"
    check_scalar(f"{call}(max_norm=...)", AT_LEAST_0, max_norm, remedy="")
    check_arrays(f"{call}(grads=...)", grads, others=True)
    leaves = {k: g for k, g in named_leaves(grads).items() if g is not None}
    if not leaves:
        rule = "must have at least one gradient"
        raise value_error(f"{call}(grads=...)", rule, grads)
    for path, leaf in leaves.items():
        _check_leaf(f"{call}(grads=...)", path, leaf, axis_name)
    total = sum_of([square(jnp.asarray(leaf)) for leaf in leaves.values()])
    if axis_name is not None:
        # Squares add up over the axis; norms do not.
        total = jax.lax.psum(total, axis_name)
    norm = jnp.sqrt(total)
    # One factor for all leaves keeps the direction of the gradient.
    factor = shrinking(norm, max_norm)
    return jax.tree.map(lambda g: scaled(jnp.asarray(g), factor), grads), norm


# --- its parts, for leaves on several devices or workers ---


def square(leaf: jax.Array) -> jax.Array:
    """The sum of |g|^2 over one leaf, in float32 or wider."""
    wide = leaf.astype(wide_dtype(leaf.dtype))
    # Not `abs(wide)**2`, whose root would round and be squared again.
    return jnp.sum(jnp.real(wide * jnp.conj(wide)))


def sum_of(squares: Sequence[jax.Array]) -> jax.Array:
    """The sum in the given order, in the widest precision among the terms."""
    # The square of a float64 leaf must not be rounded to float32.
    widest = max((s.dtype for s in squares), key=lambda dtype: dtype.itemsize)
    return sum((s.astype(widest) for s in squares), jnp.zeros((), widest))


def shrinking(norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """The factor, at most 1, of gradients with this norm."""
    return jnp.minimum(jnp.asarray(max_norm, norm.dtype) / (norm + TORCH_EPS), 1)


def scaled(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """A leaf times the factor, computed in float32 or wider and rounded once."""
    # Not in the factor's precision, which is that of the widest leaf.
    wide = leaf.astype(wide_dtype(leaf.dtype))
    return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)


def _check_leaf(argument: str, path: str, leaf: jax.Array, axis_name: Hashable) -> None:
    if not is_inexact(leaf):
        kind = getattr(leaf, "dtype", None) or type_name(leaf)
        got = f"{kind} at {path}"
        raise type_error(argument, "must have floating leaves only", got)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    # A replicated leaf would be counted once per member. Only shard_map with
    # check_vma tracks which values vary over an axis.
    for axis in axes:
        if axis is None or not tracks_varying_axes(axis):
            continue
        if axis not in varying_axes(leaf):
            rule = f"must be divided over axis {axis!r}"
            got = f"a leaf at {path} that is the same on all its members"
            remedy = "Clip without axis_name where gradients are replicated."
            raise value_error(argument, rule, got, remedy)

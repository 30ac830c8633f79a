"""The one-device gradient of the whole batch, and a check of that gradient itself.

Written on its own, with nothing of `jdist.reduction`: the reductions are spelled out
with jnp's own functions and differentiated by JAX. And because a judge may be wrong as
well, a finite difference in float64 pins the result in a random direction.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._tree import merge, split_inexact
from jdist.verify.report import OracleCheck

REDUCERS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": lambda losses, w: jnp.sum(w * losses) / jnp.sum(w),
    "sum": lambda losses, w: jnp.sum(w * losses),
    "max": lambda losses, w: jnp.max(losses, where=w > 0, initial=-jnp.inf),
    "min": lambda losses, w: jnp.min(losses, where=w > 0, initial=jnp.inf),
}


def reduced(
    loss_fn: Callable[[Any, Any], jax.Array], reduction: str
) -> Callable[[Any, Any, Any], jax.Array]:
    """The scalar loss as a function `(params, batch, weights)`.

    Args:
      loss_fn: Returns losses `(examples,)`, or a scalar that is used as it is.
      reduction: A key of `REDUCERS`.

    Raises:
      ValueError: On calling: losses that are neither a scalar nor one per weight.
    """

    def scalar(params: Any, batch: Any, weights: Any) -> jax.Array:
        losses = loss_fn(params, batch)
        shape = jnp.shape(losses)
        if shape == ():
            return losses
        w = jnp.ones(shape, losses.dtype)
        if weights is not None:
            w = jnp.asarray(weights).astype(losses.dtype)
        if len(shape) != 1 or w.shape != shape:
            rule = f"must return a scalar or one loss per example, shape {w.shape[:1]}"
            got = f"shape {shape}"
            raise ValueError(requirement("loss_fn(params, batch)", rule, got))
        return REDUCERS[reduction](losses, w)

    return scalar


def differentiated(
    fn: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, Any]]:
    """`jax.value_and_grad` in the first argument; None where a leaf is not floating."""

    def value_and_gradient(params: Any, *rest: Any) -> tuple[jax.Array, Any]:
        trainable, fixed = split_inexact(params)
        return jax.value_and_grad(lambda t: fn(merge(t, fixed), *rest))(trainable)

    return value_and_gradient


STEPS = (4e-6, 2e-6, 1e-6)


class Slopes(NamedTuple):
    """One loss near the parameters, differentiated in two ways along a direction."""

    value: jax.Array
    exact: jax.Array
    difference: jax.Array


def slopes(
    loss: Callable[..., jax.Array],
) -> Callable[..., Slopes]:
    """Differentiates `loss(params, batch, weights)` along a random direction.

    It looks at a random point next to the parameters, because a kink exactly at them (a
    ReLU at a bias of 0) has no derivative to compare with.
    """

    def at(params: Any, batch: Any, weights: Any, seed: Any, step: Any) -> Slopes:
        trainable, fixed = split_inexact(params)
        # rbg compiles several times faster than the default generator.
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))
        toward, aside = (_noise(key, trainable) for key in keys)
        size = sum(leaf.size for leaf in jax.tree.leaves(trainable))
        power = sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(trainable))
        # Not leaf by leaf: biases are often all 0, and then exactly at a kink.
        typical = jnp.where(power > 0, jnp.sqrt(power / size), 1)
        near = jax.tree.map(lambda x, d: x + 1e-3 * typical * d, trainable, aside)
        direction = jax.tree.map(lambda d: d / np.sqrt(size), toward)

        def along(t: jax.Array) -> jax.Array:
            moved = jax.tree.map(lambda x, d: x + t * d, near, direction)
            return loss(merge(moved, fixed), batch, weights)

        value, gradient = differentiated(loss)(merge(near, fixed), batch, weights)
        # For complex leaves JAX's gradient g satisfies dL = Re(g . dz).
        parts = jax.tree.map(lambda g, d: jnp.sum(g * d).real, gradient, direction)
        exact = sum(jax.tree.leaves(parts), jnp.float64(0))
        # A loop, so that the loss is compiled once, not once for each side.
        ahead, behind = jax.lax.map(along, jnp.stack([step, -step]))
        return Slopes(value, exact, (ahead - behind) / (2 * step))

    return at


def pinned(results: Sequence[Slopes], rounding: float) -> OracleCheck:
    """Holds the gradient against central differences of several step sizes.

    Their spread measures what truncation, and kinks within a step, can explain.

    Args:
      results: Slopes for each of `STEPS`.
      rounding: A bound on the rounding error of one evaluation of the loss.
    """
    values, exact, differences = np.array(results).T
    if not np.isfinite([values, exact, differences]).all():
        return OracleCheck(skipped="the loss is not finite next to the parameters")
    tolerance = float(np.ptp(differences) + rounding / STEPS[-1])
    return OracleCheck(float(exact[-1]), float(differences[-1]), tolerance)


def _noise(key: jax.Array, like: Any) -> Any:
    """A tree of normal numbers, each leaf with a key of its own."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    noise = [
        jax.random.normal(k, leaf.shape, leaf.dtype)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noise)

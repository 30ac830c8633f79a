"""The one-device gradient of the whole batch, and a check of that gradient itself.

Written on its own, with nothing of `jdist.reduction`: the reductions are spelled out
with jnp's own functions and differentiated by JAX. And because a judge may be wrong as
well, a finite difference in float64 pins the result in a random direction.
"""

from collections.abc import Callable
from typing import Any

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


def reduced_loss(
    loss_fn: Callable[[Any, Any], jax.Array],
    batch: Any,
    weights: Any,
    reduction: str,
) -> Callable[[Any], jax.Array]:
    """The scalar loss as a function of the parameters alone.

    Args:
      loss_fn: Returns losses `(examples,)`, or a scalar that is used as it is.
      batch: The whole batch.
      weights: `(examples,)` or None for 1 each.
      reduction: A key of `REDUCERS`.

    Raises:
      ValueError: On calling: losses that are neither a scalar nor one per weight.
    """

    def scalar(params: Any) -> jax.Array:
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


def value_and_gradient(loss: Callable[[Any], jax.Array], params: Any) -> Any:
    """`jax.value_and_grad`, compiled; None for leaves that are not floating."""
    trainable, fixed = split_inexact(params)
    return jax.jit(jax.value_and_grad(lambda t: loss(merge(t, fixed))))(trainable)


def pin(
    loss: Callable[[Any], jax.Array], params: Any, rounding: float, seed: int
) -> OracleCheck:
    """Holds the gradient against central differences in a random direction.

    It looks at a random point next to the parameters, because a kink exactly at them (a
    ReLU at a bias of 0) has no derivative to compare with. Three step sizes are tried:
    their spread measures what truncation, and kinks within a step, can explain.

    Args:
      loss: Scalar loss of float64 parameters; call within double precision.
      params: float64 parameters.
      rounding: A bound on the rounding error of one evaluation of the loss.
      seed: Of the direction and the point.
    """
    trainable, fixed = split_inexact(params)
    rng = np.random.default_rng(seed)

    def normal(leaf: jax.Array) -> jax.Array:
        parts = rng.normal(size=(2, *leaf.shape))
        is_complex = jnp.iscomplexobj(leaf)
        return jnp.asarray(parts[0] + 1j * parts[1] if is_complex else parts[0])

    size = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    direction = jax.tree.map(lambda p: normal(p) / np.sqrt(size), trainable)
    near = jax.tree.map(lambda p: p + 1e-3 * normal(p) * _typical(p), trainable)

    @jax.jit
    def slopes(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def along(t: jax.Array) -> jax.Array:
            moved = jax.tree.map(lambda p, d: p + t * d, near, direction)
            return loss(merge(moved, fixed))

        value, gradient = jax.value_and_grad(
            lambda t: loss(merge(t, fixed)),
        )(near)
        # For complex leaves JAX's gradient g satisfies dL = Re(g . dz).
        products = jax.tree.map(lambda g, d: jnp.sum(g * d).real, gradient, direction)
        slope = jax.tree.reduce(jnp.add, products, jnp.float64(0))
        return value, slope, (along(step) - along(-step)) / (2 * step)

    steps = (4e-6, 2e-6, 1e-6)
    results = [slopes(jnp.float64(step)) for step in steps]
    values, exact, differences = (np.array(x) for x in zip(*results, strict=True))
    if not np.isfinite([*values, *exact, *differences]).all():
        return OracleCheck(skipped="the loss is not finite next to the parameters")
    tolerance = float(np.ptp(differences) + rounding / steps[-1])
    return OracleCheck(float(exact[-1]), float(differences[-1]), tolerance)


def _typical(leaf: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.abs(leaf) ** 2)) if leaf.size else jnp.float64(0)

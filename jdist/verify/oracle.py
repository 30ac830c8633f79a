"""The one-device gradient of the whole batch, and a check of that gradient itself.

Written on its own, with nothing of `jdist.reduction`: the reductions are spelled out
with jnp's own functions and differentiated by JAX. And because a judge may be wrong as
well, finite differences in float64 pin the result in a random direction.

The differences are those of the program that is judged, run in lockstep (`lockstep`):
random numbers and discrete decisions are the program's own, casts lose nothing, and
what stands behind `stop_gradient` is held where it is, since the derivative holds it.
They are taken at a random point next to the parameters, because a kink exactly at them
(a ReLU at a bias of 0) has no derivative to compare with. How far rounding moves the
loss is measured at the same points by Monte Carlo arithmetic.

A custom derivative rule may differ from the derivative on purpose (a straight-through
estimator). Where the difference disagrees and the loss has such a rule that is not
JAX's own, nothing can be said, and the check says so.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from jdist._compat import double_precision
from jdist._errors import requirement
from jdist._tree import merge, split_inexact
from jdist.verify.bound import confidence, unit_roundoff
from jdist.verify.lockstep import Pair, Perturbation, run
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


# Of the parameters' typical size: how far aside the differences are taken, and how far
# apart.
ASIDE = 1e-3
STEPS = (4e-6, 2e-6, 1e-6)

# A kink within the smallest step is seen at one point, and hardly at another.
POINTS = 3

# Draws of the loss's rounding error, on either side and in between.
DRAWS = 4

# float64 cannot be perturbed by less than its own unit: perturbations are larger by
# this factor, and their effect is divided by it.
MAGNIFIED = 2.0**10

# Below the smallest normal number digits are lost, of a derivative's parts too.
LOST = float(np.finfo(np.float64).smallest_normal / np.finfo(np.float64).eps)

# The axis along which a point and a step from it are evaluated together.
SHIFT = "shift"


class Slopes(NamedTuple):
    """One loss next to the parameters, differentiated in two ways along a direction.

    Attributes:
      exact: By JAX.
      at: The loss at the point.
      ahead: The loss a step of each of `STEPS` ahead.
      behind: And behind.
      noise: Errors of the loss by rounding, magnified.
    """

    exact: jax.Array
    at: jax.Array
    ahead: jax.Array
    behind: jax.Array
    noise: jax.Array


def finite_differences(
    loss_fn: Callable[[Any, Any], jax.Array], reduction: str
) -> Callable[[Any, Any, Any, int], OracleCheck]:
    """Builds `check(params, batch, weights, seed)`; what it compiles is kept."""
    scalar = reduced(loss_fn, reduction)
    value_of, gradient_of = jax.jit(scalar), jax.jit(partial(_pulled_back, scalar))
    foreign: dict[ClosedJaxpr, set[str]] = {}

    def noting(value: ClosedJaxpr, *rest: Any) -> Slopes:
        return _slopes(foreign.setdefault(value, set()), value, *rest)

    slopes_of = jax.jit(noting, static_argnums=(0, 1))

    def check(params: Any, batch: Any, weights: Any, seed: int) -> OracleCheck:
        """Holds the reference against differences at up to `POINTS` points."""
        given = jax.tree.map(jnp.asarray, (params, batch, weights))
        value = value_of.trace(*given).jaxpr
        one = jnp.ones((), value.out_avals[0].dtype)
        gradient = gradient_of.trace(one, *given).jaxpr
        magnified = MAGNIFIED * unit_roundoff("float64") / _finest(value.jaxpr)
        found = OracleCheck(skipped="there is nothing to differentiate")
        for point in range(POINTS):
            with double_precision(), jax.numpy_dtype_promotion("standard"):
                slopes = slopes_of(
                    value, gradient, given, jnp.uint32(seed + point), magnified
                )
            found = pinned(jax.tree.map(np.asarray, slopes))
            if found.ok and not found.skipped:
                return found
        if foreign[value]:
            names = ", ".join(sorted(foreign[value]))
            return OracleCheck(skipped=f"{names} cannot be evaluated in float64")
        rules = sorted(set(_own_rules(value.jaxpr)))
        return found if found.ok or not rules else _disputed(found, rules)

    return check


def _pulled_back(
    scalar: Callable[..., jax.Array], cotangent: jax.Array, params: Any, *rest: Any
) -> Any:
    """The gradient, times a cotangent.

    It is an input, so that what depends on it alone, the 1 / n of a mean, is not a
    constant rounded to the program's dtype.
    """
    trainable, fixed = split_inexact(params)
    _, pull = jax.vjp(lambda t: scalar(merge(t, fixed), *rest), trainable)
    return pull(cotangent)[0]


def _slopes(
    missed: set[str],
    value: ClosedJaxpr,
    gradient: ClosedJaxpr,
    given: Any,
    seed: jax.Array,
    magnified: jax.Array,
) -> Slopes:
    """Differentiates along a random direction, at a random point aside."""
    near, direction = _surroundings(given[0], seed)

    def at(shift: jax.Array) -> list[Any]:
        moved = jax.tree.map(lambda x, d: x + shift * d, near, direction)
        return _paired(given, moved)

    def losses(drawn: jax.Array, shift: jax.Array, amplitude: jax.Array) -> jax.Array:
        """The loss at the point, and `shift` from it; what is detached stays there."""

        def one(moved: jax.Array) -> jax.Array:
            own = drawn * 2 + jax.lax.axis_index(SHIFT).astype(jnp.uint32)
            noise = Perturbation(amplitude, own, None, missed, SHIFT)
            return run(value, at(moved), noise)[0].wide

        return jax.vmap(one, axis_name=SHIFT)(jnp.stack([jnp.zeros_like(shift), shift]))

    steps = jnp.asarray(STEPS)
    shifts = jnp.concatenate([steps, -steps, *[jnp.array([1, -1]) * steps[-1]] * DRAWS])
    drawn = jnp.arange(shifts.size, dtype=jnp.uint32)
    exact = drawn < 2 * steps.size
    # A loop, so that the loss is compiled once and its memory is that of one step.
    found = jax.lax.map(
        lambda each: losses(*each),
        (seed * shifts.size + drawn, shifts, jnp.where(exact, 0.0, magnified)),
    )
    still = Perturbation(jnp.float64(0), seed, None, missed)
    one = jnp.ones((), value.out_avals[0].dtype)
    slope = run(gradient, [one, *at(jnp.zeros(()))], still)
    # For complex leaves JAX's gradient g satisfies dL = Re(g . dz).
    parts = [
        jnp.sum(pair.wide * d).real
        for pair, d in zip(slope, jax.tree.leaves(direction), strict=True)
    ]
    ahead, behind = found[: steps.size, 1], found[steps.size : 2 * steps.size, 1]
    own = jnp.stack([ahead[-1], behind[-1]])
    noisy = found[2 * steps.size :].reshape(DRAWS, 2, 2)
    noise = jnp.concatenate([noisy[..., 0] - found[0, 0], noisy[..., 1] - own])
    return Slopes(sum(parts, jnp.float64(0)), found[0, 0], ahead, behind, noise.ravel())


def _surroundings(params: Any, seed: jax.Array) -> tuple[Any, Any]:
    """A point next to the parameters and a direction, both in float64."""
    trainable, _ = split_inexact(params)
    wide = jax.tree.map(_wide, trainable)
    # rbg compiles several times faster than the default generator.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"))
    toward, aside = (_noise(key, wide) for key in keys)
    leaves = jax.tree.leaves(wide)
    count = max(sum(leaf.size for leaf in leaves), 1)
    largest = [jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves]
    unit = jnp.max(jnp.stack([jnp.zeros(()), *largest]))
    unit = jnp.where(unit > 0, unit, 1)
    power = sum((jnp.sum(jnp.abs(x / unit) ** 2) for x in leaves), jnp.zeros(()))
    # Not leaf by leaf: biases are often all 0, and then exactly at a kink.
    typical = jnp.where(power > 0, unit * jnp.sqrt(power / count), 1)
    near = jax.tree.map(lambda x, d: x + ASIDE * typical * d, wide, aside)
    return near, jax.tree.map(lambda d: typical * d / np.sqrt(count), toward)


def _paired(given: Any, moved: Any) -> list[Any]:
    """Arguments as they are, the parameters' wide sides at another point."""
    params, *rest = given
    trainable, fixed = split_inexact(params)
    pairs = jax.tree.map(Pair, trainable, moved)
    return jax.tree.leaves(
        (merge(pairs, fixed), *rest), is_leaf=lambda x: isinstance(x, Pair)
    )


def pinned(found: Slopes) -> OracleCheck:
    """Holds the gradient against differences of several step sizes and both sides.

    Their spread measures what truncation, and kinks within a step, can explain; the
    noise, what rounding can.
    """
    steps = np.asarray(STEPS)
    central = (found.ahead - found.behind) / (2 * steps)
    one_sided = np.array([found.ahead[-1] - found.at, found.at - found.behind[-1]])
    differences = np.concatenate([central, one_sided / steps[-1]])
    exact, difference = float(found.exact), float(central[-1])
    if not np.isfinite([exact, *differences, *found.noise]).all():
        return OracleCheck(skipped="the loss is not finite next to the parameters")
    deviation = float(np.sqrt(np.mean(found.noise**2))) / MAGNIFIED
    rounding = confidence(1, found.noise.size) * deviation / (np.sqrt(2) * steps[-1])
    tolerance = float(np.ptp(differences) + rounding + LOST)
    if exact != difference and tolerance > max(abs(exact), abs(difference)) / 2:
        text = f"the slope is {exact:.1e}, of which kinks and rounding next to the "
        return OracleCheck(skipped=f"{text}parameters explain {tolerance:.1e}")
    return OracleCheck(exact, difference, tolerance)


def _disputed(found: OracleCheck, rules: list[str]) -> OracleCheck:
    return OracleCheck(
        skipped=f"the loss has a derivative of its own ({', '.join(rules)}): slope "
        f"{found.slope:.6g}, and {found.difference:.6g} by finite difference"
    )


def _own_rules(jaxpr: Any) -> list[str]:
    """The functions in a program with a derivative rule that is not JAX's own."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            about = equation.params["call_jaxpr"].jaxpr.debug_info
            if JAX not in Path(about.func_filename or "").parents:
                kind = equation.primitive.name.removesuffix("_call")
                found.append(f"{kind} of {about.func_name}")
        for inner in jaxprs_in_params(equation.params):
            found += _own_rules(inner)
    return found


JAX = Path(jax.__file__).parent


def _finest(jaxpr: Any) -> float:
    """The smallest rounding unit of the floating dtypes in a program."""
    units = [1.0]
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            dtype = getattr(variable.aval, "dtype", jnp.dtype(int))
            if jnp.issubdtype(dtype, jnp.inexact):
                units.append(unit_roundoff(dtype))
        units += map(_finest, jaxprs_in_params(equation.params))
    return min(units)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)


def _noise(key: jax.Array, like: Any) -> Any:
    """A tree of normal numbers, each leaf with a key of its own."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    noise = [
        jax.random.normal(k, leaf.shape, leaf.dtype)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noise)

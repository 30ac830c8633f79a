"""The one-device gradient of the whole batch, and a check of that gradient itself.

Independent of `jdist.reduction`: the reductions are spelled out with jnp's functions
and differentiated by JAX. Because a judge may be wrong as well, finite differences in
float64 check the result in a random direction.

The differences are those of the program that is judged, run in lockstep (`lockstep`):
random numbers and discrete decisions are the program's own, casts lose nothing, and
what stands behind `stop_gradient` is held where it is, since the derivative holds it.
They are taken at a random point next to the parameters, because a kink exactly at them
(a ReLU at a bias of 0) has no derivative to compare with; and how far rounding moves
the loss is measured where the differences are taken, by how much it is scattered.

A custom derivative rule may differ from the derivative on purpose (a straight-through
estimator). Where the difference disagrees and the loss has such a rule that is not
JAX's own, nothing can be said, and the check says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike

from jdist._compat import double_precision, equations_in
from jdist._errors import requirement
from jdist._tree import PyTree, merge, split_inexact
from jdist.verify.bound import confidence, in_blocks, in_double
from jdist.verify.evaluation.lockstep import Value, paired
from jdist.verify.evaluation.piecewise import EXACT, Pieces, Recording, kept_pieces
from jdist.verify.progress import progress
from jdist.verify.report import OracleCheck

LossFn = Callable[[PyTree, PyTree], jax.Array]
"""`loss_fn(params, batch)`: losses, shape `(examples,)`, or a scalar."""

REDUCERS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": lambda losses, w: jnp.sum(w * losses) / jnp.sum(w),
    "sum": lambda losses, w: jnp.sum(w * losses),
    "max": lambda losses, w: jnp.max(losses, where=w > 0, initial=-jnp.inf),
    "min": lambda losses, w: jnp.min(losses, where=w > 0, initial=jnp.inf),
}


def reduced(loss_fn: LossFn, reduction: str) -> Callable[[Any, Any, Any], jax.Array]:
    """The scalar loss as a function `(params, batch, weights)`.

    Args:
      loss_fn: Returns losses `(examples,)`, or a scalar, which is used unchanged.
      reduction: A key of `REDUCERS`.

    Raises:
      ValueError: On calling: losses that are neither a scalar nor one per weight.
    """

    def scalar(params: PyTree, batch: PyTree, weights: ArrayLike | None) -> jax.Array:
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
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """`jax.value_and_grad` in the first argument; None where a leaf is not floating."""

    def value_and_gradient(params: PyTree, *rest: PyTree) -> tuple[jax.Array, PyTree]:
        trainable, fixed = split_inexact(params)
        return jax.value_and_grad(lambda t: fn(merge(t, fixed), *rest))(trainable)

    return value_and_gradient


def gradient_of_sum(
    loss_fn: LossFn,
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """`(params, batch) -> (sum of the losses, gradient)`: all that a loss draws.

    A derivative rule may draw random numbers that the loss itself does not.
    """
    return differentiated(lambda params, batch: jnp.sum(loss_fn(params, batch)))


def seeded(
    fn: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """`differentiated`, whose backward pass begins with its first argument.

    The cotangent is an input of the program: a rule that is not linear in it sees the
    example's own share, and what depends on it alone, such as the 1 / n of a mean, is
    not a constant rounded to the program's dtype.
    """

    def value_and_gradient(
        cotangent: jax.Array, params: PyTree, *rest: PyTree
    ) -> tuple[jax.Array, PyTree]:
        trainable, fixed = split_inexact(params)
        value, pull = jax.vjp(lambda t: fn(merge(t, fixed), *rest), trainable)
        return value, pull(cotangent)[0]

    return value_and_gradient


# How far aside the differences are taken, and how far they reach to both sides of that
# point, relative to the parameters' typical size.
ASIDE, REACH = 1e-3, 4e-6

# Where the loss is evaluated, in units of the reach: at the ends and in the middle if
# it is known how far rounding scatters the loss, else at as many points as tell it.
FEW, SHIFTS = np.linspace(-1, 1, 3), np.linspace(-1, 1, 13)

# A kink within reach of one point is hardly in reach of another.
POINTS = 3

# A loss that no cubic fits to this share of its range is chaotic, or all rounding: that
# if its range is below this share of the loss.
SCATTERED, COARSE = 0.1, 1e-8

# Below the smallest normal number digits are lost, of a derivative's parts too.
LOST = float(np.finfo(np.float64).smallest_normal / np.finfo(np.float64).eps)


class Middle(NamedTuple):
    """A run in float64, on both sides of which differences are taken.

    Attributes:
      program: The program that returns losses.
      given: Its arguments, the parameters first.
      recording: That of the run.
      losses: What it returned.
      shares: The factors of the losses in the loss.
    """

    program: Pieces
    given: tuple[PyTree, ...]
    recording: Recording
    losses: np.ndarray
    shares: np.ndarray = np.ones(())


class Exact(NamedTuple):
    """The gradient of the whole batch as it was measured.

    Attributes:
      gradient: Its floating leaves in order, float64.
      scatter: How far rounding scatters the loss in float64, one deviation.
      middle: The run at the parameters.
    """

    gradient: Sequence[np.ndarray]
    scatter: float
    middle: Middle


def finite_differences(loss_fn: LossFn, reduction: str) -> Callable[..., OracleCheck]:
    """Builds `check(params, batch, weights, seed=0, known=None)`, which keeps programs.

    `seed` is that of the points and directions. With a gradient that is known, the
    parameters themselves are the first point: that gradient is compared, and no other
    is computed where it agrees.
    """
    scalar = reduced(loss_fn, reduction)
    value_of, gradient_of = jax.jit(scalar), jax.jit(seeded(scalar))
    pieces = kept_pieces()

    def check(
        params: PyTree,
        batch: PyTree,
        weights: ArrayLike | None,
        seed: int = 0,
        known: Exact | None = None,
    ) -> OracleCheck:
        """Holds the reference against differences at up to `POINTS` points."""
        given = jax.tree.map(jnp.asarray, (params, batch, weights))
        if known is not None:
            own = pinned(*_known_slopes(known, seed))
            if own.ok and not own.skipped:
                return own
        program = value_of.trace(*given).jaxpr
        value = pieces(program)
        one = jnp.ones((), program.out_avals[0].dtype)
        gradient = pieces(gradient_of.trace(one, *given).jaxpr)
        found = OracleCheck(skipped="there is nothing to differentiate")
        for point in range(POINTS):
            near, direction = _surroundings(given[0], seed + point)
            with double_precision(), jax.numpy_dtype_promotion("standard"):
                pairs, recording = _paired(given, near), Recording()
                _, *slope = gradient.exact([one, *pairs])
                exact = _along(direction, [pair.wide for pair in slope])
                (loss,) = value.exact(pairs, recording)
            middle = Middle(value, given, recording, np.asarray(loss.wide))
            losses = _losses(middle, near, direction, SHIFTS)
            own = pinned(exact, losses)
            # One point that agrees is enough: a kink near another explains a failure
            # there.
            if own.ok and not own.skipped:
                return own
            # A point where nothing can be said does not explain it.
            found = found if found.wrong else own
        if value.missed:
            names = ", ".join(sorted(value.missed))
            return OracleCheck(skipped=f"{names} cannot be evaluated in float64")
        rules = tuple(own_rules(program))
        return replace(found, own_rules=rules) if found.wrong else found

    return check


def _known_slopes(known: Exact, seed: int) -> tuple[float, np.ndarray, float]:
    """The arguments of `pinned` for a direction in which all leaves count."""
    trainable, _ = split_inexact(known.middle.given[0])
    typical, count = _typical(trainable)
    generator = np.random.default_rng(seed)
    noise = _noise(generator, typical / math.sqrt(count), trainable)
    parts, structure = jax.tree.flatten(noise)
    length = math.sqrt(sum(float(np.sum(np.abs(x) ** 2)) for x in parts))
    for number, slope in enumerate(known.gradient):
        size = float(np.linalg.norm(slope))
        if 0 < size < math.inf:
            # JAX's gradient g of a complex leaf satisfies dL = Re(g . dz).
            share = length / (size * math.sqrt(len(parts)))
            parts[number] += share * slope.conj()
    direction = jax.tree.unflatten(structure, parts)
    exact = _along(direction, known.gradient)
    shifts = FEW if known.scatter else SHIFTS
    losses = _losses(known.middle, None, direction, shifts)
    return exact, losses, known.scatter


def _along(direction: PyTree, gradient: Sequence[ArrayLike]) -> float:
    """The derivative along a direction, of the gradient's leaves."""
    parts = [
        float(np.sum(np.asarray(g) * d).real)
        for g, d in zip(gradient, jax.tree.leaves(direction), strict=True)
    ]
    return sum(parts, 0.0)


def _losses(
    middle: Middle, near: PyTree | None, direction: PyTree, shifts: np.ndarray
) -> np.ndarray:
    """The loss along a direction; what is detached, and decisions, do not move.

    The middle is at `near`; None: at the parameters, without copies of them.
    """
    program, given, recording, losses, shares = middle
    found = []
    if near is None:
        near, _ = split_inexact(given[0])
    with (
        progress("finite differences", 0 if program.tiny else shifts.size) as advance,
        double_precision(),
        jax.numpy_dtype_promotion("standard"),
    ):
        form = EXACT._replace(held=program.holds)
        for shift in REACH * shifts:
            advance()
            own = losses
            if shift != 0:
                # Each leaf is moved while it is needed, and not all of them at once.
                move = partial(partial, _moved, shift)
                moved = jax.tree.map(move, near, direction)
                run = program.run(_paired(given, moved), form, replay=recording)
                own = np.asarray(run[0].wide)
            found.append(float(np.vdot(shares, own)))
    return np.asarray(found)


def _moved(shift: float, origin: ArrayLike, direction: np.ndarray) -> np.ndarray:
    wide = shift * direction
    wide += in_double(origin)
    return wide


def _surroundings(params: PyTree, seed: int) -> tuple[PyTree, PyTree]:
    """A random point next to the parameters and a direction, both in float64."""
    trainable, _ = split_inexact(params)
    wide = jax.tree.map(in_double, trainable)
    typical, count = _typical(wide)
    generator = np.random.default_rng(seed)
    toward = _noise(generator, ASIDE * typical, wide)
    near = jax.tree.map(np.add, wide, toward)
    return near, _noise(generator, typical / math.sqrt(count), wide)


def _typical(params: PyTree) -> tuple[float, int]:
    """The size that a parameter typically has, and how many there are."""
    leaves = jax.tree.leaves(params)
    count = max(sum(leaf.size for leaf in leaves), 1)
    tops = (np.max(np.abs(x)) for leaf in leaves for x in in_blocks(leaf))
    unit, power = float(max(tops, default=0)) or 1.0, 0.0
    for leaf in leaves:
        for (x,) in in_blocks(leaf):
            # Of infinite parameters the loss is not finite.
            with np.errstate(invalid="ignore"):
                power += float(np.sum(np.abs(x / unit) ** 2))
    # Not leaf by leaf: biases are often all 0, and then exactly at a kink.
    return unit * math.sqrt(power / count) if power > 0 else 1.0, count


def _paired(given: PyTree, moved: PyTree) -> list[Value]:
    """A program's arguments, with other values on the wide side of the parameters."""
    params, *rest = given
    own = paired(jax.tree.leaves(params), jax.tree.leaves(moved))
    return [*own, *jax.tree.leaves(rest)]


def pinned(exact: float, losses: np.ndarray, scatter: float = 0.0) -> OracleCheck:
    """Holds the derivative against the slope of a cubic through the losses.

    The residuals are rounding, and give the slope's standard error. The differences
    between the cubic, a line and the two sides bound effects of curvature and kinks.
    Through three losses a parabola fits, whose bend is all that they show of rounding.

    Args:
      exact: The derivative along a direction, computed by JAX.
      losses: The losses at each of `SHIFTS`, or of `FEW`.
      scatter: How far rounding scatters a loss, one deviation; 0 if that is not known.
    """
    if not np.isfinite([exact, *losses]).all():
        return OracleCheck(skipped="the loss is not finite next to the parameters")
    shifts = np.linspace(-1, 1, losses.size)
    # Centred and scaled, or tiny losses would vanish in the squares.
    centre = losses[losses.size // 2]
    size = np.max(np.abs(losses - centre)) or 1.0
    centred = (losses - centre) / size
    columns = np.vander(shifts, min(4, losses.size), increasing=True)
    cubic, *_ = np.linalg.lstsq(columns, centred, rcond=None)
    freedom: float = losses.size - columns.shape[1]
    residual = np.linalg.norm(centred - columns @ cubic)
    deviation = residual / np.sqrt(max(freedom, 1))
    if deviation > SCATTERED and size > COARSE * abs(centre):
        return OracleCheck(skipped="the loss is chaotic next to the parameters")
    if scatter:
        deviation, freedom = max(deviation, scatter / size), math.inf
    # The standard error of a slope fitted by least squares.
    error = deviation * np.sqrt(np.linalg.inv(columns.T @ columns)[1, 1])
    line = float(shifts @ centred / (shifts @ shifts))
    # 0 for a line: curvature moves the slope, and a kink makes the sides differ.
    bend = abs(cubic[1] - line) + abs(centred[-1] + centred[0])
    unit = size / REACH
    tolerance = float(unit * (confidence(1, freedom) * error + bend) + LOST)
    difference = float(unit * cubic[1])
    if exact != difference and tolerance > max(abs(exact), abs(difference)) / 2:
        text = f"the slope is {exact:.1e}, of which kinks and rounding next to the "
        return OracleCheck(skipped=f"{text}parameters explain {tolerance:.1e}")
    return OracleCheck(exact, difference, tolerance)


def own_rules(program: ClosedJaxpr) -> list[str]:
    """The functions in a program with a derivative rule that is not JAX's own."""
    found = set()
    for equation in equations_in(program):
        if equation.primitive.name in _RULED:
            kind, inner = _RULED[equation.primitive.name]
            about = equation.params[inner].jaxpr.debug_info
            if JAX not in Path(about.func_filename or "").parents:
                found.add(f"{kind} of {about.func_name}")
    return sorted(found)


# Primitives whose derivative a user may write: JAX's function for it, and the parameter
# with the user's.
_RULED = {
    "custom_jvp_call": ("custom_jvp", "call_jaxpr"),
    "custom_vjp_call": ("custom_vjp", "call_jaxpr"),
    "linear_call": ("linear_call", "callee"),
}


JAX = Path(jax.__file__).parent


def _noise(generator: np.random.Generator, scale: float, like: PyTree) -> PyTree:
    """A tree of normal numbers times a scale; complex ones have both parts.

    On the host: to compile this took as long as the derivative.
    """

    def drawn(leaf: np.ndarray) -> np.ndarray:
        real = scale * generator.standard_normal(leaf.shape)
        if not np.iscomplexobj(leaf):
            return real
        imaginary = scale * generator.standard_normal(leaf.shape)
        return (real + 1j * imaginary) / np.sqrt(2)

    return jax.tree.map(drawn, like)

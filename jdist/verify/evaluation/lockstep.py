"""Shadow execution: runs a program in its own precision and in float64 at once.

The program is a jaxpr, traced in the user's own settings and already differentiated, so
that custom derivatives, casts and default dtypes mean here what they mean to JAX. Every
equation is evaluated twice. The *rounded* side binds it as it stands. The *wide* side
binds it with floating operands in float64 (complex: complex128); casts between floating
dtypes are then identities.

Only what depends on the program's floating inputs has a wide side. Random bits and all
that is computed from them alone are what they are in the rounded program: noise, masks
and samples are the same on both sides. Integers that depend on floating values (an
argmax, a sampled class, an order, a branch, a number of iterations) are decided once,
by the rounded side. Comparisons are made by each side for itself: a ReLU whose input is
0 but for rounding may be on or off in a right program, and that has to be seen.

**Monte Carlo arithmetic** (Parker 1997). With an `amplitude` above 0 the wide side is
perturbed as rounding would: the result y of an equation that rounds becomes
y (1 + u d), with u the unit of the equation's own dtype and d uniform in [-1, 1]. A sum
of k terms has k roundings: for terms x in random order, the squares of the partial sums
add up to about k (s^2 / 3 + sum x^2 / 6), s being the result. So its result is
perturbed with u sqrt(k / 3) and each of its terms with u sqrt(k / 6), u being the unit
of the dtype that is accumulated in. Where the device rounds the operands of float32
products (`products`), so does the rounded side, and they are perturbed by that unit.

References:
  Parker, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic,
  UCLA CSD TR-970002, 1997.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jdist._compat import loop_counts
from jdist._tree import PyTree, Shaped, is_key
from jdist.verify.bound import (
    EXTRA,
    accumulated,
    flushes,
    single_of,
    unit_roundoff,
)
from jdist.verify.evaluation.products import PRODUCTS, kept_bits

Array = jax.Array


class RoundedSideNeeded(Exception):
    """A run without a rounded side came to a decision, which only that side makes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PrecisionPair:
    """A value in the precision of the program and in a wider one.

    Attributes:
      rounded: The value as the program computes it; None in a run that has no rounded
        side.
      wide: The value in float64, or in what `Form.wider` says.
      size: The square root of the sum of squares of the terms that the value was last
        summed of: its magnitude if they do not cancel. None: the value's own.
      narrow: The dtype of less than 32 bits that the value was cast from, where a dtype
        was chosen in which such numbers are accumulated; else None.
    """

    rounded: Any
    wide: Any
    size: Any = None
    narrow: np.dtype | None = field(default=None, metadata={"static": True})


# A value without a wide side of its own stands for itself.
Value = Array | PrecisionPair

Position = tuple[int | Array, ...]
"""A position in a run: index and iteration of each enclosing loop, then of the place.

Positions of one run are in the order of the program.
"""

Observer = Callable[[str, Position, Sequence[PrecisionPair]], PrecisionPair]
"""`observer(name, position, values)`: passes on the first value that a tap is given."""


# The axis along which a piece is evaluated at its recorded and at its own inputs.
HELD = "held"


class Form(NamedTuple):
    """What a run computes.

    Attributes:
      rounded: Whether there is a rounded side.
      wider: The dtypes of the wide side.
      drawn: Whether it is perturbed.
      sized: Whether results have sizes.
      sizes: Their dtypes.
      held: Whether values under `stop_gradient` are those of the recorded run. The wide
        side then holds these and its own along the axis `HELD` of `vmap`.
      in_parts: Whether any sum may consist of parts, each rounded to its own dtype, as
        in a trainer that splits the batch.
      together: Whether wide sides are those of several runs, along axis 0. They have
        one rounded side, and sizes are those of the first.
    """

    rounded: bool
    wider: Callable[[Any], np.dtype]
    drawn: bool = False
    sized: bool = False
    sizes: Callable[[Any], np.dtype] = single_of
    held: bool = False
    in_parts: bool = False
    together: bool = False


@dataclass(slots=True)
class Perturbation:
    """A source of random rounding errors for one scope: a program or an iteration.

    Attributes:
      amplitude: Factor of every perturbation; None for a program that is never
        perturbed, which compiles faster.
      seed: Seed of this scope.
      pool: Random numbers in [-1, 1], float32, `(numbers,)`, from which errors are
        taken: a `noise_pool`, or None without an amplitude.
      loops: The position of this scope.
      form: The form of the run.
      accumulation: The dtype in which sums are accumulated; None for at least float32.
      unmeasured: Primitives whose own rounding could not be measured; shared by all
        scopes of a program.
      observer: Called with both sides of every tap in the program, while it is traced.
    """

    amplitude: Array | None
    seed: Array
    pool: Array | None
    loops: Position
    form: Form
    accumulation: Any
    unmeasured: set[str]
    observer: Observer | None
    _places: Iterator[int] = field(default_factory=itertools.count)
    _count: int = 0
    _hashed: dict[int, Array] = field(default_factory=dict)

    def inner(self) -> "Perturbation":
        """A perturbation for a program inside this scope."""
        seed = _mix(_in_context(self.seed) + _golden(self._tick()))
        return self.within(_mix(seed))

    def within(self, seed: Array) -> "Perturbation":
        """A perturbation with another seed, for a scope of its own."""
        return replace(self, seed=seed, _count=0, _hashed={})

    def loop(self) -> "Perturbation":
        """A perturbation for a loop inside this scope; iterations share the seed."""
        return replace(self.inner(), loops=(*self.loops, next(self._places)))

    def iteration(self, index: Array) -> "Perturbation":
        """A perturbation for one iteration of this loop."""
        own = self.within(_mix(_in_context(self.seed) + index.astype(jnp.uint32)))
        return replace(own, loops=(*self.loops, index))

    def observe(self, name: str, operands: Sequence[Value]) -> Value:
        """Returns a tap's first operand, through the observer if there is one."""
        if self.observer is None:
            return operands[0]
        position = (*self.loops, next(self._places))
        found = self.observer(name, position, [as_pair(x, self) for x in operands])
        # An integer is decided by the rounded side.
        return found if has_sides(found.wide) else found.wide

    def errors(self, like: Array, unit: float) -> Array | None:
        """unit d for each entry of an array, in its dtype."""
        if self.amplitude is None or like.size == 0:
            return None
        dtype = like.real.dtype
        largest = (unit * _in_context(jnp.asarray(self.amplitude))).astype(dtype)
        real = self._draw(like.shape).astype(dtype) * largest
        if not jnp.iscomplexobj(like):
            return real
        # Both parts of a complex number are rounded, each by itself.
        return real + 1j * (self._draw(like.shape).astype(dtype) * largest)

    def _draw(self, shape: tuple[int, ...]) -> Array:
        """Numbers of the pool, from a random place on."""
        assert self.pool is not None
        pool = _in_context(self.pool)
        size, start = math.prod(shape), self._place()
        if size + PLACES <= pool.size:
            return jax.lax.dynamic_slice(pool, [start], [size]).reshape(shape)
        # As often as needed. Its length is prime, so that an array's rows are not in
        # step with it.
        twice = jnp.concatenate([pool, pool])
        turned = jax.lax.dynamic_slice(twice, [start], pool.shape)
        times = -(-size // pool.size)
        repeated = jnp.broadcast_to(turned, (times, pool.size)).reshape(-1)
        return jax.lax.slice(repeated, [0], [size]).reshape(shape)

    def _place(self) -> Array:
        """The place in the pool for the next array: a hash of seed and count."""
        group, number = divmod(self._tick(), HASHED)
        if group not in self._hashed:
            # Many at once: a dozen scalar equations for each array would be half of
            # what XLA has to compile.
            steps = jnp.asarray(_golden(group * HASHED + np.arange(HASHED)))
            bits = _mix(_in_context(self.seed) + _in_context(steps))
            self._hashed[group] = (bits % jnp.uint32(PLACES)).astype(jnp.int32)
        return jax.lax.index_in_dim(
            _in_context(self._hashed[group]), number, keepdims=False
        )

    def _tick(self) -> int:
        self._count += 1
        return self._count


def _in_context(array: Array) -> Array:
    """The array with a type of the context's mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or jax.typeof(array).sharding.mesh == mesh:
        return array
    return jax.sharding.reshard(array, PartitionSpec())


def noise_pool(size: int) -> np.ndarray:
    """Random numbers in [-1, 1] for arrays of up to `size` entries, float32."""
    generator = np.random.default_rng(4099)
    return generator.uniform(-1, 1, size + PLACES).astype(np.float32)


# Places in a pool at which an array's errors may begin, and how many are computed at
# once.
PLACES, HASHED = 65521, 64


def _golden(step: int | np.ndarray) -> np.ndarray:
    """Numbers far apart for consecutive steps: multiples of the golden ratio."""
    return np.asarray(step * 0x9E3779B9 & 0xFFFFFFFF, np.uint32)


def _mix(bits: Array) -> Array:
    """A hash of 32 bits (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def interpreted(
    jaxpr: Jaxpr,
    consts: Iterable[Any],
    inputs: Iterable[Any],
    results: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    literal: Callable[[Literal], Any],
) -> list[Any]:
    """The results of a program whose values are of any kind.

    Args:
      jaxpr: The program.
      consts: Its constants.
      inputs: Its arguments.
      results: The results of an equation, given its operands.
      literal: The value of a literal.
    """
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
        return literal(atom) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        found = results(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate(
    program: ClosedJaxpr, inputs: Sequence[Value], noise: Perturbation
) -> list[Value]:
    """Evaluates a program inside of an equation."""
    consts = map(as_array, program.consts)
    results = partial(results_of, noise=noise, sized=False)
    return interpreted(program.jaxpr, consts, inputs, results, value_of)


def results_of(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation, sized: bool
) -> Sequence[Value]:
    """Evaluates an equation on both sides; its results have sizes if `sized`."""
    # What belongs to it is computed with the mesh and settings of its trace, too.
    with equation.ctx.manager:
        return _results(equation, operands, noise, sized)


def _results(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation, sized: bool
) -> Sequence[Value]:
    name = equation.primitive.name
    if name == "tap":
        return [noise.observe(equation.params["name"], operands)]
    if not any(map(_is_pair, operands)):
        return bind(equation, operands)
    if name == "stop_gradient" and noise.form.held:
        # The value at the first input, for all of them.
        held = jax.lax.all_gather(_wide(operands[0], noise), HELD)[0]
        return [PrecisionPair(as_pair(operands[0], noise).rounded, held)]
    if name in _CONTROL:
        return _CONTROL[name](equation, operands, noise)
    inner = called(equation)
    if inner is not None:
        return _evaluate(inner, operands, noise)
    return _both_sides(equation, operands, noise, sized)


def _both_sides(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation, sized: bool
) -> Sequence[Value]:
    """Evaluates an equation without inner programs; an operand of it is a pair."""
    name = equation.primitive.name
    alone = any(map(_is_one_sided, operands))
    results: Sequence[Any] = (
        [x.aval for x in equation.outvars]
        if alone
        else bind(equation, _as_rounded(equation, operands))
    )
    if alone and not all(map(has_sides, results)):
        raise RoundedSideNeeded(name)
    if not any(map(has_sides, results)):
        # Its result is an integer, through which a perturbation does not pass.
        if name == "bitcast_convert_type":
            noise.unmeasured.add(name)
        return results
    wide = _widely(equation, operands, results, noise)
    if wide is None:
        if alone:
            raise RoundedSideNeeded(name)
        noise.unmeasured.add(name)
        return [as_pair(x, noise) if has_sides(x) else x for x in results]
    perturbed = not (noise.amplitude is None or name in _EXACT or _widens(equation))
    found: list[Value] = []
    narrow = None if noise.accumulation is None else _narrow(equation, operands)
    for r, w in zip(results, wide, strict=True):
        if noise.form.in_parts and _is_float(r) and _widens(equation):
            w = _perturb_part(w, equation, noise)
        elif perturbed and _is_float(r):
            dtypes = r.dtype, _cast_from(operands) or r.dtype
            w = _perturb(w, dtypes, summed(equation), noise)
        size = _size(equation, operands, noise) if sized and _is_float(r) else None
        own = None if alone else r
        found.append(PrecisionPair(own, w, size, narrow) if has_sides(r) else r)
    return found


def _as_rounded(equation: JaxprEqn, operands: list[Value]) -> list[Array]:
    """The operands of the rounded side, rounded as the device does for a product."""
    given = [_rounded(x) for x in operands]
    bits = kept_bits(equation)
    # Where it does so itself, this changes nothing: its kernel for an example alone may
    # have full precision.
    return given if bits is None else [_with_bits(x, bits) for x in given]


def _with_bits(x: Array, bits: int) -> Array:
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_with_bits(x.real, bits), _with_bits(x.imag, bits))
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, bits)


def _narrow(equation: JaxprEqn, operands: list[Value]) -> np.dtype | None:
    """The dtype of less than 32 bits that the results are cast from; None without."""
    if _widens(equation):
        given = _dtype_of(equation.invars[0])
        narrow = jnp.issubdtype(given, jnp.inexact) and jnp.finfo(given).bits < 32
        return given if narrow else None
    return _cast_from(operands) if equation.primitive.name in _MOVES else None


def _cast_from(operands: list[Value]) -> np.dtype | None:
    # `jnp.sum` casts 16-bit numbers to float32 before it adds them.
    found = (x.narrow for x in operands if isinstance(x, PrecisionPair))
    return next(filter(None, found), None)


def _widely(
    equation: JaxprEqn,
    operands: list[Value],
    results: Sequence[Any],
    noise: Perturbation,
) -> Sequence[Array] | None:
    """The wide side of one equation; None if it cannot be evaluated in float64.

    `results` are those of the rounded side, or their shapes and dtypes.
    """
    name = equation.primitive.name
    wide, wider = [_wide(x, noise) for x in operands], noise.form.wider
    if name in UNMEASURED or any(map(is_key, wide)):
        return None
    if noise.amplitude is not None:
        wide = _perturb_terms(wide, equation, _cast_from(operands), noise)
    try:
        if name in _RULES:
            return _RULES[name](_Call(equation, operands, wide, wider, results))
        found = _bind_wide(equation, wide, wider)
    # What JAX raises for a primitive, or parameters of it, that allow no float64.
    except (TypeError, ValueError, NotImplementedError):
        return None
    # Parameters may fix the dtype or the shape of the result: it is then not wider.
    same = all(
        w.shape == r.shape and (not _is_float(r) or w.dtype == wider(r.dtype))
        for w, r in zip(found, results, strict=True)
    )
    return found if same else None


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Array]:
    """Binds an equation to operands, with its own parameters."""
    params = equation.primitive.get_bind_params(equation.params)
    # As JAX evaluates a jaxpr: with the mesh and settings of the equation's trace.
    with equation.ctx.manager:
        found = equation.primitive.bind(*operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _bind_wide(
    equation: JaxprEqn, wide: Sequence[Array], wider: Callable[[Any], np.dtype]
) -> Sequence[Array]:
    """Binds the equation with its operands in wider dtypes."""
    params = {k: _widened(k, value, wider) for k, value in equation.params.items()}
    found = equation.primitive.bind(*wide, **params)
    return list(found) if equation.primitive.multiple_results else [found]


# ---------------------------------------------------------------------------------
# Sizes: how large a result is where the terms of its last sum do not cancel.


def sized_variables(
    equations: Sequence[tuple[str, Sequence[Any], Sequence[Any]]],
    results: Sequence[Any],
) -> frozenset[Any]:
    """The variables whose sizes make up those of results.

    Args:
      equations: Name of the primitive, inputs and outputs of each.
      results: Variables; literals have no size.
    """
    passed = _ADDS | _MOVES | _SCALED.keys()
    wanted = {v for v in results if not isinstance(v, Literal)}
    for name, inputs, outputs in reversed(equations):
        if name in passed and not wanted.isdisjoint(outputs):
            wanted.update(v for v in inputs if not isinstance(v, Literal))
    return frozenset(wanted)


def _size(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> Array | None:
    """The size of the one result of an equation; None if it is that of its value."""
    name = equation.primitive.name
    if name in _SQUARED and summed(equation) > 1:
        wide = [_wide(x, noise) for x in operands]
        # Relative to the largest, so that no square is too small or too large.
        tops = [_top(jnp.max(jnp.abs(x), initial=0)) for x in wide if _is_float(x)]
        if name not in PRODUCTS:
            tops = [jnp.max(jnp.stack(tops))] * len(tops)
        rest = iter(tops)
        squares = [
            jnp.square((jnp.abs(x) / next(rest)).astype(noise.form.sizes(float)))
            if _is_float(x)
            else x
            for x in wide
        ]
        rule = _RULES.get(name)
        call = _Call(equation, operands, squares, noise.form.sizes)
        found = rule(call) if rule else _bind_wide(equation, squares, noise.form.sizes)
        total = jnp.prod(jnp.stack(tops)) if name in PRODUCTS else tops[0]
        # A product of complex numbers asks for a complex result.
        roots = jnp.sqrt(jnp.abs(found[0]))
        return roots * total.astype(roots.dtype)
    if name in _ADDS:
        return jnp.hypot(*(_size_of(x, noise) for x in operands))
    if not any(isinstance(x, PrecisionPair) and x.size is not None for x in operands):
        return None
    sizes = [_size_of(x, noise) for x in operands]
    if name in _SCALED:
        return _SCALED[name](*sizes)
    return _bind_wide(equation, sizes, noise.form.sizes)[0] if name in _MOVES else None


def _top(largest: Array) -> Array:
    """The largest magnitude, or 1 where it is nothing to divide by."""
    usable = (largest > 0) & jnp.isfinite(largest)
    return jnp.where(usable, largest, jnp.ones_like(largest))


def _size_of(value: Value, noise: Perturbation) -> Array:
    if isinstance(value, PrecisionPair) and value.size is not None:
        return value.size
    wide = _wide(value, noise)
    return jnp.abs(wide).astype(noise.form.sizes(float)) if _is_float(wide) else wide


_SQUARED = frozenset({
    "dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum",
    "scatter-add",
})  # fmt: skip

_ADDS = frozenset({"add", "add_any", "sub"})

# A reduce_sum is one of them where it sums over an axis of length 1.
_MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "pad",
    "reduce_sum", "reshape", "reshard", "rev", "select_n", "slice", "squeeze",
    "transpose",
})  # fmt: skip

_SCALED: dict[str, Callable[..., Array]] = {
    "mul": jnp.multiply,
    "div": jnp.divide,
    "neg": lambda size: size,
    "convert_element_type": lambda size: size,
}


# ---------------------------------------------------------------------------------
# Perturbation.


def _perturb(
    wide: Array, dtypes: tuple[np.dtype, np.dtype], terms: int, noise: Perturbation
) -> Array:
    """A result as if it had been rounded, given its dtype and that of its terms."""
    dtype, narrow = dtypes
    unit = unit_roundoff(dtype)
    if terms > 1:
        adding = unit_roundoff(accumulated(narrow, noise.accumulation))
        unit = math.hypot(unit, adding * math.sqrt(terms / 3))
    errors = noise.errors(wide, unit)
    if errors is None:
        return wide
    if flushes(dtype):
        return _with_error(wide, wide * errors)
    # Subnormal numbers have one absolute spacing: their relative rounding error has no
    # limit, so they are perturbed as much as the smallest normal number.
    tiny = float(jnp.finfo(dtype).smallest_normal)
    least = jnp.where(jnp.abs(wide) < tiny, jnp.where(wide == 0, 0, tiny), wide)
    return _with_error(wide, least * errors)


def _with_error(wide: Array, error: Array) -> Array:
    """A value with an error; an infinite one, as of a masked logit, has none."""
    return jax.lax.select(jnp.isfinite(wide), wide + error, wide)


def _perturb_terms(
    wide: list[Array],
    equation: JaxprEqn,
    narrow: np.dtype | None,
    noise: Perturbation,
) -> list[Array]:
    """Operands of a sum, perturbed for the roundings of its partial sums.

    Those of a product are perturbed for their own roundings, too.
    """
    dtype, terms, unit = _dtype_of(equation.outvars[0]), summed(equation), 0.0
    if terms > 1:
        adding = unit_roundoff(accumulated(narrow or dtype, noise.accumulation))
        unit = adding * math.sqrt(terms / 6)
        if noise.form.in_parts:
            # At most a rounding of every term for each that `bound` takes.
            unit = math.hypot(unit, unit_roundoff(dtype) * math.sqrt(EXTRA))
    bits = kept_bits(equation)
    if bits is not None:
        unit = math.hypot(unit, 2.0 ** -(bits + 1))
    return [_perturbed_by(x, unit, noise) for x in wide] if unit else wide


def _perturbed_by(wide: Array, unit: float, noise: Perturbation) -> Array:
    errors = noise.errors(wide, unit) if _is_float(wide) else None
    return wide if errors is None else _with_error(wide, wide * errors)


def _perturb_part(wide: Array, equation: JaxprEqn, noise: Perturbation) -> Array:
    """Perturbs a value cast to a wider dtype, whose sum may be of narrower parts."""
    narrow = _dtype_of(equation.invars[0])
    if not jnp.issubdtype(narrow, jnp.inexact):
        return wide
    return _perturbed_by(wide, unit_roundoff(narrow) * math.sqrt(EXTRA), noise)


def summed(equation: JaxprEqn) -> int:
    """How many terms each entry of the result is a sum of; 1 if it is no sum."""
    count = _SUMS.get(equation.primitive.name)
    operands: list[Any] = equation.invars
    return count(equation.params, [x.aval.shape for x in operands]) if count else 1


Params = Mapping[str, Any]
Shapes = Sequence[tuple[int, ...]]


def _contracted(params: Params, shapes: Shapes) -> int:
    (axes, _), _ = params["dimension_numbers"]
    return math.prod(shapes[0][axis] for axis in axes)


def _convolved(params: Params, shapes: Shapes) -> int:
    return math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]]


_SUMS: dict[str, Callable[[Params, Shapes], int]] = {
    "dot_general": _contracted,
    "conv_general_dilated": _convolved,
    "reduce_sum": lambda p, shapes: math.prod(shapes[0][x] for x in p["axes"]),
    "cumsum": lambda p, shapes: shapes[0][p["axis"]],
    "cumlogsumexp": lambda p, shapes: shapes[0][p["axis"]],
    "reduce_window_sum": lambda p, _: math.prod(p["window_dimensions"]),
    "select_and_scatter_add": lambda p, _: math.prod(p["window_dimensions"]),
    # As many as the updates, spread evenly.
    "scatter-add": lambda _, shapes: (
        1 + -(-math.prod(shapes[2]) // max(math.prod(shapes[0]), 1))
    ),
}

# They select, move or negate, and round nothing.
_EXACT = frozenset({
    "abs", "and", "broadcast_in_dim", "ceil", "clamp", "complex", "concatenate", "conj",
    "copy", "copy_p", "cummax", "cummin", "device_put", "dynamic_slice",
    "dynamic_update_slice", "eq", "floor", "gather", "ge", "gt", "imag", "is_finite",
    "le", "lt", "max", "min", "ne", "neg", "not", "optimization_barrier", "or", "pad",
    "pvary", "real", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_window_max", "reduce_window_min", "reshape", "reshard", "rev", "round",
    "scatter", "scatter-max", "scatter-min", "select_n", "sharding_constraint", "sign",
    "slice", "sort", "split", "squeeze", "stop_gradient", "tie", "top_k", "transpose",
    "xor",
})  # fmt: skip

# Foreign code, or code that fails only when it is compiled for float64.
UNMEASURED = frozenset({
    "ffi_call", "io_callback", "pallas_call", "pure_callback", "reduce",
    "reduce_window", "select_and_gather_add", "shard_map", "xla_pmap",
})  # fmt: skip


def _widens(equation: JaxprEqn) -> bool:
    """Whether it is a cast that loses nothing."""
    if equation.primitive.name != "convert_element_type":
        return False
    old, new = _dtype_of(equation.invars[0]), _dtype_of(equation.outvars[0])
    if not jnp.issubdtype(old, jnp.inexact):
        return True
    return bool(jnp.promote_types(old, new) == new)


# ---------------------------------------------------------------------------------
# Equations that hold programs.


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program behind an equation that only calls it."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(key)
        if isinstance(inner, ClosedJaxpr | Jaxpr) and equation.primitive.name in _CALLS:
            return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    return None


_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
})  # fmt: skip


def _plain(
    values: Sequence[Value], paired: Sequence[bool], alone: bool, noise: Perturbation
) -> list[Value]:
    """Values with sides where told, all with the same; if `alone`, wide ones only."""
    return [
        PrecisionPair(None if alone else _rounded(x), _wide(x, noise))
        if own
        else _rounded(x)
        for x, own in zip(values, paired, strict=True)
    ]


def _scan(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    params, body = equation.params, equation.params["jaxpr"]
    counts = loop_counts(equation)
    assert counts is not None, equation.primitive.name
    consts, carried = counts
    fixed, start = operands[:consts], operands[consts : consts + carried]
    slices = operands[consts + carried :]
    alone = any(map(_is_one_sided, operands))
    # Every floating carry has sides: an iteration may make it depend on inputs.
    on_sides = [has_sides(_side(x)) for x in start]
    stacked = [has_sides(v.aval) for v in body.jaxpr.outvars[carried:]]

    def step(state: list[Value], taken: PyTree) -> PyTree:
        index, row = taken
        given, inside = [*fixed, *state, *row], loop.iteration(index)
        found = _evaluate(body, given, inside)
        made = zip((found[:carried], found[carried:]), (on_sides, stacked), strict=True)
        return tuple(_plain(*each, alone, noise) for each in made)

    loop, order = noise.loop(), jnp.arange(params["length"])
    last, ys = jax.lax.scan(
        step,
        _plain(start, on_sides, alone, noise),
        # A reversed scan begins with the last slice, which is its iteration 0.
        (
            order[::-1] if params["reverse"] else order,
            _plain(slices, list(map(_is_pair, slices)), alone, noise),
        ),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *ys]


def _while(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    params = equation.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ends = np.cumsum([params["cond_nconsts"], params["body_nconsts"]])
    for_test, for_body, start = (
        [operands[i] for i in own] for own in np.split(np.arange(len(operands)), ends)
    )
    alone = any(map(_is_one_sided, operands))
    on_sides = [has_sides(_side(x)) for x in start]
    loop = noise.loop()

    def go_on(state: tuple[Array, list[Value]]) -> Array:
        # The rounded side decides for both how many iterations there are.
        rounded = [_rounded(x) for x in (*for_test, *state[1])]
        return _rounded(_evaluate(test, rounded, noise)[0])

    def step(state: tuple[Array, list[Value]]) -> tuple[Array, list[Value]]:
        index, values = state
        given, inside = [*for_body, *values], loop.iteration(index)
        found = _evaluate(body, given, inside)
        return index + 1, _plain(found, on_sides, alone, noise)

    begin = (jnp.int32(0), _plain(start, on_sides, alone, noise))
    return jax.lax.while_loop(go_on, step, begin)[1]


def _cond(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    index, *rest = operands
    alone = any(map(_is_one_sided, rest))
    on_sides = [has_sides(v.aval) for v in equation.outvars]

    def branch(program: ClosedJaxpr) -> Callable[..., list[Value]]:
        def evaluate(*given: Value) -> list[Value]:
            inside = noise.inner()
            return _plain(_evaluate(program, given, inside), on_sides, alone, noise)

        return evaluate

    branches = [branch(program) for program in equation.params["branches"]]
    given = _plain(rest, list(map(_is_pair, rest)), alone, noise)
    return jax.lax.switch(_rounded(index).astype(jnp.int32), branches, *given)


def _linear_solve(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    # The other programs serve derivatives, which are in the program already.
    before = lengths.matvec + lengths.vecmat
    constants = operands[before : before + lengths.solve]
    right_hand = operands[sum(lengths) :]
    return _evaluate(programs.solve, [*constants, *right_hand], noise)


_CONTROL: dict[str, Callable[..., Sequence[Value]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}


# ---------------------------------------------------------------------------------
# Equations that need another form in float64.


class _Call(NamedTuple):
    """An equation and its operands, on the wide side and as they are given.

    Attributes:
      equation: The equation.
      operands: The operands as they are given.
      wide: The operands in wider dtypes.
      wider: These dtypes.
      results: Those of the rounded side, or shapes and dtypes; none for a size.
    """

    equation: JaxprEqn
    operands: Sequence[Value]
    wide: Sequence[Array]
    wider: Callable[[Any], np.dtype]
    results: Sequence[Any] = ()


def _cast(call: _Call) -> list[Array]:
    dtype = call.results[0].dtype
    if _is_float(call.results[0]):
        dtype = call.wider(dtype)
    wide = call.wide[0]
    if jnp.iscomplexobj(wide) and not jnp.issubdtype(dtype, jnp.complexfloating):
        wide = wide.real
    return [wide.astype(dtype)]


def _sort(call: _Call) -> list[Array]:
    """Permutes the wide side as the rounded side is sorted; ties stay in order."""
    axis = call.equation.params["dimension"]
    given = [_rounded(x) for x in call.operands]
    positions = jax.lax.broadcasted_iota(jnp.int32, given[0].shape, axis)
    *_, order = call.equation.primitive.bind(*given, positions, **call.equation.params)
    return [jnp.take_along_axis(x, order, axis) for x in call.wide]


def _top_k(call: _Call) -> list[Array]:
    axis = call.equation.params.get("axis", -1)
    places = call.results[1]
    return [jnp.take_along_axis(call.wide[0], places, axis), places]


def _scatter(call: _Call) -> list[Array]:
    """Scatters in float64 with the function of `jax.lax`."""
    # The equation cannot be bound: its `update_jaxpr` combines in a narrow dtype.
    name, params = call.equation.primitive.name, call.equation.params
    update = params["update_jaxpr"]
    if name == "scatter" and update is not None and update.eqns:
        raise NotImplementedError("a scatter that applies a function")
    scatter = getattr(jax.lax, name.replace("-", "_"))
    same = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [scatter(*call.wide, **{key: params[key] for key in same})]


_RULES: dict[str, Callable[[_Call], list[Array]]] = {
    "convert_element_type": _cast,
    "reduce_precision": lambda call: [call.wide[0]],
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"),
        _scatter,
    ),
    "sort": _sort,
    "top_k": _top_k,
}


def _widened(key: str, value: object, wider: Callable[[Any], np.dtype]) -> object:
    """A parameter of an equation for wider dtypes."""
    if key == "precision" and value is not None:
        # The program's precision may round operands of products, on the exact side too.
        highest = jax.lax.Precision.HIGHEST
        return (highest,) * 2 if isinstance(value, tuple) else highest
    if isinstance(value, np.dtype) and jnp.issubdtype(value, jnp.inexact):
        return wider(value)
    return value


# ---------------------------------------------------------------------------------
# Values.


def _is_pair(value: Value) -> bool:
    return isinstance(value, PrecisionPair)


def _is_one_sided(value: Value) -> bool:
    return isinstance(value, PrecisionPair) and value.rounded is None


def _rounded(value: Value) -> Array:
    if not isinstance(value, PrecisionPair):
        return value
    if value.rounded is None:
        raise RoundedSideNeeded
    return value.rounded


def _side(value: Value) -> Array:
    """One of the sides of a value."""
    return value.wide if isinstance(value, PrecisionPair) else value


def _wide(value: Value, noise: Perturbation) -> Array:
    if isinstance(value, PrecisionPair):
        return value.wide
    return value.astype(noise.form.wider(value.dtype)) if _is_float(value) else value


def as_pair(value: Value, noise: Perturbation) -> PrecisionPair:
    """The value with its sides; one without sides is the same on both."""
    if isinstance(value, PrecisionPair):
        return value
    return PrecisionPair(value, _wide(value, noise))


def value_of(literal: Literal) -> Array:
    """The array of a literal."""
    # A Python number would become a 64-bit one here.
    value = np.asarray(literal.val)
    return jnp.asarray(value, getattr(literal.aval, "dtype", value.dtype))


def paired(values: Iterable[Any], wide: Iterable[Any]) -> list[Value]:
    """Values, of which those that are floating have the wide sides given in turn."""
    rest = iter(wide)
    return [PrecisionPair(x, next(rest)) if _is_float(x) else x for x in values]


def as_array(constant: ArrayLike) -> Array:
    """The array of a constant."""
    return constant if isinstance(constant, Array) else jnp.asarray(constant)


def _dtype_of(atom: Var | Literal) -> np.dtype:
    shaped: Any = atom.aval
    return shaped.dtype


def _is_float(x: Shaped) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def has_sides(x: Any) -> bool:
    """Whether a value may differ between the sides: integers and keys do not."""
    return _is_float(x) or x.dtype == jnp.bool_

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
of the dtype that is accumulated in.

References:
  Parker, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic,
  UCLA CSD TR-970002, 1997.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jdist._compat import loop_counts
from jdist._tree import PyTree, Shaped, is_key
from jdist.verify.bound import EXTRA, accumulated, flushes, unit_roundoff, wide_of

Array = jax.Array


@dataclass(frozen=True, slots=True)
class PrecisionPair:
    """A value in the precision of the program and in float64.

    Attributes:
      rounded: The value as the program computes it.
      wide: The value in float64.
      size: The square root of the sum of squares of the terms that the value was last
        summed of: its magnitude if they do not cancel. None: the value's own.
      narrow: The dtype of less than 32 bits that the value was cast from, where a dtype
        was chosen in which such numbers are accumulated; else None.
    """

    rounded: Array
    wide: Array
    size: Array | None = None
    narrow: np.dtype | None = None


# A value without a wide side of its own stands for itself.
Value = Array | PrecisionPair

Position = tuple[int | Array, ...]
"""A position in a run: index and iteration of each enclosing loop, then of the place.

Positions of one run are in the order of the program.
"""

Observer = Callable[[str, Position, Sequence[PrecisionPair]], PrecisionPair]
"""`observer(name, position, values)`: passes on the first value that a tap is given."""


@dataclass(slots=True)
class Perturbation:
    """A source of random rounding errors for one scope: a program or an iteration.

    Attributes:
      amplitude: Factor of every perturbation; 0 for the exact evaluation, and None for
        a program that is never perturbed, which compiles faster.
      seed: Seed of this scope.
      accumulation: The dtype in which sums are accumulated; None for at least float32.
      in_parts: Whether any sum may consist of parts, each rounded to its own dtype, as
        in a trainer that splits the batch.
      unmeasured: Primitives whose own rounding could not be measured; shared by all
        scopes of a program.
      held: An axis of `vmap` along which the wide side holds several inputs. Values
        under `stop_gradient` are held fixed at those of the first input.
      observer: Called with both sides of every tap in the program, while it is traced.
      loops: The position of this scope.
    """

    amplitude: Array | None
    seed: Array
    accumulation: Any = None
    unmeasured: set[str] = field(default_factory=set)
    held: str | None = None
    observer: Observer | None = None
    in_parts: bool = False
    loops: Position = ()
    _places: Iterator[int] = field(default_factory=itertools.count)
    _pools: dict[tuple[float, Any], Array] = field(default_factory=dict)
    _count: int = 0

    # Numbers drawn per scope. Prime, so that larger arrays, which use them again and
    # again, do not find them in step with their own rows.
    POOL: ClassVar[int] = 4099

    def inner(self, step: Array) -> "Perturbation":
        """A perturbation for iteration `step` of a loop inside this scope."""
        # The golden ratio in 32 bits: consecutive scopes get seeds far apart.
        here = _in_context(self.seed)
        seed = _mix(here + jnp.uint32(self._tick()) * jnp.uint32(0x9E3779B9))
        own = _mix(seed ^ step.astype(jnp.uint32))
        return self.within(own)

    def within(self, seed: Array) -> "Perturbation":
        """A perturbation with another seed, for a scope of its own."""
        return replace(self, seed=seed, _pools={}, _count=0)

    def loop(self) -> "Perturbation":
        """A perturbation for a loop inside this scope; iterations share the seed."""
        own = self.inner(jnp.uint32(0))
        return replace(own, loops=(*self.loops, next(self._places)))

    def iteration(self, index: Array) -> "Perturbation":
        """A perturbation for one iteration of this loop."""
        own = self.within(_mix(_in_context(self.seed) + index.astype(jnp.uint32)))
        return replace(own, loops=(*self.loops, index))

    def observe(self, name: str, operands: Sequence[Value]) -> Value:
        """Returns a tap's first operand, through the observer if there is one."""
        if self.observer is None:
            return operands[0]
        position = (*self.loops, next(self._places))
        return self.observer(name, position, list(map(_as_pair, operands)))

    def factors(self, like: Array, unit: float) -> Array | None:
        """1 + unit d for each entry of an array."""
        if self.amplitude is None or like.size == 0:
            return None
        pool = self._pool(unit, self.amplitude)
        real = self._draw(like.shape, pool)
        if not jnp.iscomplexobj(like):
            return real
        # Both parts of a complex number are rounded, each by itself.
        return real + 1j * (self._draw(like.shape, pool) - 1)

    def _draw(self, shape: tuple[int, ...], pool: Array) -> Array:
        size = math.prod(shape)
        # Prime to the pool's size: arrays begin at places far apart in it.
        start = self._tick() * 1009 % self.POOL
        if start + size > self.POOL:
            times = -(-(start + size) // self.POOL)
            pool = jnp.broadcast_to(pool, (times, self.POOL)).reshape(-1)
        return jax.lax.slice(pool, [start], [start + size]).reshape(shape)

    def _pool(self, unit: float, amplitude: Array) -> Array:
        # In `jax.sharding.auto_axes` the same mesh has axes of another type.
        key = unit, jax.sharding.get_abstract_mesh()
        if key not in self._pools:
            seed, strength = map(_in_context, (self.seed, amplitude))
            bits = _mix(jax.lax.iota(jnp.uint32, self.POOL) ^ seed)
            uniform = bits.astype(jnp.float64) * 2.0**-31 - 1
            factors = 1 + uniform * (unit * strength)
            # A barrier, or XLA computes them again wherever they are used.
            self._pools[key] = jax.lax.optimization_barrier(factors)
        return self._pools[key]

    def _tick(self) -> int:
        self._count += 1
        return self._count


def _in_context(array: Array) -> Array:
    """The array with a type of the context's mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or jax.typeof(array).sharding.mesh == mesh:
        return array
    return jax.sharding.reshard(array, PartitionSpec())


def _mix(bits: Array) -> Array:
    """A hash of 32 bits (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def run(
    program: ClosedJaxpr,
    inputs: Sequence[Value],
    perturbation: Perturbation,
) -> list[PrecisionPair]:
    """Evaluates a program on both sides; to be called with 64-bit types enabled.

    Args:
      program: As traced in the settings that it is judged in.
      inputs: Its arguments. A floating array is exact, with the same value on both
        sides; a `PrecisionPair` has a wide side of its own.
      perturbation: The perturbation of the wide side.

    Returns:
      Its results; floating ones have a size.
    """
    given = [
        x if isinstance(x, PrecisionPair) or not _is_float(x) else _as_pair(x)
        for x in inputs
    ]
    found = _evaluate(program.jaxpr, program.consts, given, perturbation, sized=True)
    return list(map(_as_pair, found))


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    noise: Perturbation,
    *,
    sized: bool = False,
) -> list[Value]:
    """Evaluates a program on both sides; results have sizes if `sized`."""
    values: dict[Any, Value] = {}

    def read(atom: Var | Literal) -> Value:
        if isinstance(atom, Literal):
            # A Python number would become a 64-bit one here.
            value = np.asarray(atom.val)
            return jnp.asarray(value, getattr(atom.aval, "dtype", value.dtype))
        return values[atom]

    values.update(zip(jaxpr.constvars, map(_as_array, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    wanted = _with_size(jaxpr) if sized else frozenset()
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        here = not wanted.isdisjoint(equation.outvars)
        # What belongs to an equation is computed with the mesh of its trace, too.
        with equation.ctx.manager:
            found = _equation(equation, operands, noise, here)
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation, sized: bool
) -> Sequence[Value]:
    name = equation.primitive.name
    if name == "tap":
        return [noise.observe(equation.params["name"], operands)]
    if not any(isinstance(x, PrecisionPair) for x in operands):
        return bind(equation, operands)
    if name == "stop_gradient" and noise.held is not None:
        return [
            PrecisionPair(_rounded(operands[0]), _first(_wide(operands[0]), noise.held))
        ]
    if name in _CONTROL:
        return _CONTROL[name](equation, operands, noise)
    inner = called(equation)
    if inner is not None:
        return _evaluate(inner.jaxpr, inner.consts, operands, noise, sized=sized)
    return _both_sides(equation, operands, noise, sized)


def _both_sides(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation, sized: bool
) -> Sequence[Value]:
    """Evaluates an equation without inner programs; an operand of it is a pair."""
    name = equation.primitive.name
    rounded = bind(equation, [_rounded(x) for x in operands])
    if not any(_has_sides(x) for x in rounded):
        # Its result is an integer, through which a perturbation does not pass.
        if name == "bitcast_convert_type":
            noise.unmeasured.add(name)
        return rounded
    wide = _widely(equation, operands, rounded, noise)
    if wide is None:
        noise.unmeasured.add(name)
        return [_as_pair(x) if _has_sides(x) else x for x in rounded]
    perturbed = not (noise.amplitude is None or name in _EXACT or _widens(equation))
    found: list[Value] = []
    narrow = None if noise.accumulation is None else _narrow(equation, operands)
    for r, w in zip(rounded, wide, strict=True):
        if noise.in_parts and _is_float(r) and _widens(equation):
            w = _perturb_part(w, equation, noise)
        elif perturbed and _is_float(r):
            dtypes = r.dtype, _cast_from(operands) or r.dtype
            w = _perturb(w, dtypes, _summed(equation), noise)
        size = _size(equation, operands) if sized and _is_float(r) else None
        found.append(PrecisionPair(r, w, size, narrow) if _has_sides(r) else r)
    return found


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


def _first(wide: Array, axis: str) -> Array:
    """The value at index 0, broadcast along an axis of `vmap`."""
    return jax.lax.all_gather(wide, axis)[0]


def _widely(
    equation: JaxprEqn,
    operands: list[Value],
    rounded: Sequence[Array],
    noise: Perturbation,
) -> Sequence[Array] | None:
    """The wide side of one equation; None if it cannot be evaluated in float64."""
    name = equation.primitive.name
    if name in _UNMEASURED or any(is_key(_rounded(x)) for x in operands):
        return None
    terms = 1 if noise.amplitude is None else _summed(equation)
    wide = list(map(_wide, operands))
    if terms > 1:
        dtype = _dtype_of(equation.outvars[0])
        dtypes = dtype, _cast_from(operands) or dtype
        wide = [_perturb_terms(x, dtypes, terms, noise) for x in wide]
    try:
        if name in _RULES:
            return _RULES[name](_Call(equation, operands, wide, rounded))
        found = _bind_wide(equation, wide)
    # What JAX raises for a primitive, or parameters of it, that allow no float64.
    except (TypeError, ValueError, NotImplementedError):
        return None
    # Parameters may fix the dtype or the shape of the result: it is then not wider.
    same = all(
        w.shape == r.shape and (not _is_float(r) or w.dtype == wide_of(r.dtype))
        for w, r in zip(found, rounded, strict=True)
    )
    return found if same else None


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Array]:
    """Binds an equation to operands, with its own parameters."""
    params = equation.primitive.get_bind_params(equation.params)
    # As JAX evaluates a jaxpr: with the mesh and settings of the equation's trace.
    with equation.ctx.manager:
        found = equation.primitive.bind(*operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _bind_wide(equation: JaxprEqn, wide: Sequence[Array]) -> Sequence[Array]:
    """Binds the equation with its operands in float64."""
    params = {key: _widened(key, value) for key, value in equation.params.items()}
    found = equation.primitive.bind(*wide, **params)
    return list(found) if equation.primitive.multiple_results else [found]


# ---------------------------------------------------------------------------------
# Sizes: how large a result is where the terms of its last sum do not cancel.


def _with_size(jaxpr: Jaxpr) -> frozenset[Any]:
    """The variables whose sizes make up those of a program's results."""
    passed = _CALLS | _ADDS | _MOVES | _SCALED.keys()
    wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        here = not wanted.isdisjoint(equation.outvars)
        if here and equation.primitive.name in passed:
            wanted.update(v for v in equation.invars if not isinstance(v, Literal))
    return frozenset(wanted)


def _size(equation: JaxprEqn, operands: list[Value]) -> Array | None:
    """The size of the one result of an equation; None if it is that of its value."""
    name = equation.primitive.name
    if name in _SQUARED and _summed(equation) > 1:
        wide = [_wide(x) for x in operands]
        squares = [jnp.abs(x) ** 2 if _is_float(x) else x for x in wide]
        rule = _RULES.get(name)
        found = (
            rule(_Call(equation, operands, squares))
            if rule
            else _bind_wide(equation, squares)
        )
        # A product of complex numbers asks for a complex result.
        return jnp.sqrt(jnp.abs(found[0]))
    if name in _ADDS:
        return jnp.hypot(*map(_size_of, operands))
    if not any(isinstance(x, PrecisionPair) and x.size is not None for x in operands):
        return None
    sizes = list(map(_size_of, operands))
    if name in _SCALED:
        return _SCALED[name](*sizes)
    return _bind_wide(equation, sizes)[0] if name in _MOVES else None


def _size_of(value: Value) -> Array:
    if isinstance(value, PrecisionPair) and value.size is not None:
        return value.size
    wide = _wide(value)
    return jnp.abs(wide) if _is_float(wide) else wide


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
    factors = noise.factors(wide, unit)
    if factors is None:
        return wide
    if flushes(dtype):
        return wide * factors
    # Subnormal numbers have one absolute spacing: their relative rounding error has no
    # limit, so they are perturbed as much as the smallest normal number.
    tiny = float(jnp.finfo(dtype).smallest_normal)
    least = jnp.where(jnp.abs(wide) < tiny, jnp.where(wide == 0, 0, tiny), wide)
    return wide + least * (factors - 1)


def _perturb_terms(
    wide: Array, dtypes: tuple[np.dtype, np.dtype], terms: int, noise: Perturbation
) -> Array:
    """An operand of a sum, perturbed for the roundings of its partial sums."""
    if not _is_float(wide):
        return wide
    dtype, narrow = dtypes
    unit = unit_roundoff(accumulated(narrow, noise.accumulation)) * math.sqrt(terms / 6)
    if noise.in_parts:
        # At most a rounding of every term for each of the roundings that `bound` takes.
        unit = math.hypot(unit, unit_roundoff(dtype) * math.sqrt(EXTRA))
    factors = noise.factors(wide, unit)
    return wide if factors is None else wide * factors


def _perturb_part(wide: Array, equation: JaxprEqn, noise: Perturbation) -> Array:
    """Perturbs a value cast to a wider dtype, whose sum may be of narrower parts."""
    narrow = _dtype_of(equation.invars[0])
    if not jnp.issubdtype(narrow, jnp.inexact):
        return wide
    factors = noise.factors(wide, unit_roundoff(narrow) * math.sqrt(EXTRA))
    return wide if factors is None else wide * factors


def _summed(equation: JaxprEqn) -> int:
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
_UNMEASURED = frozenset({
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


class _Flat:
    """The two sides of several values as a flat list of arrays, and back."""

    def __init__(self, paired: Sequence[bool]) -> None:
        self.paired = tuple(paired)

    def arrays(self, values: Sequence[Value]) -> list[Array]:
        flat: list[Array] = []
        for value, paired in zip(values, self.paired, strict=True):
            flat += [_rounded(value), _wide(value)] if paired else [_rounded(value)]
        return flat

    def values(self, arrays: Sequence[Array]) -> list[Value]:
        rest = iter(arrays)
        return [
            PrecisionPair(next(rest), next(rest)) if paired else next(rest)
            for paired in self.paired
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
    # Every floating carry has two sides: an iteration may make it depend on inputs.
    carry = _Flat([_has_sides(_rounded(x)) for x in start])
    along = _Flat([isinstance(x, PrecisionPair) for x in slices])
    stacked = _Flat([_has_sides(v.aval) for v in body.jaxpr.outvars[carried:]])

    def step(state: list[Array], taken: PyTree) -> PyTree:
        index, arrays = taken
        given = [*fixed, *carry.values(state), *along.values(arrays)]
        found = _evaluate(body.jaxpr, body.consts, given, loop.iteration(index))
        return carry.arrays(found[:carried]), stacked.arrays(found[carried:])

    loop, order = noise.loop(), jnp.arange(params["length"])
    last, ys = jax.lax.scan(
        step,
        carry.arrays(start),
        # A reversed scan begins with the last slice, which is its iteration 0.
        (order[::-1] if params["reverse"] else order, along.arrays(slices)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry.values(last), *stacked.values(ys)]


def _while(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    params = equation.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ends = np.cumsum([params["cond_nconsts"], params["body_nconsts"]])
    for_test, for_body, start = np.split(np.arange(len(operands)), ends)
    carry = _Flat([_has_sides(_rounded(operands[i])) for i in start])
    loop = noise.loop()

    def go_on(state: tuple[Array, list[Array]]) -> Array:
        given = [*(operands[i] for i in for_test), *carry.values(state[1])]
        # The rounded side decides for both how many iterations there are.
        rounded = [_rounded(x) for x in given]
        return _rounded(_evaluate(test.jaxpr, test.consts, rounded, noise)[0])

    def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        index, arrays = state
        given = [*(operands[i] for i in for_body), *carry.values(arrays)]
        found = _evaluate(body.jaxpr, body.consts, given, loop.iteration(index))
        return index + 1, carry.arrays(found)

    begin = (jnp.int32(0), carry.arrays([operands[i] for i in start]))
    return carry.values(jax.lax.while_loop(go_on, step, begin)[1])


def _cond(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    index, *rest = operands
    given = _Flat([isinstance(x, PrecisionPair) for x in rest])
    results: list[Any] = equation.outvars
    result = _Flat([_has_sides(v.aval) for v in results])

    def branch(program: ClosedJaxpr) -> Callable[..., list[Array]]:
        def evaluate(inside: Perturbation, *arrays: Array) -> list[Array]:
            found = _evaluate(
                program.jaxpr, program.consts, given.values(arrays), inside
            )
            return result.arrays(found)

        return lambda *arrays: evaluate(noise.inner(jnp.uint32(0)), *arrays)

    branches = [branch(program) for program in equation.params["branches"]]
    arrays = jax.lax.switch(
        _rounded(index).astype(jnp.int32), branches, *given.arrays(rest)
    )
    return result.values(arrays)


def _linear_solve(
    equation: JaxprEqn, operands: list[Value], noise: Perturbation
) -> list[Value]:
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    # The other programs serve derivatives, which are in the program already.
    before = lengths.matvec + lengths.vecmat
    constants = operands[before : before + lengths.solve]
    right_hand = operands[sum(lengths) :]
    solve = programs.solve
    return _evaluate(solve.jaxpr, solve.consts, [*constants, *right_hand], noise)


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
      wide: The operands in float64.
      rounded: The results of the rounded side; none are needed for a size.
    """

    equation: JaxprEqn
    operands: Sequence[Value]
    wide: Sequence[Array]
    rounded: Sequence[Array] = ()


def _cast(call: _Call) -> list[Array]:
    dtype = call.rounded[0].dtype
    if _is_float(call.rounded[0]):
        dtype = wide_of(dtype)
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
    places = call.rounded[1]
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


def _widened(key: str, value: object) -> object:
    """A parameter of an equation for float64."""
    if key == "precision" and value is not None:
        # The program's precision may round operands of products, on the exact side too.
        highest = jax.lax.Precision.HIGHEST
        return (highest,) * 2 if isinstance(value, tuple) else highest
    if isinstance(value, np.dtype) and jnp.issubdtype(value, jnp.inexact):
        return wide_of(value)
    return value


# ---------------------------------------------------------------------------------
# Values.


def _rounded(value: Value) -> Array:
    return value.rounded if isinstance(value, PrecisionPair) else value


def _wide(value: Value) -> Array:
    if isinstance(value, PrecisionPair):
        return value.wide
    return value.astype(wide_of(value.dtype)) if _is_float(value) else value


def _as_pair(value: Value) -> PrecisionPair:
    if isinstance(value, PrecisionPair):
        return value
    return PrecisionPair(value, _wide(value))


def _as_array(constant: ArrayLike) -> Array:
    return constant if isinstance(constant, Array) else jnp.asarray(constant)


def _dtype_of(atom: Var | Literal) -> np.dtype:
    shaped: Any = atom.aval
    return shaped.dtype


def _is_float(x: Shaped) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _has_sides(x: Shaped) -> bool:
    """Whether a value may differ between the sides: integers and keys do not."""
    return _is_float(x) or x.dtype == jnp.bool_

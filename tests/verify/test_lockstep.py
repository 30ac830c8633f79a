"""A program in two precisions: what is exact, what is shared, what is perturbed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.lockstep import Perturbation, PrecisionPair, run


def both(fn, *inputs, amplitude=None, seed=1, accumulation=None):
    """The first result of a function on both sides, and what was not measured."""
    noise = Perturbation(amplitude, jnp.uint32(seed), accumulation)
    program = jax.jit(fn).trace(*inputs).jaxpr
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(lambda *x: _sides(run(program, x, noise)[0]))(*inputs)
    return (*found, noise.unmeasured)


def _sides(value):
    assert isinstance(value, PrecisionPair)
    return value.rounded, value.wide


def scanned(x):
    """A carry of three dtypes, and stacked results."""

    def step(carry, row):
        total, count, seen = carry
        return (jnp.sin(total + row), count + 1, seen | (row > 0)), total * row

    start = (x[0], jnp.int32(0), x[0] > 9)
    (last, count, _), rows = jax.lax.scan(step, start, x)
    return last * count.astype(x.dtype) + rows.sum()


def looped(x):
    """A loop whose end depends on the values, with integers inside."""
    return jax.lax.while_loop(
        lambda s: jnp.abs(s[0]).max() < 5,
        lambda s: (jnp.sin(s[0]) + 1.5 * s[0], s[1] + 1),
        (x, 0),
    )[0]


def branched(x):
    """A branch chosen by the values."""
    return jax.lax.cond(x.sum() > 0, jnp.exp, jnp.cos, x)


def scattered(x):
    """Added up at indices that repeat."""
    return jnp.zeros(3, x.dtype).at[jnp.array([0, 2, 2, 1, 0, 2])].add(x)


def solved(x):
    """LAPACK inside a solve with a derivative rule of its own."""
    a = jnp.diag(x * x + 1) + jnp.outer(x, x)
    return jnp.linalg.solve(a, x)


EXACT = {
    "casts": lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32) * 0.1,
    "product": lambda x: jnp.outer(x, x) @ x,
    "mixed product": lambda x: jnp.dot(
        x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), preferred_element_type=x.dtype
    )[None],
    "reduced precision": lambda x: jax.lax.reduce_precision(x, 8, 3) ** 2,
    "scan": scanned,
    "while": looped,
    "cond": branched,
    "scatter": scattered,
    "solve": solved,
    "sort": lambda x: jnp.sort(x * 1.1)[::-1],
    "sort by key": lambda x: jax.lax.sort((x, x**2), num_keys=1)[1],
    "top_k": lambda x: jax.lax.top_k(x * 1.1, 3)[0],
    "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x) ** 2))),
    "straight-through": jax.grad(
        lambda x: jnp.sum(jnp.sin(x + jax.lax.stop_gradient(jnp.round(x) - x)))
    ),
    "complex": lambda x: jnp.abs(jnp.fft.fft(x)),
    "cumulative": lambda x: jnp.cumsum(jnp.log1p(x * x)),
    "custom derivative": jax.grad(lambda x: jnp.sum(jax.nn.relu(x - 0.3) ** 3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_wide_side_is_the_function_in_float64(name, rng):
    """And the rounded side the function as it is; casts are then identities."""
    fn = EXACT[name]
    x = jnp.asarray(rng.normal(size=6), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        rounded, wide, unmeasured = both(fn, x)
        np.testing.assert_array_equal(rounded, jax.jit(fn)(x))
        # What float64 makes of it, with casts that lose nothing.
        wider = jax.jit(EXACT_IN_FLOAT64.get(name, fn))(np.asarray(x, np.float64))
    assert wide.dtype == jnp.float64
    np.testing.assert_allclose(wide, wider, rtol=1e-12, atol=1e-14)
    # Not by a bound that would hold for float32 as well.
    assert np.max(np.abs(np.asarray(rounded, np.float64) - wide)) > 1e-9
    assert not unmeasured


EXACT_IN_FLOAT64 = {
    "casts": lambda x: jnp.tanh(x) * np.float32(0.1).astype(float),
    "mixed product": lambda x: jnp.dot(x, x)[None],
    "reduced precision": lambda x: x**2,
    "sort": lambda x: jnp.sort(x * np.float64(np.float32(1.1)))[::-1],
    "top_k": lambda x: jax.lax.top_k(x * np.float64(np.float32(1.1)), 3)[0],
    "custom derivative": jax.grad(
        lambda x: jnp.sum(jax.nn.relu(x - np.float64(np.float32(0.3))) ** 3)
    ),
}


def test_what_is_drawn_is_the_same_on_both_sides():
    """Noise, masks and samples are the rounded program's; float64 draws others."""
    key = jax.random.key(5)

    def fn(x):
        noise = jax.random.normal(key, x.shape, x.dtype)
        mask = jax.random.bernoulli(key, 0.4, x.shape)
        chosen = jax.random.categorical(key, jnp.log(x))
        return jnp.where(mask, x * noise, 0) * x[chosen]

    x = jnp.linspace(0.1, 3, 50, dtype=jnp.float32)
    rounded, wide, unmeasured = both(fn, x)
    np.testing.assert_allclose(rounded, wide, rtol=1e-6)
    noise = np.asarray(jax.random.normal(key, x.shape, x.dtype), np.float64)
    drawn = np.asarray(rounded) != 0
    assert 5 < drawn.sum() < 45
    chosen = np.asarray(x)[int(jax.random.categorical(key, jnp.log(x)))]
    expected = np.asarray(x, np.float64) * noise * np.float64(chosen)
    np.testing.assert_allclose(wide[drawn], expected[drawn], rtol=1e-14)
    assert not unmeasured


def test_perturbations_are_those_of_rounding(rng):
    """One product of a unit; a sum of k terms of sqrt(k) units; nothing of nothing."""
    x = jnp.asarray(rng.uniform(1, 2, size=(400, 100)), jnp.float32)
    fns = {1: lambda x: x[:, 0] * 3, 100: lambda x: x.sum(axis=1)}
    for count, fn in fns.items():
        _, exact, _ = both(fn, x, amplitude=0.0)
        _, plain, _ = both(fn, x)
        np.testing.assert_array_equal(exact, plain)
        _, drawn, _ = both(fn, x, amplitude=1.0)
        relative = np.std((drawn - exact) / exact) / 2.0**-24
        # A product: uniform within a unit. A sum: k roundings of partial sums, which
        # grow evenly where all terms have one sign, so that a third of k counts.
        expected = np.sqrt((1 if count == 1 else count / 3 + 1) / 3)
        assert 0.8 < relative / expected < 1.2, count
        _, other, _ = both(fn, x, amplitude=1.0, seed=2)
        assert (other != drawn).mean() > 0.99


def test_iterations_and_equal_equations_are_perturbed_independently(rng):
    """Or the errors of a loop would add up where rounding errors cancel."""

    def repeated(x):
        return jax.lax.fori_loop(0, 100, lambda i, x: x * 1.0, x)

    x = jnp.asarray(rng.uniform(1, 2, size=300), jnp.float32)
    _, drawn, _ = both(repeated, x, amplitude=1.0)
    wide = np.asarray(x, np.float64)
    # A hundred roundings: ten times one, not a hundred times.
    assert 7 < np.std((drawn - wide) / wide) / (2.0**-24 / np.sqrt(3)) < 13
    large = jnp.asarray(rng.uniform(1, 2, size=(100, 100)), jnp.float32)
    _, twice, _ = both(lambda x: x * 1.0 - x * 2.0 + x, large, amplitude=1.0)
    assert np.std(twice) > 2.0**-24


def test_sixteen_bit_sums_are_accumulated_as_told(rng):
    """In float32 by default; in their own dtype on request."""
    x = jnp.asarray(rng.normal(size=(50, 400)), jnp.bfloat16)
    fn = lambda x: jax.lax.reduce_sum(x, (1,))  # noqa: E731
    _, exact, _ = both(fn, x)
    spread = {}
    for accumulation in (None, jnp.bfloat16):
        _, drawn, _ = both(fn, x, amplitude=1.0, accumulation=accumulation)
        spread[accumulation] = np.std(drawn - exact)
    assert spread[jnp.bfloat16] > 5 * spread[None]


def test_what_cannot_be_evaluated_in_float64_is_named():
    """Foreign code keeps its own precision on both sides."""

    def fn(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(lambda x: np.sin(x), shape, x * 3)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 1
        return y * bits.astype(x.dtype) + x

    x = jnp.linspace(0.1, 1, 7, dtype=jnp.float32)
    rounded, wide, unmeasured = both(fn, x)
    assert unmeasured == {"pure_callback", "bitcast_convert_type"}
    np.testing.assert_allclose(rounded, wide, rtol=1e-6)

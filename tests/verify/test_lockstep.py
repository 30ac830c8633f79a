"""A program in two precisions: what is exact, what is shared, what is perturbed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.bound import wide_of
from jdist.verify.evaluation.piecewise import BOTH, Pieces


def both(fn, *inputs, amplitude=None, seed=1, accumulation=None):
    """The first result of a function on both sides, and what was not measured."""
    program = jax.jit(fn).trace(*inputs).jaxpr
    pieces, form = Pieces(program, accumulation, {}), BOTH
    if amplitude is not None:
        form = form._replace(drawn=True)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = pieces.run(inputs, form, amplitude=amplitude or 0.0, seed=seed)
    return found[0].rounded, found[0].wide, pieces.missed


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


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.reduce_sum(x, (1,)),
        # These are cast to float32 first.
        lambda x: x.sum(1),
        lambda x: x.sum(1, where=jnp.arange(400) % 9 > 0),
        lambda x: x.mean(1),
        lambda x: jnp.cumsum(x, 1)[:, -1],
    ],
)
def test_sixteen_bit_sums_are_accumulated_as_told(fn, rng):
    """In float32 by default; in their own dtype on request."""
    x = jnp.asarray(rng.normal(size=(50, 400)), jnp.bfloat16)
    _, exact, _ = both(fn, x)
    spread = {}
    for accumulation in (None, jnp.bfloat16):
        _, drawn, _ = both(fn, x, amplitude=1.0, accumulation=accumulation)
        spread[accumulation] = np.std(drawn - exact)
    assert spread[jnp.bfloat16] > 5 * spread[None]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_wider_sums_are_accumulated_in_their_own_dtype(dtype, rng):
    """Whatever is said of 16-bit numbers; and so are those of wider casts."""
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(50, 400)), jnp.float32)
        fn = lambda x: x.astype(dtype).sum(1)  # noqa: E731
        drawn = [
            both(fn, x, amplitude=1.0, accumulation=accumulation)[1]
            for accumulation in (None, jnp.bfloat16)
        ]
    np.testing.assert_array_equal(*drawn)


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


# --- equations by the number of roundings of their sums ---


def pooled(x):
    """The mean of windows of 3 x 2."""
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 2), (3, 2), "VALID")


def convolved(x):
    """A convolution of 4 x 4 images by 3 x 3 kernels, of one channel to eight."""
    images, kernel = x.reshape(-1, 4, 4, 1), jnp.ones((3, 3, 1, 8), x.dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "VALID", dimension_numbers=layout
    )


def spread_into(x):
    """Forty-eight numbers added to each of four places."""
    flat = x.reshape(-1)[:192]
    return jnp.zeros(4, x.dtype).at[jnp.arange(192) % 4].add(flat)


SUMMED = {
    "dot_general": (lambda x: x @ jnp.ones((16, 3), x.dtype), 16),
    "reduce_sum": (lambda x: x.sum(axis=1), 16),
    "reduce_window_sum": (pooled, 6),
    "conv_general_dilated": (convolved, 9),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1)[:, -1], 16),
    "scatter-add": (spread_into, 49),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_sum_is_perturbed_by_the_square_root_of_its_roundings(name, rng):
    """Of terms of one sign: a third of them counts, as partial sums grow evenly."""
    fn, terms = SUMMED[name]
    x = jnp.asarray(rng.uniform(1, 2, size=(24, 16)), jnp.float32)
    program = jax.jit(fn).trace(x).jaxpr
    inside = [e for e in program.jaxpr.eqns if e.primitive.name == name]
    inside += [
        e
        for call in program.jaxpr.eqns
        if "jaxpr" in call.params
        for e in getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"]).eqns
        if e.primitive.name == name
    ]
    assert inside, program
    _, exact, unmeasured = both(fn, x)
    assert not unmeasured
    exact = np.asarray(exact)
    draws = [both(fn, x, amplitude=1.0, seed=seed)[1] for seed in range(8)]
    relative = np.std((np.stack(draws) - exact) / exact) / 2.0**-24
    expected = np.sqrt((terms / 3 + 1 + 1 / 6) / 3)
    assert 0.6 < relative / expected < 1.5


def test_what_rounds_nothing_is_not_perturbed(rng):
    """Selections, moves and signs; casts that widen; integers and booleans."""
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)

    def moved(x):
        y = jnp.concatenate([x.T[::-1], -jnp.abs(x.T)])
        y = jnp.where(y > 0, y, jnp.pad(y, ((0, 0), (1, 0)))[:, :-1])
        return jnp.maximum(y, jax.lax.dynamic_slice(y, (1, 0), y.shape)).astype(
            jnp.float64
        )

    with jax.enable_x64(True):
        _, exact, _ = both(moved, x)
        _, drawn, unmeasured = both(moved, x, amplitude=1.0)
    np.testing.assert_array_equal(exact, drawn)
    assert not unmeasured


def test_perturbations_stay_within_a_unit_and_do_not_lean(rng):
    """Uniform in [-1, 1], of mean zero: rounding has no direction."""
    x = jnp.asarray(rng.uniform(1, 2, size=20_000), jnp.float32)
    _, exact, _ = both(lambda x: x * 3, x)
    _, drawn, _ = both(lambda x: x * 3, x, amplitude=1.0)
    units = np.asarray((drawn - exact) / exact) / 2.0**-24
    assert np.abs(units).max() <= 1 + 1e-6
    assert np.abs(units).max() > 0.99
    assert abs(units.mean()) < 4 / np.sqrt(3 * x.size)
    _, twice, _ = both(lambda x: x * 3, x, amplitude=2.0)
    np.testing.assert_allclose(twice - exact, 2 * (drawn - exact), atol=1e-14)


def test_both_parts_of_a_complex_number_are_rounded(rng):
    """Each by itself: a real factor would leave every angle as it is."""
    x = jnp.asarray(np.exp(1j * rng.uniform(0, 6, size=1000)), jnp.complex64)
    _, exact, _ = both(lambda x: x * 3, x)
    _, drawn, _ = both(lambda x: x * 3, x, amplitude=1.0)
    units = np.asarray((drawn - exact) / exact) / 2.0**-24
    for part in (units.real, units.imag):
        assert 0.9 < np.std(part) * np.sqrt(3) < 1.1
    assert abs(np.corrcoef(units.real, units.imag)[0, 1]) < 0.2


def test_narrow_numbers_keep_their_smallest_spacing(rng):
    """float16 has subnormal numbers: below the smallest normal one, its unit holds."""
    x = jnp.asarray([1.0, 1e-6, 0.0], jnp.float16)
    spread = []
    for seed in range(40):
        _, drawn, _ = both(lambda x: x * 1.5, x, amplitude=1.0, seed=seed)
        spread.append(drawn)
    _, exact, _ = both(lambda x: x * 1.5, x)
    deviation = np.std(np.stack(spread) - np.asarray(exact), axis=0)
    tiny, unit = float(jnp.finfo(jnp.float16).smallest_normal), 2.0**-11
    assert 0.4 < deviation[0] / (1.5 * unit / np.sqrt(3)) < 1.6
    assert 0.4 < deviation[1] / (tiny * unit / np.sqrt(3)) < 1.6
    assert deviation[2] == 0


# --- sizes, and what is held ---


def sized(fn, *inputs):
    """The size of a function's only result."""
    pieces = Pieces(jax.jit(fn).trace(*inputs).jaxpr, None, {})
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        form = BOTH._replace(sized=True, sizes=wide_of)
        (found,) = pieces.run(inputs, form)
    return None if found.size is None else np.asarray(found.size)


def test_the_size_of_a_sum_is_that_of_its_terms(rng):
    """The root of the sum of their squares, through moves and factors."""
    x = jnp.asarray(rng.normal(size=(5, 40)), jnp.float32)
    wide = np.asarray(x, np.float64)
    root = np.sqrt((wide**2).sum(axis=1))
    np.testing.assert_allclose(sized(lambda x: x.sum(axis=1), x), root)
    np.testing.assert_allclose(
        sized(lambda x: -3 * x.sum(axis=1)[::-1].reshape(5, 1), x),
        3 * root[::-1, None],
    )
    added = np.hypot(root, np.abs(wide[:, 0]))
    np.testing.assert_allclose(sized(lambda x: x.sum(axis=1) - x[:, 0], x), added)
    ones = jnp.ones((40, 2), jnp.float32)
    np.testing.assert_allclose(
        sized(lambda x, y: x @ y, x, ones), np.stack([root, root], axis=1)
    )
    # A product of a number with itself is no sum: its size is its own.
    assert sized(lambda x: jnp.sin(x), x) is None


def test_what_is_decided_is_decided_once():
    """An argmax by the rounded side, a comparison by each side for itself."""
    big = jnp.float32(2**24)

    def chosen(x):
        y = jnp.stack([x + 1, x + 0.5, x])  # 2^24 + 1 is not in float32.
        return y[jnp.argmax(y)]

    rounded, wide, _ = both(chosen, big)
    assert float(rounded) == 2**24
    assert float(wide) == 2**24 + 1

    def largest(x):
        # A tie in float32, of which the first is taken.
        return jax.lax.top_k(jnp.stack([x, x + 1]), 1)[0]

    rounded, wide, _ = both(largest, big)
    assert (float(rounded[0]), float(wide[0])) == (2**24, 2**24)

    def compared(x):
        return jnp.where(x + 1 > x, x, -x)

    rounded, wide, _ = both(compared, big)
    assert (float(rounded), float(wide)) == (-(2.0**24), 2.0**24)

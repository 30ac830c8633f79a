"""The shadow execution of JAX's primitives, one by one, beside JAX in float64.

Each function is traced in float32. Its rounded side must be JAX's own run; its wide
side must be the function in float64; and a perturbed run must differ from it by
roundings where the primitive rounds, and by nothing where it does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdist.verify.evaluation.lockstep import _EXACT
from jdist.verify.evaluation.piecewise import BOTH, Pieces

SIZE = 12

# Of x in (0.1, 0.9), in float32 numbers.
ELEMENTWISE = [
    lax.abs, lax.acos, lax.acosh, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.cbrt,
    lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv, lax.erfc, lax.exp, lax.exp2,
    lax.expm1, lax.floor, lax.integer_pow, lax.lgamma, lax.log, lax.log1p, lax.logistic,
    lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh, lax.sqrt, lax.square,
    lax.tan, lax.tanh,
]  # fmt: skip

BINARY = [
    lax.add, lax.atan2, lax.div, lax.max, lax.min, lax.mul, lax.nextafter, lax.pow,
    lax.rem, lax.sub,
]  # fmt: skip

# JAX may approximate these in float32 and float64 by different series.
LOOSE = {"digamma", "lgamma", "erf_inv"}


def named(functions):
    return {fn.__name__: fn for fn in functions}


def matrix(x):
    """Symmetric, and far from singular."""
    rows = x[:9].reshape(3, 3)
    return rows @ rows.T + 2 * jnp.eye(3, dtype=x.dtype)


SHAPED = {
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (SIZE, 3)),
    "clamp": lambda x: lax.clamp(x[:1][0] * 0 + x.dtype.type(0.25), x, x * 2),
    "concatenate": lambda x: jnp.concatenate([x[:3], x[7:] * x[:5]]),
    "cumulative sum": jnp.cumsum,
    "cumulative product": jnp.cumprod,
    "cumulative maximum": lambda x: lax.cummax(x * x[::-1]),
    "cumulative log of a sum": lambda x: lax.cumlogsumexp(x),
    "dot": lambda x: x.reshape(3, 4) @ x.reshape(4, 3),
    "batched dot": lambda x: jnp.einsum(
        "bij,bjk->bik", *[x.reshape(2, 2, 3)[:, :, :2]] * 2
    ),
    "convolution": lambda x: jnp.convolve(x, x[:4], mode="same"),
    "strided convolution": lambda x: lax.conv_general_dilated(
        x.reshape(1, 1, SIZE), x[:3].reshape(1, 1, 3), (2,), "SAME"
    ),
    "dynamic slice": lambda x: lax.dynamic_slice(x * x, (jnp.int32(3),), (5,)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x * x, x[:2], (jnp.int32(4),)),
    "gather": lambda x: (x * x)[jnp.array([3, 0, 3, 11])],
    "gather by value": lambda x: x[(x * 10).astype(jnp.int32)],
    "maximum": lambda x: (x * x).reshape(3, 4).max(axis=1),
    "maximum of windows": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (3,), (2,), "VALID"
    ),
    "pad": lambda x: lax.pad(x * x, x[0], ((1, 2, 1),)),
    "product": lambda x: lax.reduce_prod(x.reshape(3, 4), (1,)),
    "reverse": lambda x: (x * x)[::-1],
    "scatter add": lambda x: jnp.zeros_like(x).at[jnp.arange(SIZE) // 3].add(x),
    "scatter maximum": lambda x: jnp.zeros_like(x).at[jnp.arange(SIZE) // 3].max(x * x),
    "scatter minimum": lambda x: jnp.ones_like(x).at[jnp.arange(SIZE) // 3].min(x * x),
    "scatter product": lambda x: jnp.ones_like(x).at[jnp.arange(SIZE) // 3].mul(x),
    "scatter set": lambda x: (x * x).at[jnp.array([4, 2])].set(x[:2]),
    "select": lambda x: jnp.where(x > x[::-1], x * x, x + x),
    "softmax": lambda x: jax.nn.softmax(x.reshape(3, 4), axis=1),
    "sort": lambda x: jnp.sort(x * x[::-1]),
    "sort of several": lambda x: lax.sort((x, x * x, -x), num_keys=1)[2],
    "split": lambda x: jnp.split(x * x, 3)[1],
    "standard deviation": lambda x: x.reshape(3, 4).std(axis=0),
    "sum of windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (4,), (2,), "VALID"),
    "top k": lambda x: lax.top_k(x * x[::-1], 4)[0],
    "transpose": lambda x: (x * x).reshape(3, 4).T,
    "triangular solve": lambda x: lax.linalg.triangular_solve(
        matrix(x), x[:3][:, None], left_side=True, lower=True
    ),
    "Cholesky": lambda x: jnp.linalg.cholesky(matrix(x)),
    "determinant": lambda x: jnp.linalg.det(matrix(x))[None],
    "inverse": lambda x: jnp.linalg.inv(matrix(x)),
    "Fourier": lambda x: jnp.fft.ifft(jnp.fft.fft(x) * 2).real,
    "complex product": lambda x: (lax.complex(x, x * x) ** 2).imag,
    "vmap of a branch": lambda x: jax.vmap(
        lambda x: lax.cond(x > 0.5, jnp.sin, jnp.cos, x)
    )(x),
    "map": lambda x: lax.map(lambda x: jnp.sin(x) * x, x),
    "reversed scan": lambda x: lax.scan(
        lambda c, x: (c * x + x, c), x[0], x, reverse=True
    )[1],
    "associative scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "nested loops": lambda x: lax.fori_loop(
        0, 3, lambda i, x: lax.fori_loop(0, i, lambda _, x: x * x, x) + x, x
    ),
    "Jacobian": lambda x: jax.jacfwd(lambda x: jnp.sin(x) * x.sum())(x),
    "Hessian": lambda x: jax.hessian(lambda x: jnp.sum(jnp.sin(x[:4]) * x[1]))(x[:4]),
}

FUNCTIONS = {
    **{n: lambda x, f=f: f(x, 3) for n, f in named([lax.integer_pow]).items()},
    **{n: f for n, f in named(ELEMENTWISE).items() if n != "integer_pow"},
    "acosh": lambda x: lax.acosh(x + 1),
    **{n: lambda x, f=f: f(x, x[::-1]) for n, f in named(BINARY).items()},
    **SHAPED,
}

# The next number of its own type, which is another one in float64.
OTHER = {"nextafter"}


def given(name):
    """Numbers of float32, no two alike, none near a kink of the functions above."""
    rng = np.random.default_rng(len(name))
    return jnp.asarray(rng.permutation(np.linspace(0.11, 0.89, SIZE)), jnp.float32)


def sides(fn, x, amplitude):
    """Both sides of the first result, and what was not measured."""
    pieces = Pieces(jax.jit(fn).trace(x).jaxpr, None, {})
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        drawn = BOTH._replace(drawn=True)
        (found,) = pieces.run([x], drawn, amplitude=amplitude, seed=3)
        return np.asarray(found.rounded), np.asarray(found.wide), pieces.missed


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - OTHER))
def test_each_is_itself_in_float64(name):
    """Beside JAX's own run in both precisions; nothing stays unmeasured."""
    fn, x = FUNCTIONS[name], given(name)
    with jax.numpy_dtype_promotion("standard"):
        rounded, wide, unmeasured = sides(fn, x, 0.0)
        # Not bit by bit: XLA may fuse it in another way.
        np.testing.assert_allclose(rounded, jax.jit(fn)(x), rtol=2.0**-22)
        with jax.enable_x64(True):
            wider = np.asarray(fn(jnp.asarray(np.asarray(x, np.float64))))
    assert wide.dtype == np.float64 == wider.dtype
    rtol = 1e-9 if name in LOOSE else 1e-12
    np.testing.assert_allclose(wide, wider, rtol=rtol, atol=1e-13)
    assert not unmeasured


# They select, move or negate: no digit is lost.
KEPT = {
    "abs", "broadcast", "floor", "max", "min", "neg", "round", "sign",
    "gather by value", "maximum of windows", "sort of several",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - OTHER))
def test_each_is_perturbed_where_it_rounds(name):
    """By some float32 roundings, more where it is a chain of them; else not at all."""
    fn, x = FUNCTIONS[name], given(name)
    with jax.numpy_dtype_promotion("standard"):
        _, exact, _ = sides(fn, x, 0.0)
        _, perturbed, _ = sides(fn, x, 1.0)
    if name in KEPT:
        np.testing.assert_array_equal(perturbed, exact)
        return
    relative = np.max(np.abs(perturbed - exact)) / np.max(np.abs(exact))
    assert 2.0**-30 < relative < 2.0**-24 * 64


def test_the_table_has_every_exact_primitive_of_one_argument():
    """What is taken to round nothing is among what is tried here, if it is a number."""
    tried = set(named([*ELEMENTWISE, *BINARY]))
    assert KEPT & tried <= _EXACT
    assert {"abs", "floor", "max", "min", "neg", "round", "sign"} <= tried & _EXACT

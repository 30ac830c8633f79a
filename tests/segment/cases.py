"""The functions that promises are tested on, and what theory says of each.

All sizes differ, so that a transposed or swapped array cannot pass. `kept` is the
number of bytes that one forward pass must keep beside its inputs and outputs, derived
beside each case: it is never read off what the library does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BATCH, IN, HIDDEN, OUT, LAYERS = 12, 5, 7, 3, 4


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the facts that follow from its formula.

    Attributes:
      fn: `fn(params, *inputs)`.
      params: Made from a generator of random numbers.
      inputs: Made from a generator of random numbers; different in each call.
      kept: Bytes kept per forward pass, beyond inputs and outputs.
      roundings: Bound on the roundings along one path from argument to gradient, for
        comparisons; a sum of n terms counts as n.
      unit: The coarsest rounding unit met on the way.
    """

    fn: Callable[..., Any]
    params: Callable[[np.random.Generator], Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    kept: int
    roundings: int = 300
    unit: float = 2.0**-24


def normal(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _weights(**shapes):
    return lambda rng: {name: normal(rng, *shape) for name, shape in shapes.items()}


def _rows(rng):
    return (normal(rng, BATCH, IN),)


def _linear(p, x):
    return x @ p["w"]


def _transposed(p, x):
    return x @ p["w"].T


def _cast(p, x):
    half = jnp.bfloat16
    return (x.astype(half) @ p["w"].astype(half)).astype(jnp.float32)


def _weight_norm(p, x):
    norm = jnp.sqrt(jnp.sum(p["v"] ** 2, axis=0, keepdims=True))
    return x @ (p["v"] / norm * p["g"])


def _tied(p, x):
    hidden = jnp.tanh(x @ p["w"])
    return hidden @ p["w"].T


def _relu_mlp(p, x):
    hidden = jax.nn.relu(x @ p["w1"] + p["b1"])
    return hidden @ p["w2"] + p["b2"]


def _gelu_mlp(p, x):
    hidden = jax.nn.gelu(x @ p["w1"] + p["b1"])
    return hidden @ p["w2"] + p["b2"]


def _tanh_mlp(p, x):
    hidden = jnp.tanh(x @ p["w1"] + p["b1"])
    return jnp.tanh(hidden @ p["w2"] + p["b2"])


def _unused(p, x, y):
    return jnp.sin(x @ p["w"]), y * p["s"]


def _low_rank(p, x):
    return jnp.tanh(x @ (p["u"] @ p["v"])) @ p["w"]


def _embedding(p, tokens):
    return jnp.tanh(p["table"][tokens]) @ p["w"]


def _dropout(p, x, key):
    hidden = x @ p["w1"]
    keep = jax.random.bernoulli(key, 0.75, hidden.shape)
    return jnp.where(keep, hidden / 0.75, 0) @ p["w2"]


def _cross_entropy(p, x, labels):
    logits = x @ p["w"]
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


SEQUENCES, TOKENS, WIDTH, HEADS, INNER = 2, 6, 8, 2, 20


def _layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def _transformer(p, x):
    b, t, d = x.shape
    u = _layer_norm(x, p["scale1"], p["bias1"])
    q, k, v = ((u @ p[n]).reshape(b, t, HEADS, d // HEADS) for n in ("q", "k", "v"))
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / math.sqrt(d // HEADS)
    mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(b, t, d) @ p["o"]
    u = _layer_norm(x, p["scale2"], p["bias2"])
    return x + jax.nn.gelu(u @ p["up"] + p["b"]) @ p["down"]


def _transformer_params(rng):
    d, f = WIDTH, INNER
    shapes = {
        "scale1": (1, 1, d), "bias1": (1, 1, d), "q": (d, d), "k": (d, d), "v": (d, d),
        "o": (d, d), "scale2": (1, 1, d), "bias2": (1, 1, d), "up": (d, f),
        "b": (1, 1, f), "down": (f, d),
    }  # fmt: skip
    return {name: normal(rng, *shape) / 2 for name, shape in shapes.items()}


def _transformer_bytes():
    """Of each layer norm mean and variance; q, k, v; the softmax's exponentials and
    their sums, which JAX divides at the end; the mixed values; the stream between the
    halves; the input of gelu. All else is element-wise.
    """
    rows = SEQUENCES * TOKENS
    arrays = 2 * 2 + 3 * WIDTH + HEADS * (TOKENS + 1) + WIDTH + WIDTH + INNER
    return 4 * rows * arrays


PIXELS, CHANNELS, FILTERS = 6, 3, 5


class ConvNorm(nnx.Module):
    """Convolution, batch normalisation and relu, with running statistics."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(CHANNELS, FILTERS, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(FILTERS, rngs=rngs)

    def __call__(self, x):
        return jax.nn.relu(self.norm(self.conv(x)))


GRAPH, _, _ = nnx.split(ConvNorm(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)


def _conv_norm(p, stats, x):
    model = nnx.merge(GRAPH, p, stats)
    y = model(x)
    return y, nnx.state(model, nnx.BatchStat)


def _conv_norm_params(rng):
    _, params, _ = nnx.split(ConvNorm(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    return jax.tree.map(lambda x: normal(rng, *x.shape), params)


def _conv_norm_inputs(rng):
    _, _, stats = nnx.split(ConvNorm(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    stats = jax.tree.map(lambda x: jnp.abs(normal(rng, *x.shape)), stats)
    return stats, normal(rng, BATCH, PIXELS, PIXELS, CHANNELS)


def _scanned(p, x):
    def layer(h, w):
        return jnp.sin(h @ w.T), None

    return jax.lax.scan(layer, x, p["w"])[0]


def _scanned_gelu(p, x):
    def layer(h, slices):
        w, b = slices
        return jax.nn.gelu(h @ w.T + b), h.sum()

    return jax.lax.scan(layer, x, (p["w"], p["b"]), reverse=True)


def _complex(p, x):
    return jnp.exp(0.3j * (x @ p["w"])).real


ROWS = BATCH * HIDDEN  # Elements of one hidden layer's activations.

CASES = {
    # dW = x^T g, dx = g W^T: nothing but the input.
    "linear": Case(_linear, _weights(w=(IN, OUT)), _rows, 0),
    "transposed": Case(_transposed, _weights(w=(OUT, IN)), _rows, 0),
    # The half-precision input is half as large as the input itself. Gradients leave
    # bf16 products rounded to 8 bits; the sums inside are float32.
    "cast": Case(
        _cast, _weights(w=(IN, OUT)), _rows, 2 * BATCH * IN, roundings=4, unit=2.0**-8
    ),
    "weight_norm": Case(_weight_norm, _weights(v=(IN, OUT), g=(1, OUT)), _rows, 0),
    # One parameter used twice: tanh(z) serves as its slope and as the next factor.
    "tied": Case(_tied, _weights(w=(IN, HIDDEN)), _rows, 4 * ROWS),
    # The hidden layer, and one byte an element for which side of 0 it was on.
    "relu_mlp": Case(
        _relu_mlp,
        _weights(w1=(IN, HIDDEN), b1=(1, HIDDEN), w2=(HIDDEN, OUT), b2=(1, OUT)),
        _rows,
        4 * ROWS + ROWS,
    ),
    # Value and slope of gelu both follow from its argument.
    "gelu_mlp": Case(
        _gelu_mlp,
        _weights(w1=(IN, HIDDEN), b1=(1, HIDDEN), w2=(HIDDEN, OUT), b2=(1, OUT)),
        _rows,
        4 * ROWS,
    ),
    # The last tanh is the output, which is kept by reference.
    "tanh_mlp": Case(
        _tanh_mlp,
        _weights(w1=(IN, HIDDEN), b1=(1, HIDDEN), w2=(HIDDEN, OUT), b2=(1, OUT)),
        _rows,
        4 * ROWS,
    ),
    # The slope of the sine needs its argument.
    "unused": Case(
        _unused,
        _weights(w=(IN, OUT), s=(1, HIDDEN), idle=(2,)),
        lambda rng: (normal(rng, BATCH, IN), normal(rng, BATCH, HIDDEN)),
        4 * BATCH * OUT,
    ),
    # u @ v is made again.
    "low_rank": Case(
        _low_rank, _weights(u=(IN, 2), v=(2, HIDDEN), w=(HIDDEN, OUT)), _rows, 4 * ROWS
    ),
    # tanh of the looked-up rows; the token ids are inputs.
    "embedding": Case(
        _embedding,
        _weights(table=(11, HIDDEN), w=(HIDDEN, OUT)),
        lambda rng: (jnp.asarray(rng.integers(0, 11, BATCH), jnp.int32),),
        4 * ROWS,
    ),
    # The product, and the mask in bytes, not the random bits behind it.
    "dropout": Case(
        _dropout,
        _weights(w1=(IN, HIDDEN), w2=(HIDDEN, OUT)),
        lambda rng: (*_rows(rng), jax.random.key(int(rng.integers(1 << 30)))),
        4 * ROWS + ROWS,
    ),
    "transformer": Case(
        _transformer,
        _transformer_params,
        lambda rng: (normal(rng, SEQUENCES, TOKENS, WIDTH),),
        _transformer_bytes(),
    ),
    # The convolution; the sign of relu's argument; mean and clipped variance of each
    # filter; and of the clipping at 0 whether it happened, and whether it was a tie.
    "conv_norm": Case(
        _conv_norm,
        _conv_norm_params,
        _conv_norm_inputs,
        (4 + 1) * BATCH * PIXELS**2 * FILTERS + (4 + 4 + 1 + 1) * FILTERS,
        roundings=3000,  # Sums over 12 x 6 x 6 pixels, twice, and their squares.
    ),
    # A loop keeps what its body's derivative reads: each layer's input and its slope.
    "scanned": Case(
        _scanned, _weights(w=(LAYERS, IN, IN)), _rows, 2 * 4 * LAYERS * BATCH * IN
    ),
    # Each layer's input and the argument of gelu; the sums are outputs.
    "scanned_gelu": Case(
        _scanned_gelu,
        _weights(w=(LAYERS, IN, IN), b=(LAYERS, 1, IN)),
        _rows,
        2 * 4 * LAYERS * BATCH * IN,
    ),
    "complex": Case(
        _complex,
        lambda rng: {"w": normal(rng, IN, OUT, dtype=np.complex64)},
        lambda rng: (normal(rng, BATCH, IN, dtype=np.complex64),),
        8 * BATCH * OUT,
    ),
    # The logits, their log-sum (the outcome of two reductions), and whether the largest
    # logit of a row is finite.
    "cross_entropy": Case(
        _cross_entropy,
        _weights(w=(IN, OUT)),
        lambda rng: (*_rows(rng), jnp.asarray(rng.integers(0, OUT, BATCH), jnp.int32)),
        4 * BATCH * OUT + 4 * BATCH + BATCH,
    ),
}


def cotangents(rng, outputs):
    """Random cotangents for a tree of outputs; None where there can be none."""

    def like(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return None
        values = rng.standard_normal(x.shape)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            values = values + 1j * rng.standard_normal(x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(like, outputs)


def reference(fn, params, inputs, d_outputs):
    """Gradients by `jax.vjp`, with None for what is not floating."""
    leaves, structure = jax.tree.flatten((params, inputs))
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

    def outputs_of(trained):
        given = iter(trained)
        merged = [
            next(given) if is_floating else x
            for x, is_floating in zip(leaves, floating, strict=True)
        ]
        params, inputs = jax.tree.unflatten(structure, merged)
        found = jax.tree.leaves(fn(params, *inputs))
        return [x for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]

    trained = [
        x for x, is_floating in zip(leaves, floating, strict=True) if is_floating
    ]
    pull = jax.jit(lambda trained, given: jax.vjp(outputs_of, trained)[1](given))
    (found,) = pull(trained, jax.tree.leaves(d_outputs))
    found = iter(found)
    merged = [next(found) if is_floating else None for is_floating in floating]
    return jax.tree.unflatten(structure, merged)


def assert_close(got, expected, case=None, roundings=300, unit=2.0**-24):
    """Equal up to a number of roundings, relative to each leaf's largest value.

    Each rounding on the way to a value is relative to an intermediate one; data and
    weights are of order one, so intermediates exceed the largest result by a small
    factor only, for which the numbers of roundings have room. None and absent are
    compared too; where the reference has zeros, a segment may say None.
    """
    if case is not None:
        roundings, unit = case.roundings, case.unit
    pairs = zip(
        jax.tree.leaves_with_path(got, is_leaf=lambda x: x is None),
        jax.tree.leaves_with_path(expected, is_leaf=lambda x: x is None),
        strict=True,
    )
    for (path, a), (other, b) in pairs:
        assert path == other
        if a is None:
            assert b is None or not np.any(b), path
            continue
        assert a.shape == b.shape, path
        assert a.dtype == b.dtype, path
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        assert np.all(np.isfinite(a)), path
        bound = roundings * unit * np.max(np.abs(b), initial=0)
        error = np.max(np.abs(a - b), initial=0)
        assert error <= bound, f"{path}: off by {error}, bound {bound}"


def assert_same_bits(got, expected):
    """Equal bit for bit, in structure, dtypes and shapes too."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

"""Segments: two compiled halves beside bare jitted halves and the whole gradient.

`python -m benchmarks.segment` prints the memory that forward passes in flight hold.
"""

import gc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks._goals import Figure, Goal, ratio, scaled
from benchmarks._harness import Case, race
from jdist.segment import Segment, segment

Function = Callable[..., Any]
IN_FLIGHT = 8


def measure() -> list[Case]:
    """The cost per call of an empty segment; two blocks beside `jax.value_and_grad`."""
    return [
        empty(),
        block("transformer block", *transformer()),
        block("ResNet block", *resnet()),
    ]


# --- the cost of a call ---


def empty() -> Case:
    """An elementwise 3 x 3 product, so small that only the cost of calls is timed."""

    def fn(p: Any, x: Any) -> Any:
        return p * x

    p, x, d = (jax.random.normal(jax.random.key(i), (3, 3)) for i in range(3))
    seg = segment(fn)
    forward, backward = bare_halves(fn)

    def bare() -> Any:
        _, pull_back = forward(p, x)
        return backward(pull_back, d)

    def halves() -> Any:
        _, residuals = seg.forward(p, x)
        return seg.backward(p, residuals, d)

    def split() -> Any:
        _, residuals = seg.forward(p, x)
        _, rest = seg.backward_inputs(p, residuals, d)
        return seg.backward_params(rest)

    contenders = {
        "bare jitted halves": bare,
        "segment": halves,
        "segment, split": split,
    }
    note = "forward + backward of an empty function"
    timings = race(contenders, rounds=30, calls=1000)
    first, found = timings["bare jitted halves"], timings["segment"]
    above = Figure(
        found.median - first.median, found.low - first.high, found.high - first.low
    )
    goals = [Goal("above bare jitted halves", scaled(above, 1e6), 15.0, unit=" us")]
    name = "empty segment, one call of each half"
    return Case(name, timings, note=note, goals=goals)


def bare_halves(fn: Function) -> tuple[Function, Function]:
    """`jax.vjp` under `jax.jit`, and the pull-back under `jax.jit`."""
    return jax.jit(lambda p, *x: jax.vjp(fn, p, *x)), jax.jit(lambda pull, d: pull(d))


# --- blocks beside the whole gradient ---


def block(name: str, fn: Function, params: Any, inputs: tuple[Any, ...]) -> Case:
    """The loss <outputs, target> and its gradients, as one program and in halves."""
    target = jax.tree.map(jnp.cos, fn(params, *inputs)[0])
    pair = jax.jit(lambda y: jnp.vdot(y, target).real)

    def loss(params: Any, *inputs: Any) -> tuple[Any, Any]:
        y, *state = fn(params, *inputs)
        return jnp.vdot(y, target).real, state

    every = tuple(range(1 + len(inputs)))
    whole = jax.jit(jax.value_and_grad(loss, argnums=every, has_aux=True))
    forward, backward = bare_halves(fn)
    plain, again = segment(fn), segment(fn, recompute=True)

    def bare() -> Any:
        (y, *state), pull_back = forward(params, *inputs)
        zeros = jax.tree.map(jnp.zeros_like, state)
        return pair(y), backward(pull_back, (target, *zeros))

    def halves(seg: Segment) -> Any:
        (y, *state), residuals = seg.forward(params, *inputs)
        d_outputs = (target, *(None for _ in state))
        return pair(y), seg.backward(params, residuals, d_outputs)

    def split() -> Any:
        (y, *state), residuals = plain.forward(params, *inputs)
        d_outputs = (target, *(None for _ in state))
        d_inputs, rest = plain.backward_inputs(params, residuals, d_outputs)
        return pair(y), d_inputs, plain.backward_params(rest)

    timings = race(
        {
            "value_and_grad of the whole": lambda: whole(params, *inputs),
            "segment": lambda: halves(plain),
            "segment, split": split,
            "segment, recompute=True": lambda: halves(again),
            "bare jitted halves": bare,
        },
        rounds=30,
        warmup=3,
    )
    kept = [in_flight(run, params, [inputs]) for run in (plain.forward, forward)]
    note = (
        f"beside inputs and outputs one forward pass keeps {kept[0] / 2**20:.1f} MiB "
        f"as a segment, {kept[1] / 2**20:.1f} MiB as bare halves; parameters are "
        f"{nbytes(params) / 2**20:.1f} MiB"
    )
    whole_took = timings["value_and_grad of the whole"]
    goals = [Goal("of the whole", ratio(timings["segment"], whole_took), 1.05)]
    shapes = ", ".join(str(x.shape) for x in jax.tree.leaves(inputs) if x.ndim > 1)
    return Case(f"{name}, {shapes}", timings, note=note, goals=goals)


def _large() -> bool:
    return jax.default_backend() != "cpu"


def transformer() -> tuple[Function, Any, tuple[Any, ...]]:
    """Pre-norm attention and gelu; float32 parameters, bfloat16 products on a GPU."""
    b, t, d, heads = (8, 1024, 1024, 16) if _large() else (4, 128, 256, 8)
    compute = jnp.bfloat16 if _large() else jnp.float32
    shapes = {
        "qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d),
        "scale1": (d,), "scale2": (d,), "bias": (4 * d,),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return (
            x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
        ).astype(compute)

    def fn(p: Any, x: Any) -> tuple[Any]:
        half = jax.tree.map(lambda w: w.astype(compute), p)
        qkv = norm(x, p["scale1"]) @ half["qkv"]
        q, k, v = jnp.split(qkv.reshape(b, t, heads, 3 * d // heads), 3, axis=-1)
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / math.sqrt(d // heads)
        shares = jax.nn.softmax(scores.astype(jnp.float32)).astype(compute)
        mixed = jnp.einsum("bhts,bshe->bthe", shares, v).reshape(b, t, d)
        x = x + (mixed @ half["out"]).astype(x.dtype)
        inner = jax.nn.gelu(norm(x, p["scale2"]) @ half["up"] + half["bias"])
        return (x + (inner @ half["down"]).astype(x.dtype),)

    return fn, params, (jax.random.normal(jax.random.key(1), (b, t, d)),)


class Bottleneck(nnx.Module):
    """ResNet's block of three convolutions with batch normalisation."""

    def __init__(self, width: int, inner: int, rngs: nnx.Rngs) -> None:
        """Makes the parameters."""
        sizes = [(width, inner, 1), (inner, inner, 3), (inner, width, 1)]
        self.convs = nnx.List(
            nnx.Conv(a, b, (k, k), use_bias=False, rngs=rngs) for a, b, k in sizes
        )
        self.norms = nnx.List(nnx.BatchNorm(b, rngs=rngs) for _, b, _ in sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images, `(batch, height, width, channels)`, to the same shape."""
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = jax.nn.relu(x + y if number == 2 else y)
        return y


def resnet() -> tuple[Function, Any, tuple[Any, ...]]:
    """A bottleneck block in training mode; running statistics are input and output."""
    b, size, width = (64, 56, 256) if _large() else (4, 28, 64)
    model = Bottleneck(width, width // 4, nnx.Rngs(0))
    graph, *states = nnx.split(model, nnx.Param, nnx.BatchStat)
    params, stats = states

    def fn(params: Any, stats: Any, x: Any) -> tuple[Any, Any]:
        merged = nnx.merge(graph, params, stats)
        return merged(x), nnx.state(merged, nnx.BatchStat)

    x = jax.random.normal(jax.random.key(1), (b, size, size, width))
    return fn, params, (stats, x)


# --- memory ---


def in_flight(
    forward: Function, params: Any, micro_batches: list[tuple[Any, ...]]
) -> int:
    """Bytes that forward passes in flight hold beyond arguments and outputs."""
    jax.block_until_ready(forward(params, *micro_batches[0]))
    # Arrays in uncollected cycles would count as live.
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    held = [forward(params, *inputs) for inputs in micro_batches]
    jax.block_until_ready(held)
    gc.collect()
    now = sum(x.nbytes for x in jax.live_arrays())
    return now - before - nbytes([outputs for outputs, _ in held])


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def memory() -> Table:
    """MiB of 8 forward passes in flight with 16 MiB of parameters, by method."""
    side, rows = 2048, 256
    w = {"w": jax.random.normal(jax.random.key(0), (side, side))}
    pair = {"w": w["w"][: side // 2], "v": w["w"][: side // 2].T}
    stack = {"w": w["w"].reshape(16, side // 4, side // 4)}
    half = jnp.bfloat16
    functions: dict[str, tuple[Function, Any, int]] = {
        "x @ W": (lambda p, x: x @ p["w"], w, side),
        "x @ W.T": (lambda p, x: x @ p["w"].T, w, side),
        "x @ W in bfloat16": (
            lambda p, x: (x.astype(half) @ p["w"].astype(half)).astype(x.dtype),
            w,
            side,
        ),
        "weight norm": (
            lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)),
            w,
            side,
        ),
        "tanh(x @ W) @ V": (
            lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
            pair,
            side // 2,
        ),
        "relu(x @ W) @ V": (
            lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"],
            pair,
            side // 2,
        ),
        "gelu(x @ W) @ V": (
            lambda p, x: jax.nn.gelu(x @ p["w"]) @ p["v"],
            pair,
            side // 2,
        ),
        "scan of 16 tanh(h @ W)": (
            lambda p, x: _scan(lambda h, w: jnp.tanh(h @ w), p, x),
            stack,
            side // 4,
        ),
        "scan of 16 gelu(h @ W)": (
            lambda p, x: _scan(lambda h, w: jax.nn.gelu(h @ w), p, x),
            stack,
            side // 4,
        ),
    }
    routes: dict[str, Callable[[Function], Function]] = {
        "jit(vjp)": lambda fn: bare_halves(fn)[0],
        "vjp(jit)": lambda fn: lambda p, x: jax.vjp(jax.jit(fn), p, x),
        "segment": lambda fn: segment(fn).forward,
        'segment, "dots"': lambda fn: segment(fn, recompute="dots").forward,
        "segment, True": lambda fn: segment(fn, recompute=True).forward,
    }
    shown = Table("function", *routes, title="MiB of 8 forward passes in flight")
    for name, (fn, params, width) in functions.items():
        keys = jax.random.split(jax.random.key(1), IN_FLIGHT)
        batches = [(jax.random.normal(key, (rows, width)),) for key in keys]
        cells = [in_flight(route(fn), params, batches) for route in routes.values()]
        shown.add_row(name, *(f"{cell / 2**20:.1f}" for cell in cells))
    return shown


def _scan(layer: Function, params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (layer(h, w), None), x, params["w"])[0]


if __name__ == "__main__":
    Console().print(memory())

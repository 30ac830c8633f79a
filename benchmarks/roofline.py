"""Does the roofline of `jdist.targets` predict the steps of this CPU?

Peak and bandwidth are measured by a product of 1536 x 1536 and by a sum of two arrays
of 128 MiB, in the same rounds as the five programs. The estimate is then made from the
compiled programs, as for hardware that is not available. It is shown as the physical
limit, with its share of the measured step: 100 % would be an exact estimate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks._harness import Case, race
from jdist import optim, targets

PRODUCT = 1536
ELEMENTS = 2**25
"""The elements of each array of the sum; three arrays cross the memory bus."""


class Timed(NamedTuple):
    """A program and its arguments."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]


def measure() -> list[Case]:
    """Times two yardsticks, for peak and bandwidth, and five programs in turn."""
    programs = {
        "training step, 3 layers of 1024": dense(),
        "Adam, 16 M parameters": adam(),
        "convolution net, gradient": convolutions(),
        "attention, gradient": attention(),
        "recurrent net, 64 turns, gradient": recurrence(),
    }
    x = jnp.ones((PRODUCT, PRODUCT))
    y = jnp.ones(ELEMENTS)
    yardsticks = {
        "product": Timed(lambda x: x @ x, (x,)),
        "sum": Timed(lambda y, z: y + z, (y, y * 2)),
    }
    everything = {
        name: compiled(each) for name, each in (yardsticks | programs).items()
    }
    timings = race(everything, rounds=15)
    chip = targets.Chip(
        "this CPU",
        "cpu",
        2**36,
        3 * 4 * ELEMENTS / timings["sum"].median,
        {"float32": 2 * PRODUCT**3 / timings["product"].median},
        source="measured here",
    )
    here = targets.Hardware(chip, (1,))
    figures = f"{chip.peak_flops['float32'] / 1e9:.0f} GFLOP/s, "
    figures += f"{chip.bandwidth / 1e9:.1f} GB/s"
    cases = []
    for name, each in programs.items():
        found = targets.compile(each.fn, *each.arguments, target=here)
        share = (found.seconds or 0.0) / timings[name].median
        note = (
            f"estimated {share:.0%} of measured: {found.flops / 1e9:.3g} GFLOP, "
            f"{found.bytes_accessed / 1e9:.3g} GB at {figures}"
        )
        cases.append(Case(name, {"measured": timings[name]}, found.seconds, note))
    return cases


def compiled(timed: Timed) -> Callable[[], Any]:
    """The compiled program as a contender."""
    ready = jax.jit(timed.fn).lower(*timed.arguments).compile()
    return lambda: ready(*timed.arguments)


def dense() -> Timed:
    """Forward, backward and an SGD step of three layers."""
    key = jax.random.key(0)
    layers = [jax.random.normal(key, (1024, 1024)) / 32] * 3
    x = jax.random.normal(key, (512, 1024))

    def step(layers: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(layers: list[jax.Array]) -> jax.Array:
            h = x
            for w in layers:
                h = jax.nn.relu(h @ w)
            return (h**2).mean()

        return [
            w - 0.1 * g for w, g in zip(layers, jax.grad(loss)(layers), strict=True)
        ]

    return Timed(step, (layers, x))


def adam() -> Timed:
    """An Adam step, which is memory traffic alone."""
    optimizer = optim.adam(lr=1e-3)
    params = jnp.ones(2**24)
    state = optimizer.init(params)
    return Timed(optimizer.step, (params, params * 0.1, state))


def convolutions() -> Timed:
    """The gradient of two 3 x 3 convolutions."""
    key = jax.random.key(1)
    kernels = [
        jax.random.normal(key, (3, 3, 16, 32)) / 12,
        jax.random.normal(key, (3, 3, 32, 32)) / 17,
    ]
    x = jax.random.normal(key, (16, 32, 32, 16))

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return (x**2).mean()

    return Timed(jax.grad(loss), (kernels, x))


def attention() -> Timed:
    """The gradient of attention with eight heads over 512 positions."""
    key = jax.random.key(2)
    queries, keys, values = jax.random.normal(key, (3, 8, 512, 64))

    def loss(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        scores = jnp.einsum("hqd,hkd->hqk", queries, keys) / 8
        return (jax.nn.softmax(scores) @ values).sum()

    return Timed(jax.grad(loss, (0, 1, 2)), (queries, keys, values))


def recurrence() -> Timed:
    """The gradient of a loop, whose trip count the estimate must know."""
    key = jax.random.key(3)
    w = jax.random.normal(key, (512, 512)) / 23
    inputs = jax.random.normal(key, (64, 64, 512))

    def loss(w: jax.Array, inputs: jax.Array) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w + x), None

        return (jax.lax.scan(turn, inputs[0], inputs)[0] ** 2).mean()

    return Timed(jax.grad(loss), (w, inputs))

"""remote_call beside plain rpc_sync: what JAX's transformations cost on top.

A function of one array on another worker, forward and with its gradient, between two
processes with a core each. The plain contender calls the same compiled functions by
`rpc_sync`, one for the value and one for the gradient, as one would by hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._goals import Figure, Goal, scaled
from benchmarks._harness import Case, Timing, race
from jdist import autograd, rpc

SIZES = {"3 x 3": (3, 3), "1 MiB": (512, 512), "16 MiB": (2048, 2048)}
GOAL = 1.0
"""Milliseconds that JAX's transformations may add to a pair of calls under `jit`."""


def measure() -> list[Case]:
    """For each size the value alone, and the value with its gradient."""
    return rpc.spawn(_drive, nprocs=2, pin=1)[0]


@jax.jit
def wave(x: jax.Array) -> jax.Array:
    """A function that is cheap beside its transport."""
    return jnp.sin(x) * 2.0


@jax.jit
def wave_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The backward pass of `wave`."""
    return jax.vjp(wave, x)[1](cotangent)[0]


def _drive(rank: int) -> list[Case]:
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    cases = []
    if rank == 0:
        for size, shape in SIZES.items():
            x = jnp.linspace(-1.0, 1.0, shape[0] * shape[1]).reshape(shape)
            few = shape[0] < 1000
            options = {"rounds": 40 if few else 15, "calls": 20 if few else 1}
            forward = race(_forward(x), **options)
            cases.append(Case(f"value, {size}", forward))
            backward = race(_backward(x), **options)
            added = Goal(
                "over the pair of rpc_sync, in jit", _added(backward), GOAL, unit=" ms"
            )
            cases.append(Case(f"value and gradient, {size}", backward, goals=[added]))
    rpc.shutdown()
    return cases


def _remote(x: jax.Array) -> jax.Array:
    return autograd.remote_call("worker1", wave, x)


def _loss(x: jax.Array) -> jax.Array:
    return (_remote(x) ** 2).sum()


def _forward(x: jax.Array) -> dict[str, Callable[[], Any]]:
    compiled = jax.jit(_remote)
    return {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", wave, (x,)),
        "remote_call": lambda: _remote(x),
        "remote_call in jit": lambda: compiled(x),
    }


def _backward(x: jax.Array) -> dict[str, Callable[[], Any]]:
    @jax.jit
    def loss_of(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda y: (y**2).sum())(y)

    def by_hand() -> tuple[jax.Array, jax.Array]:
        loss, cotangent = loss_of(rpc.rpc_sync("worker1", wave, (x,)))
        return loss, rpc.rpc_sync("worker1", wave_gradient, (x, cotangent))

    eager = jax.value_and_grad(_loss)
    compiled = jax.jit(eager)
    return {
        "a pair of rpc_sync": by_hand,
        "jax.value_and_grad": lambda: eager(x),
        "the same in jit": lambda: compiled(x),
    }


def _added(found: Mapping[str, Timing]) -> Figure:
    """The added milliseconds, at the medians and at the ends of both spreads."""
    compiled, by_hand = found["the same in jit"], found["a pair of rpc_sync"]
    low, high = compiled.low - by_hand.high, compiled.high - by_hand.low
    return scaled(Figure(compiled.median - by_hand.median, low, high), 1e3)

"""Functions that tests call on other workers, and data for them."""

import dataclasses
import queue
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from jdist import autograd
from tests.rpc.rref.common import PATIENCE

TRACED = "/jdist/tests/layer_is_traced"
traced = queue.SimpleQueue()
"""Has an entry for each time that JAX traced `layer` in this process.

`layer` itself does not refer to it: what changes, or cannot be read, would be traced
anew.
"""
jax.monitoring.register_event_listener(
    lambda event, **_: traced.put("layer") if event == TRACED else None
)

SIZE = 3
BAD_MOOD = False
gate = threading.Event()
arrived = threading.Semaphore(0)


def layer(params, x):
    """(4, 3) to (4, 5), and an integer."""
    jax.monitoring.record_event(TRACED)
    h = jnp.tanh(x @ params["kernel"] + params["bias"][None])
    return {"h": h, "rows": jnp.int32(x.shape[0])}


def params(*seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(3, 5)), dtype),
        "bias": jnp.asarray(rng.normal(size=(5,)), dtype),
    }


def rows(*seed, dtype=np.float64, shape=(4, 3)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def shift(x, by):
    return jnp.sin(x) * by


def pick(table, indices, mask):
    """Integer and boolean arguments; its second result is one of integers."""
    chosen = table[indices]
    return jnp.where(mask, chosen, 2 * chosen), indices + 1


def noise(key, x):
    return x * jax.random.normal(key, x.shape, x.dtype), jax.random.fold_in(key, 7)


def activated(activation, x, *, name, scale=2.0):
    """A function and a text among the arguments; a default that nobody gives."""
    return {name: activation(x) * scale}


def relayed(x, to):
    """Calls on to the next worker: `to` names those that are still to come."""
    if not to:
        return jnp.cos(x) * x
    return jnp.sin(autograd.remote_call(to[0], relayed, x, to[1:])) * x


def relayed_locally(x, to):
    return jnp.sin(relayed_locally(x, to[1:])) * x if to else jnp.cos(x) * x


def growing(x):
    """As long as a global of its module says."""
    return jnp.concatenate([x] * SIZE)


def set_size(size):
    globals()["SIZE"] = size


def nothing_but_text(x):
    return "text"


def unshaped(x):
    return x.reshape(2, 2)


def moody(x):
    """Raises once its worker is in a bad mood."""
    if BAD_MOOD:
        raise ValueError("in a bad mood on purpose")
    return x + 1


def set_mood(bad):
    globals()["BAD_MOOD"] = bad


def failing(x):
    """Raises when it runs, not when it is traced."""

    def fail(context, buffer, value):
        raise ZeroDivisionError("at run time on purpose")

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return buffer_callback(fail, shape, has_side_effect=True)(x)


def waiting(x):
    """Twice its argument, once somebody opens the gate of the process it runs in."""

    def wait(context, buffer, value):
        arrived.release()
        if not gate.wait(PATIENCE):
            raise TimeoutError("nobody opened the gate")
        np.asarray(buffer)[...] = 2 * np.asarray(value)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return buffer_callback(wait, shape, has_side_effect=True)(x)


def close_gate():
    gate.clear()
    while arrived.acquire(blocking=False):
        pass


def await_arrivals(count):
    for _ in range(count):
        assert arrived.acquire(timeout=PATIENCE)


def open_gate():
    gate.set()


def traces():
    return traced.qsize()


def scaled(x, by):
    return x * by if x.dtype != bool else x & by


def loss(x):
    return (jnp.sin(x) ** 2).sum()


class Result(NamedTuple):
    first: Any
    rest: Any


def mirrored(nested, pair):
    (b, empty), (a, nothing) = nested["b"], nested["a"]
    return Result({"z": b, "y": empty}, [nothing, (a, pair["b"][0])])


def failing_at(x, to):
    return autograd.remote_call(to, failing, x)


def relayed_twice(x, by, to):
    return jnp.sin(autograd.remote_call(to, shift, x, by))


GLOBAL = autograd.variable(3.0)


def reads_a_global(x):
    return x * GLOBAL.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A pytree with a method, one of its fields static."""

    weight: Any
    activation: str = dataclasses.field(metadata={"static": True})

    def apply(self, x, by):
        return getattr(jnp, self.activation)(self.weight * x) * by

    __call__ = apply

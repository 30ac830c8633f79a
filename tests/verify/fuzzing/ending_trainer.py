"""Trainers that end their process, hang or refuse; another process imports them."""

import os
import threading

import jax
import jax.numpy as jnp

AXES = {"way": ("right", "abort", "hang", "exit", "raise", "refuse"), "tp": (1, 2)}


def problem(layout):
    w = jnp.asarray([0.3, -0.4, 0.5], jnp.float32)
    return w, jnp.asarray([[1, 2, 3], [3, 5, 7], [2, 1, 4]], jnp.float32) / 7


def claim(layout):
    return lambda w, x: jnp.tanh(x @ w) ** 2


def gradient(w, x):
    return jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)


def hangs():
    threading.Event().wait()


WAYS = {"abort": os.abort, "hang": hangs, "exit": lambda: os._exit(7)}


def trainer(layout):
    def candidate(w, x):
        if layout["way"] == "raise":
            raise RuntimeError(f"no axis {layout['tp']} here\nnor there")
        if layout["way"] == "refuse":
            raise NotImplementedError("not with tp")
        if layout["way"] != "right" and layout["tp"] == 2:
            WAYS[layout["way"]]()
        return gradient(w, x)

    return candidate


def devices_of(layout):
    """Is right with as many devices, and in the dtypes, that the test's process has."""

    def candidate(w, x):
        assert len(jax.devices()) == layout["devices"]
        assert jax.config.jax_enable_x64 == layout["x64"]
        return gradient(w, x)

    return candidate

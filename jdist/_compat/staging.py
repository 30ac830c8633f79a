"""Primitives of jdist's own: what `jax.interpreters` does not offer for them."""

import os
from typing import Any

import jax
from jax.extend.core import Effect

from jdist._compat import internals


def unrepeatable_effect(text: str) -> Effect:
    """An effect that may stand in loops, branches and custom derivatives."""

    def told(self: Effect) -> str:
        return text

    # A class for each text: JAX registers effects by their types, and prints them.
    kind = type("UnrepeatableEffect", (Effect,), {"__repr__": told, "__str__": told})
    # An effect keeps a call from being dropped or made twice. `jax.checkpoint` would
    # make it twice and refuses it.
    for registry in internals.effect_registries:
        registry.add_type(kind)
    return kind()


def device_count_of(context: Any) -> int:
    """The number of devices for which a program that is being lowered is compiled.

    Args:
      context: What a lowering rule is given first.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return int(axes.num_devices if mesh is None else mesh.size)


def is_partitioned(context: Any) -> bool:
    """Whether XLA will partition the program that is being lowered.

    A program for one device is not, nor the inside of a `shard_map` over all axes.

    Args:
      context: What a lowering rule is given first.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None and set(mesh.axis_names) <= set(axes.manual_axes):
        return False
    return device_count_of(context) > 1


def thread_pool_size() -> int:
    """How many threads XLA's CPU client of this process has for its programs.

    XLA reads `PJRT_NPROC`, or `NPROC`, when the client is made, and takes the cores
    that this process may use if there is neither; never less than its devices.
    """
    told = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    if told and told.isdecimal() and int(told):
        threads = int(told)
    elif hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))
    else:
        threads = os.cpu_count() or 1
    try:
        return max(threads, len(jax.local_devices(backend="cpu")))
    except RuntimeError:  # Only an accelerator was asked for in JAX_PLATFORMS.
        return threads

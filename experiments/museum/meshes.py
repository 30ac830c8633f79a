"""Meshes of a few devices, and the operators of tensor parallelism."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdist import verify

Tree = Any
Trainer = Callable[..., Any]
Judge = Callable[[Trainer], verify.Trace | verify.Report]


def mesh(**axes: int) -> Mesh:
    """A mesh of the first devices.

    Args:
      **axes: The size of each axis by its name.
    """
    devices = np.array(jax.devices()[: prod(axes.values())])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def spmd(function: Trainer, over: Mesh, ins: Tree, outs: Tree) -> Trainer:
    """A program of every device, whose collectives the user writes: compiled.

    Args:
      function: The program of one device.
      over: The mesh.
      ins: Specs of its arguments.
      outs: Specs of its results.
    """
    mapped = jax.shard_map(
        function, mesh=over, in_specs=ins, out_specs=outs, check_vma=False
    )
    return jax.jit(mapped)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: Tree, axis: str) -> Tree:
    """The identity into a divided layer; its cotangents are summed over the axis.

    Args:
      x: The layer's input, the same on all devices of the axis.
      axis: The mesh axis.
    """
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (lax.psum(g, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x: Tree, axis: str) -> Tree:
    """The sum over the axis out of a divided layer; its cotangent passes.

    Args:
      x: The partial output of each device.
      axis: The mesh axis.
    """
    return lax.psum(x, axis)


leave.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, g: (g,))


def whole(x: Tree, axis: str, dim: int) -> Tree:
    """All devices' slices of an array, side by side.

    Args:
      x: This device's slice.
      axis: The mesh axis.
      dim: The dimension along which it is divided.
    """
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def own(x: Tree, axis: str, dim: int) -> Tree:
    """This device's slice of an array.

    Args:
      x: The whole array.
      axis: The mesh axis.
      dim: The dimension along which it is divided.
    """
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)

"""A model applied to a batch over replicas, as PyTorch's `nn.DataParallel` does.

    batch  --scatter-->  rows of replica 0 .. K-1  --apply-->  outputs  --gather--> all
    params --replicate-> the same on each

It applies a model to batches that one device cannot hold. It is differentiable, but
not meant for training: the loss is computed outside, on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdist._compat import (
    automatic,
    is_traced,
    laid_out,
    outside_mesh,
    with_automatic_axes,
)
from jdist._errors import check_function
from jdist._tree import PyTree, check_arrays, examples_in, is_inexact, wide_dtype
from jdist.data_parallel.replicas.inputs import brought, check_alive
from jdist.data_parallel.replicas.layout import check_mesh, check_params
from jdist.data_parallel.replicas.mapping import EACH, over_replicas
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import sharded
from jdist.segment.internal import GuardedJit


def parallel_apply(
    fn: Callable[[Any, Any], Any],
    mesh: Mesh | None = None,
    *,
    replicas: int | None = None,
    data_axis: str = "data",
) -> Callable[[Any, Any], Any]:
    """Applies a model to a batch of any size, divided over replicas.

    Args:
      fn: `fn(params, batch) -> outputs`, pytrees of arrays `(examples, ...)`; it treats
        examples independently.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      data_axis: The mesh axis that counts replicas.

    Returns:
      `apply(params, batch) -> outputs` of the whole batch, in its order. Compiled;
      differentiable in `params`, whose gradient is the whole batch's, added up over
      the devices of a mesh in float32 at least. With explicit axes the outputs have
      them under `jax.set_mesh(mesh)`, and automatic ones elsewhere.

    Raises:
      TypeError: Neither a mesh nor replicas are given.
      ValueError: The mesh has no such axis, or a mesh and replicas are given. On
        calling: an empty batch.

    Example:
      >>> import jax.numpy as jnp
      >>> model = parallel_apply(lambda w, x: x * w, replicas=2)
      >>> model(jnp.array(2.0), jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)

    References:
      `torch.nn.DataParallel`, `torch.nn.parallel.data_parallel`.
    """
    check_function("parallel_apply(fn=...)", fn)
    placement = Placement.of("parallel_apply", mesh, replicas, data_axis)
    within, outside = _applied(fn, placement), None
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        # JAX differentiates what has explicit axes only where their mesh is set.
        outside = _applied(fn, replace(placement, mesh=automatic(mesh)))

    def apply(params: PyTree, batch: PyTree) -> PyTree:
        """The outputs of the whole batch; see `data_parallel.parallel_apply`."""
        with outside_mesh(mesh):
            if outside is None:
                return within(params, batch)
            examples_in(batch, "apply(params, batch)")  # It refuses what is no tree.
            if _is_typed((params, batch)):
                return within(params, batch)
            return outside(*with_automatic_axes((params, batch)))

    return apply


def _applied(
    fn: Callable[[Any, Any], Any], placement: Placement
) -> Callable[[Any, Any], Any]:
    """`parallel_apply`, with outputs whose axes are of the mesh's own type."""
    mesh, replicas, rows = (
        placement.mesh,
        placement.count,
        PartitionSpec(placement.axis),
    )
    check_mesh("parallel_apply", placement)

    def outputs_of(params: PyTree, scattered: PyTree) -> PyTree:
        def on_replica(wide: PyTree, batch: PyTree) -> PyTree:
            given = jax.tree.map(_as_it_was, wide, params)
            return (fn(given, batch),)

        # Widened outside the mapped function: JAX sums gradients where parameters enter
        # it, and the sum must be in float32 at least.
        mapped = over_replicas(on_replica, placement, (EACH, rows), (rows,))
        return mapped(jax.tree.map(_widened, params), scattered)

    compiled = GuardedJit(outputs_of, "parallel_apply", {"fn": fn})

    def applied(params: PyTree, batch: PyTree) -> PyTree:
        count = examples_in(batch, "apply(params, batch)")
        check_arrays("apply(params=...)", params)
        check_arrays("apply(batch=...)", batch)
        check_params("apply(params=...)", params, placement)
        # The weights are not needed: outputs of padding are dropped below.
        scattered, _ = sharded(batch, placement)
        # Before `brought`, which would read a donated array to move it.
        check_alive("apply(params, batch)", (params, batch))
        params, scattered = brought(
            "apply(params, batch)", placement, params, scattered
        )
        (found,) = compiled(params, scattered)
        if count % replicas == 0:
            return found
        share, extra = divmod(count, replicas)
        real = [
            rank * (share + 1) + i
            for rank in range(replicas)
            for i in range(share + (rank < extra))
        ]
        # Padding is within each replica's rows, not at the end of the batch. JAX picks
        # no rows along an explicit axis that divides them.
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            found = jax.tree.map(lambda x: laid_out(x, mesh, EACH), found)
        return jax.tree.map(lambda x: x[jax.numpy.array(real)], found)

    return applied


def _is_typed(arguments: PyTree) -> bool:
    """Whether a mesh is set, or what is differentiated has explicit axes."""
    return not jax.sharding.get_abstract_mesh().empty or any(
        AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
        for x in jax.tree.leaves(arguments)
        if is_traced(x)
    )


def _widened(param: PyTree) -> PyTree:
    """Casts a parameter to the dtype in which its gradients are summed."""
    return param.astype(wide_dtype(param.dtype)) if is_inexact(param) else param


def _as_it_was(wide: PyTree, param: PyTree) -> PyTree:
    return wide.astype(param.dtype) if is_inexact(wide) else wide

"""The loss and gradient of a whole batch, computed by replicas on parts of it.

Each replica runs one forward and one backward pass over its own examples and gets a
`Partial` (see `jdist.reduction`); one collective joins the partials. The replicas are
the devices of a mesh axis under `shard_map`, or, on a single device, the rows of a
`vmap` with an axis name; both run the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec

from jdist import reduction as reductions
from jdist._compat import called_outside_mesh, paced
from jdist._errors import check_function, value_error
from jdist._tree import PyTree, check_arrays
from jdist.data_parallel.gradient.buckets import Cap
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.gradient_order import with_gradient_order
from jdist.data_parallel.gradient.hook_state import check_hook_rows
from jdist.data_parallel.hooks import Bucket, Hook
from jdist.data_parallel.replicas.inputs import are_ready, brought, check_alive
from jdist.data_parallel.replicas.layout import check_mesh, check_params
from jdist.data_parallel.replicas.mapping import EACH, as_row, over_replicas, own_row
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import Weights, rows_in, weights_given
from jdist.segment.internal import GuardedJit


def value_and_grad(
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    mesh: Mesh | None = None,
    *,
    replicas: int | None = None,
    data_axis: str = "data",
    reduction: str = "mean",
    method: str = "all_reduce",
    bucket_cap_mb: Cap = None,
    hook: Hook | Callable[[PyTree, Bucket], tuple[PyTree, Bucket]] | None = None,
) -> Callable[..., tuple[PyTree, ...]]:
    """Like `jax.value_and_grad` of the reduced loss, computed over replicas.

        dL/dW = sum_i (B_i / B) dL_i/dW        (mean; B_i is replica i's total weight)

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`: one real loss per example, shape
        `(examples,)`. It must treat examples independently, or combine them by
        collectives over `data_axis`.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      data_axis: The mesh axis that counts replicas; parameters are replicated over it.
        Over further axes of the mesh they may be divided, and their gradients are then,
        too.
      reduction: "mean" S w l / S w, "sum" S w l, or "max", "min" over w > 0, where
        ties share the gradient equally over the whole batch.
      method: "all_reduce" sums partial gradients on the way; "all_gather" collects
        them all on every replica and folds them in rank order. Equal to rounding.
      bucket_cap_mb: Gradients that travel together, one collective for each bucket, in
        the order in which the backward pass makes them. None: a first bucket of 1 MiB,
        others of 25 MiB, and leaves of 1 MiB and more alone. A number: the only limit,
        in MiB, by the rule of `assign_buckets`; or a list of limits for the first,
        second, .. bucket.
      hook: How a bucket is summed, from `data_parallel.hooks`, or a pure function
        `(state, bucket) -> (state, bucket)`. None: exactly.

    Returns:
      `fn(params, batch, weights=None) -> (loss, gradient)`, compiled. `batch` and
      `weights` come from `shard_batch`; without weights each example counts 1. With a
      hook that keeps a state, `fn(params, batch, weights=None, hook_state=None) ->
      (loss, gradient, hook_state)`: give back what the step before returned; its leaves
      have a first axis of replicas and are divided over the mesh.
      The loss is a scalar, float32 or wider. The gradient has the structure, shapes and
      dtypes of `params`, with None where a parameter is not a floating array, and is
      replicated: bit-equal on all replicas. Weights in device memory are not read back
      to be checked: negative or NaN ones give NaN, all-zero ones a loss of NaN and a
      gradient of 0.

    Raises:
      TypeError: An argument is of another type; neither a mesh nor replicas are given.
        On calling: weights are no numbers.
      ValueError: Unknown reduction or method; a mesh without the axis; a mesh and
        replicas; a limit below 0. On calling: a hook that returns another
        shape; losses of another shape; a batch that does not divide by the replicas;
        weights of another shape; NumPy weights that are negative, not finite or all 0,
        or whose total is beyond the devices' precision; parameters that are divided
        over the replicas. On a mesh with further axes: one that is explicit, a hook,
        buckets, or another method; see docs/data_parallel.md.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> fn = data_parallel.value_and_grad(lambda w, x: (x @ w) ** 3, replicas=2)
      >>> batch, weights = data_parallel.shard_batch(x, replicas=2, sizes=(2, 1))
      >>> loss, gradient = fn(jnp.array([0.3, 0.4]), batch, weights)
      >>> print(f"{loss:.3f} {gradient[0]:.2f} {gradient[1]:.2f}")
      25.425 96.01 118.68

    References:
      Li et al., PyTorch Distributed, VLDB 2020; `torch.nn.parallel
      .DistributedDataParallel`, which divides by the number of replicas instead.
    """
    call = "value_and_grad"
    check_function(f"{call}(loss_fn=...)", loss_fn)
    placement = Placement.of(call, mesh, replicas, data_axis)
    divided = check_mesh(call, placement)
    options = (method, bucket_cap_mb, hook)
    communication = Communication(call, data_axis, reduction, *options, divided=divided)
    step, start = _compiled(loss_fn, placement, communication)

    @called_outside_mesh
    def fn(
        params: PyTree,
        batch: PyTree,
        weights: Weights = None,
        hook_state: PyTree = None,
    ) -> tuple[PyTree, ...]:
        """The whole batch's loss and gradient; see `data_parallel.value_and_grad`."""
        count = rows_in("fn", batch, placement.count)
        weights = weights_given("fn", batch, weights, count, reduction)
        check_params("fn(params=...)", params, placement)
        given = (batch, weights)
        if not are_ready((params, given), placement.mesh):
            check_arrays("fn(params=...)", params)
            check_arrays("fn(batch=...)", batch)
            # Before `brought`, which would read a donated buffer to move it.
            check_alive("fn(params, batch)", (params, *given))
            params, given = brought("fn(params, batch)", placement, params, given)
        batch, weights = given
        if not communication.stateful:
            if hook_state is not None:
                rule = "must be None for a hook that keeps no state, and without a hook"
                raise value_error("fn(hook_state=...)", rule, hook_state)
            hook_state = ()
        elif hook_state is None:
            (hook_state,) = start(params, batch, weights)
        else:
            check_hook_rows("fn(hook_state=...)", hook_state, placement.count)
        found = step(params, batch, weights, hook_state)
        paced(placement.mesh, found[0])
        return tuple(found if communication.stateful else found[:2])

    return fn


def _compiled(
    loss_fn: Callable[..., jax.Array],
    placement: Placement,
    communication: Communication,
) -> tuple[GuardedJit, GuardedJit]:
    """The compiled programs of one function: its step, and its hook's first state."""
    reduction, axis = communication.reduction, communication.axis
    rows = PartitionSpec(axis)

    def parts(params: PyTree, batch: PyTree, weights: jax.Array | None) -> PyTree:
        fn = partial(reductions.partial, loss_fn, reduction=reduction, axis_name=axis)
        weights = communication.weights_of(batch, weights, params)
        return with_gradient_order(fn, params, batch, weights)

    def step(
        params: PyTree, batch: PyTree, weights: jax.Array | None, state: PyTree
    ) -> PyTree:
        own = own_row(state)
        part, ready = parts(params, batch, weights)
        loss, gradient, own = communication(part, ready, params, own)
        return loss, gradient, as_row(own)

    def start(params: PyTree, batch: PyTree, weights: jax.Array | None) -> PyTree:
        # Only shapes are used of these gradients: XLA drops their computation.
        own = communication.start(*parts(params, batch, weights))
        return (as_row(own),)

    reads = {"loss_fn": loss_fn, "hook": communication.hook}
    takes, gives = (EACH, rows, rows), (EACH, EACH, rows)
    mapped = over_replicas(step, placement, (*takes, rows), gives)
    first = over_replicas(start, placement, takes, (rows,))
    # Nothing is donated: callers keep the parameters.
    return (
        GuardedJit(mapped, communication.call, reads),
        GuardedJit(first, communication.call, reads),
    )

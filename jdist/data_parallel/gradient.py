"""The whole batch's loss and gradient, computed by replicas that each see a part.

Each replica runs one forward and one backward pass over its own examples and gets a
`Partial` (see `jdist.reduction`); one collective joins the partials; the division by
the total comes last. The replicas are the devices of a mesh axis under `shard_map`, or,
on a single device, the rows of a `vmap` with an axis name: the same code in both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jdist import reduction as reductions
from jdist._compat import map_shards
from jdist._errors import requirement
from jdist._tree import examples_in
from jdist.data_parallel.shards import check_weight_values, replicas_of

METHODS = {"all_reduce": reductions.all_reduce, "all_gather": reductions.all_gather}


def value_and_grad(
    loss_fn: Callable[[Any, Any], jax.Array],
    mesh: Mesh | int,
    *,
    axis: str = "data",
    reduction: str = "mean",
    method: str = "all_reduce",
) -> Callable[..., tuple[jax.Array, Any]]:
    """Like `jax.value_and_grad` of the reduced loss, computed over replicas.

        dL/dW = sum_i (B_i / B) dL_i/dW        (mean; B_i is replica i's total weight)

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`: one real loss per example, shape
        `(examples,)`. It must treat examples independently, or combine them by
        collectives over `axis`.
      mesh: The devices; or a number of replicas that share one device.
      axis: The mesh axis that counts replicas; parameters are replicated over it.
      reduction: "mean" S w l / S w, "sum" S w l, or "max", "min" over w > 0, where
        ties share the gradient equally over the whole batch.
      method: "all_reduce" sums partial gradients on the way; "all_gather" collects
        them all on every replica and folds them in rank order. Equal to rounding.

    Returns:
      `fn(params, batch, weights=None) -> (loss, gradient)`, compiled. `batch` and
      `weights` come from `shard_batch`; without weights each example counts 1.
      The loss is a scalar, float32 or wider. The gradient has the structure, shapes and
      dtypes of `params`, with None where a parameter is not a floating array, and is
      replicated: bit-equal on all devices. Weights in device memory are not read back
      to be checked: negative, NaN or all-zero ones give NaN.

    Raises:
      ValueError: Unknown reduction or method; a mesh without the axis. On calling:
        losses of another shape; a batch that does not divide by the replicas; weights
        of another shape; NumPy weights that are negative, not finite or all 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> fn = data_parallel.value_and_grad(lambda w, x: (x @ w) ** 3, mesh=2)
      >>> batch, weights = data_parallel.shard_batch(x, 2, sizes=(2, 1))
      >>> loss, gradient = fn(jnp.array([0.3, 0.4]), batch, weights)
      >>> print(f"{loss:.3f} {gradient[0]:.2f} {gradient[1]:.2f}")
      25.425 96.01 118.68

    References:
      Li et al., PyTorch Distributed, VLDB 2020; `torch.nn.parallel
      .DistributedDataParallel`, which divides by the number of replicas instead.
    """
    call = "value_and_grad"
    replicas = replicas_of(mesh, axis, call)
    reductions.check_reduction(call, reduction)
    if method not in METHODS:
        rule = f"must be one of {', '.join(map(repr, METHODS))}"
        raise ValueError(requirement(f"{call}(method=...)", rule, repr(method)))

    def on_replica(params: Any, batch: Any, weights: jax.Array) -> Any:
        own = reductions.partial(loss_fn, params, batch, weights, reduction)
        whole = METHODS[method](own, reduction, axis)
        return reductions.finish(whole, reduction, like=params)

    compiled = jax.jit(_over_replicas(on_replica, mesh, axis))

    def fn(params: Any, batch: Any, weights: Any = None) -> tuple[jax.Array, Any]:
        """The whole batch's loss and gradient; see `data_parallel.value_and_grad`."""
        count = examples_in(batch, "fn(params, batch)")
        _check_call(count, replicas, weights)
        if weights is None:
            weights = np.ones(count, np.float32)
        return compiled(params, batch, weights)

    return fn


def _over_replicas(
    on_replica: Callable[..., Any], mesh: Mesh | int, axis: str
) -> Callable[..., Any]:
    """Runs a replica's function on all of them; what it returns must be replicated."""
    if isinstance(mesh, Mesh):
        shard = PartitionSpec(axis)
        whole = PartitionSpec()
        return map_shards(on_replica, mesh, (whole, shard, shard), whole)
    mapped = jax.vmap(on_replica, in_axes=(None, 0, 0), out_axes=None, axis_name=axis)

    def on_one_device(params: Any, batch: Any, weights: jax.Array) -> Any:
        rows = jax.tree.map(
            lambda x: x.reshape(mesh, -1, *x.shape[1:]), (batch, weights)
        )
        return mapped(params, *rows)

    return on_one_device


def _check_call(count: int, replicas: int, weights: Any) -> None:
    if count % replicas or not count:
        rule = f"must divide evenly over {replicas} replicas"
        got = f"{count} examples"
        remedy = "Use `shard_batch`, which pads with weight 0."
        raise ValueError(requirement("fn(batch=...)", rule, got, remedy))
    if weights is None:
        return
    if jnp.shape(weights) != (count,):
        rule = f"must be one per example, shape ({count},)"
        got = f"shape {jnp.shape(weights)}"
        raise ValueError(requirement("fn(weights=...)", rule, got))
    if not isinstance(weights, jax.Array):
        check_weight_values("fn", np.asarray(weights))

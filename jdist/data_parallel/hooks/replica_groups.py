"""Gradients of the whole batch for the first steps, then of groups of replicas.

After the switch the replicas' parameters differ, and have to be averaged periodically:
see `jdist.data_parallel.local_sgd`.
"""

from functools import reduce

import jax
import jax.numpy as jnp

from jdist._errors import check_at_least, requirement
from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook
from jdist.data_parallel.hooks.hook_switch import switch
from jdist.data_parallel.hooks.plain_sum import all_reduce


def post_local_sgd(start: int, group_size: int = 1) -> Hook:
    """The batch's gradient for `start` steps, then that of each group's examples.

    Within a group replicas are weighted as always: the gradient of a group is the mean
    over its examples, `sum_i B_i g_i / sum_i B_i` with i in the group; 0 where the
    group has no examples.

    Args:
      start: Steps with the same gradient on all replicas.
      group_size: Consecutive replicas that form a group; 1 for no communication.

    Raises:
      ValueError: `start` is below 0 or `group_size` below 1; on use, if the number of
        replicas is not a multiple of the group's.

    References:
      Lin et al., Don't use large mini-batches, use local SGD, ICLR 2020;
      `torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook`.
    """
    return switch(all_reduce(), group_mean(group_size), at=start)


def group_mean(size: int) -> Hook:
    """The gradient of each group's own examples; see `post_local_sgd`."""
    argument = "post_local_sgd(group_size=...)"
    check_at_least(argument, size, 1)

    def mean(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        weight = group_sum(bucket.weight, bucket, size)
        total = group_sum(bucket.buffer, bucket, size)
        # Real, also for complex gradients, and as wide as their parts.
        divisor = weight.astype(jnp.finfo(total.dtype).dtype)
        # A group without examples has no mean; its gradient is 0, not NaN.
        return state, bucket.replaced(jnp.where(weight == 0, 0, total / divisor))

    return Hook(f"groups of {size}", mean, replicated=False)


def group_sum(array: jax.Array, bucket: Bucket, size: int) -> jax.Array:
    """The sum over the group of consecutive replicas that this one belongs to."""
    count = bucket.replicas
    if count % size:
        rule = f"must divide the {count} replicas"
        raise ValueError(requirement("post_local_sgd(group_size=...)", rule, size))
    # Each array is passed around its group, and all members add them in rank order, so
    # that they get the same bits.
    rows = [array]
    for shift in range(1, size):
        pairs = [(k, k // size * size + (k - shift) % size) for k in range(count)]
        rows.append(jax.lax.ppermute(array, bucket.axis_name, pairs))
    # Row s came from the member s places further on; now member 0 comes first.
    place = jax.lax.axis_index(bucket.axis_name) % size
    ordered = jnp.roll(jnp.stack(rows), place, axis=0)
    return reduce(jnp.add, list(ordered))

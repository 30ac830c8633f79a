"""No compression: the plain sum."""

from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook
from jdist.data_parallel.replicas.mapping import summed


def all_reduce() -> Hook:
    """Adds the buckets up as they are: lossless, one all-reduce for each.

    The same gradient, to rounding, as without a hook. It is what other hooks are
    compared with, and what they are composed with.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`.
    """

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        return state, bucket.replaced(summed(bucket.buffer, bucket.axis_name))

    return Hook("all_reduce", reduce)

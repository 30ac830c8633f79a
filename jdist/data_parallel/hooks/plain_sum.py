"""The exact sum, without compression."""

from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook
from jdist.data_parallel.replicas.mapping import summed


def all_reduce() -> Hook:
    """Sums each bucket by one all-reduce, without loss.

    Gives the same gradient, up to rounding, as no hook. Other hooks are compared with
    it, and are composed with it.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`.
    """

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        return state, bucket.replaced(summed(bucket.buffer, bucket.axis_name))

    return Hook("all_reduce", reduce)

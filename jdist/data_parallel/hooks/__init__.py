"""Ways to add gradients up over replicas, with and without loss; one in each file.

A hook is a pure function `(state, bucket) -> (state, bucket)` that is given each bucket
of gradients before it is summed and returns the sum, or what can be said of it in fewer
bytes. `data_parallel.value_and_grad(..., hook=...)` calls it.
"""

from jdist.data_parallel.hooks.all_reduce import all_reduce
from jdist.data_parallel.hooks.cast import bf16, fp16
from jdist.data_parallel.hooks.error_feedback import error_feedback
from jdist.data_parallel.hooks.hook import Bucket, Hook
from jdist.data_parallel.hooks.int8 import int8_per_channel, int8_per_tensor
from jdist.data_parallel.hooks.post_local_sgd import post_local_sgd
from jdist.data_parallel.hooks.power_sgd import power_sgd
from jdist.data_parallel.hooks.switch import switch

__all__ = [
    "Bucket",
    "Hook",
    "all_reduce",
    "bf16",
    "error_feedback",
    "fp16",
    "int8_per_channel",
    "int8_per_tensor",
    "post_local_sgd",
    "power_sgd",
    "switch",
]


def __dir__() -> list[str]:
    return __all__

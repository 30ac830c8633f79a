"""Communication hooks: sums of gradients over replicas, lossless and compressed.

A hook is a pure function `(state, bucket) -> (state, bucket)`. It is given each bucket
of gradients before the sum, and returns the sum, or an approximation that is sent in
fewer bytes. `data_parallel.value_and_grad(..., hook=...)` calls it.
"""

from jdist.data_parallel.hooks.cast import bf16, fp16
from jdist.data_parallel.hooks.hook import Bucket, Hook, all_reduce, error_feedback
from jdist.data_parallel.hooks.hook_switch import switch
from jdist.data_parallel.hooks.int8 import int8_per_channel, int8_per_tensor
from jdist.data_parallel.hooks.low_rank import power_sgd

__all__ = [
    "Bucket",
    "Hook",
    "all_reduce",
    "bf16",
    "error_feedback",
    "fp16",
    "int8_per_channel",
    "int8_per_tensor",
    "power_sgd",
    "switch",
]


def __dir__() -> list[str]:
    return __all__

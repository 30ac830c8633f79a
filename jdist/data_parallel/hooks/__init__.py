"""Ways to add gradients up over replicas, with and without loss; one in each file.

A hook is a pure function `(state, bucket) -> (state, bucket)` that is given each bucket
of gradients before it is summed and returns the sum, or what can be said of it in fewer
bytes. `data_parallel.value_and_grad(..., hook=...)` calls it.
"""

from jdist.data_parallel.hooks.all_reduce import all_reduce as all_reduce
from jdist.data_parallel.hooks.cast import bf16 as bf16
from jdist.data_parallel.hooks.cast import fp16 as fp16
from jdist.data_parallel.hooks.error_feedback import error_feedback as error_feedback
from jdist.data_parallel.hooks.hook import Bucket as Bucket
from jdist.data_parallel.hooks.hook import Hook as Hook
from jdist.data_parallel.hooks.int8 import int8_per_channel as int8_per_channel
from jdist.data_parallel.hooks.int8 import int8_per_tensor as int8_per_tensor
from jdist.data_parallel.hooks.post_local_sgd import post_local_sgd as post_local_sgd
from jdist.data_parallel.hooks.power_sgd import power_sgd as power_sgd
from jdist.data_parallel.hooks.switch import switch as switch

"""Ways to add gradients up over replicas, with and without loss; one in each file.

A hook is a pure function `(state, bucket) -> (state, bucket)` that is given each bucket
of gradients before it is summed and returns the sum, or what it can say of it in fewer
bytes. `data_parallel.value_and_grad(..., hook=...)` calls it.
"""

from jdist.data_parallel.hooks._base import Bucket as Bucket
from jdist.data_parallel.hooks._base import Hook as Hook
from jdist.data_parallel.hooks.all_reduce import all_reduce as all_reduce

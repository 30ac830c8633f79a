"""PyTorch's distributed-training machinery as pure functions in JAX.

Each way of distributing a computation is proved equal to the one-device gradient by
the library itself. The parts, each usable alone:

- `jdist.optim`: optimizers as pure steps; gradients are passed in.
- `jdist.data_parallel`: replicas whose gradient is exactly the whole batch's.
- `jdist.reduction`: the weighted sums behind it.
- `jdist.segment`: a function compiled once into a forward and a backward half.
- `jdist.rpc`: workers, calls, futures, references; threads, processes, machines.
- `jdist.autograd`: reverse mode across workers, and its optimizer.
- `jdist.pipeline`: schedules as data, simulated, planned, and run by stages.
- `jdist.verify`: the judge that compares any two ways to a gradient.
"""

from jdist._errors import JdistError as JdistError
from jdist._errors import Unavailable as Unavailable
from jdist._errors import VerificationError as VerificationError

__version__ = "0.1.0.dev0"

"""PyTorch's distributed-training machinery as pure functions in JAX.

Each way of distributing a computation is proved equal to the one-device gradient by
the library itself. The parts, each usable alone and imported on first use:

- `jdist.optim`: optimizers as pure steps; gradients are passed in.
- `jdist.data_parallel`: replicas whose gradient is exactly the whole batch's.
- `jdist.reduction`: the weighted sums behind it.
- `jdist.segment`: a function compiled once into a forward and a backward half.
- `jdist.rpc`: workers, calls, futures, references; threads, processes, machines.
- `jdist.autograd`: reverse mode across workers, and its optimizer.
- `jdist.pipeline`: schedules as data, simulated, planned, and run by stages.
- `jdist.verify`: the judge that compares any two ways to a gradient.
- `jdist.ray`: workers that Ray places on the machines of a cluster.
- `jdist.targets`: programs compiled for accelerators that this machine lacks.
"""

import importlib
from types import ModuleType

from jdist._errors import JdistError, Unavailable, VerificationError

__version__ = "0.1.0"

_PARTS = (
    "autograd", "data_parallel", "optim", "pipeline", "ray", "reduction", "rpc",
    "segment", "targets", "verify",
)  # fmt: skip

__all__ = ["JdistError", "Unavailable", "VerificationError"]


def __getattr__(name: str) -> ModuleType:
    """Imports a part on first use."""
    # Lazily, so that `import jdist` takes 0.03 s and does not import JAX.
    if name in _PARTS:
        return importlib.import_module(f"jdist.{name}")
    raise AttributeError(f"module 'jdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The parts, the exceptions and the version."""
    return sorted([*_PARTS, *__all__, "__version__"])

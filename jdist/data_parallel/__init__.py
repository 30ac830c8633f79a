"""Training over replicas whose gradient is exactly the whole batch's.

A batch D is split over K replicas into D_1 .. D_K of B_1 .. B_K examples, and

    dL/dW = sum_i (B_i / B) dL_i/dW

for any B_i. Averaging the replicas' gradients as if all B_i were equal is a common
mistake. Here weights travel with the data, so that uneven shards, empty shards and
masked examples are right.
"""

from jdist._fit import Metrics
from jdist.data_parallel import hooks
from jdist.data_parallel.data.checkpoint import TrainCheckpoints
from jdist.data_parallel.data.process_group import ProcessLost, process_group
from jdist.data_parallel.data.sampler import Sampler
from jdist.data_parallel.elasticity.elastic_run import Elastic
from jdist.data_parallel.gradient.buckets import assign_buckets
from jdist.data_parallel.gradient.value_and_grad import value_and_grad
from jdist.data_parallel.replicas.broadcast import replicate
from jdist.data_parallel.replicas.shards import shard_batch
from jdist.data_parallel.step.averaged import averaged
from jdist.data_parallel.step.fit import evaluate, fit
from jdist.data_parallel.step.join import EarlyEnd, Join
from jdist.data_parallel.step.local_sgd import LocalSGD, LocalState
from jdist.data_parallel.step.nnx_loss import from_nnx
from jdist.data_parallel.step.train_state import TrainState
from jdist.data_parallel.step.train_step import Synchronization, TrainStep, train_step
from jdist.data_parallel.step.zero import Sharded, zero
from jdist.reduction import weighted_mean

__all__ = [
    "EarlyEnd",
    "Elastic",
    "Join",
    "LocalSGD",
    "LocalState",
    "Metrics",
    "ProcessLost",
    "Sampler",
    "Sharded",
    "Synchronization",
    "TrainCheckpoints",
    "TrainState",
    "TrainStep",
    "assign_buckets",
    "averaged",
    "evaluate",
    "fit",
    "from_nnx",
    "hooks",
    "process_group",
    "replicate",
    "shard_batch",
    "train_step",
    "value_and_grad",
    "weighted_mean",
    "zero",
]


def __dir__() -> list[str]:
    # Shells complete from this list. The subpackages are attributes too, because their
    # modules have been imported, but they are internal.
    return __all__

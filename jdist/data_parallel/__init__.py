"""Training over replicas whose gradient is exactly the whole batch's.

A batch D is split over K replicas into D_1 .. D_K of B_1 .. B_K examples, and

    dL/dW = sum_i (B_i / B) dL_i/dW

whatever the B_i are. Averaging the replicas' gradients, as if all B_i were equal, is
the classic mistake; here weights travel with the data, and uneven shards, empty shards
and masked examples come out right.
"""

from jdist._fit import Metrics as Metrics
from jdist._fit import over_epoch as over_epoch
from jdist.data_parallel.data.checkpoint import TrainCheckpoints as TrainCheckpoints
from jdist.data_parallel.data.process_group import ProcessLost as ProcessLost
from jdist.data_parallel.data.process_group import process_group as process_group
from jdist.data_parallel.data.sampler import Sampler as Sampler
from jdist.data_parallel.data.sampler import Shards as Shards
from jdist.data_parallel.gradient.buckets import assign_buckets as assign_buckets
from jdist.data_parallel.gradient.value_and_grad import value_and_grad as value_and_grad
from jdist.data_parallel.replicas.agreement import ReplicasDiffer as ReplicasDiffer
from jdist.data_parallel.replicas.broadcast import check_replicas as check_replicas
from jdist.data_parallel.replicas.broadcast import replicate as replicate
from jdist.data_parallel.replicas.shards import shard_batch as shard_batch
from jdist.data_parallel.step.averaged import averaged as averaged
from jdist.data_parallel.step.data_parallel import DataParallel as DataParallel
from jdist.data_parallel.step.fit import evaluate as evaluate
from jdist.data_parallel.step.fit import fit as fit
from jdist.data_parallel.step.join import EarlyEnd as EarlyEnd
from jdist.data_parallel.step.join import Join as Join
from jdist.data_parallel.step.local_sgd import LocalSGD as LocalSGD
from jdist.data_parallel.step.local_sgd import LocalState as LocalState
from jdist.data_parallel.step.local_sgd import local_sgd as local_sgd
from jdist.data_parallel.step.nnx_loss import FromNNX as FromNNX
from jdist.data_parallel.step.nnx_loss import from_nnx as from_nnx
from jdist.data_parallel.step.reducer import reducer as reducer
from jdist.data_parallel.step.train_state import TrainState as TrainState
from jdist.data_parallel.step.train_step import Synchronization as Synchronization
from jdist.data_parallel.step.train_step import TrainStep as TrainStep
from jdist.data_parallel.step.train_step import train_step as train_step
from jdist.data_parallel.step.zero import Sharded as Sharded
from jdist.data_parallel.step.zero import zero as zero
from jdist.reduction import weighted_mean as weighted_mean

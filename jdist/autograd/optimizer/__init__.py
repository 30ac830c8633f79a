"""Optimizers over parameters that live on many workers."""

from jdist.autograd.optimizer.distributed_optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)

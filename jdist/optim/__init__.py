"""Optimizers as pure steps: gradients are passed in, state is a pytree.

    opt = optim.sgd(lr=1e-2, momentum=0.9)
    state = opt.init(params)
    params, state = opt.step(params, grads, state)

The algorithms, names and defaults are those of torch's functional optimizers
(`torch.distributed.optim._FunctionalSGD` and its family), exact to torch's
single-tensor path. One algorithm per file, in `algorithms`, with the named tuple that
is its state of a parameter.
"""

from jdist.optim._hyperparameters import Hyperparameter
from jdist.optim._loss_scale import DynamicLossScale
from jdist.optim._optimizer import Optimizer, Update, leafwise
from jdist.optim.algorithms.adadelta import adadelta
from jdist.optim.algorithms.adafactor import adafactor
from jdist.optim.algorithms.adagrad import adagrad
from jdist.optim.algorithms.adam import adam
from jdist.optim.algorithms.adamax import adamax
from jdist.optim.algorithms.adamw import adamw
from jdist.optim.algorithms.asgd import asgd
from jdist.optim.algorithms.muon import muon
from jdist.optim.algorithms.nadam import nadam
from jdist.optim.algorithms.radam import radam
from jdist.optim.algorithms.rmsprop import rmsprop
from jdist.optim.algorithms.rprop import rprop
from jdist.optim.algorithms.sgd import sgd
from jdist.optim.clipping import clip_by_global_norm
from jdist.optim.ema import with_ema
from jdist.optim.labels import by_label
from jdist.optim.master_weights import (
    compute_copies,
    with_master_weights,
)
from jdist.optim.optax_bridge import as_optax, from_optax
from jdist.optim.registry import functional_optim_map, register_functional_optim

__all__ = [
    "DynamicLossScale",
    "Hyperparameter",
    "Optimizer",
    "Update",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "as_optax",
    "asgd",
    "by_label",
    "clip_by_global_norm",
    "compute_copies",
    "from_optax",
    "functional_optim_map",
    "leafwise",
    "muon",
    "nadam",
    "radam",
    "register_functional_optim",
    "rmsprop",
    "rprop",
    "sgd",
    "with_ema",
    "with_master_weights",
]


def __dir__() -> list[str]:
    return __all__

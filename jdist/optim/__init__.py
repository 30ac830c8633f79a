"""Optimizers as pure steps: gradients are passed in, state is a pytree.

    opt = optim.sgd(lr=1e-2, momentum=0.9)
    state = opt.init(params)
    params, state = opt.step(params, grads, state)

The algorithms, names and defaults are those of torch's functional optimizers
(`torch.distributed.optim._FunctionalSGD` and its family), exact to torch's
single-tensor path. One algorithm per file.
"""

from jdist.optim._base import Optimizer as Optimizer
from jdist.optim._base import Update as Update
from jdist.optim._base import check_optimizer as check_optimizer
from jdist.optim._base import leafwise as leafwise
from jdist.optim._hyper import Hyperparameter as Hyperparameter
from jdist.optim._hyper import Rule as Rule
from jdist.optim.adadelta import AdadeltaState as AdadeltaState
from jdist.optim.adadelta import adadelta as adadelta
from jdist.optim.adagrad import AdagradState as AdagradState
from jdist.optim.adagrad import adagrad as adagrad
from jdist.optim.adam import AdamState as AdamState
from jdist.optim.adam import adam as adam
from jdist.optim.adamax import AdamaxState as AdamaxState
from jdist.optim.adamax import adamax as adamax
from jdist.optim.adamw import adamw as adamw
from jdist.optim.asgd import ASGDState as ASGDState
from jdist.optim.asgd import asgd as asgd
from jdist.optim.clipping import clip_by_global_norm as clip_by_global_norm
from jdist.optim.labels import by_label as by_label
from jdist.optim.master_weights import DynamicLossScale as DynamicLossScale
from jdist.optim.master_weights import LossScaleState as LossScaleState
from jdist.optim.master_weights import MasterState as MasterState
from jdist.optim.master_weights import all_finite as all_finite
from jdist.optim.master_weights import compute_copies as compute_copies
from jdist.optim.master_weights import with_master_weights as with_master_weights
from jdist.optim.nadam import NAdamState as NAdamState
from jdist.optim.nadam import nadam as nadam
from jdist.optim.optax_bridge import as_optax as as_optax
from jdist.optim.optax_bridge import from_optax as from_optax
from jdist.optim.radam import RAdamState as RAdamState
from jdist.optim.radam import radam as radam
from jdist.optim.registry import functional_optim_map as functional_optim_map
from jdist.optim.registry import register_functional_optim as register_functional_optim
from jdist.optim.rmsprop import RMSpropState as RMSpropState
from jdist.optim.rmsprop import rmsprop as rmsprop
from jdist.optim.rprop import RpropState as RpropState
from jdist.optim.rprop import rprop as rprop
from jdist.optim.sgd import SGDState as SGDState
from jdist.optim.sgd import sgd as sgd

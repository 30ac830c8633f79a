"""Optimizers as pure steps: gradients are passed in, state is a pytree.

    opt = optim.sgd(lr=1e-2, momentum=0.9)
    state = opt.init(params)
    params, state = opt.step(params, grads, state)

The algorithms, names and defaults are those of torch's functional optimizers
(`torch.distributed.optim._FunctionalSGD` and its family), exact to torch's
single-tensor path. One algorithm per file.
"""

from jdist.optim._base import Optimizer as Optimizer
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
from jdist.optim.nadam import NAdamState as NAdamState
from jdist.optim.nadam import nadam as nadam
from jdist.optim.radam import RAdamState as RAdamState
from jdist.optim.radam import radam as radam
from jdist.optim.rmsprop import RMSpropState as RMSpropState
from jdist.optim.rmsprop import rmsprop as rmsprop
from jdist.optim.rprop import RpropState as RpropState
from jdist.optim.rprop import rprop as rprop
from jdist.optim.sgd import SGDState as SGDState
from jdist.optim.sgd import sgd as sgd

"""Optimizers as pure steps: gradients are passed in, state is a pytree.

    opt = optim.sgd(lr=1e-2, momentum=0.9)
    state = opt.init(params)
    params, state = opt.step(params, grads, state)

The algorithms, names and defaults are those of torch's functional optimizers
(`torch.distributed.optim._FunctionalSGD` and its family), exact to torch's
single-tensor path. One algorithm per file.
"""

from jdist.optim._base import Optimizer as Optimizer
from jdist.optim.sgd import SGDState as SGDState
from jdist.optim.sgd import sgd as sgd

"""Interface of the optimizers for other parts of jdist, in addition to the public one.

Where the leaves of a model are in several places (stages of a pipeline, owners of
remote parameters), the norm is computed from each place's sum of squares, and each
place scales its own gradients.
"""

from jdist.optim._hyperparameters import check_overrides
from jdist.optim._optimizer import check_optimizer
from jdist.optim._whole_arrays import copies_over
from jdist.optim.clipping import scaled, shrinking, square, sum_of
from jdist.optim.master_weights import all_finite, computed_in, loss_scaling, started

__all__ = [
    "all_finite",
    "check_optimizer",
    "check_overrides",
    "computed_in",
    "copies_over",
    "loss_scaling",
    "scaled",
    "shrinking",
    "square",
    "started",
    "sum_of",
]

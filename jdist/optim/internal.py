"""Interface of the optimizers for other parts of jdist, in addition to the public one.

Where the leaves of a model are in several places (stages of a pipeline, owners of
remote parameters), the norm is computed from each place's sum of squares, and each
place scales its own gradients.
"""

from jdist.optim._hyperparameters import check_overrides
from jdist.optim.clipping import scaled, shrinking, square, sum_of

__all__ = ["check_overrides", "scaled", "shrinking", "square", "sum_of"]

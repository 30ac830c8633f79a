"""Planted defects: named ways in which a training step goes wrong.

Each `Defect` turns a right step into a wrong one: `defect.plant(step)`. A step is a
gradient function, `(params, batch, *rest) -> (loss, gradient)`, or a training step,
`(params, opt_state, batch, *rest) -> (params, opt_state)`. `verify.score` runs a test
against each of them and reports those that it misses.

`GRADIENT` are the defects of gradient functions, `TRAINING` those of training steps,
`ALL` both. `Traits` describe a step where its arguments do not.

Example:
  >>> from jdist.verify import defects
  >>> for defect in defects.TRAINING[-2:]:
  ...     print(f"{defect.name}: {defect.sentence}")
  leaf left behind: One parameter is not moved.
  step clipped leaf by leaf: Each leaf's step is clipped to half the norm of the ...
"""

from jdist.verify.defects.batch_defects import BATCH_DEFECTS
from jdist.verify.defects.defect import Defect, PlantedStep
from jdist.verify.defects.leaf_defects import LEAF_DEFECTS
from jdist.verify.defects.step_call import NoEffect, NotApplicable, Traits
from jdist.verify.defects.training_defects import TRAINING_DEFECTS

ALL = (*LEAF_DEFECTS, *BATCH_DEFECTS, *TRAINING_DEFECTS)
"""All planted defects."""

GRADIENT = tuple(defect for defect in ALL if "gradient" in defect.kinds)
"""Defects of a gradient."""

TRAINING = tuple(defect for defect in ALL if "training" in defect.kinds)
"""Defects of a training step."""

__all__ = [
    "ALL",
    "GRADIENT",
    "TRAINING",
    "Defect",
    "NoEffect",
    "NotApplicable",
    "PlantedStep",
    "Traits",
]


def __dir__() -> list[str]:
    return __all__

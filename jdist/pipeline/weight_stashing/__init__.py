"""PipeDream: asynchronous epochs with weight stashing."""

from jdist.pipeline.weight_stashing.optimizer import (
    StashState,
    WeightStashing,
    with_weight_stashing,
)

__all__ = ["StashState", "WeightStashing", "with_weight_stashing"]

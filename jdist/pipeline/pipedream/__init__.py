"""PipeDream: asynchronous epochs with weight stashing."""

from jdist.pipeline.pipedream.weight_stashing import (
    StashState,
    WeightStashing,
    with_weight_stashing,
)

__all__ = ["StashState", "WeightStashing", "with_weight_stashing"]

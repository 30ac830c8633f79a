"""Planning: profiles of layers, cuts of a model, and PipeDream's partitioning."""

from jdist.pipeline.plan.partitioner import partition
from jdist.pipeline.plan.plan import Plan
from jdist.pipeline.plan.profile import Layer, Profile

__all__ = [
    "Layer",
    "Plan",
    "Profile",
    "partition",
]

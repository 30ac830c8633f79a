"""Planning: profiles of layers, cuts of a model, and PipeDream's partitioning."""

from jdist.pipeline.plan.partitioner import partition
from jdist.pipeline.plan.plan import Plan, load_plan
from jdist.pipeline.plan.profile import Layer, Profile, load_profile

__all__ = [
    "Layer",
    "Plan",
    "Profile",
    "load_plan",
    "load_profile",
    "partition",
]

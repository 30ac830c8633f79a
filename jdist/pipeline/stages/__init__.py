"""Stages: pure functions with named inputs and outputs, also made from modules."""

from jdist.pipeline.stages.chain import with_ends
from jdist.pipeline.stages.measure import profile
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.module_stages import FromModules, stages_from_modules
from jdist.pipeline.stages.nnx_stages import modules_from_nnx, stages_from_nnx
from jdist.pipeline.stages.stage import Stage

__all__ = [
    "FromModules",
    "Module",
    "Stage",
    "modules_from_nnx",
    "profile",
    "stages_from_modules",
    "stages_from_nnx",
    "with_ends",
]

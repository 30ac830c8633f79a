"""Pipelined model parallelism: schedules as data, their costs, and their execution."""

from jdist._fit import Metrics
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.measured_timeline import timed
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.places import Meshes, OneProgram, Workers
from jdist.pipeline.plan import (
    Layer,
    Plan,
    Profile,
    load_plan,
    load_profile,
    partition,
)
from jdist.pipeline.run.update import PipelineState
from jdist.pipeline.schedule import (
    Schedule,
    ScheduleError,
    UpdatePolicy,
    split_drain,
)
from jdist.pipeline.schedules.dualpipe_v import dualpipe_v
from jdist.pipeline.schedules.gpipe import gpipe
from jdist.pipeline.schedules.interleaved import interleaved
from jdist.pipeline.schedules.looped_bfs import looped_bfs
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.schedules.v_shaped import v_half, v_min
from jdist.pipeline.schedules.zbv import zbv
from jdist.pipeline.schedules.zero_bubble import zero_bubble
from jdist.pipeline.simulation import Costs, Record, Timeline, simulate
from jdist.pipeline.stages import (
    FromModules,
    Module,
    Stage,
    modules_from_nnx,
    profile,
    stages_from_modules,
    stages_from_nnx,
    with_ends,
)
from jdist.pipeline.synthesis import Found, synthesize
from jdist.pipeline.training_loop import fit
from jdist.pipeline.weight_stashing.optimizer import with_weight_stashing

__all__ = [
    "Costs",
    "Found",
    "FromModules",
    "Layer",
    "Meshes",
    "Metrics",
    "Module",
    "OneProgram",
    "Pipeline",
    "PipelineCheckpoints",
    "PipelineState",
    "Plan",
    "Profile",
    "Record",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Timeline",
    "UpdatePolicy",
    "Workers",
    "dualpipe_v",
    "fit",
    "gpipe",
    "interleaved",
    "load_plan",
    "load_profile",
    "looped_bfs",
    "modules_from_nnx",
    "one_f_one_b",
    "partition",
    "pipedream",
    "profile",
    "simulate",
    "split_drain",
    "stages_from_modules",
    "stages_from_nnx",
    "synthesize",
    "timed",
    "v_half",
    "v_min",
    "with_ends",
    "with_weight_stashing",
    "zbv",
    "zero_bubble",
]


def __dir__() -> list[str]:
    # Imported subpackages are attributes too, but no part of the public interface.
    return __all__

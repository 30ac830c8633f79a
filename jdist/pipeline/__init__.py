"""Pipelined model parallelism: schedules as data, their costs, and their execution."""

from jdist._fit import Metrics, over_epoch
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.measured_timeline import timed
from jdist.pipeline.pipeline import PipeDream, Pipeline
from jdist.pipeline.places import Meshes, OneProgram, Workers
from jdist.pipeline.plan import (
    Layer,
    Plan,
    PlannedStage,
    Profile,
    load_plan,
    load_profile,
    partition,
)
from jdist.pipeline.run.update import PipelineState
from jdist.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    UpdatePolicy,
    split_drain,
    versions_used,
)
from jdist.pipeline.schedules.dualpipe_v import dualpipe_v
from jdist.pipeline.schedules.forward_only import forward_only
from jdist.pipeline.schedules.gpipe import gpipe
from jdist.pipeline.schedules.interleaved import interleaved
from jdist.pipeline.schedules.looped_bfs import looped_bfs
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.schedules.pipedream_2bw import pipedream_2bw
from jdist.pipeline.schedules.pipedream_flush import pipedream_flush
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
from jdist.pipeline.training_loop import fit
from jdist.pipeline.weight_stashing.optimizer import (
    StashState,
    WeightStashing,
    with_weight_stashing,
)

__all__ = [
    "Action",
    "Costs",
    "FromModules",
    "Layer",
    "Meshes",
    "Metrics",
    "Module",
    "OneProgram",
    "PipeDream",
    "Pipeline",
    "PipelineCheckpoints",
    "PipelineState",
    "Plan",
    "PlannedStage",
    "Profile",
    "Record",
    "Schedule",
    "ScheduleError",
    "Stage",
    "StashState",
    "Timeline",
    "UpdatePolicy",
    "WeightStashing",
    "Workers",
    "dualpipe_v",
    "fit",
    "forward_only",
    "gpipe",
    "interleaved",
    "load_plan",
    "load_profile",
    "looped_bfs",
    "modules_from_nnx",
    "one_f_one_b",
    "over_epoch",
    "partition",
    "pipedream",
    "pipedream_2bw",
    "pipedream_flush",
    "profile",
    "simulate",
    "split_drain",
    "stages_from_modules",
    "stages_from_nnx",
    "timed",
    "versions_used",
    "with_ends",
    "with_weight_stashing",
    "zbv",
    "zero_bubble",
]


def __dir__() -> list[str]:
    # Imported subpackages are attributes too, but no part of the public interface.
    return __all__

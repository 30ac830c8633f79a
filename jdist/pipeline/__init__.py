"""Pipelined model parallelism: schedules as data, their costs, and their execution."""

from jdist._fit import Metrics, over_epoch
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.fit import fit
from jdist.pipeline.pipedream.weight_stashing import (
    StashState,
    WeightStashing,
    with_weight_stashing,
)
from jdist.pipeline.pipeline import PipeDream, Pipeline
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
from jdist.pipeline.schedules import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipedream_flush,
    zbv,
    zero_bubble,
)
from jdist.pipeline.simulate import Costs, Record, Timeline, simulate
from jdist.pipeline.stages import (
    FromModules,
    Module,
    Stage,
    modules_from_nnx,
    profile,
    stages_from_modules,
    stages_from_nnx,
)
from jdist.pipeline.timed import timed

__all__ = [
    "Action",
    "Costs",
    "FromModules",
    "Layer",
    "Metrics",
    "Module",
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
    "with_weight_stashing",
    "zbv",
    "zero_bubble",
]


def __dir__() -> list[str]:
    # Completion shows what users may touch, not the rooms, which are attributes too.
    return __all__

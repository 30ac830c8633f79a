"""Pipelined model parallelism: schedules as data, and what they cost."""

from jdist._fit import Epoch as Epoch
from jdist._fit import over_epoch as over_epoch
from jdist.pipeline.checkpoint import PipelineCheckpoints as PipelineCheckpoints
from jdist.pipeline.pipedream.pipedream import EpochMetrics as EpochMetrics
from jdist.pipeline.pipedream.pipedream import PipeDream as PipeDream
from jdist.pipeline.pipedream.weight_stashing import StashState as StashState
from jdist.pipeline.pipedream.weight_stashing import WeightStashing as WeightStashing
from jdist.pipeline.pipedream.weight_stashing import (
    with_weight_stashing as with_weight_stashing,
)
from jdist.pipeline.pipeline import Pipeline as Pipeline
from jdist.pipeline.plan.partition import partition as partition
from jdist.pipeline.plan.plan import Plan as Plan
from jdist.pipeline.plan.plan import PlannedStage as PlannedStage
from jdist.pipeline.plan.plan import load_plan as load_plan
from jdist.pipeline.plan.profile import Layer as Layer
from jdist.pipeline.plan.profile import Profile as Profile
from jdist.pipeline.plan.profile import load_profile as load_profile
from jdist.pipeline.run.evaluation import Evaluation as Evaluation
from jdist.pipeline.run.fit import fit as fit
from jdist.pipeline.run.training import Metrics as Metrics
from jdist.pipeline.run.training import PipelineState as PipelineState
from jdist.pipeline.schedule.actions import Action as Action
from jdist.pipeline.schedule.actions import ScheduleError as ScheduleError
from jdist.pipeline.schedule.schedule import Schedule as Schedule
from jdist.pipeline.schedule.split_drain import split_drain as split_drain
from jdist.pipeline.schedule.update_policy import UpdatePolicy as UpdatePolicy
from jdist.pipeline.schedule.versions import versions_used as versions_used
from jdist.pipeline.schedules import dualpipe_v as dualpipe_v
from jdist.pipeline.schedules import forward_only as forward_only
from jdist.pipeline.schedules import gpipe as gpipe
from jdist.pipeline.schedules import interleaved as interleaved
from jdist.pipeline.schedules import looped_bfs as looped_bfs
from jdist.pipeline.schedules import one_f_one_b as one_f_one_b
from jdist.pipeline.schedules import pipedream as pipedream
from jdist.pipeline.schedules import pipedream_2bw as pipedream_2bw
from jdist.pipeline.schedules import pipedream_flush as pipedream_flush
from jdist.pipeline.schedules import zbv as zbv
from jdist.pipeline.schedules import zero_bubble as zero_bubble
from jdist.pipeline.simulate.costs import Costs as Costs
from jdist.pipeline.simulate.simulate import simulate as simulate
from jdist.pipeline.simulate.timeline import Record as Record
from jdist.pipeline.simulate.timeline import Timeline as Timeline
from jdist.pipeline.stages.measure import profile as profile
from jdist.pipeline.stages.module import Module as Module
from jdist.pipeline.stages.module_stages import FromModules as FromModules
from jdist.pipeline.stages.module_stages import (
    stages_from_modules as stages_from_modules,
)
from jdist.pipeline.stages.nnx_stages import modules_from_nnx as modules_from_nnx
from jdist.pipeline.stages.nnx_stages import stages_from_nnx as stages_from_nnx
from jdist.pipeline.stages.stage import Stage as Stage
from jdist.pipeline.timed import timed as timed

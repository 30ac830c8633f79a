"""Pipelined model parallelism: schedules as data, their costs, and their execution."""

from jdist._fit import Metrics
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.measured_timeline import timed
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.places import Meshes, OneProgram, Workers
from jdist.pipeline.plan.partitioner import partition
from jdist.pipeline.plan.plan import Plan, load_plan
from jdist.pipeline.plan.profile import Layer, Profile, load_profile
from jdist.pipeline.run.update import PipelineState
from jdist.pipeline.schedule.actions import ScheduleError
from jdist.pipeline.schedule.drain import split_drain
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedules.dualpipe_v import dualpipe_v
from jdist.pipeline.schedules.gpipe import gpipe
from jdist.pipeline.schedules.interleaved import interleaved
from jdist.pipeline.schedules.looped_bfs import looped_bfs
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.schedules.v_shaped import v_half, v_min
from jdist.pipeline.schedules.zbv import zbv
from jdist.pipeline.schedules.zero_bubble import zero_bubble
from jdist.pipeline.simulation.costs import Costs
from jdist.pipeline.simulation.simulator import simulate
from jdist.pipeline.simulation.timeline import Record, Timeline
from jdist.pipeline.stages.chain import with_ends
from jdist.pipeline.stages.measure import profile
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.module_stages import FromModules, stages_from_modules
from jdist.pipeline.stages.nnx_stages import modules_from_nnx, stages_from_nnx
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.synthesis.synthesizer import Found, synthesize
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

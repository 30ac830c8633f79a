"""Pipelined model parallelism: schedules as data, and what they cost."""

from jdist.pipeline.nnx_stages import stages_from_nnx as stages_from_nnx
from jdist.pipeline.pipeline import Pipeline as Pipeline
from jdist.pipeline.schedule import Schedule as Schedule
from jdist.pipeline.schedule import Updates as Updates
from jdist.pipeline.schedule_actions import Action as Action
from jdist.pipeline.schedule_actions import ScheduleError as ScheduleError
from jdist.pipeline.schedule_csv import from_csv as from_csv
from jdist.pipeline.schedule_csv import to_csv as to_csv
from jdist.pipeline.schedules import dualpipe_v as dualpipe_v
from jdist.pipeline.schedules import forward_only as forward_only
from jdist.pipeline.schedules import gpipe as gpipe
from jdist.pipeline.schedules import interleaved as interleaved
from jdist.pipeline.schedules import looped_bfs as looped_bfs
from jdist.pipeline.schedules import one_f_one_b as one_f_one_b
from jdist.pipeline.schedules import pipedream as pipedream
from jdist.pipeline.schedules import pipedream_2bw as pipedream_2bw
from jdist.pipeline.schedules import zbv as zbv
from jdist.pipeline.schedules import zero_bubble as zero_bubble
from jdist.pipeline.stage import Stage as Stage

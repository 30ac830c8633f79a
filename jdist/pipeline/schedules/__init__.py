"""The published schedules, one family per file."""

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

__all__ = [
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "pipedream_flush",
    "zbv",
    "zero_bubble",
]

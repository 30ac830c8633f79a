"""The published schedules, one family per file."""

from jdist.pipeline.schedules.dualpipe_v import dualpipe_v as dualpipe_v
from jdist.pipeline.schedules.forward_only import forward_only as forward_only
from jdist.pipeline.schedules.gpipe import gpipe as gpipe
from jdist.pipeline.schedules.interleaved import interleaved as interleaved
from jdist.pipeline.schedules.looped_bfs import looped_bfs as looped_bfs
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream as pipedream
from jdist.pipeline.schedules.pipedream_2bw import pipedream_2bw as pipedream_2bw
from jdist.pipeline.schedules.pipedream_flush import pipedream_flush as pipedream_flush
from jdist.pipeline.schedules.zbv import zbv as zbv
from jdist.pipeline.schedules.zero_bubble import zero_bubble as zero_bubble

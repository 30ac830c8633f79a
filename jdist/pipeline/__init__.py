"""Model and pipeline parallelism."""

from jdist.pipeline.pipeline import Pipeline as Pipeline
from jdist.pipeline.stage import Stage as Stage

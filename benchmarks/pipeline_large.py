"""How long is a pipeline's step where micro-batches are large, beside one core's?

Like `pipeline`, with a batch of 2048: products of 128 rows or more reach full speed, so
that the whole batch on one core is the fair comparison.
"""

from benchmarks import _pipeline_jdist
from benchmarks import _pipeline_models as models
from benchmarks._goals import Goal, ratio, scaled
from benchmarks._harness import Case
from benchmarks._pair import Pair
from benchmarks.pipeline import OURS, SETTINGS, race

GOAL = 0.9
"""Goal for the share of 2m/(m+1), the speed-up over the whole batch."""


def measure() -> list[Case]:
    """1F1B with each number of micro-batches, and the whole batch."""
    with Pair(_pipeline_jdist.prepare_large, SETTINGS) as ours:
        found = race({OURS: ours})
    whole, goals = found[OURS, models.WHOLE], []
    for m in models.MICRO_BATCHES:
        for kind in (models.ONE_F_ONE_B, models.SPLIT_DRAIN):
            job = models.piped(kind, m)
            share = scaled(ratio(whole, found[OURS, job]), (m + 1) / (2 * m))
            goals.append(Goal(f"of 2m/(m+1), {job}", share, GOAL, at_least=True))
    timings = {job: found[OURS, job] for _, job in found}
    return [Case("batch 2048", timings, goals=goals)]

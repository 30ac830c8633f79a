"""How long is a pipeline's step where micro-batches are large, beside one core's?

As `pipeline`, with a batch of 2048: products of 128 rows and more are as fast as they
get, so that the whole batch on one core is what to compare with.
"""

from benchmarks import _pipeline_jdist
from benchmarks import _pipeline_models as models
from benchmarks._harness import Case
from benchmarks._pair import Pair
from benchmarks.pipeline import OURS, SETTINGS, race

GOAL = 0.9
"""Of 2m/(m+1), the speed-up over the whole batch."""


def measure() -> list[Case]:
    """1F1B with each number of micro-batches, and the whole batch."""
    with Pair(_pipeline_jdist.prepare_large, SETTINGS) as ours:
        found = race({OURS: ours})
    whole, notes = found[OURS, models.WHOLE].median, []
    for m in models.MICRO_BATCHES:
        for kind in (models.ONE_F_ONE_B, models.SPLIT_DRAIN):
            job = models.piped(kind, m)
            share = whole / found[OURS, job].median * (m + 1) / (2 * m)
            notes.append(f"{job}: {share:.2f}")
    timings = {job: found[OURS, job] for _, job in found}
    return [
        Case(
            "batch 2048", timings, note=f"of 2m/(m+1) (goal {GOAL}): {'; '.join(notes)}"
        )
    ]

"""How long is a step of unequal stages by a schedule that is found, beside families'?

Each of two processes is pinned to one core; 8 micro-batches. `1 : 2` has 4 and 8 layers
of 1024, batch 512; torch's zero bubbles have the same layers of a process in two stages
each. In the other job the last stage has attention and a large head. The search begins
with the costs of timed steps of 1F1B and ZB-H1, within the memory of ZB-H1; `simulated`
is predicted from the costs of a timed run of its own.
"""

from collections.abc import Mapping

from benchmarks import _pipeline_jdist, _pipeline_torch
from benchmarks import _pipeline_models as models
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case, Timing
from benchmarks._pair import Pair
from benchmarks.pipeline import OF_SIMULATION, OURS, SAME, SETTINGS, race

OF_FAMILY = 1.1
"""Goal for the speed over the best family's, where the simulation predicts so much."""


def measure() -> list[Case]:
    """Families and what is found, of jdist and of torch, in turn."""
    with (
        Pair(_pipeline_jdist.prepare_unequal, SETTINGS) as ours,
        Pair(_pipeline_torch.prepare_unequal, SETTINGS) as theirs,
    ):
        found = race({OURS: ours, SAME: theirs})
    return [
        _case("1 : 2", "", found),
        _case(models.HEADED, f"{models.HEADED}, ", found),
    ]


def _case(name: str, job: str, found: Mapping[tuple[str, str], Timing]) -> Case:
    kinds = models.ONE_F_ONE_B, models.ZERO_BUBBLE, models.FOUND
    own = {kind: found[OURS, job + kind] for kind in kinds}
    simulated = {kind: found[OURS, f"{job}simulated, {kind}"] for kind in kinds}
    best = min(kinds[:2], key=lambda kind: own[kind].median)
    gain = min(simulated[kind].median for kind in kinds[:2])
    gain /= simulated[models.FOUND].median
    goals = [
        Goal(
            "of its simulation's speed, found",
            ratio(simulated[models.FOUND], own[models.FOUND]),
            OF_SIMULATION,
            at_least=True,
        )
    ]
    if gain >= OF_FAMILY:
        speed = ratio(own[best], own[models.FOUND])
        goals.append(Goal(f"of the speed of {best}", speed, OF_FAMILY, at_least=True))
    shown = {f"{kind}, {OURS}": timing for kind, timing in own.items()}
    shown |= {f"simulated, {kind}": timing for kind, timing in simulated.items()}
    if not job:
        theirs = {kind: timing for (who, kind), timing in found.items() if who == SAME}
        shown |= {f"{kind}, {SAME}": timing for kind, timing in theirs.items()}
    note = f"simulated: found {gain:.3f} times as fast as the best family"
    return Case(name, shown, note=note, goals=goals)

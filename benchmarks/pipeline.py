"""How long is a step of a pipeline over two processes, beside torch's and one core's?

Each process is pinned to one core. Two equal stages of 6 layers of 1024, batch 512: the
gradient of all parameters. torch.distributed.pipelining runs 1F1B over gloo in the same
run, as it is shipped and with the process settings of `jdist.launch`, one thread a
process; jdist runs it as published and with its drain split. `unsplit` is the same
compiled stages with the same micro-batches in one process; `simulated` is 1F1B
predicted from the costs of a timed run of its own. Joined weight gradients are one
product each over all micro-batches.
"""

from collections.abc import Mapping

from benchmarks import _pipeline_jdist, _pipeline_torch
from benchmarks import _pipeline_models as models
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair
from jdist.rpc import ProcessSettings

SETTINGS = ProcessSettings(callback_threads=0)
ROUNDS = 9
WARMUP = 1
OURS, SHIPPED, SAME = "jdist", "torch as shipped", "torch, same settings"
OF_WHOLE = {2: 0.93, 4: 0.87, 8: 0.74, 16: 0.58}
"""Goals: the share of 2m/(m+1) over the whole batch; small products are slow on CPU."""

JOINED_GOAL = 0.94
"""Of the time of 1F1B that adds gradients up."""


def measure() -> list[Case]:
    """For each number of micro-batches the contenders, then what an action costs."""
    with (
        Pair(_pipeline_jdist.prepare, SETTINGS) as ours,
        Pair(_pipeline_torch.prepare, None) as shipped,
        Pair(_pipeline_torch.prepare, SETTINGS) as same,
    ):
        found = race({OURS: ours, SHIPPED: shipped, SAME: same})
    cases = [_case(m, found) for m in models.MICRO_BATCHES]
    empty = {name: found[OURS, name] for name in (models.EMPTY, models.EMPTY_PIPED)}
    note = "goal: under 80 us; over two processes the way of the messages counts too"
    return [*cases, Case("host overhead", empty, note=note)]


def race(pairs: Mapping[str, Pair]) -> dict[tuple[str, str], Timing]:
    """Every job of every pair once a round, by contender and job."""
    jobs = [(name, job, pair) for name, pair in pairs.items() for job in pair.jobs]
    seconds: dict[tuple[str, str], list[float]] = {job[:2]: [] for job in jobs}
    for turn in range(WARMUP + ROUNDS):
        for name, job, pair in jobs:
            spent = pair.run(job, 1)
            if turn >= WARMUP:
                seconds[name, job].append(spent.elapsed)
    return {job: timing(values) for job, values in seconds.items()}


def _case(m: int, found: Mapping[tuple[str, str], Timing]) -> Case:
    own = tuple(models.piped(kind, m) for kind in models.OWN)
    rest = (models.predicted(m), models.unsplit(m), models.WHOLE)
    shown = {f"{job}, {OURS}": found[OURS, job] for job in (*own, *rest)}
    for name in (SHIPPED, SAME):
        for job in (own[0], models.WHOLE):
            shown[f"{job}, {name}"] = found[name, job]
    return Case(f"m = {m}", shown, note=_note(m, found))


def _note(m: int, found: Mapping[tuple[str, str], Timing]) -> str:
    whole_drain, split_drain, zero, joined = (
        found[OURS, models.piped(kind, m)].median for kind in models.OWN
    )
    # ZB-H1 with B = F + W: m (F + B) + (n - 1)(F + B - 2W), n = 2, F = W = 1.
    bound = (3 * m + 1) / (3 * m + 3)
    simulated = found[OURS, models.predicted(m)].median / whole_drain
    return (
        f"1F1B {_beside(whole_drain, m, found)}; with a split drain "
        f"{_beside(split_drain, m, found)}; goals 0.95 / 0.95 of torch, 0.95 of "
        f"2m/(m+1) over unsplit, {OF_WHOLE[m]} over the whole batch; 1F1B has "
        f"{simulated:.2f} of its simulation's speed (goal 0.93); ZB-H1 "
        f"{zero / whole_drain:.2f} of 1F1B (its bound {bound:.2f}); joined weight "
        f"gradients {joined / whole_drain:.2f} of 1F1B (goal {JOINED_GOAL})"
    )


def _beside(step: float, m: int, found: Mapping[tuple[str, str], Timing]) -> str:
    """Seconds of a step beside torch's, and its part of the ideal speed-up."""
    same_step = models.piped(models.ONE_F_ONE_B, m)
    shipped, same = (found[name, same_step].median for name in (SHIPPED, SAME))
    unsplit, whole = (
        found[OURS, job].median / step * (m + 1) / (2 * m)
        for job in (models.unsplit(m), models.WHOLE)
    )
    return (
        f"{step / shipped:.2f} of torch as shipped, {step / same:.2f} with the same "
        f"settings, {unsplit:.2f} of 2m/(m+1) over unsplit, {whole:.2f} over the whole"
    )

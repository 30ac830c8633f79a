"""How long is a step of a pipeline over two processes, beside torch's and one core's?

Each process is pinned to one core. Two equal stages of 6 layers of 1024, batch 512: the
gradient of all parameters. torch.distributed.pipelining runs 1F1B over gloo in the same
run, as it is shipped and with the process settings of `jdist.launch`, one thread a
process; jdist runs it as published and with its drain split. `unsplit` is the same
compiled stages with the same micro-batches in one process; `simulated` is 1F1B
predicted from the costs of a timed run of its own.
"""

from collections.abc import Mapping

from benchmarks import _pipeline_jdist, _pipeline_torch
from benchmarks import _pipeline_models as models
from benchmarks._goals import Figure, Goal, ratio, scaled
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair
from jdist.rpc import ProcessSettings

SETTINGS = ProcessSettings(callback_threads=0)
ROUNDS = 9
WARMUP = 1
OURS, SHIPPED, SAME = "jdist", "torch as shipped", "torch, same settings"
OF_WHOLE = {2: 0.93, 4: 0.87, 8: 0.74, 16: 0.58}
"""Goals for the share of 2m/(m+1) over the whole batch; small products are slow."""

OF_TORCH = OF_UNSPLIT = 0.95
OF_SIMULATION = 0.93

OVERHEAD = 80.0
"""Host time of an action, in microseconds."""


def measure() -> list[Case]:
    """The contenders for each number of micro-batches; the host cost of an action."""
    with (
        Pair(_pipeline_jdist.prepare, SETTINGS) as ours,
        Pair(_pipeline_torch.prepare, None) as shipped,
        Pair(_pipeline_torch.prepare, SETTINGS) as same,
    ):
        found = race({OURS: ours, SHIPPED: shipped, SAME: same})
    cases = [_case(m, found) for m in models.MICRO_BATCHES]
    empty = {name: found[OURS, name] for name in (models.EMPTY, models.EMPTY_PIPED)}
    alone = scaled(found[OURS, models.EMPTY], 1e6)
    goals = [Goal("an action, in one process", alone, OVERHEAD, unit=" us")]
    note = "over two processes the way of the messages counts too"
    return [*cases, Case("host overhead", empty, note=note, goals=goals)]


def race(pairs: Mapping[str, Pair]) -> dict[tuple[str, str], Timing]:
    """Runs every job of every pair once a round; timings by contender and job."""
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
    whole_drain, split_drain, zero = (
        found[OURS, models.piped(kind, m)] for kind in models.OWN
    )
    # ZB-H1 with B = F + W: m (F + B) + (n - 1)(F + B - 2W), n = 2, F = W = 1.
    bound = (3 * m + 1) / (3 * m + 3)
    zero_bubble = zero.median / whole_drain.median
    simulated = ratio(found[OURS, models.predicted(m)], whole_drain)
    goals = [
        *_goals(m, "1F1B", whole_drain, found),
        *_goals(m, "split drain", split_drain, found),
        Goal(
            "of its simulation's speed, 1F1B", simulated, OF_SIMULATION, at_least=True
        ),
    ]
    note = f"ZB-H1 {zero_bubble:.2f} of 1F1B (its bound {bound:.2f})"
    return Case(f"m = {m}", shown, note=note, goals=goals)


def _goals(
    m: int, kind: str, step: Timing, found: Mapping[tuple[str, str], Timing]
) -> list[Goal]:
    """Goals of a step beside torch's, and for its share of the ideal speed-up."""
    same_step = models.piped(models.ONE_F_ONE_B, m)

    def share(job: str) -> Figure:
        return scaled(ratio(found[OURS, job], step), (m + 1) / (2 * m))

    return [
        *(
            Goal(f"of {torch}, {kind}", ratio(step, found[torch, same_step]), OF_TORCH)
            for torch in (SHIPPED, SAME)
        ),
        *(
            Goal(f"of 2m/(m+1) over {over}, {kind}", share(job), least, at_least=True)
            for over, job, least in (
                ("unsplit", models.unsplit(m), OF_UNSPLIT),
                ("the whole batch", models.WHOLE, OF_WHOLE[m]),
            )
        ),
    ]

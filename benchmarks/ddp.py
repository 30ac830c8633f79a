"""How long is a data-parallel training step over two processes, beside torch's DDP?

Each process is pinned to one core, so that computation and communication add up: the
least that a step can take is both together. jdist runs with the process settings of
`jdist.launch` for programs without callbacks (`--callback-threads 0`), torch as it is
shipped and with the same settings. All processes live at once and take turns.
"""

from collections.abc import Mapping

from benchmarks import _ddp_jdist, _ddp_torch
from benchmarks._ddp_models import MODELS, Model
from benchmarks._goals import Figure, Goal, ratio
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair, Spent
from jdist.rpc import ProcessSettings

SETTINGS = ProcessSettings(callback_threads=0)
ROUNDS = 25
WARMUP = 3
OURS, SHIPPED, SAME = "jdist", "torch as shipped", "torch, same settings"


def measure() -> list[Case]:
    """For each model steps and their parts, in wall-clock and in processor time."""
    with (
        Pair(_ddp_jdist.prepare, SETTINGS) as ours,
        Pair(_ddp_torch.prepare, None) as shipped,
        Pair(_ddp_torch.prepare, SETTINGS) as same,
    ):
        pairs = {OURS: ours, SHIPPED: shipped, SAME: same}
        return [case for model in MODELS for case in _cases(model, pairs)]


def _cases(model: Model, pairs: Mapping[str, Pair]) -> list[Case]:
    spent = _race(model, pairs)
    return [
        _case(
            model, kind, {name: timing([s[i] for s in x]) for name, x in spent.items()}
        )
        for i, kind in enumerate(("", ", processor time"))
    ]


def _race(model: Model, pairs: Mapping[str, Pair]) -> dict[str, list[Spent]]:
    """Runs every job of every pair once a round."""
    start = f"{model.name}: "
    jobs = [
        (f"{job.removeprefix(start)}, {name}", pair, job)
        for name, pair in pairs.items()
        for job in pair.jobs
        if job.startswith(start)
    ]
    spent: dict[str, list[Spent]] = {
        name: [] for name, _, _ in sorted(jobs, key=_order)
    }
    for turn in range(WARMUP + ROUNDS):
        for name, pair, job in jobs:
            found = pair.run(job, model.calls)
            if turn >= WARMUP:
                spent[name].append(found)
    return spent


def _order(job: tuple[str, Pair, str]) -> int:
    """The sort key that puts steps first and then the parts."""
    return ("step", "tuned step", "computation", "communication").index(
        job[0].partition(",")[0]
    )


def _case(model: Model, kind: str, timings: Mapping[str, Timing]) -> Case:
    parts = [timings[f"{part}, {OURS}"] for part in ("computation", "communication")]
    least = Figure(
        *(
            sum(getattr(part, end) for part in parts)
            for end in ("median", "low", "high")
        )
    )
    step = timings[f"step, {OURS}"]
    shipped, same = (timings[f"step, {torch}"] for torch in (SHIPPED, SAME))
    goals = [
        Goal("of torch as shipped", ratio(step, shipped), model.goal),
        Goal("of torch, same settings", ratio(step, same), 1.0),
        Goal("of its own parts", ratio(step, least), 1.08),
    ]
    note = "tuned: gradient_as_bucket_view and fused SGD"
    return Case(f"{model.name}{kind}", timings, note=note, goals=goals)

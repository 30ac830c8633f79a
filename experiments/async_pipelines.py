"""Which published rule costs least where the gradients of a pipeline come late?

A small language model learns the characters of Python's manual in 4 and 32 stages, and
a small residual network digits in 4 and 8, by PipeDream with and without weight
stashing, vertical sync, 2BW, weight prediction (SpecTrain, XPipe, PipeOptim), PipeMare,
Nesterov's look-ahead, basis rotation, delay compensation and error feedback, under SGD,
Adam and Muon. Each method has the same number of learning rates and of seeds: four and
three, so that the full form takes a quarter of an hour of processor time. An epoch is
one compiled program, with the bits of the executor; seconds are those of the simulator,
for stages of equal length whose updates take no time.

The full form writes each result down and goes on from there when it is called again.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._asynchronous import compiled, rules, study, task
from experiments._asynchronous.images import Images
from experiments._asynchronous.language import Language
from experiments._asynchronous.study import Found, Study
from experiments._asynchronous.task import Task
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline

FULL = {
    "text": Study(
        Language(length=16, steps=150),
        (4, 32),
        tuple(study.METHODS),
        seeds=3,
        rates=4,
    ),
    "digits": Study(
        Images(halves=8, steps=150), (4, 8), tuple(study.METHODS), seeds=3, rates=4
    ),
}
QUICK = {
    "text": Study(
        Language(width=8, halves=2, length=8, batch=4, steps=6, test=4),
        (1, 2),
        (study.SYNC, study.STASH),
        seeds=2,
        rates=1,
    )
}
SMOOTHED = 25
"""Updates over which a curve of training losses is averaged."""

Runs = Mapping[tuple[str, int], Found]


class Order(NamedTuple):
    """An order that publications report: one method ends with a lower loss.

    Attributes:
      text: The order as a sentence.
      lower: The method with the lower loss, and in how many stages: the index of
        `Study.stages`.
      higher: The other one.
      sources: The publications, by their numbers at arXiv.
    """

    text: str
    lower: tuple[str, int]
    higher: tuple[str, int]
    sources: tuple[str, ...]


ORDERS = (
    Order(
        "PipeDream's delayed gradients cost more in more stages",
        (study.STASH, 0),
        (study.STASH, -1),
        ("1910.05124", "2505.01099", "2602.03515"),
    ),
    Order(
        "weight prediction (XPipe) costs less than weight stashing",
        (study.XPIPE, -1),
        (study.STASH, -1),
        ("1809.02839", "1911.04610", "2312.00839"),
    ),
    Order(
        "weight prediction (PipeOptim) costs less than weight stashing",
        (study.PIPEOPTIM, -1),
        (study.STASH, -1),
        ("2312.00839",),
    ),
    Order(
        "weight stashing costs less than none",
        (study.STASH, -1),
        (study.NONE, -1),
        ("1806.03377",),
    ),
    Order(
        "Nesterov's look-ahead costs less than weight stashing",
        (study.NESTEROV, -1),
        (study.STASH, -1),
        ("2505.01099",),
    ),
    Order(
        "basis rotation costs less than weight stashing",
        (study.ROTATION, -1),
        (study.STASH, -1),
        ("2602.03515",),
    ),
    Order(
        "one step of delay (2BW) costs less than as many as there are stages",
        (study.TWO, -1),
        (study.STASH, -1),
        ("2606.30634",),
    ),
    Order(
        "error feedback mends a part of 2BW's cost",
        (study.FEEDBACK, -1),
        (study.TWO, -1),
        ("2606.30634",),
    ),
)


def run(settings: Settings, progress: Progress) -> Result:
    """Trains all methods, and holds the compiled form against the executor."""
    chosen = QUICK if settings.quick else FULL
    folder = Path(settings.out) / "async_pipelines-runs"
    why = "orders are judged in the full form only" if settings.quick else ""
    parts = []
    for title, each in chosen.items():
        given, runs, read = each._replace(seed=settings.seed), {}, 0
        for name, stages in progress.track(given.cases(), description=title):
            runs[name, stages], known = study.resumed(given, folder, name, stages)
            read += known
        parts.append(part_of(title, given, runs, read, why))
    return Result(
        claims=[claim for part in parts for claim in part.claims],
        pictures=[picture for part in parts for picture in part.pictures],
        tables={name: rows for part in parts for name, rows in part.tables.items()},
        data={key: found for part in parts for key, found in part.data.items()},
        notes=[*(note for part in parts for note in part.notes), CONTROL],
    )


CONTROL = (
    "Without stashing a backward pass sees other weights than its forward pass: what "
    "it computes again, it computes with those that it sees."
)


def part_of(title: str, given: Study, runs: Runs, read: int, why: str) -> Result:
    """What came out for one task."""
    return Result(
        claims=[
            executor_claim(title, given.task),
            *order_claims(title, given, runs, why),
        ],
        pictures=list(pictures(title, given, runs)),
        tables={f"Methods: {title}": rows(given, runs)},
        data={
            f"{title}: {name}, {stages} stages": found.record()
            for (name, stages), found in runs.items()
        },
        notes=[f"{title}: {note}" for note in notes(given, read)],
    )


def notes(given: Study, read: int) -> Iterator[str]:
    """The sizes, the grids, and what was not computed again."""
    yield f"{given.task.text}."
    for grid in dict.fromkeys(map(given.grid, given.methods)):
        names = "; ".join(name for name in given.methods if given.grid(name) == grid)
        yield f"learning rates {', '.join(f'{rate:g}' for rate in grid)}: {names}."
    yield f"{given.seeds} seeds of weights and batches; the best mean is shown."
    if read:
        yield f"{read} of {len(given.cases())} results were read from an earlier call."


# --- the executor ---


def executor_claim(title: str, given: Task) -> Claim:
    """Whether the compiled form ends an epoch with the bits of a `Pipeline`."""
    stages, steps = min(4, given.halves), min(7, given.steps)
    made, data = task.staged(given, stages), given.training(0)
    params = task.cut(given.parameters(0), stages)
    optimizer = optim.adam(lr=0.01)
    pipe = pipeline.Pipeline(
        made,
        given.losses,
        pipeline.pipedream(stages, stages),
        optimizer=optimizer,
    )
    few = jax.tree.map(lambda x: x[:steps], data)
    batches = [{name: x[i] for name, x in few.batch.items()} for i in range(steps)]
    state, _ = pipe.train_epoch(pipe.init(params), batches)
    versions = pipeline.pipedream(stages, steps).versions_used()
    rule = rules.stashed(optimizer)
    program = compiled.Program(made, given.losses, rule, versions)
    found = jax.jit(program)(params, few)
    leaves = jax.tree.leaves(found.params), jax.tree.leaves(list(state.params))
    same = [np.array_equal(a, b) for a, b in zip(*leaves, strict=True)]
    text = f"{title}: the compiled form ends an epoch with the bits of the executor"
    shown = (
        f"{sum(same)} of {len(same)} arrays after {steps} updates in {stages} stages"
    )
    return Claim(text, all(same), shown, leads=True)


# --- orders ---


def order_claims(title: str, given: Study, runs: Runs, why: str) -> Iterator[Claim]:
    """A claim for each order whose methods were trained."""
    for order in ORDERS:
        pair = [_at(given, *place) for place in (order.lower, order.higher)]
        text = f"{title}: {order.text} (arXiv {', '.join(order.sources)})"
        if not all(key in runs for key in pair):
            yield Claim(text, None, "", why or "its methods were not trained")
            continue
        low, high = (runs[key] for key in pair)
        shown = "; ".join(
            f"{name} in {stages}: {told(runs[name, stages])}" for name, stages in pair
        )
        yield judged(text, is_lower(low, high), is_lower(high, low), shown, why)
    yield from muon_claim(title, runs, why)


def muon_claim(title: str, runs: Runs, why: str) -> Iterator[Claim]:
    """Whether one step of delay costs Muon less than Adam."""
    keys = {name: key for key in runs for name in [key[0]]}
    wanted = (study.SYNC, study.TWO, study.MUON, study.MUON_TWO)
    text = f"{title}: one step of delay costs Muon less than Adam (arXiv 2606.30634)"
    if not all(name in keys for name in wanted):
        yield Claim(text, None, "", why or "its methods were not trained")
        return
    adam, late, muon, muon_late = (runs[keys[name]].losses for name in wanted)
    cost, muons = late - adam, muon_late - muon
    shown = f"Adam {cost.mean():+.4f}, Muon {muons.mean():+.4f}"
    more, less = surely_positive(cost - muons), surely_positive(muons - cost)
    yield judged(text, more, less, shown, why)


def judged(text: str, found: bool, reverse: bool, shown: str, why: str) -> Claim:
    """A claim that holds, or that the reverse refutes; left open where neither is."""
    open_ = "" if found or reverse else "the seeds' differences do not decide it"
    return Claim(text, found, shown).unless(why or open_)


def _at(given: Study, name: str, place: int) -> tuple[str, int]:
    by_stages = study.METHODS[name].by_stages
    return name, given.stages[place if by_stages else 0]


def is_lower(low: Found, high: Found) -> bool:
    """Whether a method ends lower, by more than the seeds' differences vary."""
    diverged = [not np.isfinite(each.losses).all() for each in (low, high)]
    if any(diverged):
        return diverged == [False, True]
    return surely_positive(high.losses - low.losses)


def surely_positive(differences: np.ndarray) -> bool:
    """Whether the mean of paired differences exceeds twice its standard error."""
    if len(differences) < 2:
        return False
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return bool(differences.mean() > 2 * error)


def told(found: Found) -> str:
    """Mean and standard deviation over the seeds."""
    if not np.isfinite(found.losses).all():
        return "diverged"
    return f"{found.losses.mean():.4f} ± {found.losses.std(ddof=1):.4f}"


# --- time and memory ---


@functools.cache
def seconds(versions: str, stages: int) -> float:
    """Simulated seconds of an update, if a batch's forward pass takes one on a device.

    A backward pass takes two. Flushes and 2BW cut a batch into as many micro-batches as
    there are stages. Of asynchronous epochs it is the steady state.
    """
    if versions == "flush":
        costs = _costs(stages, stages)
        return pipeline.simulate(pipeline.one_f_one_b(stages, stages), costs).makespan
    parts = stages if versions == "2bw" else 1
    policy: Any = "2bw" if versions == "2bw" else "stashing"
    short, long = (
        pipeline.simulate(
            pipeline.pipedream(stages, updates * parts, policy=policy),
            _costs(stages, parts),
        ).makespan
        for updates in (2 * stages, 4 * stages)
    )
    return (long - short) / (2 * stages)


def _costs(stages: int, parts: int) -> pipeline.Costs:
    share = 1 / (stages * parts)
    return pipeline.Costs(forward=share, backward=2 * share)


def memory(name: str, given: Task, stages: int) -> list[rules.Memory]:
    """The memory of each stage."""
    program = study.program_of(name, given, stages)
    parts = task.cut(given.parameters(0), stages)
    made = [study.METHODS[name].rule(own) for own in parts]
    return [
        rules.memory(rule, place, own)
        for rule, place, own in zip(made, program.places, parts, strict=True)
    ]


# --- tables and pictures ---


def rows(given: Study, runs: Runs) -> list[list[str]]:
    """A row for each method and number of stages.

    Seconds are the simulator's for an update, and the loss in equal time is that of
    training when PipeDream's updates have all been made. Bytes are those of weights and
    state in the largest stage.
    """
    table = [
        ["method", "optimizer", "stages", "rate", "held-out loss", "seconds",
         "in equal time", "versions", "bytes"],
    ]  # fmt: skip
    for (name, stages), found in runs.items():
        method = study.METHODS[name]
        shown = stages if method.by_stages else given.stages[-1]
        held = memory(name, given.task, shown)
        most = max(own.weights + own.state for own in held)
        one = seconds(method.versions, shown)
        table.append(
            [
                name,
                method.optimizer,
                str(stages) if method.by_stages else f"any, as of {shown}",
                f"{found.rates[found.best]:g}",
                told(found),
                f"{one:.3f}",
                f"{in_time(found, one, seconds('stashing', shown)):.3f}",
                str(max(own.versions for own in held)),
                f"{most:,}",
            ]
        )
    return table


def in_time(found: Found, one: float, other: float) -> float:
    """The training loss after as many updates of `other` seconds as there are."""
    # Rounded: a ratio of equal times may be just below 1.
    made = int(len(found.curve) * round(other / one, 6))
    return float(smoothed(found.curve)[max(1, made) - 1])


def pictures(title: str, given: Study, runs: Runs) -> Iterator[Picture]:
    """The loss over the stages, over updates and over simulated time."""
    yield Picture(
        f"{title}-stages",
        f"{title.capitalize()}: held-out loss after all updates with the best learning "
        "rate of each method; bars are standard deviations over seeds. Dashed or "
        "dotted: in any number of stages.",
        plot_stages(given, runs),
    )
    yield Picture(
        f"{title}-curves",
        f"{title.capitalize()}: training loss in {given.stages[-1]} stages, mean of "
        "the seeds, over updates and over the simulator's time.",
        plot_curves(given, runs),
    )


def plot_stages(given: Study, runs: Runs) -> Figure:
    """Final losses by the number of stages."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, name in enumerate(given.methods):
        color = f"C{number % 10}"
        keys = [key for key in runs if key[0] == name]
        own = [runs[key].losses for key in keys]
        mean, spread = ([f(x) for x in own] for f in (np.mean, np.std))
        if study.METHODS[name].by_stages:
            stages = [key[1] for key in keys]
            axes.errorbar(
                stages,
                mean,
                spread,
                marker="o" if number < 10 else "s",
                color=color,
                label=name,
                capsize=3,
            )
        else:
            style = "--" if number < 10 else ":"
            axes.axhline(mean[0], linestyle=style, color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(given.stages, list(map(str, given.stages)))
    axes.set_xlabel("stages")
    axes.set_ylabel("held-out loss")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def plot_curves(given: Study, runs: Runs) -> Figure:
    """Training losses of the most stages."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.6), sharey=True, layout="constrained"
    )
    stages = given.stages[-1]
    for number, name in enumerate(given.methods):
        # The colours are ten, and the methods more.
        line: dict[str, Any] = {
            "color": f"C{number % 10}",
            "linestyle": "-" if number < 10 else ":",
        }
        method = study.METHODS[name]
        found = runs[name, stages if method.by_stages else given.stages[0]]
        curve = smoothed(found.curve)
        updates = np.arange(1, len(curve) + 1)
        left.plot(updates, curve, **line)
        times = updates * seconds(method.versions, stages)
        right.plot(times, curve, label=name, **line)
    left.set_xlabel("updates")
    left.set_ylabel("training loss")
    right.set_xlabel("simulated seconds")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def smoothed(curve: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean of the last updates, of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(curve, np.float64)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - SMOOTHED, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)

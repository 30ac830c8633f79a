"""Which published rule costs least where the gradients of a pipeline come late?

A small language model learns the characters of Python's manual, and a small residual
network digits, in 4, 8, 16 and 32 stages, by PipeDream with and without weight
stashing, vertical sync, 2BW, weight prediction (SpecTrain, XPipe, PipeOptim), PipeMare,
Nesterov's look-ahead, basis rotation, delay compensation and error feedback, under SGD,
Adam and Muon. Each method has seven learning rates, two seeds that choose one of them
in each number of stages, and then five others, whose results are shown. An epoch is one
compiled program, with the bits of the executor; seconds are those of the simulator, for
the profile of the network's pieces here, and updates that take no time.

The full form writes each result down and goes on from there when it is called again.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._asynchronous import compiled, rules, study, task
from experiments._asynchronous.images import Images
from experiments._asynchronous.language import Language
from experiments._asynchronous.study import Found, Study
from experiments._asynchronous.task import Task
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline

TASKS: dict[str, Task] = {
    "text": Language(length=16, steps=300),
    "digits": Images(halves=32, steps=200),
}
FULL = {
    title: Study(
        given, (4, 8, 16, 32), tuple(study.METHODS), seeds=5, tuning=2, rates=7
    )
    for title, given in TASKS.items()
}
QUICK = {
    "text": Study(
        Language(width=8, halves=2, length=8, batch=4, steps=6, test=4),
        (1, 2),
        (study.SYNC, study.STASH),
        seeds=2,
        tuning=1,
        rates=1,
    )
}
SMOOTHED = 25
"""Updates over which a curve of training losses is averaged."""
STUDENT = (12.706, 4.303, 3.182, 2.776)
"""Quantiles at 0.975, for two to five seeds; with more the last one is too strict."""

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
        notes=[f"{title}: {note}" for note in notes(given, runs, read)],
    )


def notes(given: Study, runs: Runs, read: int) -> Iterator[str]:
    """The sizes, the grids, the seeds, and what was not computed again."""
    yield f"{given.task.text}."
    for grid in dict.fromkeys(map(given.grid, given.methods)):
        names = "; ".join(name for name in given.methods if given.grid(name) == grid)
        yield f"learning rates {', '.join(f'{rate:g}' for rate in grid)}: {names}."
    yield (
        f"{given.tuning} seeds choose a learning rate for each method and number of "
        f"stages; {given.seeds} others are shown: other weights and batches."
    )
    edges = [
        f"{name} in {stages} ({found.rates[found.best]:g})"
        for (name, stages), found in runs.items()
        if found.is_at_edge
    ]
    yield f"best rates at an edge of their grid: {'; '.join(edges) or 'none'}."
    if read:
        yield f"{read} of {len(given.cases())} results were read from an earlier call."


# --- the executor ---


def executor_claim(title: str, given: Task) -> Claim:
    """Whether the compiled form ends an epoch with the bits of a `Pipeline`.

    It is the form that the study runs, in which each half is a stage.
    """
    stages, steps = min(4, given.halves), min(7, given.steps)
    whole, data = given.parameters(0), given.training(0)
    optimizer = optim.adam(lr=0.01)
    pipe = pipeline.Pipeline(
        task.staged(given, stages),
        given.losses,
        pipeline.pipedream(stages, stages),
        optimizer=optimizer,
    )
    few = jax.tree.map(lambda x: x[:steps], data)
    batches = [{name: x[i] for name, x in few.batch.items()} for i in range(steps)]
    state, _ = pipe.train_epoch(pipe.init(task.cut(whole, stages)), batches)
    program = study.program_of_halves(given, rules.stashed(optimizer), steps)
    order = program.order_of(pipeline.pipedream(stages, steps).versions_used())

    def run(params: Any, order: compiled.VersionOrder) -> compiled.Trained:
        return program.with_order(order)(params, few)

    found = jax.jit(run)(task.cut(whole, given.halves), order)
    leaves = jax.tree.leaves(found.params), jax.tree.leaves(list(state.params))
    same = [np.array_equal(a, b) for a, b in zip(*leaves, strict=True)]
    text = f"{title}: the compiled form ends an epoch with the bits of the executor"
    shown = (
        f"{sum(same)} of {len(same)} arrays after {steps} updates in {stages} stages"
    )
    return Claim(text, all(same), shown, leads=True)


# --- orders ---

SEVERAL = 3
"""Papers that report an order independently."""


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
            f"{name} in {stages}: {told(runs[name, stages].losses)}"
            for name, stages in pair
        )
        shown += f"; paired {told(high.losses - low.losses, '+')}"
        ways = is_lower(low, high), is_lower(high, low)
        yield judged(text, len(order.sources), ways, shown, why)
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
    shown = f"Adam {told(cost, '+')}, Muon {told(muons, '+')}; "
    shown += f"paired {told(cost - muons, '+')}"
    ways = surely_positive(cost - muons), surely_positive(muons - cost)
    yield judged(text, 1, ways, shown, why)


def judged(
    text: str, sources: int, ways: tuple[bool, bool], shown: str, why: str
) -> Claim:
    """A claim that holds, or that the reverse refutes; left open where neither is.

    Where the reverse of what `SEVERAL` papers report is found, the study is in doubt
    and the claim fails. Refuting fewer is a result.
    """
    found, reverse = ways
    if reverse and sources < SEVERAL:
        why = why or "refuted: the reverse holds"
    elif not found and not reverse:
        why = why or "the seeds' differences do not decide it"
    return Claim(text, found, shown).unless(why)


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
    """Whether the 0.95 interval of the mean of paired differences is above 0."""
    count = len(differences)
    if count < 2:
        return False
    error = differences.std(ddof=1) / np.sqrt(count)
    quantile = STUDENT[min(count, len(STUDENT) + 1) - 2]
    return bool(differences.mean() > quantile * error)


def told(values: np.ndarray, sign: str = "") -> str:
    """Mean and standard deviation over the seeds."""
    if diverged := np.count_nonzero(~np.isfinite(values)):
        return f"{diverged} of {len(values)} diverged"
    return f"{values.mean():{sign}.4f} ± {values.std(ddof=1):.4f}"


# --- time and memory ---


Pieces = tuple[tuple[float, float], ...]
"""Seconds of each piece of a network, forward and backward over a batch."""


@functools.cache
def profiled(given: Task) -> Pieces:
    """What the pieces take here, if the forward pass of all of them takes a second."""
    batch = given.training(0).batch[given.input][0]
    own = zip(given.pieces(), given.parameters(0), strict=True)
    layers = [
        pipeline.Module(str(number), piece, weights)
        for number, (piece, weights) in enumerate(own)
    ]
    _, *found = pipeline.profile(layers, {"x": batch}).layers
    whole = sum(each.forward for each in found)
    return tuple((each.forward / whole, each.backward / whole) for each in found)


@functools.cache
def seconds(versions: str, stages: int, pieces: Pieces) -> float:
    """Simulated seconds of an update, if a batch's forward pass takes one on a device.

    Flushes and 2BW cut a batch into as many micro-batches as there are stages. Of
    asynchronous epochs it is the steady state.
    """
    parts = stages if versions in ("flush", "2bw") else 1
    runs = [np.sum(run, axis=0) / parts for run in task.cut(pieces, stages)]
    forward, backward = np.array(runs).T
    costs = pipeline.Costs(forward=forward, backward=backward)
    if versions == "flush":
        return pipeline.simulate(pipeline.one_f_one_b(stages, stages), costs).makespan
    policy: Any = "2bw" if versions == "2bw" else "stashing"
    short, long = (
        pipeline.simulate(
            pipeline.pipedream(stages, updates * parts, policy=policy), costs
        ).makespan
        for updates in (2 * stages, 4 * stages)
    )
    return (long - short) / (2 * stages)


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
    pieces = profiled(given.task)
    for (name, stages), found in runs.items():
        method = study.METHODS[name]
        shown = stages if method.by_stages else given.stages[-1]
        held = memory(name, given.task, shown)
        most = max(own.weights + own.state for own in held)
        one = seconds(method.versions, shown, pieces)
        table.append(
            [
                name,
                method.optimizer,
                str(stages) if method.by_stages else f"any, as of {shown}",
                f"{found.rates[found.best]:g}",
                told(found.losses),
                f"{one:.3f}",
                f"{in_time(found, one, seconds('stashing', shown, pieces)):.3f}",
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


FAMILIES = {
    "Adam": (study.SYNC, study.STASH, study.NONE, study.VERTICAL),
    "Adam, mended": (
        study.PIPEOPTIM, study.XPIPE, study.PIPEMARE, study.NESTEROV, study.ROTATION,
    ),
    "one step of delay": (
        study.TWO, study.FEEDBACK, study.MUON, study.MUON_TWO, study.MUON_FEEDBACK,
    ),
    "SGD": (
        study.SGD, study.SGD_STASH, study.SPECTRAIN, study.DC, study.LOOK_AHEAD,
    ),
}  # fmt: skip
"""The methods of each column of a picture."""
REFERENCES = {study.SYNC: ("black", ":"), study.STASH: ("black", "-")}
"""The colour and the dashes of methods that each column has."""
STYLES = (
    ("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", "-"),
    ("#e69f00", "--"),
)  # fmt: skip
"""Those of a family's other methods: colours that colour-blind readers tell apart."""


def pictures(title: str, given: Study, runs: Runs) -> Iterator[Picture]:
    """The loss over the stages, over updates and over simulated time."""
    yield Picture(
        title,
        f"{title.capitalize()}: held-out loss after all updates with the best learning "
        "rate of each method, with standard deviations over seeds (lines without "
        f"markers: in any number of stages); and training loss in {given.stages[-1]} "
        "stages, mean of the seeds, over updates and over the simulator's time. What "
        "diverged with a seed is left out.",
        plot(given, runs),
    )


def plot(given: Study, runs: Runs) -> Figure:
    """A column for each family, with the references in all of them."""
    families = {
        title: [name for name in names if name in given.methods]
        for title, names in FAMILIES.items()
    }
    families = {title: names for title, names in families.items() if names}
    figure, axes = plt.subplots(
        3,
        len(families),
        figsize=(1 + 3 * len(families), 9.5),
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=(1.6, 1, 1),
    )
    for column, (title, names) in zip(axes.T, families.items(), strict=True):
        column[0].set_title(title)
        known = [name for name in REFERENCES if name in given.methods]
        others = [name for name in names if name not in REFERENCES]
        styles = zip(others, STYLES, strict=False)
        drawn = [*((name, REFERENCES[name]) for name in known), *styles]
        for place, (name, style) in enumerate(drawn):
            shift = 1.03 ** (place - len(drawn) / 2)
            _draw(column, given, runs, name, style, shift)
        labels = "stages", f"updates in {given.stages[-1]} stages", "simulated seconds"
        for place, label in zip(column, labels, strict=True):
            place.set_xlabel(label)
        column[0].set_xscale("log", base=2)
        column[0].set_xticks(given.stages, list(map(str, given.stages)))
        column[2].legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize=8)
    for place, label in zip(axes[:, 0], ("held-out", *["training"] * 2), strict=True):
        place.set_ylabel(f"{label} loss")
    return figure


def _draw(
    column: Sequence[Axes],
    given: Study,
    runs: Runs,
    name: str,
    style: tuple[str, str],
    shift: float,
) -> None:
    """A method in the three places of a column; `shift` keeps bars apart."""
    final, over_updates, over_time = column
    line: dict[str, Any] = {"color": style[0], "linestyle": style[1], "label": name}
    method, keys = study.METHODS[name], [key for key in runs if key[0] == name]
    losses = [runs[key].losses for key in keys]
    mean, spread = ([f(own) for own in losses] for f in (np.mean, np.std))
    if method.by_stages:
        final.errorbar(
            [shift * key[1] for key in keys],
            mean,
            spread,
            marker="o",
            ms=4,
            capsize=3,
            **line,
        )
    else:
        final.axhline(mean[0], **line)
    stages = given.stages[-1]
    found = runs[name, stages if method.by_stages else given.stages[0]]
    curve = smoothed(found.curve)
    updates = np.arange(1, len(curve) + 1)
    over_updates.plot(updates, curve, **line)
    one = seconds(method.versions, stages, profiled(given.task))
    over_time.plot(updates * one, curve, **line)


def smoothed(curve: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean of the last updates, of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(curve, np.float64)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - SMOOTHED, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)

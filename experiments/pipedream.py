"""What do asynchronous updates do to training? PipeDream with weight stashing, without,
with vertical sync and 2BW, beside model parallelism, GPipe and 1F1B, on digits.

A small convolutional network in four stages and a deeper one in two learn the same
batches in the same order by each method, one update per batch. Accuracy is that of all
stages on one device, whose results have the same bits as with a process for each
stage. If there is a core for each stage, seconds are measured in processes that are
pinned to one core each; otherwise they are simulated from passes timed one by one.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import _pipedream_clocks as clocks
from experiments._pipedream_runs import (
    BATCH,
    CONTROL,
    FLUSH,
    METHODS,
    PARTS,
    STASH,
    Curve,
    Flushing,
    Network,
    Trainer,
    Unstashed,
    batches_of,
    loss_of,
    through,
)
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline, verify

TOLERANCE = 0.02
"""The largest allowed deficit of stashing's mean test accuracy to that of 1F1B."""
LEARNT = 0.85  # by 1F1B; below it a comparison means nothing
QUICK = [
    Network("digits", "the small network", ((8,), (16,), ()), 0.1, 2, 2),
]
FULL = [
    Network("digits", "the small network", ((16,), (32,), (32,), ()), 0.1, 8, 3),
    Network("deeper", "the deeper network", ((16,) * 4, (32,) * 4), 0.05, 8, 3),
]
JUDGED = (64, 12, 12, 12, 10)
"""Widths between the dense stages whose updates are judged."""


class Found(NamedTuple):
    """The results for one network.

    Attributes:
      network: The network.
      runs: The training runs of each method, by seed.
      simulated: Simulated seconds of an epoch, by method.
      measured: Seconds of each timed epoch in pinned processes; None if not possible.
      why_not: The reason why they were not measured.
    """

    network: Network
    runs: Mapping[str, Sequence[Curve]]
    simulated: Mapping[str, float]
    measured: Mapping[str, Sequence[float]] | None = None
    why_not: str = "no processes were timed"

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of an epoch: the median of the measured ones, or as simulated."""
        if self.measured is None:
            return self.simulated
        return {name: statistics.median(own) for name, own in self.measured.items()}

    @property
    def how(self) -> str:
        """Whether the seconds are measured or simulated, as text."""
        return "simulated" if self.measured is None else "measured"

    def accuracy(self, name: str) -> list[float]:
        """The mean over the seeds, before the first epoch and after each."""
        return np.mean([curve.accuracy for curve in self.runs[name]], axis=0).tolist()


def run(settings: Settings, progress: Progress) -> Result:
    """Measures and simulates epochs, trains by all methods, and judges updates."""
    networks = QUICK if settings.quick else FULL
    reasons = {
        network.name: "time is judged in the full form only"
        if settings.quick
        else clocks.why_not(network.stages)
        for network in networks
    }
    found = [
        investigated(network, settings, reasons[network.name], progress)
        for network in networks
    ]
    pinned = not settings.quick
    runtimes = {STASH: stashing, CONTROL: Unstashed}
    reports = judged(runtimes, settings.seed, pinned=pinned)
    return Result(
        claims=[
            *(claim for each in found for claim in claims(each)),
            *judge_claims(reports),
        ],
        pictures=[picture for each in found for picture in pictures(each)],
        tables={f"Methods: {each.network.name}": rows(each) for each in found},
        data={
            each.network.key: {
                "network": str(each.network),
                "accuracy": {
                    name: [curve.accuracy for curve in runs]
                    for name, runs in each.runs.items()
                },
                "simulated": each.simulated,
                "measured": each.measured,
            }
            for each in found
        },
        notes=list(notes(found)),
    )


def investigated(
    network: Network, settings: Settings, why_not: str, progress: Progress
) -> Found:
    """All results for one network; this process is idle while others are timed."""
    task = progress.add_task(f"{network.name}: clocks", total=None)
    measured = None if why_not else clocks.measured(network, settings.seed)
    simulated = clocks.simulated(network)
    progress.remove_task(task)
    trainer = Trainer(network)
    wanted = [(name, seed) for name in METHODS for seed in range(network.seeds)]
    if settings.quick:
        compared = (FLUSH, STASH, CONTROL)
        wanted = [(name, seed) for name, seed in wanted if not seed or name in compared]
    runs: dict[str, list[Curve]] = {}
    for name, seed in progress.track(wanted, description=f"{network.name}: training"):
        runs.setdefault(name, []).append(trainer.curve(name, settings.seed + seed))
    return Found(network, runs, simulated, measured, why_not)


# --- the judge ---


def stashing(
    stages: Sequence[pipeline.Stage], loss_fn: Any, optimizer: optim.Optimizer
) -> pipeline.Pipeline:
    """PipeDream with weight stashing."""
    schedule = pipeline.pipedream(len(stages), len(stages))
    return pipeline.Pipeline(stages, loss_fn, schedule, optimizer=optimizer)


def judged(
    runtimes: Mapping[str, Any], seed: int, *, pinned: bool
) -> dict[str, verify.Report]:
    """Judges each runtime's update as the gradient at its forward passes' weights.

    The versions are the parameters after runs of increasing numbers of batches. The
    forward pass of update t used version t - (n - 1 - j) at stage j of n.

    Args:
      runtimes: Runtimes by name; each is made from stages, a loss and an optimizer.
      seed: Seed of parameters and batches.
      pinned: Whether to compare the oracle with finite differences, which takes as long
        as everything else.
    """
    count = len(JUDGED) - 1
    names = ["x", *(f"h{j}" for j in range(count))]
    stages = [pipeline.Stage(dense, (taken,), (put,)) for taken, put in pairwise(names)]
    rng = np.random.default_rng((seed, 4))
    drawn = [np.sqrt(2 / a) * rng.normal(size=(a, b)) for a, b in pairwise(JUDGED)]
    ((batches, *_), _) = batches_of(seed, 1)
    batches = [
        batch | {"x": batch["x"].reshape(BATCH, -1).astype(np.float64)}
        for batch in batches[: count + 1]
    ]
    with jax.enable_x64(True):
        judge = verify.gradients_judge(
            lambda params, batch: loss_of(through(stages, params, batch["x"]), batch)
        )
        reports = {}
        for name, runtime in runtimes.items():
            # The optimizer's state is the update itself; a difference of parameters
            # would carry their rounding.
            pipe = runtime(stages, loss_of, optimizer=remembering())
            versions = [[jnp.asarray(own) for own in drawn]]
            for steps in range(1, count + 2):
                state = pipe.init(versions[0])
                state, metrics = pipe.train_epoch(state, batches[:steps])
                versions.append(state.params)
            met = [versions[j + 1][j] for j in range(count)]
            found = jnp.asarray(metrics.losses[-1], jnp.float64), state.opt_states
            reports[name] = judge(
                met,
                batches[-1],
                {name: lambda *_, own=found: own},
                finite_differences=pinned,
            )
    return reports


def remembering() -> optim.Optimizer:
    """Gradient descent with a learning rate of 1, whose state is the last gradient."""
    return optim.from_optax(
        optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda grads, state, params=None: (
                jax.tree.map(jnp.negative, grads),
                grads,
            ),
        )
    )


def dense(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """A stage of one dense layer."""
    return jnp.tanh(x @ matrix)


# --- what is claimed ---


def claims(found: Found) -> Iterator[Claim]:
    """Claims on accuracy, versions and seconds of one network."""
    name, seeds = found.network.name, f"over {len(found.runs[FLUSH])} seeds"
    sync, stash = (found.accuracy(method)[-1] for method in (FLUSH, STASH))
    yield Claim(f"{name}: 1F1B learns", sync > LEARNT, f"{sync:.1%} {seeds}")
    text = f"{name}: with stashing it is at most {TOLERANCE:.0%} worse"
    shown = f"{stash:.1%}, 1F1B {sync:.1%}, {seeds}"
    yield Claim(text, stash > sync - TOLERANCE, shown, leads=True)
    yield from version_claims(found)
    text = f"{name}: PipeDream's throughput is at least 1F1B's with flushes"
    clocks_of = {"simulated": found.simulated}
    if found.measured is not None:
        clocks_of["measured"] = found.seconds
    for how, seconds in clocks_of.items():
        fast, slow = seconds[STASH], seconds[FLUSH]
        shown = f"{slow / fast:.2f} times; {fast:.3f} s and {slow:.3f} s an epoch"
        yield Claim(f"{text}, {how}", fast <= slow, shown, leads=how == found.how)
    if found.measured is None:
        yield Claim(f"{text}, measured", None, "", found.why_not)


def version_claims(found: Found) -> Iterator[Claim]:
    """Claims on the versions in the record of a run, for each stage."""
    passes, n = found.runs[STASH][0].passes, found.network.stages
    stale = {
        j: {p.newest - p.version for p in passes if p.stage == j and p.kind == "B"}
        for j in range(n)
    }
    most = [max(own) for own in stale.values()]
    text = f"{found.network.name}: stage j of {n} uses weights that are at most "
    text += f"{n - 1} - j updates old"
    yield Claim(text, most == [n - 1 - j for j in range(n)], f"{most}")
    held = [max(p.held for p in passes if p.stage == j) for j in range(n)]
    text = f"{found.network.name}: and keeps {n} - j versions of them"
    yield Claim(text, held == [n - j for j in range(n)], f"{held}")


def judge_claims(reports: Mapping[str, verify.Report]) -> Iterator[Claim]:
    """Claims that the judge accepts stashing and rejects its absence."""
    good, bad = reports[STASH], reports[CONTROL]
    text = "with stashing, an update is the gradient at the weights that it met"
    yield Claim(text, good.ok, f"error/bound {good.worst:.2f}")
    text = "without, the judge sees that it is none"
    yield Claim(text, not bad.ok, f"error/bound {bad.worst:.1e}")


# --- what is told ---


def notes(found: Sequence[Found]) -> Iterator[str]:
    """Notes on what was measured and how."""
    for each in found:
        yield control_note(each)
    yield (
        f"All methods make one update for each batch of {BATCH}. GPipe, 1F1B "
        f"and 2BW cut it into {PARTS} parts: more passes, which are less efficient, "
        "and more messages are part of their seconds. Simulated messages are free."
    )


def control_note(found: Found) -> str:
    """The accuracy without stashing, on which there is no claim."""
    stash, none, sync = (found.accuracy(name)[-1] for name in (STASH, CONTROL, FLUSH))
    ends = f"{none:.1%} without stashing, {stash:.1%} with it, {sync:.1%} with 1F1B"
    return f"{found.network.name} ends at {ends}."


def rows(found: Found) -> list[list[str]]:
    """A table with a row for each method."""
    table = [["method", "seeds", "accuracy", "simulated ms per epoch", "measured"]]
    for name, runs in found.runs.items():
        timed = found.measured is not None and name in found.measured
        shown = f"{1e3 * found.seconds[name]:.1f}" if timed else ""
        end = f"{found.accuracy(name)[-1]:.1%}"
        simulated = f"{1e3 * found.simulated[name]:.1f}"
        table.append([name, str(len(runs)), end, simulated, shown])
    return table


def pictures(found: Found) -> Iterator[Picture]:
    """Two pictures for each network."""
    key, name = found.network.key, found.network.name.capitalize()
    yield Picture(
        f"{key}-accuracy",
        f"{name}: test accuracy, mean over seeds; seconds are {found.how}.",
        plot(found),
    )
    yield Picture(
        f"{key}-versions",
        f"{name}: how stale the weights are that a pass uses, and how many are kept.",
        plot_versions(found.runs[STASH][0].passes, found.network.stages),
    )


def plot(found: Found) -> Figure:
    """Accuracy over epochs and over seconds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for number, name in enumerate(found.runs):
        style = "o-" if isinstance(METHODS[name], Flushing) else "s--"
        # Equal curves overlap, so that later ones are narrower.
        width = {"linewidth": 4 - 0.45 * number, "markersize": 10 - number}
        curve = found.accuracy(name)
        epochs = np.arange(len(curve))
        left.plot(epochs, curve, style, label=name, **width)
        right.plot(epochs * found.seconds[name], curve, style, label=name, **width)
    left.set_xlabel("epoch")
    left.set_ylabel("test accuracy")
    where = ", a process and a core for each stage" if found.measured else ""
    right.set_xlabel(f"seconds, {found.how}{where}")
    right.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{found.network.name}, {found.network.stages} stages")
    figure.tight_layout()
    return figure


def plot_versions(passes: Sequence[Any], stages: int) -> Figure:
    """The staleness of each backward pass and the versions kept after it, by stage."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    for j in range(stages):
        own = [p for p in passes if p.stage == j and p.kind == "B"][:12]
        batches = [p.micro_batch for p in own]
        stale = [p.newest - p.version for p in own]
        left.plot(batches, stale, "o-", label=f"stage {j}")
        right.plot(batches, [p.held for p in own], "o-", label=f"stage {j}")
    for axes, label in ((left, "updates old"), (right, "versions kept")):
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_yticks(range(stages + 1))
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure

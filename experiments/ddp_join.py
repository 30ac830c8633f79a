"""What becomes of the gradient where replicas run out of data: divided by weight, and
by PyTorch's two divisors?

Four replicas train a convolutional net on real digits. Their streams have different
lengths, and each ends with a smaller batch. At every step the gradient is judged
against `jax.value_and_grad` of all remaining examples on one device. The gradients of
PyTorch's `join` are judged as well, divided by the number of remaining replicas and by
the initial number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import Task, digits
from experiments._replicas import over, replicas_identical
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, verify

REPLICAS = 4
BATCH = 24
ACCURACY = 0.85
RULES = {
    "weight": "by weight",
    "active": "by replicas still there",
    "initial": "by replicas at the start",
}
OPTIMIZER = optim.sgd(lr=0.12, momentum=0.9, nesterov=True)


@dataclass
class Run:
    """Measurements of a run; rows are steps, None where a rule was not judged."""

    ratios: dict[str, list[Any]] = field(default_factory=lambda: {r: [] for r in RULES})
    lengths: dict[str, list[float]] = field(
        default_factory=lambda: {r: [] for r in RULES}
    )
    active: list[int] = field(default_factory=list)
    even: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    identical: int = 0
    accuracy: float = 0.0
    seen: float = 0.0
    early_end: str = ""


def run(settings: Settings, progress: Progress) -> Result:
    """Trains by weight; measures all three rules at each step."""
    steps = 60 if settings.quick else 240
    shares = [steps, steps * 3 // 4, steps // 2, steps // 4]
    task = digits(settings.seed, sum(shares), BATCH)
    streams = divided(task, shares)
    here = min(settings.devices, jax.device_count())
    mesh: Mesh | int = REPLICAS
    if here >= REPLICAS:
        mesh = Mesh(np.array(jax.devices()[:REPLICAS]), ("data",))
    # A failed judgement is repeated with many more draws, a second for each step.
    judge_others_every = 10 if settings.quick else 1
    measured = train(task, streams, mesh, progress, judge_others_every)
    examples = sum(len(y) for stream in streams for _, y in stream)
    by_hand = "" if here >= REPLICAS else f"{here} device(s) here: replicas by vmap"
    return Result(
        claims=claims(measured, steps, examples, devices=here >= REPLICAS),
        pictures=[
            Picture(
                "division",
                "Above: how wrong each rule's gradient is, relative to what rounding "
                "explains. Below: its length beside the whole batch's.",
                plot(measured),
            )
        ],
        data={"shares": shares, **vars(measured)},
        notes=[by_hand] if by_hand else [],
    )


def divided(task: Task, shares: Sequence[int]) -> list[list[Any]]:
    """Batches of each replica; the last of each stream is cut to a different size."""
    batches, streams = iter(task.batches), []
    for rank, count in enumerate(shares):
        stream = [next(batches) for _ in range(count)]
        stream[-1] = tuple(part[: BATCH // 2 - 3 * rank] for part in stream[-1])
        streams.append(stream)
    return streams


def train(
    task: Task,
    streams: list[list[Any]],
    mesh: Mesh | int,
    progress: Progress,
    judge_others_every: int,
) -> Run:
    """Computes gradients by all three rules at every step; steps by the first.

    PyTorch's two rules are judged at every `judge_others_every`-th step, and where
    batches differ in size.
    """
    measured = Run()
    gradient = {
        reduction: data_parallel.value_and_grad(
            task.losses, reduction=reduction, **over(mesh)
        )
        for reduction in ("mean", "sum")
    }
    joined = {
        rule: data_parallel.Join(streams, rows=BATCH, divide_by=rule, **over(mesh))
        for rule in RULES
    }
    judged, optimize = verify.gradients_judge(task.losses), jax.jit(OPTIMIZER.step)
    params = jax.device_put(task.params)
    state = OPTIMIZER.init(params)
    steps = list(zip(*joined.values(), strict=True))
    for t, shards in enumerate(progress.track(steps, description="training")):
        parts = [stream[t] for stream in streams if t < len(stream)]
        whole = tuple(np.concatenate(leaf) for leaf in zip(*parts, strict=True))
        found = {
            rule: gradient[joined[rule].reduction](params, *own)
            for rule, own in zip(RULES, shards, strict=True)
        }
        measured.seen += float(np.sum(shards[0][1]))
        measured.active.append(len(parts))
        even = len({len(y) for _, y in parts}) == 1
        measured.even.append(even)
        measured.losses.append(float(found["weight"][0]))
        measured.identical += replicas_identical(found["weight"])
        own = jax.device_put(jax.device_get(params), jax.devices()[0])
        # One shape for all steps, so that the judge compiles once.
        rows, weights = filled(whole, REPLICAS * BATCH)
        all_rules = not even or t % judge_others_every == 0
        given = candidates(found if all_rules else {"weight": found["weight"]})
        report = judged(own, rows, given, weights=weights, finite_differences=False)
        for rule in RULES:
            worst = report.of(rule).worst if rule in given else None
            measured.ratios[rule].append(worst)
            size = length(found[rule][1]) / length(found["weight"][1])
            measured.lengths[rule].append(size)
        params, state = optimize(params, found["weight"][1], state)
    measured.accuracy = task.accuracy(jax.device_get(params))
    measured.early_end = early_end(streams)
    return measured


def candidates(found: Any) -> dict[str, Any]:
    """Candidates for the judge: every gradient with the loss of the right one."""
    loss = found["weight"][0]
    return {
        rule: (lambda params, batch, g=gradient: (loss, g))
        for rule, (_, gradient) in found.items()
    }


def filled(batch: Any, rows: int) -> tuple[Any, np.ndarray]:
    """Pads a batch by its first example; returns it and weights, 0 for padding."""
    count = len(batch[1])
    index = np.where(np.arange(rows) < count, np.arange(rows), 0)
    weights = (np.arange(rows) < count).astype(np.float32)
    return tuple(part[index] for part in batch), weights


def early_end(streams: list[list[Any]]) -> str:
    """The error of the strict mode, as text."""
    try:
        for _ in data_parallel.Join(
            streams, replicas=REPLICAS, rows=BATCH, early_end="error"
        ):
            pass
    except data_parallel.EarlyEnd as error:
        return str(error)
    return ""


def length(tree: Any) -> float:
    """The global norm of a tree."""
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


# --- what is claimed, and shown ---


def claims(measured: Run, steps: int, examples: int, *, devices: bool) -> list[Claim]:
    """The claims of the experiment."""
    ratios = measured.ratios
    uneven = [t for t in range(steps) if not measured.even[t]]
    alone = [t for t in range(steps) if measured.active[t] == 1]
    expected = np.array(measured.active) / REPLICAS
    initial, active = (np.array(measured.lengths[r]) for r in ("initial", "active"))
    off = float(np.max(np.abs(initial / active / expected - 1)))
    return [
        Claim(
            "by weight, every gradient is the whole batch's within the derived bound",
            max(ratios["weight"]) <= 1,
            f"{steps} judged, error/bound at most {max(ratios['weight']):.3f}",
            leads=True,
        ),
        Claim(
            "every example is counted once",
            measured.seen == examples,
            f"total weight {measured.seen:.0f} of {examples} examples",
        ),
        Claim(
            "where batches differ in size, dividing by replicas is caught",
            min(ratios["active"][t] for t in uneven if t not in alone) > 1,
            f"at {len([t for t in uneven if t not in alone])} steps",
        ),
        Claim(
            "divided by the number at the start, a gradient is A/K of the one divided "
            "by the A of K replicas still there",
            off < 1e-5,
            f"to {off:.1e}; at the end {initial[-1]:.2f} of the whole batch's",
        ),
        Claim(
            "the strict mode ends with the first stream, and says whose it was",
            "replicas 3 of 4" in measured.early_end,
            measured.early_end,
        ),
        Claim(
            "all replicas hold the same gradient, bit for bit, those without data too",
            measured.identical == steps,
            f"{measured.identical} of {steps} steps",
        ).unless("" if devices else "replicas share a device by vmap"),
        Claim(
            "training goes on to the end",
            measured.accuracy > ACCURACY,
            f"test accuracy {measured.accuracy:.1%}",
        ),
    ]


def plot(measured: Run) -> Figure:
    """error/bound above, relative lengths below; a line where a replica leaves."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    for number, (rule, text) in enumerate(RULES.items()):
        ratios = np.array(measured.ratios[rule], float)  # None becomes NaN.
        at = np.flatnonzero(~np.isnan(ratios))
        shown = np.maximum(ratios[at], 1e-3)
        above.semilogy(at, shown, ".-", linewidth=1, markersize=3, label=text)
        # Equal curves overlap, so that later ones are narrower.
        below.plot(measured.lengths[rule], linewidth=3 - number, label=text)
    above.axhline(1, color="black", linestyle="--", linewidth=1, label="derived bound")
    leaving = np.flatnonzero(np.diff(measured.active)) + 0.5
    for axes in (above, below):
        for at in leaving:
            axes.axvline(at, color="0.8", linewidth=1, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    above.set(ylabel="error / bound")
    above.set_title("What a gradient is divided by; dots: the steps judged", pad=24)
    below.set(xlabel="step (grey: a replica's data ends)", ylabel="relative length")
    below.set_ylim(0, 1.6)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    above.legend(frameon=False, fontsize=8, ncols=4, **place)
    return figure

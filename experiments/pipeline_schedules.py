"""Does a simulation foretell a run: time, bubble and memory of every schedule, from
another run's costs?

Two processes, each pinned to a core of its own, run a stack of equal layers in every
schedule. A timed run gives costs, from which the simulator predicts the makespan of
later runs. Activations are counted in bytes on the workers.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import _pair
from experiments._result import Claim, Picture, Result, Settings
from jdist import pipeline, rpc
from jdist.pipeline import Costs, Record, Timeline, simulate

WORKERS = ["worker0", "worker1"]
KINDS = ("run", "simulated")
WITHIN = 0.15
"""The largest allowed relative error of a predicted makespan."""


class Family(NamedTuple):
    """A schedule for two workers."""

    make: Callable[[int], pipeline.Schedule]
    stages: int
    costs_from: str
    """The schedule whose run gives the costs; another one if it has them all."""


FAMILIES = {
    "GPipe": Family(lambda m: pipeline.gpipe(2, m), 2, "1F1B"),
    "1F1B": Family(lambda m: pipeline.one_f_one_b(2, m), 2, "GPipe"),
    "interleaved": Family(lambda m: pipeline.interleaved(2, m, 2), 4, "looped BFS"),
    "looped BFS": Family(lambda m: pipeline.looped_bfs(2, m, 2), 4, "interleaved"),
    "ZB-H1": Family(lambda m: pipeline.zero_bubble(2, m), 2, "ZB-H1"),
    "ZBV": Family(lambda m: pipeline.zbv(2, m), 4, "ZBV"),
    "DualPipeV": Family(lambda m: pipeline.dualpipe_v(2, m), 4, "DualPipeV"),
}


class Sizes(NamedTuple):
    """Sizes of the model and the batch."""

    width: int
    layers: int
    rows: int
    """Rows of a micro-batch."""
    micro_batches: int
    runs: int
    """Timed runs of each schedule: the first half gives costs for the second."""

    def memory(self, family: Family) -> dict[str, Any]:
        """Bytes that a stage of k layers keeps of a micro-batch.

        From F to B it keeps its input and each layer's output. From B to W it keeps
        each layer's input, and the cotangent of its matrix product.
        """
        k, array = self.layers // family.stages, self.rows * self.width * 4
        # The first stage sends no cotangent: its W does all the work, and until then it
        # keeps its activations and one cotangent.
        left = [k + 2, *[2 * k] * (family.stages - 1)]
        return {
            "activation_bytes": (k + 1) * array,
            "pending_bytes": [arrays * array for arrays in left],
        }


class Runs(NamedTuple):
    """The measured and the predicted runs of one schedule."""

    measured: Timeline
    predicted: Timeline
    error: float
    """The relative error of the predicted makespan."""

    @property
    def both(self) -> tuple[Timeline, Timeline]:
        """The measured and the predicted timeline."""
        return self.measured, self.predicted


FULL = Sizes(512, 8, 128, 8, 8)
QUICK = Sizes(128, 8, 32, 4, 4)


def run(settings: Settings, progress: Progress) -> Result:
    """Runs all schedules in two processes, then predicts all of them."""
    sizes = QUICK if settings.quick else FULL
    task = progress.add_task("schedules in two processes", total=None)
    why_not = _pair.can_pin()
    (found, _) = rpc.spawn(
        work, (sizes, settings.seed), nprocs=2, pin=0 if why_not else 1
    )
    progress.update(task, total=1, completed=1)
    runs = foretold({name: timelines(r) for name, r in found.items()}, sizes)
    if settings.quick:
        why_not = "time is judged in the full form only"
    timed = (claim.unless(why_not) for claim in time_claims(runs))
    files = {
        f"{name} {kind}.json": timeline.to_chrome_trace
        for name, both in runs.items()
        for kind, timeline in zip(KINDS, both.both, strict=True)
    }
    return Result(
        claims=[*memory_claims(runs, sizes), *timed],
        pictures=[
            Picture(
                "gantt",
                "Left: measured. Right: simulated. Blue: forward. Orange: backward. "
                "Green: weight gradients. Paler: a worker's second stage.",
                plot_gantt(runs),
            ),
            Picture("bubbles", "Idle shares, and activations.", plot_bars(runs)),
        ],
        tables={"Runs and simulations": rows(runs)},
        data={
            name: {
                "measured": [tuple(r) for r in both.measured.records()],
                "predicted": [tuple(r) for r in both.predicted.records()],
                "activation_bytes": both.measured.activation_bytes,
                "error": both.error,
            }
            for name, both in runs.items()
        },
        files=files,
    )


# --- in the two processes ---


def work(rank: int, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Runs every schedule `sizes.runs` times; returns records by schedule."""
    rpc.init_rpc(f"worker{rank}")
    rng = np.random.default_rng(seed)
    shape, scale = (sizes.width, sizes.width), sizes.width**-0.5
    weights = [
        rng.normal(size=shape, scale=scale).astype(np.float32)
        for _ in range(sizes.layers)
    ]
    count = sizes.rows * sizes.micro_batches
    x, y = (rng.normal(size=(count, sizes.width)).astype(np.float32) for _ in "xy")
    batch = {"x": jnp.asarray(x), "target": jnp.asarray(y)}
    found = {}
    for name, family in FAMILIES.items():
        found[name] = timed(family, sizes, weights, batch)
    rpc.shutdown()
    return found


def timed(family: Family, sizes: Sizes, weights: Any, batch: Any) -> list[Any]:
    """The timed runs of one schedule, after one that compiles."""
    names = [f"h{j}" for j in range(family.stages)]
    pipe = pipeline.Pipeline(
        [
            pipeline.Stage(layers, (taken,), (put,))
            for taken, put in zip(["x", *names], names, strict=False)
        ],
        losses,
        family.make(sizes.micro_batches),
        pipeline.Workers(WORKERS),
    )
    own = sizes.layers // family.stages
    params = [weights[j * own : (j + 1) * own] for j in range(family.stages)]
    step = functools.partial(pipe.value_and_grad, pipe.place(params), batch)
    step()
    found = []
    for _ in range(sizes.runs):
        rpc.barrier()
        _, timeline = pipeline.timed(pipe, step)
        records = [tuple(record) for record in timeline.records()]
        found.append((records, timeline.activation_bytes))
    return found


def layers(params: Any, x: jax.Array) -> jax.Array:
    """Applies a part of the stack."""
    for matrix in params:
        x = jnp.tanh(x @ matrix)
    return x


def losses(y: jax.Array, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    return ((y - batch["target"]) ** 2).mean(-1)


# --- foretelling ---


def timelines(found: list[Any]) -> list[Timeline]:
    """Timelines from records, which the processes return."""
    made = []
    for records, held in found:
        timeline = Timeline.from_records([Record(*record) for record in records])
        made.append(replace(timeline, activation_bytes=held))
    return made


def foretold(found: dict[str, list[Timeline]], sizes: Sizes) -> dict[str, Runs]:
    """The shortest of the second half of each schedule's runs, and its prediction.

    Costs come from the shortest of the first half: the least disturbed runs.
    """
    half = sizes.runs // 2
    runs = {}
    for name, family in FAMILIES.items():
        schedule = family.make(sizes.micro_batches)
        measured = min(found[name][half:], key=lambda t: t.makespan)
        source = min(found[family.costs_from][:half], key=lambda t: t.makespan)
        costs = Costs.measured(source, **sizes.memory(family))
        predicted = simulate(schedule, costs)
        error = predicted.makespan / measured.makespan - 1
        runs[name] = Runs(measured, predicted, error)
    return runs


# --- what is claimed, and shown ---


def memory_claims(runs: dict[str, Runs], sizes: Sizes) -> Iterator[Claim]:
    """Claims on orders and bytes, which noise does not affect."""
    for name, (measured, predicted, _) in runs.items():
        same = measured.columns == predicted.columns
        text = f"{name}: every action ran once, in the order of the schedule"
        yield Claim(text, same, f"{len(measured.columns)} actions")
        found, told = measured.activation_bytes, predicted.activation_bytes
        assert found is not None
        assert told is not None
        shown = f"{mebibytes(found)} MiB, simulated {mebibytes(told)}"
        placement = FAMILIES[name].make(sizes.micro_batches).placement
        if any(a == b for a, b in pairwise(placement)):
            # Neighbours on one worker share the value that passes between them.
            text = f"{name}: no worker kept more activations than simulated"
            fits = all(a <= b for a, b in zip(found, told, strict=True))
            yield Claim(text, fits, shown)
        else:
            text = f"{name}: each worker kept the simulated activations, to the byte"
            yield Claim(text, found == told, shown, leads=name == "ZB-H1")
    frugal, greedy = (runs[n].measured.activation_bytes for n in ("1F1B", "GPipe"))
    assert frugal is not None
    assert greedy is not None
    m = sizes.micro_batches
    share = [a / b * m for a, b in zip(frugal, greedy, strict=True)]
    text = f"1F1B keeps n - j micro-batches where GPipe keeps {m}"
    yield Claim(text, share == [2, 1], f"{share[0]:g} and {share[1]:g}")


def time_claims(runs: dict[str, Runs]) -> Iterator[Claim]:
    """Claims that other runs predict these."""
    for name, (measured, predicted, error) in runs.items():
        source = FAMILIES[name].costs_from
        of = "another run" if source == name else f"a run of {source}"
        text = f"{name} takes the time foretold from {of}, within {WITHIN:.0%}"
        took = (
            f"{measured.makespan * 1e3:.1f} ms, foretold {predicted.makespan * 1e3:.1f}"
        )
        holds = abs(error) <= WITHIN
        yield Claim(text, holds, f"{took} ({error:+.1%})", leads=True)


def mebibytes(sizes: tuple[float, ...]) -> str:
    """MiB of each worker, as text."""
    return " / ".join(f"{size / 2**20:.2f}" for size in sizes)


def rows(runs: dict[str, Runs]) -> list[list[str]]:
    """A table with a row for each schedule."""
    table = [["schedule", "ms", "foretold", "bubble", "foretold", "MiB kept"]]
    for name, (measured, predicted, error) in runs.items():
        assert measured.activation_bytes is not None
        table.append(
            [
                name,
                f"{measured.makespan * 1e3:.2f}",
                f"{predicted.makespan * 1e3:.2f} ({error:+.1%})",
                f"{measured.bubble:.1%}",
                f"{predicted.bubble:.1%}",
                mebibytes(measured.activation_bytes),
            ]
        )
    return table


def plot_gantt(runs: dict[str, Runs]) -> Figure:
    """A row for each schedule; both charts of a row have one scale."""
    figure, axes = plt.subplots(
        len(runs), 2, figsize=(18, 1.9 * len(runs)), layout="constrained"
    )
    for (name, both), row in zip(runs.items(), axes, strict=True):
        end = max(both.measured.makespan, both.predicted.makespan)
        for timeline, own, kind in zip(
            both[:2], row, ("run", "simulated"), strict=True
        ):
            timeline.draw(own)
            own.set_xlim(0, end)
            own.set_title(
                f"{name}, {kind}: {timeline.makespan * 1e3:.1f} ms, "
                f"bubble {timeline.bubble:.1%}"
            )
    named = {
        label: bar
        for own in axes.flat
        for bar, label in zip(*own.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named, loc="outside lower center", ncols=len(named))
    return figure


def plot_bars(runs: dict[str, Runs]) -> Figure:
    """Bubbles and activations of the fuller worker, measured and simulated."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2))
    at = np.arange(len(runs))
    for turn, kind in enumerate(KINDS):
        shown = [found.both[turn] for found in runs.values()]
        place = at + (turn - 0.5) * 0.4
        left.bar(place, [t.bubble for t in shown], 0.4, label=kind)
        most = [max(t.activation_bytes or (0,)) / 2**20 for t in shown]
        right.bar(place, most, 0.4, label=kind)
    for axes in (left, right):
        axes.set_xticks(at, list(runs), rotation=30, ha="right")
        axes.margins(y=0.25)  # for the legend
        axes.legend(loc="upper left", ncols=2)
    left.set_ylabel("bubble")
    right.set_ylabel("MiB of activations on the fuller worker")
    figure.tight_layout()
    return figure

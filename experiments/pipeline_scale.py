"""What do schedules cost with up to 1024 stages: simulated time, bubble, memory, and
what do slow links do to them?

Each schedule is simulated with costs in units of one stage's forward pass. With free
messages the makespans equal the published ones to the last bit; with costly messages
there is no formula. The largest case runs in a process of its own, so that its memory
can be measured.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import pipeline, rpc

SECONDS, BYTES = 10.0, 2 * 2**30
"""Limits of the time and memory to simulate the largest case."""
PER_STAGE = 4
"""Micro-batches per stage."""
SLOW_LINKS = (0.0, 0.03, 0.1, 0.3, 1.0)
"""Latencies of a message, in forward passes of a stage."""

# In units of the forward pass of an n-th of the model: F = B = W = 1.
WHOLE, HALF = pipeline.Costs(), pipeline.Costs(forward=0.5, backward=1.0)


class Family(NamedTuple):
    """A schedule for any number of workers, and its published properties."""

    make: Callable[[int, int], pipeline.Schedule]
    costs: pipeline.Costs
    bubble: Callable[[int], float]
    """The published idle seconds of a worker, for n workers."""
    alive: Callable[[int, int], float]
    """Published activations alive on the fullest worker, from F to W, in stages."""


FAMILIES = {
    "GPipe": Family(pipeline.gpipe, WHOLE, lambda n: 3 * (n - 1), lambda n, m: m),
    "1F1B": Family(pipeline.one_f_one_b, WHOLE, lambda n: 3 * (n - 1), lambda n, m: n),
    "interleaved, 2 chunks": Family(
        lambda n, m: pipeline.interleaved(n, m, 2),
        HALF,
        lambda n: 1.5 * (n - 1),
        lambda n, m: (3 * n - 1) / 2,
    ),
    "ZB-H1": Family(pipeline.zero_bubble, WHOLE, lambda n: n - 1, lambda n, m: n),
    "ZBV": Family(pipeline.zbv, HALF, lambda n: 0.5 * (n - 1), lambda n, m: n),
    "DualPipeV": Family(
        pipeline.dualpipe_v, HALF, lambda n: 0.5 * (n - 1), lambda n, m: n + 0.5
    ),
}


def run(settings: Settings, progress: Progress) -> Result:
    """Simulates all families at all sizes, one with slow links, and the largest."""
    largest = 64 if settings.quick else 1024
    sizes = [2**k for k in range(1, largest.bit_length())]
    runs: dict[str, list[dict[str, float]]] = {}
    for name, n in progress.track(
        [(name, n) for name in FAMILIES for n in sizes if not _skipped(name, n)],
        description="free messages",
    ):
        runs.setdefault(name, []).append(played(name, n))
    links = linked(16 if settings.quick else 64)
    stages = 128 if settings.quick else largest
    (big,) = rpc.spawn(_largest, (stages, PER_STAGE * stages), nprocs=1)
    claims = [*size_claims(runs, links), *limit_claims(big, settings.quick)]
    return Result(
        claims=claims,
        pictures=[
            Picture("scale", "Left: idle share. Right: memory.", plot(runs)),
            Picture(
                "links", "Messages that take longer and longer.", plot_links(links)
            ),
        ],
        tables={"The largest of each": rows(runs)},
        data={"runs": runs, "links": links, "largest": big},
        notes=[
            "DualPipeV's pairs are consecutive actions here: (n - 1)(F + B - 2W).",
            "Published activations count a micro-batch once, from F to the last of B "
            "and W; the table's last column adds the cotangents that a W waits with.",
        ],
    )


def _skipped(name: str, n: int) -> bool:
    """Whether to skip a size; only GPipe and 1F1B run above 256 workers."""
    # ZBV and DualPipeV have 25 million actions at 1024, and 256 shows the same line.
    return n > 256 and name not in ("GPipe", "1F1B")


def played(name: str, n: int) -> dict[str, float]:
    """Simulates one family with n workers and free messages."""
    family, m = FAMILIES[name], PER_STAGE * n
    # As the publications count it, a pending weight gradient holds one activation.
    costs = replace(family.costs, activation_bytes=1.0, pending_bytes=1.0)
    found = pipeline.simulate(family.make(n, m), costs)
    assert found.activation_bytes is not None
    parts = 2 if family.costs is HALF else 1
    return {
        "workers": n,
        "micro_batches": m,
        "makespan": found.makespan,
        "published": 3 * m + family.bubble(n),
        "bubble": found.bubble,
        "alive": max(found.activation_bytes) / parts,
        "held": max(found.peak_activations) / parts,
        "published_alive": family.alive(n, m),
    }


def linked(n: int) -> dict[str, list[float]]:
    """The makespan relative to the work alone, for increasingly slow links."""
    found = {}
    for name, family in FAMILIES.items():
        schedule = family.make(n, PER_STAGE * n)
        costs = [
            pipeline.Costs(
                forward=family.costs.forward,
                backward=family.costs.backward,
                latency=latency,
            )
            for latency in SLOW_LINKS
        ]
        times = [pipeline.simulate(schedule, cost).makespan for cost in costs]
        found[name] = [time / (3 * PER_STAGE * n) for time in times]
    return found


def _largest(rank: int, stages: int, micro_batches: int) -> dict[str, float]:
    """Simulates 1F1B with messages, timed from nothing to the timeline."""
    before = time.perf_counter()
    schedule = pipeline.one_f_one_b(stages, micro_batches)
    costs = pipeline.Costs(message_bytes=1.0, bandwidth=10.0, latency=0.05)
    found = pipeline.simulate(schedule, costs)
    seconds = time.perf_counter() - before
    # `ru_maxrss` is in bytes on macOS and in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "actions": len(found.columns),
        "seconds": seconds,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "makespan": found.makespan,
    }


def size_claims(
    runs: dict[str, list[dict[str, float]]], links: dict[str, list[float]]
) -> Iterator[Claim]:
    """Claims on every family at every size, and that slower links cost more."""
    for name, found in runs.items():
        sizes = f"{len(found)} sizes up to {found[-1]['workers']:.0f} workers"
        same = all(run["makespan"] == run["published"] for run in found)
        worst = max(abs(run["makespan"] / run["published"] - 1) for run in found)
        text = f"{name} takes exactly the published time"
        shown = f"{sizes}, largest deviation {worst:.1g}"
        yield Claim(text, same, shown, leads=name == "1F1B")
        frugal = all(run["alive"] == run["published_alive"] for run in found)
        text = f"{name} holds exactly the published activations"
        last = found[-1]
        yield Claim(text, frugal, f"{last['alive']:g} at {last['workers']:.0f} workers")
    for name, times in links.items():
        grows = all(a < b for a, b in pairwise(times))
        text = f"{name} gets slower with every slower link"
        yield Claim(text, grows, f"{times[0]:.3f} to {times[-1]:.3f} of the work")


def limit_claims(big: dict[str, float], quick: bool) -> Iterator[Claim]:
    """Claims on the time and memory of the largest case."""
    case = f"{big['stages']:.0f} stages x {big['micro_batches']:.0f} micro-batches"
    used = f"{big['bytes'] / 2**30:.2f} GiB"
    yield Claim(f"{case} fit in 2 GiB", big["bytes"] < BYTES, used)
    took = f"{big['seconds']:.1f} s for {big['actions'] / 1e6:.1f} M actions"
    text = f"{case} are simulated in under {SECONDS:.0f} s"
    hurried = "time is judged in the full form only" if quick else ""
    yield Claim(text, big["seconds"] < SECONDS, took).unless(hurried)


def rows(runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """A table with a row for each family."""
    header = ["activations alive, in stages", "with cotangents"]
    table = [["schedule", "workers", "bubble", *header]]
    for name, found in runs.items():
        last = found[-1]
        counts = f"{last['alive']:g}", f"{last['held']:g}"
        table.append([name, f"{last['workers']:.0f}", f"{last['bubble']:.1%}", *counts])
    return table


def plot(runs: dict[str, list[dict[str, float]]]) -> Figure:
    """The idle share and the activations over workers."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for number, (name, found) in enumerate(runs.items()):
        workers = [run["workers"] for run in found]
        # Some curves are equal, so that later points are smaller.
        size = 1 + 3 * (len(runs) - number)
        style = {"marker": "o", "markersize": size, "label": name}
        left.plot(workers, [run["bubble"] for run in found], **style)
        right.plot(workers, [run["alive"] for run in found], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"workers; {PER_STAGE} micro-batches each")
    left.set_ylabel("bubble")
    right.set_yscale("log", base=2)
    right.set_ylabel("activations on the fullest worker, in stages")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3
    )
    return figure


def plot_links(links: dict[str, list[float]]) -> Figure:
    """The makespan over the latency."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, times in links.items():
        axes.plot(SLOW_LINKS, times, "o-", label=name)
    axes.set_xlabel("latency of a message, in forward passes")
    axes.set_ylabel("makespan / work")
    axes.legend()
    figure.tight_layout()
    return figure

"""How much faster than the best family is a schedule that a solver finds for unequal
stages, within how much memory, and how far may it be from the best there is?

Stages are drawn at random: seconds of F, B and W of each. For each draw the best family
is the fastest of those that fit into the memory, under the same simulator. Bytes are
counted in activations of a stage, of which a pending weight gradient holds two.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import Unavailable, pipeline

PROVED = 1e-3
"""The largest gap that counts as a proof: costs are rounded to a millionth each."""


class Sizes(NamedTuple):
    """Sizes of a search."""

    workers: int
    micro_batches: int
    draws: int
    seconds: float
    """The time of one search."""

    @property
    def memory(self) -> dict[str, float | None]:
        """Limits of a worker, in activations: 1F1B's, half as much again, none."""
        return {"1F1B's": self.workers, "3/2": 1.5 * self.workers, "any": None}


class Case(NamedTuple):
    """The best family and the schedule found, for one draw and one limit."""

    family: str
    family_seconds: float | None
    seconds: float
    lower_bound: float
    peak: float
    memory: float | None

    @property
    def speedup(self) -> float:
        """How many times as fast as the best family; 1 where none fits."""
        return (self.family_seconds or self.seconds) / self.seconds

    @property
    def gap(self) -> float:
        """What a better schedule could save at most."""
        return 1 - self.lower_bound / self.seconds


def run(settings: Settings, progress: Progress) -> Result:
    """Searches for all draws and limits, and for one draw along the memory."""
    sizes = Sizes(3, 4, 3, 2.0) if settings.quick else Sizes(4, 8, 100, 5.0)
    rng = np.random.default_rng(settings.seed)
    drawn = [costs_of(rng, sizes.workers) for _ in range(sizes.draws)]
    claims = list(fraction_claims())
    try:
        cases = {
            name: [
                searched(costs, memory, sizes)
                for costs in progress.track(drawn, description=f"memory: {name}")
            ]
            for name, memory in sizes.memory.items()
        }
    except Unavailable as error:
        claims.append(Claim("schedules are found", None, "", str(error)))
        return Result(claims, pictures=[gantt_picture(drawn[0], sizes, found=False)])
    claims += found_claims(cases, settings.quick)
    limits = [sizes.workers * share for share in (0.5, 0.75, 1, 1.5, 2, 3)]
    curve = [searched(drawn[0], limit, sizes) for limit in limits]
    return Result(
        claims=claims,
        pictures=[
            gantt_picture(drawn[0], sizes),
            Picture(
                "memory",
                "One draw within more and more memory, and less than 1F1B's, where no "
                "family may fit.",
                plot_memory(curve),
            ),
        ],
        tables={"Times as fast as the best family": rows(cases)},
        data={
            "cases": {
                name: [case._asdict() for case in own] for name, own in cases.items()
            },
            "curve": [case._asdict() for case in curve],
        },
        notes=[
            f"{sizes.workers} workers, {sizes.micro_batches} micro-batches, "
            f"{sizes.seconds:g} s for each search.",
            "Uniform seconds: F 0.5 to 1.5, B 0.7 to 1.5 times and W 0.4 to 1.2 times "
            "as long; a whole backward pass as long as both.",
        ],
    )


def costs_of(rng: np.random.Generator, stages: int) -> pipeline.Costs:
    """Random seconds of each stage."""
    forward = rng.uniform(0.5, 1.5, stages)
    inputs = forward * rng.uniform(0.7, 1.5, stages)
    params = forward * rng.uniform(0.4, 1.2, stages)
    return pipeline.Costs(
        forward=forward,
        backward=inputs + params,
        backward_inputs=inputs,
        backward_params=params,
        activation_bytes=1.0,
    )


def best_family(
    costs: pipeline.Costs, memory: float | None, sizes: Sizes
) -> pipeline.Timeline | None:
    """The fastest family that fits, if any does."""
    shape = sizes.workers, sizes.micro_batches
    plain = [pipeline.one_f_one_b(*shape), pipeline.gpipe(*shape)]
    split = [pipeline.zero_bubble(*shape), *map(pipeline.split_drain, plain)]
    played = [pipeline.simulate(schedule, costs) for schedule in (*plain, *split)]
    fitting = [one for one in played if memory is None or peak_of(one) <= memory]
    return min(fitting, key=lambda one: one.makespan, default=None)


def peak_of(timeline: pipeline.Timeline) -> float:
    """The most that any worker holds."""
    return max(timeline.peak_bytes or (0.0,))


def found_for(
    costs: pipeline.Costs, memory: float | None, sizes: Sizes
) -> pipeline.Found:
    """The schedule of a search."""
    workers, micro_batches, _, seconds = sizes
    return pipeline.synthesize(
        costs,
        workers=workers,
        micro_batches=micro_batches,
        memory=memory,
        seconds=seconds,
    )


def searched(costs: pipeline.Costs, memory: float | None, sizes: Sizes) -> Case:
    """One case; the schedule is simulated anew."""
    family = best_family(costs, memory, sizes)
    found = found_for(costs, memory, sizes)
    again = pipeline.simulate(found.schedule.validate(), costs)
    return Case(
        family.name.split(", ")[0] if family else "none",
        family.makespan if family else None,
        again.makespan,
        found.lower_bound,
        peak_of(again),
        memory,
    )


def fraction_claims() -> Iterator[Claim]:
    """Claims on the families of controllable memory, for up to 32 workers."""
    shares = {"a half": (pipeline.v_half, 2), "a third": (pipeline.v_min, 3)}
    costs = pipeline.Costs(activation_bytes=1.0, pending_bytes=1.0)
    for name, (make, part) in shares.items():
        # In stages of half a worker's size: 1F1B holds 2n of them.
        held = {
            n: peak_of(pipeline.simulate(make(n, 2 * n), costs)) for n in range(2, 33)
        }
        most = max(kept - 2 * n / part for n, kept in held.items())
        text = f"{make.__name__} holds {name} of 1F1B's activations, and a constant"
        shown = f"at most {most:.2g} half-size stages more, from F to W"
        yield Claim(text, most <= 8 / 3 + 1e-9, shown)


def found_claims(cases: Mapping[str, Sequence[Case]], quick: bool) -> Iterator[Claim]:
    """Claims on what is found."""
    for name, own in cases.items():
        fits = all(case.memory is None or case.peak <= case.memory for case in own)
        never = all(case.lower_bound <= case.seconds for case in own)
        slower = sum(case.speedup < 1 for case in own)
        gain = np.median([case.speedup for case in own])
        text = f"memory {name}: no schedule found is slower than the best family"
        shown = f"{slower} of {len(own)} are; the median is {gain:.3f} times as fast"
        yield Claim(text, fits and never and not slower, shown, leads=True)
    # Where memory binds, the table has the gaps.
    free = [case for own in cases.values() for case in own if case.memory is None]
    proved = sum(case.gap < PROVED for case in free)
    text = "without a limit nine of ten are proved to be the best"
    hurried = "proofs are counted in the full form only" if quick else ""
    shown = f"{proved} of {len(free)}"
    yield Claim(text, proved >= 0.9 * len(free), shown).unless(hurried)


def rows(cases: Mapping[str, Sequence[Case]]) -> list[list[str]]:
    """A row for each limit."""
    header = ["lower quartile", "median", "upper quartile", "proved"]
    table = [["memory", *header, "median gap", "largest gap"]]
    for name, own in cases.items():
        quartiles = np.quantile([case.speedup for case in own], (0.25, 0.5, 0.75))
        gaps = [case.gap for case in own]
        proved = f"{sum(gap < PROVED for gap in gaps)} of {len(own)}"
        shown = [f"{gap:.1%}" for gap in (np.median(gaps), max(gaps))]
        table.append([name, *(f"{q:.3f}" for q in quartiles), proved, *shown])
    return table


def gantt_picture(
    costs: pipeline.Costs, sizes: Sizes, *, found: bool = True
) -> Picture:
    """The best family under 1F1B's memory, and what is found."""
    memory = float(sizes.workers)
    drawn = [best_family(costs, memory, sizes)]
    if found:
        schedule = found_for(costs, memory, sizes).schedule
        drawn.append(pipeline.simulate(schedule, costs))
    figure, axes = plt.subplots(
        len(drawn), figsize=(12, 3 * len(drawn)), squeeze=False, layout="constrained"
    )
    played = [timeline for timeline in drawn if timeline is not None]
    for timeline, below in zip(played, axes.flat, strict=False):
        timeline.draw(below)
        below.set_xlim(0, max(one.makespan for one in played))
    return Picture("gantt", "The best family within 1F1B's memory; the found.", figure)


def plot_memory(curve: Sequence[Case]) -> Figure:
    """Makespans over the limit of memory."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    limits = np.array([case.memory for case in curve], np.float64)
    families = np.array([case.family_seconds for case in curve], np.float64)
    axes.plot(limits, families, "s--", label="best family")
    axes.plot(limits, [case.seconds for case in curve], "o-", label="found")
    axes.plot(limits, [case.lower_bound for case in curve], ":", label="lower bound")
    axes.set_xlabel("memory of a worker, in activations of a stage")
    axes.set_ylabel("makespan, in seconds")
    axes.legend()
    return figure

"""What does PipeDream's planner make of a ResNet-50 and a VGG-16 for 2, 4 and 16
workers: profiled here, and from the profiles that were published with it?

Each layer is timed on this machine. The planner partitions the profile into stages,
some of them replicated, for the machines of the paper's cluster A. Every plan is then
simulated, and so is data parallelism on as many workers. A machine without an
accelerator computes so slowly that the network hardly matters, so that plans gain
little there; this is a property of the machine, not a flaw of the planner.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._profiles import profiled, resnet_layers, sizes_for, vgg_layers
from experiments._result import Claim, Picture, Result, Settings
from jdist import pipeline

PROFILES = Path(__file__).parents[1] / "tests" / "pipeline" / "profiles"
"""Profiles from PipeDream's repository, unchanged: see LICENSE.pipedream.txt there."""


class Machine(NamedTuple):
    """Workers and bytes per second between them for each level, innermost first."""

    workers: tuple[int, ...]
    bandwidths: tuple[float, ...]


PCIE, ETHERNET = 12e9, 1.25e9
CLUSTER = {
    2: Machine((2,), (PCIE,)),
    4: Machine((4,), (PCIE,)),
    16: Machine((4, 4), (PCIE, ETHERNET)),
}
"""The paper's cluster A by number of workers: servers of four with 10 Gbit/s."""
PAPER = {"VGG-16": "15-1, 5.28 times", "ResNet-50": "16, 1 time"}
"""Table 1 for 16 workers of cluster A: configuration, and an epoch's speed-up over data
parallelism."""
PLANNED = {"VGG-16": 0.06688875213, "ResNet-50": 0.0432084692}
"""Seconds that the published planner finds for its own profiles on 16 workers."""
PUBLISHED = {"VGG-16": "vgg16.txt", "ResNet-50": "resnet50.txt"}
SLOWER = tuple(2.0**k for k in range(-6, 7))
"""Factors of both bandwidths in the picture."""
ROUNDS = 12
"""The number of turns of all replicas over which a pace is measured."""


class Case(NamedTuple):
    """A profile planned for one machine, with simulations of the plan.

    Attributes:
      model: The paper's name of the network.
      source: "here" or "published".
      plan: The plan that counts transfers at its cuts.
      pace: Simulated seconds per micro-batch, with messages on their links.
      alone: The same for data parallelism.
      free: The plan that does not count transfers.
      free_pace: Its simulated pace with free messages.
    """

    model: str
    source: str
    plan: pipeline.Plan
    pace: float
    alone: float
    free: pipeline.Plan
    free_pace: float

    @property
    def workers(self) -> int:
        """The number of workers of the machine."""
        return math.prod(self.plan.workers)


def run(settings: Settings, progress: Progress) -> Result:
    """Profiles, plans and simulates."""
    sizes = sizes_for(settings)
    profiles = {
        ("VGG-16", "here"): profiled(vgg_layers(sizes), sizes.vgg.image, sizes),
        ("ResNet-50", "here"): profiled(resnet_layers(sizes), sizes.pixels, sizes),
    }
    for model, file in PUBLISHED.items():
        profiles[model, "published"] = pipeline.load_profile(PROFILES / file)
    wanted = [(*which, count) for which in profiles for count in CLUSTER]
    cases = [
        planned(model, source, profiles[model, source], CLUSTER[count])
        for model, source, count in progress.track(wanted, description="planning")
    ]
    factors = SLOWER[::3] if settings.quick else SLOWER
    gains = {which: gained(profile, factors) for which, profile in profiles.items()}
    return Result(
        claims=list(claims(cases)),
        pictures=list(pictures(cases, gains, factors)),
        tables={
            "Plans, and what they gain over data parallelism": rows(cases),
            "Stages of the plans for what was profiled here": stage_rows(cases),
        },
        data={
            "profiles": {f"{m}, {s}": p.to_text() for (m, s), p in profiles.items()},
            "cases": [recorded(case) for case in cases],
            "gains": {f"{m}, {s}": found for (m, s), found in gains.items()},
        },
        notes=[
            f"Profiled here: {sizes.vgg} and {sizes.resnet}, {sizes.pixels} pixels, "
            f"{sizes.examples} images at a time, on {jax.devices()[0].device_kind}.",
            "The paper measured time; here are times of the planner's model.",
        ],
    )


# --- plans ---


def planned(
    model: str, source: str, profile: pipeline.Profile, machine: Machine
) -> Case:
    """Plans with and without transfers; simulates both and data parallelism."""
    plan = pipeline.partition(profile, *machine)
    free = pipeline.partition(profile, *machine, transfers=False)
    costs = plan.costs(reductions=True, bandwidth=links(plan))
    whole = pipeline.partition(in_one(profile, plan), *machine)
    return Case(
        model,
        source,
        plan,
        pace(plan, costs),
        pace(whole, whole.costs(reductions=True)),
        free,
        pace(free, free.costs(reductions=True)),
    )


def in_one(profile: pipeline.Profile, plan: pipeline.Plan) -> pipeline.Profile:
    """All layers merged into one, so that data parallelism is the only plan."""
    layers = [profile[name] for stage in plan.stages for name in stage.layers]
    whole = pipeline.Layer(
        "all",
        "all layers",
        math.fsum(layer.forward for layer in layers),
        math.fsum(layer.backward for layer in layers),
        (layers[-1].output_bytes,),
        math.fsum(layer.parameter_bytes for layer in layers),
    )
    return pipeline.Profile.chain([whole])


def links(plan: pipeline.Plan) -> list[float]:
    """Bandwidths from each stage to the next: those of the outermost level crossed."""
    found = []
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        size, crossed = 1, plan.bandwidths[0]
        for count, bandwidth in zip(plan.workers, plan.bandwidths, strict=True):
            if len({rank // size for rank in before.ranks + after.ranks}) > 1:
                crossed = bandwidth
            size *= count
        found.append(crossed)
    return found


def pace(plan: pipeline.Plan, costs: pipeline.Costs) -> float:
    """Simulated seconds per micro-batch, without fill and drain."""
    period = math.lcm(*(len(stage.ranks) for stage in plan.stages))
    # Of three equal thirds the middle one is measured, which is steady.
    turns = period * ROUNDS
    timeline = pipeline.simulate(plan.schedule(3 * turns), costs)
    ends = {
        record.micro_batch: record.end
        for record in timeline.records()
        if record.kind == "B" and record.stage == 0
    }
    return (ends[2 * turns] - ends[turns]) / turns


def gained(profile: pipeline.Profile, factors: Sequence[float]) -> list[float]:
    """Data parallelism's time over the plan's for 16 workers, at other bandwidths."""
    found = []
    for factor in factors:
        bandwidths = tuple(factor * speed for speed in CLUSTER[16].bandwidths)
        plan = pipeline.partition(profile, CLUSTER[16].workers, bandwidths)
        found.append(plan.data_parallel_time / plan.bottleneck_time)
    return found


# --- what came out ---


def claims(cases: Sequence[Case]) -> Iterator[Claim]:
    """Claims about all plans, and about the published ones what was published."""
    ratios = [c.plan.bottleneck_time / c.plan.data_parallel_time for c in cases]
    text = "no plan's bottleneck is slower than data parallelism's, by the same model"
    shown = f"{max(ratios):.4f} of it at most, {len(cases)} plans"
    yield Claim(text, max(ratios) <= 1 + 1e-12, shown, leads=True)
    off = [abs(busy(case.free) / case.free.bottleneck_time - 1) for case in cases]
    text = "the slowest stage's passes and reductions are the planner's bottleneck"
    yield Claim(text, max(off) < 1e-9, f"relative difference {max(off):.1e} at most")
    off = [abs(case.alone / case.plan.data_parallel_time - 1) for case in cases]
    text = "simulated data parallelism takes what the model says"
    yield Claim(text, max(off) < 1e-9, f"relative difference {max(off):.1e} at most")
    slack = [case.free_pace / case.free.bottleneck_time - 1 for case in cases]
    text = "no simulated plan is faster than its bottleneck"
    yield Claim(text, min(slack) > -1e-9, f"{min(slack):+.1e} at least")
    published = [case for case in cases if case.source == "published"]
    late = max(c.free_pace / c.free.bottleneck_time - 1 for c in published)
    text = "plans of the published profiles run at 1 / bottleneck in steady state"
    yield Claim(text, late < 1e-9, f"relative difference {late:.1e} at most")
    gain = {c.model: c for c in published if c.workers == 16}
    for model, seconds in PLANNED.items():
        found = gain[model].plan.bottleneck_time
        text = f"{model}'s published profile: the published planner's bottleneck"
        same = abs(found - seconds) < 1e-10
        yield Claim(text, same, f"{found:.10f} s beside {seconds:.10f} s")
    vgg, resnet = (over_alone(gain[model]) for model in ("VGG-16", "ResNet-50"))
    text = "as in the paper, VGG-16 gains from a pipeline and ResNet-50 next to nothing"
    holds = vgg > 1.5 and 1 <= resnet < 1.1
    shown = f"{vgg:.2f} and {resnet:.2f} times data parallelism"
    yield Claim(text, holds, shown, leads=True)


def busy(plan: pipeline.Plan) -> float:
    """Seconds per micro-batch of the slowest stage."""
    pairs = zip(plan.stages, plan.reduction_seconds, strict=True)
    return max(stage.share + extra / len(stage.ranks) for stage, extra in pairs)


def over_alone(case: Case) -> float:
    """The modelled speed-up of the plan over data parallelism."""
    return case.plan.data_parallel_time / case.plan.bottleneck_time


def rows(cases: Sequence[Case]) -> list[list[str]]:
    """A table with a row for each case."""
    header = ["model", "profile", "workers", "plan", "ms per micro-batch"]
    header += ["gain", "simulated gain", "paper's table 1"]
    table = [header]
    for case in cases:
        stages = case.plan.configuration
        paper = PAPER[case.model] if case.workers == 16 else ""
        table.append(
            [
                case.model,
                case.source,
                " x ".join(map(str, case.plan.workers)),
                stages,
                f"{1e3 * case.plan.bottleneck_time:.4g}",
                f"{over_alone(case):.2f}",
                f"{case.alone / case.pace:.2f}",
                paper,
            ]
        )
    return table


def stage_rows(cases: Sequence[Case]) -> list[list[str]]:
    """A table with a row for each stage."""
    table = [["model", "workers", "stage", "layers", "ranks", "ms", "MiB of weights"]]
    for case in cases:
        if case.source != "here":
            continue
        for number, stage in enumerate(case.plan.stages):
            table.append(
                [
                    case.model,
                    str(case.workers),
                    str(number),
                    f"{stage.layers[0]} .. {stage.layers[-1]}",
                    " ".join(map(str, stage.ranks)),
                    f"{1e3 * (stage.forward + stage.backward):.4g}",
                    f"{stage.parameter_bytes / 2**20:.2f}",
                ]
            )
    return table


def recorded(case: Case) -> dict[str, Any]:
    """The case as JSON values."""
    plans = {"plan": asdict(case.plan), "free": asdict(case.free)}
    return case._asdict() | plans


def pictures(
    cases: Sequence[Case],
    gains: Mapping[tuple[str, str], Sequence[float]],
    factors: Sequence[float],
) -> Iterator[Picture]:
    """Plans for 16 workers, and gains over bandwidth."""
    for case in cases:
        if case.workers == 16:
            name = f"{case.model}-{case.source}".lower()
            caption = f"{case.model}, profile: {case.source}. Seconds of each stage."
            yield Picture(name, caption, plot_plan(case.plan))
    caption = (
        "What a pipeline gains over data parallelism, for slower and slower links."
    )
    yield Picture("gains", caption, plot_gains(gains, factors))


def plot_plan(plan: pipeline.Plan) -> Figure:
    """Each stage's seconds per micro-batch, with the bottleneck."""
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(plan.stages)), layout="constrained")
    axes = figure.subplots()
    names = [
        f"stage {i}: {len(stage.layers)} layers x {len(stage.ranks)} workers"
        for i, stage in enumerate(plan.stages)
    ]
    computing = [1e3 * stage.share for stage in plan.stages]
    joining = [
        1e3 * seconds / len(stage.ranks)
        for stage, seconds in zip(plan.stages, plan.reduction_seconds, strict=True)
    ]
    axes.barh(names, computing, color="#4c78a8", label="passes")
    axes.barh(names, joining, left=computing, color="#9ecae9", label="reductions")
    bottleneck = 1e3 * plan.bottleneck_time
    axes.axvline(bottleneck, color="#f58518", label="bottleneck")
    beside = 1e3 * plan.data_parallel_time
    axes.axvline(beside, color="#54a24b", ls="--", label="data parallel")
    axes.set_xlim(0, 1.05 * max(beside, bottleneck))
    # `barh` draws from the bottom; the first stage belongs on top.
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per micro-batch, divided by the stage's workers")
    figure.legend(loc="outside lower right", ncols=4)
    axes.set_title(str(plan))
    return figure


def plot_gains(
    gains: Mapping[tuple[str, str], Sequence[float]], factors: Sequence[float]
) -> Figure:
    """Gains over bandwidth."""
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for (model, source), found in gains.items():
        style = "o-" if source == "published" else "s--"
        axes.plot(factors, found, style, label=f"{model}, {source}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bandwidth, in those of cluster A")
    axes.set_ylabel("data parallelism's time / the plan's")
    axes.legend()
    figure.tight_layout()
    return figure

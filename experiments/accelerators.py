"""How would a ResNet-50 and a transformer train on three slices that are not here; and
does what was proved on CPUs hold on the devices that are?

Without `--here` the layers are compiled for each slice from shapes and partitioned into
stages by their estimated times. The programs of every stage are then compiled as a
whole, which gives their memory and, by a simulation of 1F1B, the time of a step.
Nothing runs, and all seconds are roofline estimates. With `--here` small problems run
on the devices of this machine.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import _here
from experiments._profiles import resnet_layers, sizes_for
from experiments._result import Claim, Picture, Result, Settings
from jdist import Unavailable, optim, pipeline, targets

SLICES = ("v5e:2x2", "a100:1x4", "h100:1x4")
GIB = 2**30
DESCRIBED = targets.Hardware(
    targets.Chip(
        "described",
        "cpu",
        16 * GIB,
        1e11,
        {"float32": 1e12, "bfloat16": 1e12},
        link_bandwidth=1e10,
    ),
    (4,),
)
"""Made-up chips, compiled for by the CPU's compiler; used if no other is installed."""


class Problem(NamedTuple):
    """A model as layers, and one micro-batch.

    Attributes:
      name: The name in tables.
      modules: The layers, with shapes for parameters and states.
      batch: The shapes of a micro-batch.
      micro_batches: The number of micro-batches in a step.
    """

    name: str
    modules: Sequence[pipeline.Module]
    batch: Mapping[str, Any]
    micro_batches: int


class Planned(NamedTuple):
    """A model planned for one slice.

    Attributes:
      problem: The model.
      slice: The name of the hardware.
      plan: The plan, with one stage on each chip.
      seconds: Estimated seconds of each stage's compiled forward and backward passes.
      memory: Bytes that each stage needs on its chip.
      capacity: Bytes of memory of a chip.
      timeline: The timeline of a simulated step.
    """

    problem: Problem
    slice: str
    plan: pipeline.Plan
    seconds: list[tuple[float, float]]
    memory: list[int]
    capacity: int
    timeline: pipeline.Timeline

    @property
    def speed_up(self) -> float:
        """The speed-up over one chip that does all the work, if it had the memory."""
        alone = self.problem.micro_batches * sum(f + b for f, b in self.seconds)
        return alone / self.timeline.makespan


def run(settings: Settings, progress: Progress) -> Result:
    """Plans for absent slices, or runs on the devices of this machine."""
    if settings.here:
        return _here.run(settings, progress)
    slices, missing = available(settings)
    problems = [resnet(settings), transformer(settings)]
    wanted = [(problem, each) for problem in problems for each in slices]
    found = [
        planned(problem, each)
        for problem, each in progress.track(wanted, description="compiling")
    ]
    return Result(
        claims=list(claims(found, missing)),
        pictures=[
            Picture(
                "steps",
                "Estimated seconds of a step of 1F1B on four chips, as simulated: work "
                "of the busiest stage, and what fill, drain and messages add.",
                plot(found),
            )
        ],
        tables={"Plans, all seconds estimated by roofline": rows(found)},
        data={"plans": [recorded(each) for each in found]},
        notes=[
            "Nothing was run: times are estimates by roofline with published figures, "
            "without latencies, hosts and input.",
            f"{DESCRIBED.name}, where it is listed, are made-up chips that the CPU's "
            "compiler stands for where no other is installed.",
        ],
    )


def available(settings: Settings) -> tuple[list[targets.Hardware], list[str]]:
    """Slices whose compilers are installed, and why others are missing."""
    found, missing = [], []
    for name in SLICES[:1] if settings.quick else SLICES:
        each = targets.target(name)
        try:
            _ = each.devices  # raises if the compiler is missing
            found.append(each)
        except Unavailable as error:
            missing.append(f"{name}: {error}")
    if not found and jax.device_count("cpu") >= DESCRIBED.chips:
        found = [DESCRIBED]
    return found, missing


# --- models ---


def resnet(settings: Settings) -> Problem:
    """A ResNet of Flax modules, with shapes in place of parameters."""
    sizes = sizes_for(settings)
    layers = resnet_layers(sizes)
    image = (sizes.examples, sizes.pixels, sizes.pixels, 3)
    return Problem(
        f"{sizes.resnet}, {sizes.pixels} pixels",
        pipeline.modules_from_nnx(layers),
        {"x": jax.ShapeDtypeStruct(image, jnp.float32)},
        8,
    )


def transformer(settings: Settings) -> Problem:
    """Equal blocks of attention and a feed-forward net, in bfloat16."""
    width, length, blocks, rows = (
        (64, 32, 4, 2) if settings.quick else (2048, 1024, 24, 2)
    )

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def block(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(normalised(x) @ params["qkv"], 3, -1)
        parts = [t.reshape(*t.shape[:2], -1, 64) for t in (q, k, v)]
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        x = x + mixed.reshape(x.shape) @ params["out"]
        return x + jax.nn.gelu(normalised(x) @ params["up"]) @ params["down"]

    params = {
        "qkv": shape(width, 3 * width),
        "out": shape(width, width),
        "up": shape(width, 4 * width),
        "down": shape(4 * width, width),
    }
    modules = [pipeline.Module(f"block{i}", block, params) for i in range(blocks)]
    name = f"transformer, {blocks} blocks of width {width}, {length} tokens"
    return Problem(name, modules, {"x": shape(rows, length, width)}, 16)


def normalised(x: jax.Array) -> jax.Array:
    """Normalises by the root mean square, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


# --- plans ---


def planned(problem: Problem, hardware: targets.Hardware) -> Planned:
    """Partitions layers into stages by compiled costs; compiles whole stages."""
    chip, n, m = hardware.chip, hardware.chips, problem.micro_batches
    # A message between two chips uses only one of the links.
    bandwidth = chip.link_bandwidth / chip.links
    profile = pipeline.profile(problem.modules, problem.batch, target=hardware)
    plan = pipeline.partition(profile, n, bandwidth, replicate=False)
    made = pipeline.stages_from_modules(problem.modules, plan)
    schedule = pipeline.one_f_one_b(len(made.stages), m)
    pipe = pipeline.Pipeline(
        made.stages,
        lambda y, batch: jnp.square(y.astype(jnp.float32)).mean(
            tuple(range(1, y.ndim))
        ),
        schedule,
        hardware.devices[: len(made.stages)],
        optimizer=optim.adam(),
        loss_inputs=made.loss_inputs,
    )
    whole = jax.tree.map(
        lambda x: x.update(shape=(m * x.shape[0], *x.shape[1:])), problem.batch
    )
    lowered = pipe.lower(pipe.init(made.params, made.states), whole)
    seconds, memory = [], []
    known: dict[str, targets.CompiledProgram] = {}
    for j in range(len(made.stages)):
        parts = [lowered[f"stage {j}: {part}"] for part in PARTS]
        forward, backward, update = (compiled(x, hardware, known) for x in parts)
        seconds.append((forward.seconds or math.inf, backward.seconds or math.inf))
        memory.append(needed(forward, backward, update, min(m, len(made.stages) - j)))
    # Compiled as a whole, a stage differs from the sum of its layers.
    costs = replace(
        plan.costs(bandwidth=bandwidth),
        forward=[f for f, _ in seconds],
        backward=[b for _, b in seconds],
    )
    timeline = pipeline.simulate(schedule, costs)
    return Planned(problem, hardware.name, plan, seconds, memory, chip.memory, timeline)


PARTS = ("forward", "backward", "update")


def compiled(
    lowered: jax.stages.Lowered,
    hardware: targets.Hardware,
    known: dict[str, targets.CompiledProgram],
) -> targets.CompiledProgram:
    """Compiles a program; equal ones, as of a transformer's stages, only once."""
    # Results are named after layers, which does not affect the compiled program.
    text = re.sub(r'jax\.result_info = "[^"]*"', "", lowered.as_text())
    if text not in known:
        known[text] = targets.compile(lowered, target=hardware)
    return known[text]


def needed(
    forward: targets.CompiledProgram,
    backward: targets.CompiledProgram,
    update: targets.CompiledProgram,
    in_flight: int,
) -> int:
    """Bytes that a stage needs: weights, gradients and state; activations; scratch.

    The results of the forward pass count for every micro-batch in flight, including the
    output, which has been sent to the next stage.
    """
    kept = [each.bytes_per_device for each in (forward, backward, update)]
    assert all(kept)
    scratch = max(each.temporaries + each.code for each in kept if each)
    return (
        kept[2].arguments + in_flight * kept[0].outputs + scratch  # type: ignore[union-attr]
    )


# --- what came out ---


def claims(found: Sequence[Planned], missing: Sequence[str]) -> Iterator[Claim]:
    """Claims about every plan."""
    full = max(max(each.memory) / each.capacity for each in found)
    text = "every stage's programs fit the memory of its chip, as compiled"
    yield Claim(text, full <= 1, f"{full:.1%} of it at most", leads=True)
    fastest = [
        max(f + b for f, b in each.seconds) * each.problem.micro_batches
        for each in found
    ]
    over = min(
        each.timeline.makespan / least
        for each, least in zip(found, fastest, strict=True)
    )
    text = "no simulated step is shorter than the work of its busiest stage"
    yield Claim(text, over >= 1, f"{over:.2f} times it at least")
    gains = [each.speed_up for each in found]
    text = "by the estimates four chips in a pipeline are faster than one of them"
    shown = f"{min(gains):.2f} to {max(gains):.2f} times, {len(found)} plans"
    yield Claim(text, min(gains) > 1, shown, leads=True)
    if missing:
        text = "the same on slices whose compilers are installed"
        yield Claim(text, None, "", why_not="; ".join(missing))


def rows(found: Sequence[Planned]) -> list[list[str]]:
    """A table with a row for each plan."""
    table = [
        ["model", "slice", "layers", "step (estimate)", "bubble", "speed-up", "memory"]
    ]
    for each in found:
        layers = "-".join(str(len(stage.layers)) for stage in each.plan.stages)
        table.append(
            [
                each.problem.name,
                each.slice,
                layers,
                f"{each.timeline.makespan * 1e3:.3g} ms",
                f"{each.timeline.bubble:.0%}",
                f"{each.speed_up:.2f}",
                f"{max(each.memory) / GIB:.3g} of {each.capacity / GIB:.3g} GiB",
            ]
        )
    return table


def recorded(each: Planned) -> dict[str, Any]:
    """All numbers of a plan, as JSON values."""
    return {
        "model": each.problem.name,
        "slice": each.slice,
        "stages": [list(stage.layers) for stage in each.plan.stages],
        "estimated_seconds": each.seconds,
        "bytes": each.memory,
        "step_estimate": each.timeline.makespan,
        "bubble": each.timeline.bubble,
    }


def plot(found: Sequence[Planned]) -> Figure:
    """A bar for each plan; a panel for each model, as their steps differ widely."""
    by_model: dict[str, list[Planned]] = {}
    for each in found:
        by_model.setdefault(each.problem.name, []).append(each)
    figure, panels = plt.subplots(
        len(by_model),
        figsize=(7, 0.5 * len(found) + 1.3 * len(by_model)),
        squeeze=False,
        layout="constrained",
    )
    for axes, (model, plans) in zip(panels[:, 0], by_model.items(), strict=True):
        busy = [
            each.problem.micro_batches * max(f + b for f, b in each.seconds) * 1e3
            for each in plans
        ]
        steps = [each.timeline.makespan * 1e3 for each in plans]
        places = np.arange(len(plans))
        axes.barh(places, busy, label="busiest stage")
        rest = np.subtract(steps, busy)
        bars = axes.barh(places, rest, left=busy, label="fill, drain, messages")
        axes.bar_label(bars, [f"{x:.3g}" for x in steps], padding=3)
        axes.margins(x=0.1)
        axes.set_yticks(places, [each.slice for each in plans])
        axes.set_title(model, fontsize="medium", loc="left")
    # Stacked lengths can be compared on a linear axis only.
    axes.set_xlabel("estimated ms of a step")
    figure.legend(
        *axes.get_legend_handles_labels(),
        frameon=False,
        ncols=2,
        loc="outside lower center",
    )
    return figure

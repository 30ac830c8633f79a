"""What would a step of Llama 3 8B take on sixteen chips that are not here, under which
schedule, and what of each chip's memory?

The layers of examples/language_model.py, at the published sizes, are compiled from
shapes for the mesh of one stage, divided over data and model axes: embedding, one of
the equal blocks, and head with the loss. `partition` divides the model by their
estimated times, `simulate` plays four schedules, and `synthesize` looks for shorter
ones within a chip's memory, of one stage on each place and of two. Nothing runs, and
all seconds are roofline estimates.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich.progress import Progress

from examples import language_model as example
from experiments._result import Claim, Picture, Result, Settings
from experiments.accelerators import DESCRIBED, GIB
from jdist import Unavailable, optim, pipeline, targets

SLICES = ("v5p:4x2x2", "h100:2x8")
STAGES, DATA, MODEL = 4, 2, 2
# Schedules that are found, and the families of the same stages.
SEARCHED = {
    "found": ("GPipe", "1F1B", "ZB-H1"),
    "found, two parts": ("interleaved",),
}
SECONDS = 60.0
"""The time of a search."""
# Llama Team, The Llama 3 Herd of Models, 2024, table 3; the vocabulary and a tied head
# as in its published configuration (128256 words, not tied).
PUBLISHED = example.Sizes(128256, 4096, 32, 32, 8, 14336, 5e5, 0.0, tied=False)
SMALL = example.Sizes(256, 64, 8, 4, 2, 128, 5e5, 0.0, tied=False)
KINDS = ("embedding", "block", "head")


class Problem(NamedTuple):
    """The model and the size of a step.

    Attributes:
      sizes: The sizes of the model.
      length: Tokens in a sequence.
      micro_batches: Micro-batches in a step, each of one sequence for each part of the
        data axis.
    """

    sizes: example.Sizes
    length: int
    micro_batches: int


class Cost(NamedTuple):
    """Costs of a layer on one chip of a stage's mesh, for one micro-batch.

    Attributes:
      forward: Estimated seconds of the forward pass.
      backward: Estimated seconds of the backward pass as one program; a block is
        rematerialized.
      inputs: Estimated seconds of the half with the cotangents of the inputs.
      params: Estimated seconds of the half with the gradients of the parameters.
      weights: Bytes of its parameters.
      state: Bytes of the optimizer's state: masters and moments.
      grads: Bytes of its gradient.
      kept: Bytes kept of a micro-batch from forward to backward.
      pending: Bytes kept from one half of the backward pass to the other.
      scratch: Bytes that a backward program needs in addition.
      collectives: The number of collectives of each kind in forward and backward, and
        their bytes on a chip.
    """

    forward: float
    backward: float
    inputs: float
    params: float
    weights: float
    state: float
    grads: float
    kept: float
    pending: float
    scratch: float
    collectives: dict[str, tuple[int, float]]


class Planned(NamedTuple):
    """A schedule on a slice.

    Attributes:
      slice: The name of the slice.
      schedule: The name of the schedule.
      layers: The number of layers of each stage.
      memory: Bytes of the fullest chip, by kind.
      capacity: Bytes of memory of a chip.
      timeline: The timeline of a simulated step.
      busy: Seconds of computation of the busiest chip in the step.
    """

    slice: str
    schedule: str
    layers: list[int]
    memory: dict[str, float]
    capacity: int
    timeline: pipeline.Timeline
    busy: float

    @property
    def needed(self) -> float:
        """Bytes needed on the fullest chip."""
        return sum(self.memory.values())


def run(settings: Settings, progress: Progress) -> Result:
    """Costs of the layers for each slice, and its schedules."""
    problem = Problem(SMALL, 32, 8) if settings.quick else Problem(PUBLISHED, 8192, 16)
    slices, missing = available(settings)
    costs, found = {}, []
    for each in progress.track(slices, description="compiling"):
        costs[each.name] = costs_of(problem, each)
        try:
            found += planned(problem, each, costs[each.name], search=True)
        except Unavailable as error:
            missing.append(f"{', '.join(SEARCHED)}: {error}")
            found += planned(problem, each, costs[each.name], search=False)
    return Result(
        claims=list(claims(found, missing)),
        pictures=[
            Picture(
                "schedules",
                "Left: estimated seconds of a simulated step; the work of the busiest "
                "chip, and what fill, drain and messages add. Right: memory of the "
                "fullest chip by kind; the line is what a chip has.",
                plot(found),
            )
        ],
        tables={
            "Schedules, all seconds estimated by roofline": rows(found),
            "Layers on one chip, for one micro-batch": layer_rows(costs),
        },
        data={
            "layers": {
                name: {kind: cost._asdict() for kind, cost in own.items()}
                for name, own in costs.items()
            },
            "plans": [recorded(each) for each in found],
        },
        notes=[
            "Nothing was run: times are estimates by roofline with published figures, "
            "without latencies, hosts and input.",
            "A stage is the sum of its layers: its programs compiled whole overlap "
            "more, and reuse memory between layers.",
        ],
    )


def available(settings: Settings) -> tuple[list[targets.Hardware], list[str]]:
    """Slices whose compilers are installed, and why others are missing."""
    found, missing = [], []
    for name in () if settings.quick else SLICES:
        each = targets.target(name)
        try:
            _ = each.devices  # raises if the compiler is missing
            found.append(each)
        except Unavailable as error:
            missing.append(f"{name}: {error}")
    # Without any compiler, made-up chips that the CPU's compiler can compile for.
    return found or [DESCRIBED], missing


# --- layers ---


class Rematerialized(example.Block):
    """A block that keeps only its input for the backward pass."""

    __call__ = nnx.remat(example.Block.__call__)


def costs_of(problem: Problem, hardware: targets.Hardware) -> dict[str, Cost]:
    """Costs of each kind of layer, from the programs of a pipeline of three stages."""
    abstract = nnx.eval_shape(lambda: three_layers(problem.sizes))
    made = pipeline.stages_from_nnx(
        [[layer] for layer in abstract], ["tokens", "h1", "h2", "scores"]
    )
    # All three are compiled for the mesh of one stage.
    chips = hardware.devices[: DATA * MODEL]
    (mesh,) = example.meshes(chips, (1, DATA, MODEL))
    optimizer = optim.with_master_weights(
        optim.adam(lr=1e-4), compute_dtype=jnp.bfloat16
    )
    programs: dict[str, targets.CompiledProgram] = {}
    for schedule in (pipeline.one_f_one_b(3, 2), pipeline.zero_bubble(3, 2)):
        pipe = pipeline.Pipeline(
            made.stages, example.losses_of, schedule, [mesh] * 3, optimizer=optimizer
        )
        specs = jax.tree_util.tree_map_with_path(example.spec, made.params)
        state = pipe.init(pipe.place(made.params, specs), made.states)
        shape = 2 * DATA, problem.length
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, dtype in {
                "tokens": jnp.int32, "targets": jnp.int32, "mask": jnp.float32,
            }.items()
        }  # fmt: skip
        for name, lowered in pipe.lower(state, batch).items():
            if wanted(name) and name not in programs:
                programs[name] = targets.compile(lowered, target=hardware)
    hidden = shard_bytes(
        jax.ShapeDtypeStruct((DATA, problem.length, problem.sizes.width), jnp.bfloat16),
        NamedSharding(mesh, PartitionSpec("data")),
    )
    owned = zip(state.params, state.opt_states, strict=True)
    return {
        kind: cost_of(f"stage {j}", programs, *trees, hidden)
        for j, (kind, trees) in enumerate(zip(KINDS, owned, strict=True))
    }


def three_layers(sizes: example.Sizes) -> list[nnx.Module]:
    """A layer of each kind."""
    rngs = nnx.Rngs(0)
    # Without a dtype it would return float32, in which all layers would compute.
    words, width = sizes.vocabulary, sizes.width
    embed = nnx.Embed(words, width, dtype=jnp.bfloat16, rngs=rngs)
    return [embed, Rematerialized(sizes, rngs), example.Head(sizes, embed, rngs)]


def wanted(name: str) -> bool:
    """Whether a program takes time or memory; sums of losses do not."""
    return name.startswith("loss") or "ward" in name or "update" in name


def cost_of(
    stage: str,
    programs: Mapping[str, targets.CompiledProgram],
    params: Any,
    state: Any,
    hidden: float,
) -> Cost:
    """The costs of a layer from its programs; those of the head include the loss."""
    forward, backward, inputs, weights = (
        programs.get(f"{stage}: {part}")
        for part in (
            "forward", "backward", "backward, inputs", "backward, parameters",
        )
    )  # fmt: skip
    assert forward is not None
    assert backward is not None
    both = [forward, backward]
    if last := stage == f"stage {len(KINDS) - 1}":
        both.append(programs["loss: forward and backward"])
    parts = [each for each in (inputs, weights) if each is not None]
    loss = seconds(both[2]) if last else 0.0
    counts: dict[str, tuple[int, float]] = {}
    for each in both:
        for collective in each.collectives:
            times, size = counts.get(collective.kind, (0, 0.0))
            new = times + collective.count, size + collective.count * collective.bytes
            counts[collective.kind] = new
    own = [each.bytes_per_device for each in [*both, *parts] if each.bytes_per_device]
    assert len(own) == len(both) + len(parts)
    pending = max(0.0, own[len(both)].outputs - hidden) if parts else 0.0
    bytes_of = partial(jax.tree.reduce, lambda total, x: total + shard_bytes(x))
    return Cost(
        forward=seconds(forward),
        backward=seconds(backward) + loss,
        inputs=seconds(inputs or backward) + loss,
        params=seconds(weights) if weights else 0.0,
        weights=bytes_of(params, initializer=0.0),
        state=bytes_of(state, initializer=0.0),
        grads=2 * bytes_of(params, initializer=0.0),  # sums are in float32
        # Includes the output, which the next layer keeps.
        kept=own[0].outputs,
        pending=pending,
        scratch=max(each.temporaries + each.code for each in own),
        collectives=counts,
    )


def seconds(program: targets.CompiledProgram) -> float:
    """The estimated seconds; infinite for a program without an estimate."""
    return math.inf if program.seconds is None else program.seconds


def shard_bytes(
    x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None = None
) -> float:
    """Bytes of an array on one device."""
    place = sharding or x.sharding
    assert place is not None
    return math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize


# --- schedules ---


def schedules(problem: Problem) -> dict[str, pipeline.Schedule]:
    """The schedules by name; the interleaved one has two stages on each place."""
    m = problem.micro_batches
    return {
        "GPipe": pipeline.gpipe(STAGES, m),
        "1F1B": pipeline.one_f_one_b(STAGES, m),
        "interleaved": pipeline.interleaved(STAGES, m, 2),
        "ZB-H1": pipeline.zero_bubble(STAGES, m),
    }


def planned(
    problem: Problem,
    hardware: targets.Hardware,
    costs: Mapping[str, Cost],
    *,
    search: bool,
) -> list[Planned]:
    """Each schedule with the stages of `partition`, or with equal stages."""
    blocks = [f"block{i}" for i in range(problem.sizes.blocks)]
    order = ["embedding", *blocks, "head"]
    by_name = {name: costs[re.sub(r"\d", "", name)] for name in order}
    width, length = problem.sizes.width, problem.length
    message = length * width * 2.0  # of a sequence in bfloat16, on each chip
    profile = pipeline.Profile.chain(
        [
            pipeline.Layer(name, "", c.forward, c.backward, (message,), c.weights)
            for name, c in by_name.items()
        ]
    )
    found, cuts = [], {}
    for name, schedule in schedules(problem).items():
        rates = bandwidths(hardware, schedule.stages)
        if schedule.stages == STAGES:
            plan = pipeline.partition(
                profile, STAGES, min(rates), replicate=False, transfers=False
            )
            cut = [stage.layers for stage in plan.stages]
        else:  # a plan has one stage on each worker
            parts = np.array_split(order, schedule.stages)
            cut = [tuple(map(str, part)) for part in parts]
        stages = [[by_name[layer] for layer in part] for part in cut]
        own = costs_of_stages(stages, message, rates)
        found.append(simulated(name, schedule, stages, hardware, own))
        cuts[name] = stages, own
    for name, families in SEARCHED.items() if search else ():
        stages, own = cuts[families[0]]
        # The stages of a place run in turn, and share what programs need in addition.
        scratch = max(layer.scratch for stage in stages for layer in stage)
        made = pipeline.synthesize(
            replace(own, weight_bytes=list(map(kept_bytes, stages))),
            workers=STAGES,
            micro_batches=problem.micro_batches,
            chunks=len(stages) // STAGES,
            memory=hardware.chip.memory - scratch,
            seconds=SECONDS,
        )
        found.append(simulated(name, made.schedule, stages, hardware, own))
    return found


def kept_bytes(stage: Sequence[Cost]) -> float:
    """Bytes on a chip besides what micro-batches keep and what programs need."""
    return sum(layer.weights + layer.state + layer.grads for layer in stage)


def costs_of_stages(
    stages: Sequence[Sequence[Cost]], message: float, rates: Sequence[float]
) -> pipeline.Costs:
    """Costs of stages as sums of their layers'."""

    def total(field: str) -> list[float]:
        return [sum(getattr(layer, field) for layer in stage) for stage in stages]

    return pipeline.Costs(
        forward=total("forward"),
        backward=total("backward"),
        backward_inputs=total("inputs"),
        backward_params=total("params"),
        message_bytes=message,
        bandwidth=rates,
        activation_bytes=total("kept"),
        pending_bytes=total("pending"),
    )


def bandwidths(hardware: targets.Hardware, stages: int) -> list[float]:
    """Bytes per second of a chip from each stage to the next.

    The places of a slice are neighbours, connected by one of a chip's links. If a
    switch joins the chips of a host, messages to another host use the network.
    """
    chip = hardware.chip
    link = chip.link_bandwidth / chip.links
    if not chip.network_bandwidth:
        return [link] * (stages - 1)
    size = hardware.chips // hardware.hosts
    hosts = [(j % STAGES) * DATA * MODEL // size for j in range(stages)]
    pairs = itertools.pairwise(hosts)
    return [link if a == b else chip.network_bandwidth for a, b in pairs]


def simulated(
    name: str,
    schedule: pipeline.Schedule,
    stages: Sequence[Sequence[Cost]],
    hardware: targets.Hardware,
    costs: pipeline.Costs,
) -> Planned:
    """Simulates a step of the schedule; computes the memory of its fullest chip."""
    timeline = pipeline.simulate(schedule, costs)
    assert timeline.activation_bytes is not None
    memory = []
    for worker, activations in enumerate(timeline.activation_bytes):
        own = [stages[j] for j in range(len(stages)) if j % STAGES == worker]
        layers = [layer for stage in own for layer in stage]
        memory.append(
            {
                "parameters": sum(layer.weights for layer in layers),
                "optimizer": sum(layer.state for layer in layers),
                "gradients": sum(layer.grads for layer in layers),
                "activations": activations,
                "scratch": max(layer.scratch for layer in layers),
            }
        )
    fullest = max(memory, key=lambda kinds: sum(kinds.values()))
    work = np.add(costs.forward, costs.backward) * schedule.micro_batches
    busy = max(sum(work[worker::STAGES]) for worker in range(STAGES))
    counts = [len(stage) for stage in stages]
    capacity = hardware.chip.memory
    return Planned(
        hardware.name, name, counts, fullest, capacity, timeline, float(busy)
    )


# --- what came out ---


def claims(found: Sequence[Planned], missing: Sequence[str]) -> Iterator[Claim]:
    """Claims about every schedule."""
    full = max(each.needed / each.capacity for each in found)
    text = "under every schedule the model fits the chips' memory, as estimated"
    yield Claim(text, full <= 1, f"{full:.1%} of it at most", leads=True)
    over = min(each.timeline.makespan / each.busy for each in found)
    text = "no simulated step is shorter than the work of its busiest chip"
    yield Claim(text, over >= 0.999, f"{over:.3f} times it at least")
    held = {(each.slice, each.schedule): each.memory["activations"] for each in found}
    ratio = max(
        held[name, "1F1B"] / held[name, "GPipe"] for name in {x.slice for x in found}
    )
    text = "1F1B keeps fewer activations than GPipe"
    yield Claim(text, ratio < 1, f"{ratio:.2f} of its bytes at most")
    steps = {(each.slice, each.schedule): each.timeline.makespan for each in found}
    longest = max(
        (
            step / min(steps[name, family] for family in SEARCHED[schedule])
            for (name, schedule), step in steps.items()
            if schedule in SEARCHED
        ),
        default=None,
    )
    if longest is not None:
        text = "no schedule that is found is slower than a family of the same stages"
        yield Claim(text, longest <= 1, f"{longest:.3f} of the best one's step at most")
    if missing:
        text = "the same where what it needs is installed"
        yield Claim(text, None, "", why_not="; ".join(missing))


def rows(found: Sequence[Planned]) -> list[list[str]]:
    """A table with a row for each schedule of each slice."""
    table = [
        ["slice", "schedule", "layers", "step (estimate)", "bubble", *found[0].memory,
         "of"]
    ]  # fmt: skip
    table += [
        [
            each.slice,
            each.schedule,
            "-".join(map(str, each.layers)),
            f"{each.timeline.makespan:.3g} s",
            f"{each.timeline.bubble:.0%}",
            *(f"{size / GIB:.3g}" for size in each.memory.values()),
            f"{each.capacity / GIB:.3g} GiB",
        ]
        for each in found
    ]
    return table


def layer_rows(costs: Mapping[str, Mapping[str, Cost]]) -> list[list[str]]:
    """A table with a row for each kind of layer on each slice."""
    table = [
        ["slice", "layer", "forward", "backward", "weights", "kept", "scratch",
         "collectives, forward and backward"]
    ]  # fmt: skip
    for name, own in costs.items():
        for kind, cost in own.items():
            groups = [
                f"{count} {what} of {size / 2**20:.3g} MiB"
                for what, (count, size) in sorted(cost.collectives.items())
            ]
            table.append(
                [
                    name,
                    kind,
                    f"{cost.forward * 1e3:.3g} ms",
                    f"{cost.backward * 1e3:.3g} ms",
                    f"{cost.weights / GIB:.3g} GiB",
                    f"{cost.kept / 2**20:.3g} MiB",
                    f"{cost.scratch / GIB:.3g} GiB",
                    ", ".join(groups) or "none",
                ]
            )
    return table


def recorded(each: Planned) -> dict[str, Any]:
    """All numbers of a plan, as JSON values."""
    return {
        "slice": each.slice,
        "schedule": each.schedule,
        "layers": each.layers,
        "bytes": each.memory,
        "step_estimate": each.timeline.makespan,
        "bubble": each.timeline.bubble,
    }


def plot(found: Sequence[Planned]) -> Figure:
    """Steps and memory, in a row for each slice."""
    slices = list(dict.fromkeys(each.slice for each in found))
    figure, panels = plt.subplots(
        len(slices),
        2,
        figsize=(9, 2.6 * len(slices) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), name in zip(panels, slices, strict=True):
        plans = [each for each in found if each.slice == name]
        places, names = np.arange(len(plans)), [each.schedule for each in plans]
        busy = [each.busy for each in plans]
        steps = [each.timeline.makespan for each in plans]
        left.barh(places, busy, label="busiest chip")
        bars = left.barh(
            places, np.subtract(steps, busy), left=busy, label="fill, drain, messages"
        )
        left.bar_label(bars, [f"{x:.3g} s" for x in steps], padding=3)
        left.margins(x=0.15)
        left.set(title=name, xlabel="estimated seconds of a step")
        below = np.zeros(len(plans))
        for number, kind in enumerate(plans[0].memory):
            sizes = np.array([each.memory[kind] for each in plans]) / GIB
            # Other colours than those of the times on the left.
            colour = f"C{number + 2}"
            right.barh(places, sizes, left=below, label=kind, color=colour)
            below += sizes
        right.axvline(plans[0].capacity / GIB, color="black", linewidth=1)
        right.set(title=name, xlabel="GiB of the fullest chip")
        for axes in (left, right):
            axes.set_yticks(places, names)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
    (bars, times), (kinds, sizes) = (
        axes.get_legend_handles_labels() for axes in panels[0]
    )
    figure.legend(
        [*bars, *kinds],
        [*times, *sizes],
        frameon=False,
        ncols=4,
        loc="outside lower center",
    )
    return figure

"""Does a Llama in stages that are divided over data and model axes train as on one
device, under any schedule, by one process or two, and go on elsewhere after it was
saved?

The model and the code that divides it are `examples/language_model.py`: rotary
positions, grouped-query attention, SwiGLU, one table for embedding and head. It learns
the bytes of Python's own sources, in padded sequences that are weighted by their
tokens. Gradients are judged against `jax.value_and_grad` of the whole batch on one
device at several steps of the run, and so is a mistake: the gradient of the table from
only one of its two uses.

Rounding makes two runs drift apart, as one device drifts from itself when it sums the
sequences in another order, which is measured too.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.progress import Progress

from examples import language_model as llama
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline, rpc, verify

SHAPES = ((2, 2, 2), (2, 1, 2), (2, 1, 1), (1, 1, 1))
"""Sizes of stages, data and model axes; the largest that fits the devices is used."""
SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(2, llama.MICRO_BATCHES),
    "ZB-H1": pipeline.zero_bubble(2, llama.MICRO_BATCHES),
}
OPTIMIZER = optim.adam(lr=llama.LR)
# Drift grows from random rounding: two runs of one kind differ by a small factor.
SAME_DRIFT = 10


@dataclass(frozen=True, slots=True)
class Run:
    """A training run.

    Attributes:
      name: The name in tables and pictures.
      losses: The loss of each step.
      first: The number of the first step.
      reports: The judge's reports, by step.
    """

    name: str
    losses: list[float]
    first: int = 0
    reports: Mapping[int, verify.Report] = field(default_factory=dict)

    def followed_by(self, other: "Run") -> "Run":
        """Joins two halves of a run."""
        reports = {**self.reports, **other.reports}
        return Run(self.name, self.losses + other.losses, self.first, reports)

    def drift(self, other: "Run") -> np.ndarray:
        """The relative distance of the losses from those of a run of all steps."""
        theirs = np.asarray(other.losses)[self.first :][: len(self.losses)]
        return np.abs(np.asarray(self.losses) - theirs) / theirs


def run(settings: Settings, progress: Progress) -> Result:
    """Trains on one device, under each schedule, and after a restart elsewhere."""
    steps, every, blocks = (4, 0, 1) if settings.quick else (120, 40, 2)
    model = model_of(llama.Sizes(blocks=blocks), settings.seed)
    batches = llama.batches(steps, settings.seed)
    rng = np.random.default_rng(settings.seed)
    orders = [rng.permutation(llama.SEQUENCES) for _ in batches]
    step = plain_step(model)
    alone = [
        train_alone(model, step, batches, "one device"),
        train_alone(
            model, step, list(map(reordered, batches, orders)), "another order"
        ),
    ]
    devices = jax.devices()[: settings.devices]
    shape = next(s for s in SHAPES if math.prod(s) <= len(devices))
    places = (llama.meshes(devices, shape) * 2)[:2]
    fewer = (llama.meshes(devices, (shape[0], 1, 1)) * 2)[:2]
    pipes = {name: model.pipe(each, places) for name, each in SCHEDULES.items()}
    elsewhere = model.pipe(SCHEDULES["1F1B"], fewer)
    halves = (batches[: steps // 2], batches[steps // 2 :])
    runs = []
    for name, pipe in progress.track(pipes.items(), description="training"):
        start, first = train(model, pipe, model.start(pipe), halves[0], name, every)
        if name == "1F1B":
            again, same = carried_over(pipe, start, elsewhere, model.start(elsewhere))
            named = "1F1B, restored on one device a stage"
            _, resumed = train(model, elsewhere, again, halves[1], named, every)
        _, second = train(model, pipe, start, halves[1], name, every)
        runs.append(first.followed_by(second))
    mistaken = None if settings.quick else one_end(model, places, batches[0])
    across = " x ".join(map(str, shape))
    apart = None
    if devices[0].platform == "cpu":
        apart = in_two_processes(blocks, shape[1:], steps // 2, settings.seed)
    found = [*alone, *runs, resumed, *([] if apart is None else [apart])]
    return Result(
        claims=list(claims(alone, runs, resumed, apart, same, mistaken, across)),
        pictures=[
            Picture(
                "loss",
                "The loss of every step. Below: how far each run is from one device's, "
                "relative to it.",
                plot(found),
            )
        ],
        tables={"Runs": rows(found)},
        data={
            "stages, data, model": shape,
            "losses": {each.name: each.losses for each in found},
            "error_over_bound": {
                each.name: {str(t): r.worst for t, r in each.reports.items()}
                for each in [*runs, resumed]
            },
        },
    )


def reordered(
    batch: Mapping[str, np.ndarray], order: np.ndarray
) -> dict[str, np.ndarray]:
    """The same sequences in another order, in which they are summed."""
    return {name: x[order] for name, x in batch.items()}


# --- the model in one piece ---


@dataclass(frozen=True, slots=True)
class Model:
    """The stages, and the same model as one function of parameters by path.

    Attributes:
      made: The stages.
      losses: Computes one loss for each sequence, from parameters with a single table.
      copy: The path of the head's copy of the table, which the function does not take.
      judge: Judges gradients of the function.
    """

    made: pipeline.FromModules
    losses: Callable[[Any, Any], jax.Array]
    copy: str
    judge: Callable[..., verify.Report]

    def pipe(
        self,
        schedule: pipeline.Schedule,
        places: Any,
        tied: bool = True,
    ) -> pipeline.Pipeline:
        """A pipeline; with `tied=False` its mistake is that the table is not shared."""
        stages = self.made.stages
        if not tied:
            stages = [replace(stage, tied={}) for stage in stages]
        return pipeline.Pipeline(
            stages, llama.losses_of, schedule, places, optimizer=OPTIMIZER
        )

    def start(self, pipe: pipeline.Pipeline) -> pipeline.PipelineState:
        """The initial state of a pipeline."""
        return pipe.init(self.placed(pipe), self.made.states, jax.random.key(0))

    def placed(self, pipe: pipeline.Pipeline) -> list[Any]:
        """The initial parameters at the places of a pipeline."""
        given = self.made.params
        return pipe.place(given, jax.tree_util.tree_map_with_path(llama.spec, given))

    def own(self, stages: Sequence[Any]) -> dict[str, np.ndarray]:
        """Parameters or gradients of the stages by path, without the copy."""
        found = {name: np.asarray(leaf) for name, leaf in by_path(stages).items()}
        del found[self.copy]
        return found

    def judged(
        self,
        pipe: pipeline.Pipeline,
        params: Sequence[Any],
        batch: Mapping[str, np.ndarray],
        name: str,
    ) -> verify.Report:
        """The verdict on a pipeline's gradient at these parameters."""
        weights = batch["mask"].sum(1)

        def gradient(_: Any, batch: Any) -> tuple[jax.Array, Any]:
            loss, grads = pipe.value_and_grad(params, batch, weights)
            return loss, self.own(grads)

        own, programs = self.own(params), {name: gradient}
        return self.judge(
            own, batch, programs, weights=weights, finite_differences=False
        )


def model_of(sizes: llama.Sizes, seed: int) -> Model:
    """The model with random weights."""
    device = jax.devices()[0]
    _, made = llama.pipelined(
        llama.layers(sizes, seed), SCHEDULES["1F1B"], [device, device]
    )
    names, shape = list(by_path(made.params)), jax.tree.structure(made.params)
    table, copy = (name for name in names if name.endswith("embedding"))

    def losses(params: Mapping[str, jax.Array], batch: Any) -> jax.Array:
        leaves = [params[table if name == copy else name] for name in names]
        value = batch["tokens"]
        for stage, own in zip(
            made.stages, jax.tree.unflatten(shape, leaves), strict=True
        ):
            value = stage.fn(own, value)
        return llama.losses_of(value, batch)

    return Model(made, losses, copy, verify.gradients_judge(losses))


def by_path(stages: Sequence[Any]) -> dict[str, Any]:
    """The arrays of all stages by path."""
    leaves = jax.tree_util.tree_leaves_with_path(stages)
    return {
        # A parameter of NNX is a node that holds its array.
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): (
            leaf
        )
        for path, leaf in leaves
    }


# --- runs ---


def plain_step(model: Model) -> Callable[..., Any]:
    """A training step of the function on one device."""

    def loss(params: Any, batch: Any) -> jax.Array:
        weights = batch["mask"].sum(1)
        return (model.losses(params, batch) * weights).sum() / weights.sum()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        found, grads = jax.value_and_grad(loss)(params, batch)
        return *OPTIMIZER.step(params, grads, state), found

    return step


def train_alone(
    model: Model,
    step: Callable[..., Any],
    batches: Sequence[Mapping[str, np.ndarray]],
    name: str,
) -> Run:
    """Trains on one device."""
    params: Any = jax.tree.map(jnp.asarray, model.own(model.made.params))
    state = OPTIMIZER.init(params)
    losses = []
    for batch in batches:
        params, state, found = step(params, state, batch)
        losses.append(float(found))
    return Run(name, losses)


def train(
    model: Model,
    pipe: pipeline.Pipeline,
    state: pipeline.PipelineState,
    batches: Sequence[Mapping[str, np.ndarray]],
    name: str,
    every: int,
) -> tuple[pipeline.PipelineState, Run]:
    """Trains a pipeline from a state; judged every `every` steps, never if 0."""
    losses, reports, first = [], {}, state.step
    for batch in batches:
        if every and state.step % every == 0:
            reports[state.step] = model.judged(pipe, state.params, batch, name)
        state, metrics = pipe.train_step(state, batch, batch["mask"].sum(1))
        losses.append(float(metrics.loss))
    return state, Run(name, losses, first, reports)


def in_two_processes(blocks: int, shape: Sequence[int], steps: int, seed: int) -> Run:
    """1F1B by two workers, each on a mesh of its own process's devices."""
    losses, _ = rpc.spawn(train_as_worker, (blocks, shape, steps, seed), nprocs=2)
    return Run("1F1B by two processes", losses)


def train_as_worker(
    rank: int, blocks: int, shape: Sequence[int], steps: int, seed: int
) -> list[float]:
    """The program of each worker; returns its losses."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(shape))
    own = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    workers = ["worker0", "worker1"]
    rpc.init_rpc(workers[rank])
    model = model_of(llama.Sizes(blocks=blocks), seed)
    places = pipeline.Workers(workers, mesh=own)
    pipe = model.pipe(SCHEDULES["1F1B"], places)
    batches = llama.batches(steps, seed)
    _, found = train(model, pipe, model.start(pipe), batches, workers[rank], 0)
    rpc.shutdown()
    return found.losses


def carried_over(
    pipe: pipeline.Pipeline,
    state: pipeline.PipelineState,
    other: pipeline.Pipeline,
    like: pipeline.PipelineState,
) -> tuple[pipeline.PipelineState, bool]:
    """Saves a state and restores it at other places; whether all bits are equal."""
    with tempfile.TemporaryDirectory() as folder:
        with pipeline.PipelineCheckpoints(folder, pipe) as saved:
            saved.save(state)
        with pipeline.PipelineCheckpoints(folder, other) as saved:
            again = saved.restore(like)
    pairs = zip(
        jax.tree.leaves((state.params, state.opt_states)),
        jax.tree.leaves((again.params, again.opt_states)),
        strict=True,
    )
    return again, all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
    )


def one_end(
    model: Model, places: Sequence[Mesh], batch: Mapping[str, np.ndarray]
) -> verify.Report:
    """The verdict on stages that do not share the table."""
    pipe = model.pipe(SCHEDULES["1F1B"], places, tied=False)
    return model.judged(pipe, model.placed(pipe), batch, "one end")


# --- what came out ---

UNJUDGED = "the judge's programs take a minute to compile: the full form has them"


def claims(
    alone: Sequence[Run],
    runs: Sequence[Run],
    resumed: Run,
    apart: Run | None,
    same_bits: bool,
    mistaken: verify.Report | None,
    across: str,
) -> Iterator[Claim]:
    """Claims on gradients, losses, two processes, the restart and the mistake."""
    one, other = alone
    # Losses that are equal in another order are so by chance: rounding is the floor.
    yardstick = max(float(other.drift(one).max()), float(jnp.finfo(jnp.float32).eps))
    for each in [*runs, resumed]:
        reports = each.reports.values()
        text = f"{each.name}: gradients are those of the whole batch on one device"
        if each is not resumed:
            text = f"{each.name} over {across} devices: " + text.partition(": ")[2]
        if reports:
            worst = max(report.worst for report in reports)
            holds = all(report.ok for report in reports)
            shown = f"error at most {worst:.2g} of the bound, at {len(reports)} steps"
            yield Claim(text, holds, shown, leads=True)
        else:
            yield Claim(text, None, "", why_not=UNJUDGED)
        text = f"{each.name}: losses drift from one device's as its own do in another "
        text += "order"
        drift = float(each.drift(one).max())
        shown = f"relative to them {drift:.1e}, in another order {yardstick:.1e}"
        yield Claim(text, drift <= SAME_DRIFT * yardstick, shown, leads=not reports)
    text = (
        "1F1B by two processes, each with a mesh: losses are bit for bit those of one"
    )
    if apart is None:
        yield Claim(text, None, "", why_not="both processes would take the accelerator")
    else:
        same = apart.losses == runs[0].losses[: len(apart.losses)]
        yield Claim(text, same, f"{len(apart.losses)} steps")
    text = "what was saved comes back bit for bit on other devices"
    yield Claim(text, same_bits, "parameters and optimizer")
    text = "the model learns"
    first, last = one.losses[0], one.losses[-1]
    yield Claim(text, last < first, f"loss {first:.2f} to {last:.2f} per byte")
    text = "the table's gradient from one of its ends alone is caught, and it alone"
    if mistaken is None:
        yield Claim(text, None, "", why_not=UNJUDGED)
    else:
        failed = [leaf.path for leaf in mistaken.failures]
        named = len(failed) == 1 and failed[0].endswith("embedding")
        yield Claim(text, named, ", ".join(failed) or "nothing")


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A table with a row for each run."""
    one = runs[0]
    table = [["run", "steps", "last loss", "drift", "error/bound"]]
    for each in runs:
        worst = max((report.worst for report in each.reports.values()), default=None)
        table.append(
            [
                each.name,
                f"{each.first} to {each.first + len(each.losses) - 1}",
                f"{each.losses[-1]:.4f}",
                f"{each.drift(one).max():.1e}",
                "" if worst is None else f"{worst:.2g}",
            ]
        )
    return table


def plot(runs: Sequence[Run]) -> Figure:
    """Losses above, drifts below."""
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 6))
    for each in runs:
        steps = np.arange(each.first, each.first + len(each.losses))
        (line,) = above.plot(steps, each.losses, label=each.name, linewidth=1)
        if each is not runs[0]:
            # A logarithmic axis has no 0.
            drift = np.maximum(each.drift(runs[0]), 1e-9)
            below.semilogy(steps, drift, color=line.get_color(), linewidth=1)
    above.set_ylabel("loss per byte")
    below.set_ylabel("relative drift")
    below.set_xlabel("step")
    above.legend()
    return figure

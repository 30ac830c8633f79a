"""What asynchronous updates do to training: PipeDream with weight stashing, without,
with vertical sync and 2BW, beside model parallelism, GPipe and 1F1B, on digits.

A convolutional network in four stages learns the same batches in the same order by each
method, one update per batch. Stages of one process share its cores, so that their clock
shows nothing: seconds are simulated, from passes that are timed here one by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import data
from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline, verify

STAGES, PARTS, BATCH = 4, 4, 32
STEPS = 1437 // BATCH  # of an epoch
RATE = 0.1
TOLERANCE = 0.02
"""By how much stashing's mean test accuracy over the seeds may be below 1F1B's."""
LEARNT = 0.85  # by 1F1B, or the comparison says nothing
SYNCHRONOUS: dict[str, pipeline.Schedule] = {
    "model parallel": pipeline.gpipe(STAGES, 1),
    "GPipe": pipeline.gpipe(STAGES, PARTS),
    "1F1B": pipeline.one_f_one_b(STAGES, PARTS),
}
POLICIES: dict[str, Any] = {
    "PipeDream": "stashing",
    "no stashing": "none",
    "vertical sync": "vertical_sync",
    "2BW": "2bw",
}


class Model(NamedTuple):
    """The network's stages, and functions of all of them together.

    Attributes:
      made: Stages, and the shapes of their parameters.
      scores: `(params, images)`, compiled.
    """

    made: Any
    scores: Callable[[Any, Any], jax.Array]

    def losses(self, params: Any, batch: Any) -> jax.Array:
        """One for each example."""
        return loss_of(self.scores(params, batch["x"]), batch)


class Curve(NamedTuple):
    """One training run.

    Attributes:
      accuracy: On the test images, before the first epoch and after each.
      passes: Of the last epoch, by asynchronous methods.
    """

    accuracy: list[float]
    passes: Sequence[Any] = ()


def run(settings: Settings, progress: Progress) -> Result:
    """Trains by all methods, judges updates, simulates clocks."""
    epochs, seeds = (3, 2) if settings.quick else (12, 5)
    model = network(partial(convolutional, 8 if settings.quick else 16))
    optimizer = optim.sgd(lr=RATE)
    wanted = [
        (name, seed) for name in (*SYNCHRONOUS, *POLICIES) for seed in range(seeds)
    ]
    if settings.quick:
        compared = ("1F1B", "PipeDream")
        wanted = [(name, seed) for name, seed in wanted if not seed or name in compared]
    runs: dict[str, list[Curve]] = {}
    for name, seed in progress.track(wanted, description="training"):
        found = trained(name, model, optimizer, settings.seed + seed, epochs)
        runs.setdefault(name, []).append(found)
    sizes = list(pairwise((64, 12, 12, 12, 10)))
    small = network(lambda rngs: [Dense(*each, rngs) for each in sizes])
    reports = {
        name: judged(policy, small, settings.seed)
        for name, policy in (("PipeDream", "stashing"), ("no stashing", "none"))
    }
    seconds = clocks(model)
    stash, sync = (mean_of(runs[name]) for name in ("PipeDream", "1F1B"))
    return Result(
        proved=(
            f"stashing ends at {stash[-1]:.1%}, 1F1B at {sync[-1]:.1%}; without it "
            f"updates are no gradients; an epoch takes {seconds['PipeDream']:.2f} s "
            f"instead of {seconds['1F1B']:.2f} s (simulated)."
        ),
        claims=list(claims(runs, reports, seconds)),
        pictures=[
            Picture("accuracy", "Test accuracy, mean over seeds.", plot(runs, seconds)),
            Picture(
                "versions",
                "How stale the weights are that a pass uses, and how many are kept.",
                plot_versions(runs["PipeDream"][0].passes),
            ),
        ],
        tables={"Methods": rows(runs, seconds)},
        data={
            "accuracy": {n: [c.accuracy for c in found] for n, found in runs.items()},
            "seconds": seconds,
        },
        notes=["Seconds are simulated from passes timed here, with free messages."],
    )


# --- the network ---


class Convolution(nnx.Module):
    """3 x 3 and a relu."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        """Of so many channels."""
        self.conv = nnx.Conv(inputs, outputs, (3, 3), strides=stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(examples, height, width, inputs)`."""
        return nnx.relu(self.conv(x))


class Dense(nnx.Module):
    """A matrix over all that there is of an image."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        """Of so many numbers."""
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(examples, outputs)`."""
        return self.linear(x.reshape(len(x), -1))


def convolutional(width: int, rngs: nnx.Rngs) -> list[nnx.Module]:
    """Three convolutions and a readout, a stage each."""
    return [
        Convolution(1, width, 1, rngs),
        Convolution(width, 2 * width, 2, rngs),
        Convolution(2 * width, 2 * width, 1, rngs),
        Dense(4 * 4 * 2 * width, 10, rngs),
    ]


def network(modules: Callable[[nnx.Rngs], list[nnx.Module]]) -> Model:
    """Stages of modules, one each."""
    shapes = nnx.eval_shape(lambda: nnx.List(modules(nnx.Rngs(0))))
    made = pipeline.stages_from_nnx(list(shapes))

    def scores(params: Any, x: Any) -> Any:
        for stage, own in zip(made.stages, params, strict=True):
            x = stage.fn(own, x)
        return x

    return Model(made, jax.jit(scores))


def initial(model: Model, seed: int, dtype: Any = jnp.float32) -> list[Any]:
    """Random parameters of each stage."""
    rng = np.random.default_rng((seed, 3))

    def drawn(leaf: Any) -> Any:
        if len(leaf.shape) == 1:
            return jnp.zeros(leaf.shape, dtype)
        scale = np.sqrt(2 / np.prod(leaf.shape[:-1]))
        return jnp.asarray(scale * rng.normal(size=leaf.shape), dtype)

    return [jax.tree.map(drawn, tree) for tree in model.made.params]


def loss_of(scores: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """One for each example."""
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def named(examples: Any) -> dict[str, Any]:
    """Images and labels by name."""
    return {"x": examples[0], "labels": examples[1]}


# --- training ---


def trained(
    name: str, model: Model, optimizer: optim.Optimizer, seed: int, epochs: int
) -> Curve:
    """One method with one seed: the same batches in the same order for all methods."""
    digits = data(seed, epochs * STEPS, BATCH)
    batches = [named(batch) for batch in digits.batches]
    params = initial(model, seed)
    curve = [accuracy(model, params, digits.test)]
    pipe = pipeline_for(name, model, optimizer)
    state = pipe.init(params)
    for epoch in range(epochs):
        own = batches[epoch * STEPS : (epoch + 1) * STEPS]
        if name in SYNCHRONOUS:
            for batch in own:
                state, _ = pipe.train_step(state, batch)
        else:
            state, _ = pipe.train_epoch(state, cut(own) if name == "2BW" else own)
        curve.append(accuracy(model, state.params, digits.test))
    return Curve(curve, () if name in SYNCHRONOUS else pipe.passes)


def pipeline_for(name: str, model: Model, optimizer: optim.Optimizer) -> Any:
    """The pipeline of a method; all its stages on one device."""
    stages = model.made.stages
    if name in SYNCHRONOUS:
        return pipeline.Pipeline(
            stages, loss_of, SYNCHRONOUS[name], optimizer=optimizer
        )
    return pipeline.PipeDream(
        stages, loss_of, optimizer=optimizer, policy=POLICIES[name]
    )


def cut(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches, of which 2BW makes one update for each batch."""
    return [
        {key: np.split(value, STAGES)[part] for key, value in batch.items()}
        for batch in batches
        for part in range(STAGES)
    ]


def accuracy(model: Model, params: Any, examples: Any) -> float:
    """Share of the examples that are recognised."""
    return float(
        (np.argmax(model.scores(params, examples[0]), 1) == examples[1]).mean()
    )


# --- the judge ---


def judged(policy: Any, model: Model, seed: int) -> verify.Report:
    """Whether a policy's update is a gradient, at the weights of its forward passes.

    Update t is the difference of runs of t + 1 and of t batches. Its forward pass met
    version t - (n - 1 - j) at stage j. In float64, so that differences are exact.
    """
    with jax.enable_x64(True):
        batches = [
            {"x": x.astype(np.float64), "labels": y}
            for x, y in data(seed, STAGES + 1, BATCH).batches
        ]
        pipe = pipeline.PipeDream(
            model.made.stages, loss_of, optimizer=optim.sgd(lr=1.0), policy=policy
        )
        versions = [initial(model, seed, jnp.float64)]
        for count in range(1, len(batches) + 1):
            state = pipe.init(versions[0])
            state, metrics = pipe.train_epoch(state, batches[:count])
            versions.append(state.params)
        last = len(batches) - 1
        met = [versions[last - (STAGES - 1 - j)][j] for j in range(STAGES)]
        update = jax.tree.map(
            lambda old, new: old - new, versions[last], versions[last + 1]
        )
        found = jnp.asarray(metrics.losses[-1], jnp.float64), update
        candidates = {policy: lambda *_: found}
        return verify.gradients(model.losses, met, batches[last], candidates)


# --- clocks ---


def clocks(model: Model) -> dict[str, float]:
    """Simulated seconds of an epoch."""
    whole, part = (costs_of(model, rows) for rows in (BATCH, BATCH // PARTS))
    found = {}
    for name, schedule in SYNCHRONOUS.items():
        costs = whole if schedule.micro_batches == 1 else part
        found[name] = STEPS * pipeline.simulate(schedule, costs).makespan
    asynchronous = pipeline.simulate(pipeline.pipedream(STAGES, STEPS), whole).makespan
    found |= dict.fromkeys(("PipeDream", "no stashing", "vertical sync"), asynchronous)
    buffered = pipeline.pipedream_2bw(STAGES, STEPS * STAGES)
    found["2BW"] = pipeline.simulate(buffered, part).makespan
    return found


def costs_of(model: Model, rows: int) -> pipeline.Costs:
    """What each stage's passes take for so many images."""
    params = initial(model, 0)
    modules = [
        pipeline.Module(f"stage{j}", stage.fn, own)
        for j, (stage, own) in enumerate(zip(model.made.stages, params, strict=True))
    ]
    images = jnp.asarray(data(0, 1, rows).batches[0][0])
    profile = pipeline.profile(modules, {"x": images}, repeats=20)
    layers = [profile[module.name] for module in modules]
    return pipeline.Costs(
        forward=[layer.forward for layer in layers],
        backward=[layer.backward for layer in layers],
    )


# --- what came out ---


def mean_of(found: Sequence[Curve]) -> list[float]:
    """Over the seeds, before the first epoch and after each."""
    return np.mean([curve.accuracy for curve in found], axis=0).tolist()


def claims(
    runs: Mapping[str, Sequence[Curve]],
    reports: Mapping[str, verify.Report],
    seconds: Mapping[str, float],
) -> Iterator[Claim]:
    """About accuracy, gradients, versions and clocks."""
    sync, stash = (mean_of(runs[name])[-1] for name in ("1F1B", "PipeDream"))
    seeds = f"over {len(runs['1F1B'])} seeds"
    yield Claim("1F1B learns the digits", sync > LEARNT, f"{sync:.1%} {seeds}")
    text = f"stashing is at most {TOLERANCE:.0%} below it"
    yield Claim(text, stash > sync - TOLERANCE, f"{stash:.1%} {seeds}")
    good, bad = reports["PipeDream"], reports["no stashing"]
    text = "with stashing, an update is the gradient at the weights that it met"
    yield Claim(text, good.ok, f"error/bound {good.worst:.2f}")
    text = "without, the judge sees that it is none"
    yield Claim(text, not bad.ok, f"error/bound {bad.worst:.1e}")
    yield from version_claims(runs["PipeDream"][0].passes)
    fast, slow = seconds["PipeDream"], seconds["1F1B"]
    text = (
        "simulated, PipeDream's epoch takes at most as long as 1F1B's with its flushes"
    )
    yield Claim(text, fast <= slow, f"{fast:.3f} s and {slow:.3f} s")


def version_claims(passes: Sequence[Any]) -> Iterator[Claim]:
    """From the record of the run, stage by stage."""
    stale = {
        j: {p.newest - p.version for p in passes if p.stage == j and p.kind == "B"}
        for j in range(STAGES)
    }
    most = [max(found) for found in stale.values()]
    text = "stage j of n uses weights that are at most n - 1 - j updates old"
    yield Claim(text, most == [STAGES - 1 - j for j in range(STAGES)], f"{most}")
    held = [max(p.held for p in passes if p.stage == j) for j in range(STAGES)]
    text = "and keeps n - j versions of them"
    yield Claim(text, held == [STAGES - j for j in range(STAGES)], f"{held}")


def rows(
    runs: Mapping[str, Sequence[Curve]], seconds: Mapping[str, float]
) -> list[list[str]]:
    """One line per method."""
    table = [["method", "seeds", "accuracy", "simulated ms per epoch"]]
    for name, found in runs.items():
        end = f"{mean_of(found)[-1]:.1%}"
        table.append([name, str(len(found)), end, f"{1e3 * seconds[name]:.1f}"])
    return table


def plot(runs: Mapping[str, Sequence[Curve]], seconds: Mapping[str, float]) -> Figure:
    """Accuracy per epoch and per simulated second."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, found in runs.items():
        style = "o-" if name in SYNCHRONOUS else "s--"
        curve = mean_of(found)
        epochs = np.arange(len(curve))
        left.plot(epochs, curve, style, label=name, alpha=0.8)
        right.plot(epochs * seconds[name], curve, style, label=name, alpha=0.8)
    left.set_xlabel("epoch")
    left.set_ylabel("test accuracy")
    right.set_xlabel("simulated seconds")
    right.legend()
    figure.tight_layout()
    return figure


def plot_versions(passes: Sequence[Any]) -> Figure:
    """Staleness of each backward pass and versions kept after it, per stage."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    for j in range(STAGES):
        own = [p for p in passes if p.stage == j and p.kind == "B"][:12]
        batches = [p.micro_batch for p in own]
        stale = [p.newest - p.version for p in own]
        left.plot(batches, stale, "o-", label=f"stage {j}")
        right.plot(batches, [p.held for p in own], "o-", label=f"stage {j}")
    for axes, label in ((left, "updates old"), (right, "versions kept")):
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
    right.legend()
    figure.tight_layout()
    return figure

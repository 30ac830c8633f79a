"""Do two linear layers on two devices, model parallelism at its smallest, have the
gradient that they have on one?

A linear layer from 10 to 10 with a ReLU is on the first device, one from 10 to 5 on the
second. Activations are sent forward and cotangents back, and each layer is updated on
its device. The batch is 20, the loss the mean squared error, the learning rate of SGD
0.001.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import optim, pipeline, verify

EXAMPLES, INPUTS, HIDDEN, OUTPUTS = 20, 10, 10, 5
LEARNING_RATE = 0.001


class First(nnx.Module):
    """The layer on the first device."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(examples, 10)` to `(examples, 10)`."""
        return nnx.relu(self.linear(x))


class Second(nnx.Module):
    """The layer on the second device."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Maps `(examples, 10)` to `(examples, 5)`."""
        return self.linear(h)


@dataclass
class Run:
    """The measurements of a run; lists have an item per step."""

    ratios: list[float] = field(default_factory=list)
    identical: int = 0
    losses: list[float] = field(default_factory=list)
    refusal: str = ""


def squared_error(y: jax.Array, batch: Any) -> jax.Array:
    """The mean squared error over the outputs, for each example."""
    return ((y - batch["target"]) ** 2).mean(-1)


def run(settings: Settings, progress: Progress) -> Result:
    """Trains on two devices and on one, and compares every step."""
    steps = 20 if settings.quick else 200
    devices = jax.devices()[: min(2, settings.devices)]
    places = [devices[0], devices[-1]]
    measured = train(settings.seed, steps, places, progress)
    notes = []
    if len(devices) < 2:
        notes.append("One device here: both stages are on it, nothing had to move.")
    return Result(
        claims=claims(measured, steps, two=len(devices) == 2),
        pictures=[
            Picture(
                "loss",
                "The loss of every step.",
                plot(measured),
            )
        ],
        data=vars(measured),
        notes=notes,
    )


def train(seed: int, steps: int, places: list[jax.Device], progress: Progress) -> Run:
    """Takes the steps of both runs, side by side."""
    measured = Run()
    rngs = nnx.Rngs(seed)
    made = pipeline.stages_from_nnx([First(rngs), Second(rngs)])
    rng = np.random.default_rng(seed)
    batch = {
        "x": rng.normal(size=(EXAMPLES, INPUTS)).astype(np.float32),
        "target": rng.normal(size=(EXAMPLES, OUTPUTS)).astype(np.float32),
    }

    def parallel(where: list[jax.Device] | None) -> pipeline.Pipeline:
        return pipeline.Pipeline(
            made.stages,
            squared_error,
            pipeline.gpipe(2, 1),
            where,
            optimizer=optim.sgd(lr=LEARNING_RATE),
        )

    def whole(params: Any, batch: Any) -> jax.Array:
        h = made.stages[0].fn(params[0], batch["x"])
        return squared_error(made.stages[1].fn(params[1], h), batch)

    two, one = parallel(places), parallel(None)
    states = [two.init(made.params), one.init(made.params)]
    judged = verify.gradients_judge(whole)
    for _ in progress.track(range(steps), description="training"):
        params = jax.device_put(jax.device_get(states[0].params), places[0])
        found = two.value_and_grad(states[0].params, batch)
        report = judged(
            params, batch, {"two": lambda p, b, f=found: f}, finite_differences=False
        )
        measured.ratios.append(report.worst)
        (states[0], metrics), (states[1], _) = (
            pipe.train_step(state, batch)
            for pipe, state in zip((two, one), states, strict=True)
        )
        measured.losses.append(float(metrics.loss))
        measured.identical += identical(states[0].params, states[1].params)
    measured.refusal = labels_elsewhere(two, states[0].params, batch, places[0])
    return measured


def identical(first: Any, second: Any) -> bool:
    """Whether all leaves have the same bits."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def labels_elsewhere(
    pipe: pipeline.Pipeline, params: Any, batch: Any, device: jax.Device
) -> str:
    """The error for labels that are on the first device, as text."""
    wrong = {**batch, "target": jax.device_put(batch["target"], device)}
    try:
        pipe.value_and_grad(params, wrong)
    except ValueError as error:
        return str(error)
    return ""


# --- what is claimed, and shown ---


def claims(measured: Run, steps: int, *, two: bool) -> list[Claim]:
    """The claims of the experiment."""
    says = "must have 'target' on" in measured.refusal
    return [
        Claim(
            "every gradient is the whole batch's within the derived bound",
            max(measured.ratios) <= 1,
            f"{steps} judged, error/bound at most {max(measured.ratios):.3f}",
            leads=True,
        ),
        Claim(
            "after every step the parameters are those of one device, bit for bit",
            measured.identical == steps,
            f"{measured.identical} of {steps} steps",
        ),
        Claim(
            "the loss falls",
            measured.losses[-1] < measured.losses[0],
            f"{measured.losses[0]:.4f} to {measured.losses[-1]:.4f}",
        ),
        Claim(
            "labels that are not on the output's device are refused, with the remedy",
            says,
            measured.refusal,
        ).unless("" if two else "there is one device only"),
    ]


def plot(measured: Run) -> Figure:
    """The loss of every step."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(measured.losses)
    axes.set_xlabel("step")
    axes.set_ylabel("mean squared error")
    axes.set_title("Training loss of a model in two stages")
    return figure

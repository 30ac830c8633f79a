"""Does a net in three stages on three workers, made of remote references alone, train
as on one device?

Each stage is an object on its worker. A micro-batch passes through a chain of remote
calls: each returns a reference to the stage's output, which the next stage fetches from
its owner. Activations therefore travel from worker to worker and never through the
driver. The backward pass takes the same routes in reverse, and a DistributedOptimizer
steps every stage on its owner. The data are scikit-learn's digits.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import data
from experiments._result import Claim, Picture, Result, Settings
from jdist import autograd, optim, rpc, verify

WIDTHS = (64, 56, 40, 10)
STAGES = len(WIDTHS) - 1
BATCH, PARTS = 96, 4
STEPS, QUICK_STEPS = 200, 25
RATE = 3e-3
WORKERS = tuple(f"worker{i}" for i in range(STAGES))


class Trained(NamedTuple):
    """The results of a run, with stages in order.

    Attributes:
      losses: The loss of each step.
      first: Gradients of the first step.
      params: Parameters after the last step.
    """

    losses: list[float]
    first: list[Any]
    params: list[Any]


def run(settings: Settings, progress: Progress) -> Result:
    """Trains in three processes and on one worker; judges against `jax.grad`."""
    steps = QUICK_STEPS if settings.quick else STEPS
    found = rpc.spawn(work, (steps, settings.seed), nprocs=STAGES, timeout=900)[0]
    with rpc.local_cluster(WORKERS[:1], allow=("experiments",)):
        alone = train(WORKERS[:1] * STAGES, steps, settings.seed)
    digits = data(settings.seed, steps, BATCH)
    report = judged(found, digits.batches[0], settings.seed)
    accuracy = accuracy_of(found.params, digits.test)
    before = accuracy_of(initial(settings.seed), digits.test)
    return Result(
        claims=list(claims(found, alone, report, (before, accuracy))),
        pictures=[
            Picture(
                "loss",
                "Loss of each step: three workers (line) and one (dots).",
                plot(found, alone),
            )
        ],
        tables={"The first step's gradients": rows(report)},
        data={
            "losses": found.losses,
            "accuracy": accuracy,
            "error_over_bound": report.worst,
        },
    )


# --- the net ---


def initial(seed: int) -> list[Any]:
    """Random parameters of each stage."""
    rng = np.random.default_rng((seed, 2))
    return [
        {
            "w": (rng.normal(size=(n, m)) / np.sqrt(n)).astype(np.float32),
            "b": np.zeros(m, np.float32),
        }
        for n, m in pairwise(WIDTHS)
    ]


def hidden(params: Any, x: jax.Array) -> jax.Array:
    """Applies a stage other than the last."""
    return jnp.tanh(x @ params["w"] + params["b"])


def scores(params: Any, x: jax.Array) -> jax.Array:
    """Applies the last stage; returns scores."""
    return x @ params["w"] + params["b"]


def losses_of(params: Sequence[Any], batch: Any) -> jax.Array:
    """The cross-entropy of the whole net on one device, for each example."""
    x, labels = batch
    for each in params[:-1]:
        x = hidden(each, x)
    return optax.softmax_cross_entropy_with_integer_labels(
        scores(params[-1], x), labels
    )


def share_of_loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The contribution of a micro-batch to the mean over its batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, x), labels)
    return losses.sum() / BATCH


class Stage:
    """One stage, on the worker that makes it."""

    def __init__(self, number: int, seed: int) -> None:
        """Makes its parameters on the worker."""
        self._variable = autograd.variable(initial(seed)[number])

    def parameters(self) -> rpc.RRef[autograd.Variable]:
        """A reference to its variable."""
        return rpc.RRef(self._variable)

    def forward(self, x: rpc.RRef[Any]) -> Any:
        """The output; `to_here` fetches `x` from its owner."""
        return autograd.apply(hidden, self._variable, x.to_here())

    def loss(self, x: rpc.RRef[Any], labels: np.ndarray) -> Any:
        """The micro-batch's share of the loss; for the last stage."""
        return autograd.apply(share_of_loss, self._variable, x.to_here(), labels)

    def gradient(self, context_id: int) -> Any:
        """The gradient of its parameters in a context."""
        found = autograd.get_gradients(context_id)[self._variable]
        return jax.tree.map(np.asarray, found)

    def value(self) -> Any:
        """The values of its parameters."""
        return jax.tree.map(np.asarray, self._variable.value)


# --- training ---


def train(owners: Sequence[str], steps: int, seed: int) -> Trained:
    """Trains from the first worker; stage i is on `owners[i]`."""
    stages = [
        rpc.remote(owner, Stage, args=(i, seed)) for i, owner in enumerate(owners)
    ]
    params = [stage.rpc_sync().parameters() for stage in stages]
    dist_opt = autograd.DistributedOptimizer(optim.adam, params, lr=RATE)
    losses: list[float] = []
    first: list[Any] = []
    for batch in data(seed, steps, BATCH).batches:
        with autograd.context() as context_id:
            # All micro-batches are started before the first is waited for.
            under_way = [through(stages, *part) for part in parts(batch)]
            shares = [rref.to_here() for rref in under_way]
            autograd.backward(context_id, shares)
            first = first or [s.rpc_sync().gradient(context_id) for s in stages]
            dist_opt.step(context_id)
        losses.append(sum(float(share.value) for share in shares))
    return Trained(losses, first, [stage.rpc_sync().value() for stage in stages])


def through(
    stages: Sequence[rpc.RRef[Stage]], images: np.ndarray, labels: np.ndarray
) -> rpc.RRef[Any]:
    """Starts a micro-batch; returns a reference to its share of the loss."""
    x = rpc.RRef(images)
    for stage in stages[:-1]:
        x = stage.remote().forward(x)
    return stages[-1].remote().loss(x, labels)


def parts(batch: Any) -> Iterator[Any]:
    """The micro-batches of a batch, with flat images."""
    images, labels = batch
    flat = images.reshape(len(images), -1)
    return zip(np.split(flat, PARTS), np.split(labels, PARTS), strict=True)


def work(rank: int, steps: int, seed: int) -> Trained | None:
    """Entry point of each process; rank 0 drives."""
    rpc.init_rpc(f"worker{rank}", allow=("experiments",))
    found = train(WORKERS, steps, seed) if rank == 0 else None
    rpc.shutdown()
    return found


# --- what came out ---


def judged(found: Trained, batch: Any, seed: int) -> verify.Report:
    """Judges the first step's gradients against the whole net on one device."""
    images, labels = batch
    flat = images.reshape(len(images), -1), labels
    params = jax.tree.map(jnp.asarray, initial(seed))
    ours = jnp.float32(found.losses[0]), jax.tree.map(jnp.asarray, found.first)
    return _judge(losses_of)(params, flat, {"pipeline": lambda *_: ours})


_judge = functools.cache(verify.gradients_judge)
"""Cached, so that the judge compiles once for a loss."""


def accuracy_of(params: Sequence[Any], examples: Any) -> float:
    """The share of correctly classified examples."""
    images, labels = examples
    x = images.reshape(len(images), -1)
    for each in params[:-1]:
        x = hidden(each, x)
    return float(np.mean(np.argmax(scores(params[-1], x), axis=1) == labels))


def claims(
    found: Trained,
    alone: Trained,
    report: verify.Report,
    accuracy: tuple[float, float],
) -> Iterator[Claim]:
    """Claims of equality with one worker's run, and of correct gradients."""
    for what, mine, other in (
        ("gradients of the first step", found.first, alone.first),
        ("parameters after the last step", found.params, alone.params),
    ):
        equal, count = same_bits(mine, other)
        text = f"{what} are those of all stages on one worker, bit for bit"
        shown = f"{equal} of {count} arrays"
        yield Claim(text, equal == count == 2 * STAGES, shown, leads=True)
    text = "gradients are those of jax.grad over the whole batch, within the bound"
    yield Claim(text, report.ok, f"error/bound {report.worst:.2f}")
    start, end = (float(np.mean(x)) for x in (found.losses[:3], found.losses[-3:]))
    yield Claim("the loss falls", end < 0.7 * start, f"{start:.2f} to {end:.2f}")
    before, after = accuracy
    yield Claim("accuracy rises", after > before + 0.3, f"{before:.0%} to {after:.0%}")


def same_bits(one: Any, other: Any) -> tuple[int, int]:
    """The number of equal arrays, and of all."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return sum(x.tobytes() == y.tobytes() for x, y in pairs), len(pairs)


def rows(report: verify.Report) -> list[list[str]]:
    """A table with a row for each leaf."""
    found = [
        [leaf.path, f"{leaf.max_abs:.1e}", f"{leaf.ratio:.2f}"]
        for leaf in report.leaves
    ]
    return [["leaf", "largest difference", "error/bound"], *found]


def plot(found: Trained, alone: Trained) -> Figure:
    """The loss on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.semilogy(found.losses, label="three workers")
    axes.semilogy(alone.losses, ".", label="one worker")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return figure

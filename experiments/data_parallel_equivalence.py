"""Do replicas with uneven shards compute the gradient of one device, and so its
training run? A convolutional net on real digits.

The net is trained with momentum on one device, and on 2, 4 and 8 replicas whose shards
all differ in size and rotate at every step. At every step (at every ninth in the quick
form, which has 2 and 8 replicas) the replicas' gradient is judged against
`jax.value_and_grad` of the whole batch on one device; after every step all copies of
the parameters are compared bit by bit. The classic mistake, the mean of the replicas'
means, is judged as well and must be caught.

Rounding makes two runs drift apart, as one device drifts from itself when it sums the
examples in another order. That drift is measured too and defines "the same loss
curve".
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import Task, digits
from experiments._replicas import over, replicas_identical
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, verify

BATCH = 96
REPLICAS = (2, 4, 8)
MISTAKEN = 8
"""The number of replicas for which the mean of means is judged."""
MISTAKE = "mean of means"
ORDERS = 3
ACCURACY = 0.95
# Drift grows from random rounding: two runs of one kind differ by a small factor.
SAME_DRIFT = 10

OPTIMIZER = optim.sgd(lr=0.12, momentum=0.9, nesterov=True)


class Plan(NamedTuple):
    """The schedule of a training run and its judgements.

    Attributes:
      steps: Training steps.
      judge_every: Steps from one judgement to the next.
      judge_mistake_every: Steps from one judgement of the mean of means to the next; a
        multiple of `judge_every`.
      counts: Numbers of replicas.
    """

    steps: int
    judge_every: int = 1
    judge_mistake_every: int = 1
    counts: tuple[int, ...] = REPLICAS


# Most of the time goes into the judge, and into compiling for each number of replicas.
# An odd period, so that the shards, which rotate at every step, differ between judged
# steps. Failed judgements are repeated with many more draws.
QUICK = Plan(75, 9, 36, (2, 8))


@dataclass
class Run:
    """The results of a training run; lists have an item per step."""

    name: str
    losses: list[float]
    accuracy: float
    ratios: list[float]
    identical: int = 0
    oracle: str = ""
    caught: tuple[float, ...] = ()

    def drift(self, other: "Run") -> np.ndarray:
        """The distance of the losses from another run's, step by step."""
        return np.abs(np.subtract(self.losses, other.losses))


def run(settings: Settings, progress: Progress) -> Result:
    """Trains, judges and compares."""
    plan = QUICK if settings.quick else Plan(400)
    task = digits(settings.seed, plan.steps, BATCH)
    rng = np.random.default_rng(settings.seed)
    step = plain_step(task)
    thread = ThreadPoolExecutor(1)
    try:
        # In a thread: most of its time is XLA's, which meanwhile compiles for training.
        judge = partial(thread.submit, verify.gradients_judge(task.losses))
        trained = [
            train_replicas(task, mesh, name, progress, judge, plan, count == MISTAKEN)
            for count, mesh, name in replicas(settings.devices, plan.counts)
        ]
        alone = train_alone(task, step, "1 device", progress)
        orders = [
            train_alone(task, step, f"1 device, order {i + 1}", progress, rng)
            for i in range(ORDERS)
        ]
        runs = [judged(run, reports, progress) for run, reports in trained]
    finally:
        # After an error or Ctrl-C the remaining gradients are not judged.
        thread.shutdown(cancel_futures=True)
    spread = {
        r.name: dict(zip(("low", "median", "high"), _quartiles(r.ratios), strict=True))
        for r in runs
    }
    return Result(
        claims=claims(
            alone, orders, runs, plan, sharing(settings.devices, plan.counts)
        ),
        pictures=[
            Picture(
                "loss",
                "The loss of every step. Below: how far each run is from one device's; "
                "in grey, one device that adds the examples in other orders.",
                plot_losses(alone, orders, runs),
            ),
            Picture(
                "error",
                "The largest error of a step's gradient, relative to what rounding "
                "explains; and that of the mean of means.",
                plot_ratios(runs, plan.steps),
            ),
        ],
        tables={"Runs": _rows([alone, *runs])},
        data={
            "steps": plan.steps,
            "runs": [vars(r) for r in (alone, *orders, *runs)],
            "error_over_bound": spread,
        },
    )


# --- who holds what ---


def replicas(
    available: int, counts: Sequence[int] = REPLICAS
) -> list[tuple[int, Mesh | int, str]]:
    """Replicas on their own devices, or on one device if there are too few."""
    devices = np.array(jax.devices()[:available])
    return [
        (count, Mesh(devices[:count], ("data",)), f"{count} devices")
        if count <= len(devices)
        else (count, count, f"{count} replicas on 1 device")
        for count in counts
    ]


def shard_sizes(count: int, step: int) -> tuple[int, ...]:
    """Unequal shard sizes in proportion 1 : 2 : .. : count, rotated at every step."""
    total = count * (count + 1) // 2
    sizes = [BATCH * (rank + 1) // total for rank in range(count)]
    sizes[-1] += BATCH - sum(sizes)
    return tuple(np.roll(sizes, step).tolist())


# --- the runs ---


def plain_step(task: Task) -> Callable[..., Any]:
    """A training step in plain JAX, on one device."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: task.losses(p, batch).mean())(params)
        return *OPTIMIZER.step(params, grads, state), loss

    return step


def train_alone(
    task: Task,
    step: Callable[..., Any],
    name: str,
    progress: Progress,
    rng: np.random.Generator | None = None,
) -> Run:
    """Trains on one device; with `rng`, examples are summed in random order."""
    params = jax.device_put(task.params, jax.devices()[0])
    state = OPTIMIZER.init(params)
    losses = []
    for batch in progress.track(task.batches, description=name):
        order = np.arange(BATCH) if rng is None else rng.permutation(BATCH)
        shuffled = tuple(part[order] for part in batch)
        params, state, loss = step(params, state, shuffled)
        losses.append(float(loss))
    return Run(name, losses, task.accuracy(params), [])


def train_replicas(
    task: Task,
    mesh: Mesh | int,
    name: str,
    progress: Progress,
    judge: Callable[..., Future[verify.Report]],
    plan: Plan,
    mistaken_too: bool,
) -> tuple[Run, list[Future[verify.Report]]]:
    """Trains the same over replicas; has the gradients judged meanwhile.

    Args:
      task: Data, model and batches.
      mesh: The devices; or a number of replicas on one device.
      name: The name of the run.
      progress: Shows a bar.
      judge: Begins a judgement.
      plan: The schedule of judgements.
      mistaken_too: Whether to judge the mean of means as well.

    Returns:
      The run without what the judge finds, and its judgements in order.
    """
    count = mesh if isinstance(mesh, int) else mesh.size
    gradient = data_parallel.value_and_grad(task.losses, **over(mesh))
    mistaken = mean_of_means(task)
    optimize = jax.jit(OPTIMIZER.step)
    params = jax.device_put(task.params)
    state = OPTIMIZER.init(params)
    if not isinstance(mesh, int):
        # Replicated from the start: a step from one device would compile another
        # program.
        params, state = data_parallel.replicate((params, state), mesh)
    run = Run(name, [], 0.0, [])
    reports = []
    for t, batch in enumerate(progress.track(task.batches, description=name)):
        sizes = shard_sizes(count, t)
        found = gradient(
            params, *data_parallel.shard_batch(batch, sizes=sizes, **over(mesh))
        )
        if t % plan.judge_every == 0:
            # The judge computes on one device.
            here = jax.device_put(jax.device_get(params), jax.devices()[0])
            candidates = {name: returning(found)}
            if mistaken_too and t % plan.judge_mistake_every == 0:
                candidates[MISTAKE] = returning(mistaken(here, batch, sizes))
            once = {"finite_differences": t == 0}
            reports.append(judge(here, batch, candidates, **once))
        params, state = optimize(params, found[1], state)
        run.losses.append(float(found[0]))
        run.identical += replicas_identical((params, state))
    run.accuracy = task.accuracy(jax.device_get(params))
    return run, reports


def judged(
    run: Run, reports: Sequence[Future[verify.Report]], progress: Progress
) -> Run:
    """The run with what the judge found at each judged step."""
    for pending in progress.track(reports, description=f"{run.name}, judged"):
        report = pending.result()
        run.ratios.append(report.of(run.name).worst)
        if any(row.candidate == MISTAKE for row in report.leaves):
            run.caught = (*run.caught, report.of(MISTAKE).worst)
        if report.oracle is not None:
            run.oracle = str(report.oracle)
    return run


def returning(found: Any) -> Callable[..., Any]:
    """A candidate for the judge that returns a computed gradient."""
    return lambda params, batch: found


def mean_of_means(task: Task) -> Callable[..., tuple[jax.Array, Any]]:
    """The mistaken gradient, in which each replica's mean has the same weight."""

    @jax.jit
    def gradient(params: Any, batch: Any, shares: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: jnp.sum(shares * task.losses(p, batch)))(
            params
        )

    def mistaken(params: Any, batch: Any, sizes: Sequence[int]) -> Any:
        shares = [np.full(size, 1 / (size * len(sizes))) for size in sizes]
        return gradient(params, batch, np.concatenate(shares).astype(np.float32))

    return mistaken


# --- what is claimed, and shown ---


def claims(
    alone: Run,
    orders: Sequence[Run],
    runs: Sequence[Run],
    plan: Plan,
    shared: str = "",
) -> list[Claim]:
    """Claims of all runs; copies on a shared device cannot show that they agree.

    Args:
      alone: The run on one device.
      orders: Runs on one device with examples summed in other orders.
      runs: The runs over replicas.
      plan: The schedule of each run.
      shared: The reason why copies cannot be compared; empty if they can.
    """
    steps = plan.steps
    worst = max(max(r.ratios) for r in runs)
    judged = [len(r.ratios) for r in runs]
    caught = next(r.caught for r in runs if r.caught)
    drift, usual = (max(float(r.drift(alone).max()) for r in g) for g in (runs, orders))
    accuracies = [r.accuracy for r in (alone, *runs)]
    return [
        Claim(
            "every judged gradient equals one device's within the derived bound",
            worst <= 1 and set(judged) == {len(range(0, steps, plan.judge_every))},
            f"{sum(judged)} of {len(runs) * steps} judged, error/bound at most "
            f"{worst:.3f}",
            leads=True,
        ),
        Claim(
            "the one-device gradient is the derivative of the loss",
            all("pinned" in r.oracle for r in runs),
            runs[0].oracle,
        ),
        Claim(
            "after every step all replicas hold the same bits",
            all(r.identical == steps for r in runs),
            ", ".join(f"{r.name}: {r.identical} of {steps}" for r in runs),
        ).unless(shared),
        Claim(
            "the loss curves are one curve: they drift no more than one device's own "
            "does when its examples are added up in another order",
            drift <= SAME_DRIFT * usual,
            f"by {drift:.1e}; another order: {usual:.1e}",
        ),
        Claim(
            f"test accuracy is above {ACCURACY:.0%} on every number of replicas",
            min(accuracies) > ACCURACY,
            ", ".join(f"{a:.1%}" for a in accuracies),
        ),
        Claim(
            "the mean of means is caught at every step at which it is judged",
            len(caught) == len(range(0, steps, plan.judge_mistake_every))
            and min(caught) > 1,
            f"{len(caught)} steps, error/bound at least {min(caught):.1e}",
        ),
    ]


def plot_losses(alone: Run, orders: Sequence[Run], runs: Sequence[Run]) -> Figure:
    """Loss curves above, distances from one device's below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2)
    )
    above.plot(alone.losses, color="black", linewidth=4, alpha=0.25, label=alone.name)
    above.plot([], [], color="0.75", linewidth=1, label="1 device, other orders")
    for other in orders:
        below.semilogy(_positive(other.drift(alone)), color="0.75", linewidth=1)
    for run in runs:
        above.plot(run.losses, linewidth=1, label=run.name)
        below.semilogy(_positive(run.drift(alone)), linewidth=1)
    above.set(ylabel="training loss", title="Training on replicas")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="distance from\none device's loss")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_ratios(runs: Sequence[Run], steps: int) -> Figure:
    """The error/bound of every judged step."""
    figure, axes = plt.subplots(figsize=(9, 4.5))

    def plot(ratios: Sequence[float], **style: str) -> None:
        at = np.linspace(0, steps, len(ratios), endpoint=False)
        axes.semilogy(at, ratios, linewidth=1, **style)

    for run in runs:
        plot(run.ratios, label=run.name)
        if run.caught:
            plot(run.caught, color="firebrick", label="mean of means")
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="derived bound")
    axes.set(xlabel="step", ylabel="error / bound", title="Errors of judged gradients")
    axes.legend(frameon=False, ncols=3, loc="center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _positive(values: np.ndarray) -> np.ndarray:
    """Zeros as NaN, which a logarithmic plot leaves out."""
    return np.where(values > 0, values, np.nan)


def _quartiles(values: Sequence[float]) -> list[float]:
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    header = ["run", "final loss", "test accuracy", "error/bound, median", "largest"]
    return [header] + [
        [
            r.name,
            f"{r.losses[-1]:.6f}",
            f"{r.accuracy:.2%}",
            *(
                [f"{np.median(r.ratios):.3f}", f"{max(r.ratios):.3f}"]
                if r.ratios
                else ["", ""]
            ),
        ]
        for r in runs
    ]


def sharing(available: int, counts: Sequence[int] = REPLICAS) -> str:
    """The reason why copies cannot be compared; empty if each replica has a device."""
    present = min(available, jax.device_count())
    shared = [count for count in counts if count > present]
    if not shared:
        return ""
    return (
        f"{present} device(s) here, and {', '.join(map(str, shared))} replicas share "
        "one by vmap"
    )

"""Does a run lose or repeat anything when replicas die in the middle of steps, and
others join?

A convolutional net is trained on real digits by replicas that are workers of one
process. A seeded random history determines which replicas leave without notice, and
when, and when others join. It is compared with the run of a single replica. With a
fixed order of sums the two must agree in every bit; without it they differ by
rounding.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import Task, digits
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, rpc

BATCH = 32
SLOTS = 8
ACCURACY = 0.85
_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class History:
    """The times at which replicas join and die.

    Attributes:
      replicas: Replicas at the start; number 0 leads and stays.
      deaths: For each dying replica, by number: the count of its steps in the last of
        which it dies, in the middle of its share.
      joins: The steps in which another replica joins; numbers continue.
    """

    replicas: int
    deaths: dict[int, int]
    joins: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """The results of a history.

    Attributes:
      losses: The losses of all steps.
      params: The parameters after the last step.
      shares: For each replica, by number: the steps that it computed shares of.
      died: The replicas that died.
    """

    losses: list[float] = field(default_factory=list)
    params: Any = None
    shares: dict[int, list[int]] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)


def run(settings: Settings, progress: Progress) -> Result:
    """Runs one replica alone, and a history with and without a fixed order."""
    steps = 60 if settings.quick else 240
    task = digits(settings.seed, steps, BATCH)
    history = drawn(settings.seed, steps, 2 if settings.quick else 6)
    alone = History(1, {}, ())
    runs = {
        "alone": train(task, alone, SLOTS),
        "fixed": train(task, history, SLOTS),
        "free": train(task, history, None),
    }
    accuracy = task.accuracy(runs["fixed"].params)
    return Result(
        claims=claims(runs, history, steps, accuracy),
        pictures=[
            Picture(
                "timeline",
                "Above: the loss of each step, of one replica alone (line) and under "
                "the history (dots). Below: the steps that each replica computed "
                "shares of; a cross where it died.",
                plot(runs, steps),
            )
        ],
        data={
            "deaths": history.deaths,
            "joins": history.joins,
            "losses": runs["fixed"].losses,
            "accuracy": accuracy,
            "largest difference without a fixed order": difference(runs),
        },
    )


def drawn(seed: int, steps: int, events: int) -> History:
    """A history with as many deaths as joins; joins are in the first two thirds."""
    rng = np.random.default_rng((seed, 7))
    replicas = 3
    joins = sorted(rng.choice(np.arange(2, steps * 2 // 3), events, replace=False))
    # The last newcomer stays.
    mortal = rng.permutation(np.arange(1, replicas + events - 1))[:events]
    deaths = {int(who): int(rng.integers(2, steps // 8)) for who in mortal}
    return History(replicas, deaths, tuple(map(int, joins)))


class Died(Exception):
    """Raised in a replica that has left without notice."""


class Watched:
    """An array that calls `before(step)` when a share of a batch is read."""

    def __init__(self, array: np.ndarray, before: Callable[[int], None]) -> None:
        """Takes shape and dtype of the array."""
        self.shape, self.dtype = array.shape, array.dtype
        self._array, self._before = array, before

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns rows of the array; calls `before` first."""
        # Shares of a batch are read by an array of indices, anything else by a slice.
        if not isinstance(rows, slice):
            self._before(int(rows[0]) // BATCH)
        return self._array[rows]


class Replicas:
    """The replicas of one run, each on a thread.

    Args:
      task: The training task.
      history: When replicas join and die.
      elastic: The elastic run.
      join: Adds a worker to the group of the replicas.
    """

    def __init__(
        self,
        task: Task,
        history: History,
        elastic: data_parallel.Elastic,
        join: Callable[[str], rpc.WorkerInfo],
    ) -> None:
        """Starts all replicas but number 0, which runs in `train`."""
        self._task, self._history = task, history
        self._elastic, self._join_group = elastic, join
        self._data = [np.concatenate(part) for part in zip(*task.batches, strict=True)]
        self._threads: list[threading.Thread] = []
        self._joins = list(history.joins)
        self._count = 1
        self.found = Run()
        for _ in range(history.replicas - 1):
            self._join()

    def train(self) -> Run:
        """Runs replica 0 and waits for the others; returns the results."""
        self._replica(0)
        for thread in self._threads:
            thread.join()
        return self.found

    def _join(self) -> None:
        number, self._count = self._count, self._count + 1
        self._join_group(f"replica{number}")
        thread = threading.Thread(target=self._replica, args=(number,))
        self._threads.append(thread)
        thread.start()

    def _before_first(self, step: int) -> None:
        """Called before each share of replica 0; lets others join."""
        if self._joins and step >= self._joins[0]:
            del self._joins[0]
            self._join()
        # The steps are so short that the run would end before a newcomer has begun.
        if not all(self.found.shares.get(each) for each in range(self._count)):
            threading.Event().wait(_PAUSE)

    def _replica(self, number: int) -> None:
        shares = self.found.shares.setdefault(number, [])

        def before(step: int) -> None:
            shares.append(step)
            if number == 0:
                self._before_first(step)
            if self._history.deaths.get(number) == len(set(shares)):
                self.found.died.append(number)
                rpc.shutdown(graceful=False)
                raise Died

        images, labels = self._data
        data = (Watched(images, before), labels)
        with rpc.use_worker(f"replica{number}"):
            try:
                state, losses = self._elastic.run(self._task.params, data)
            except Died:
                return
        if number == 0:
            self.found.params = state.params
            self.found.losses = list(losses.values())


def train(task: Task, history: History, slots: int | None) -> Run:
    """Trains with the batches of the task in order, under a history."""
    examples = sum(len(labels) for _, labels in task.batches)
    elastic = data_parallel.Elastic(
        task.losses,
        optim.sgd(lr=0.12, momentum=0.9, nesterov=True),
        data_parallel.Sampler(examples, BATCH, shuffle=False),
        slots=slots,
    )
    with rpc.elastic_cluster("replica0") as join:
        return Replicas(task, history, elastic, join).train()


def claims(
    runs: dict[str, Run], history: History, steps: int, accuracy: float
) -> list[Claim]:
    """The claims of the experiment."""
    alone, fixed = runs["alone"], runs["fixed"]
    same = [a == b for a, b in zip(alone.losses, fixed.losses, strict=False)]
    params = zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(fixed.params), strict=True
    )
    newcomers = [
        taken for number, taken in fixed.shares.items() if number >= history.replicas
    ]
    events = f"{len(fixed.died)} deaths and {len(history.joins)} joins"
    return [
        Claim(
            "in a fixed order of sums every step's loss has the bits of the run of one "
            "replica alone",
            len(same) == len(fixed.losses) == steps and all(same),
            f"{sum(same)} of {steps} steps, {events}",
            leads=True,
        ),
        Claim(
            "and so have the parameters after the last step",
            all(np.array_equal(a, b) for a, b in params),
            f"{len(jax.tree.leaves(alone.params))} arrays",
        ),
        Claim(
            "the history came about as it was drawn, and every newcomer took part",
            sorted(fixed.died) == sorted(history.deaths)
            and len(newcomers) == len(history.joins)
            and all(newcomers),
            f"{events}, {sum(map(len, newcomers))} shares by newcomers",
        ),
        Claim(
            f"the net learns: accuracy of {ACCURACY:.0%} on images it has not seen",
            accuracy >= ACCURACY,
            f"{accuracy:.1%}",
        ),
    ]


def difference(runs: dict[str, Run]) -> float:
    """The largest difference between the losses of one replica and of a free order."""
    pairs: Sequence[Any] = [runs["alone"].losses, runs["free"].losses]
    return float(np.max(np.abs(np.subtract(*pairs))))


def plot(runs: dict[str, Run], steps: int) -> Figure:
    """Losses above, replicas below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1)
    )
    above.plot(runs["alone"].losses, linewidth=1, label="one replica alone")
    above.plot(runs["fixed"].losses, ".", markersize=4, label="under the history")
    above.set(ylabel="loss", yscale="log")
    above.set_title("Replicas that die and join, and the loss of every step")
    above.legend(frameon=False)
    for number, taken in runs["fixed"].shares.items():
        if not taken:
            continue
        colour = f"C{number % 10}"
        below.hlines(number, min(taken), max(taken), color=colour, linewidth=4)
        if number in runs["fixed"].died:
            below.plot(max(taken), number, "x", color="black", markersize=8)
    below.set(xlabel="step", ylabel="replica", xlim=(-1, steps))
    below.set_yticks(sorted(runs["fixed"].shares))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure

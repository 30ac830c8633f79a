"""Steps of an elastic run and of `train_step`, and a replica that dies."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks._ddp_jdist import losses
from benchmarks._ddp_models import MODELS, RATE, Model
from benchmarks._pair import Job, Spent, timed
from jdist import data_parallel, optim, rpc
from jdist.data_parallel.elasticity.follower import Follower

# In the first steps of a run replicas join, and one fetches the state.
SKIPPED = 2


class Read(NamedTuple):
    """One read of a replica's share of a batch.

    Attributes:
      row: The first row of the share.
      elapsed: Seconds on the machine's monotonic clock.
      processor: Seconds of processor time of this process.
    """

    row: int
    elapsed: float
    processor: float


class Watched:
    """An array that records each read of a share, which begins a step."""

    def __init__(self, array: np.ndarray) -> None:
        """Takes shape and dtype of the array."""
        self.shape, self.dtype = array.shape, array.dtype
        self._array = array
        self.read: list[Read] = []

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns rows of the array and records the read."""
        # Shares of a batch are read by an array of indices, anything else by a slice.
        if not isinstance(rows, slice):
            read = Read(int(rows[0]), time.monotonic(), time.process_time())
            self.read.append(read)
            self.before(read)
        return self._array[rows]

    def before(self, read: Read) -> None:
        """Hook that is called before the rows are returned."""


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """For each model the steps of `train_step` and of an elastic run."""
    with data_parallel.process_group() as mesh:
        rpc.init_rpc(f"worker{rank}")
        jobs: dict[str, Job] = {}
        for model in MODELS:
            step = partial(timed_step, plain(model, mesh, rank))
            jobs[f"{model.name}: train_step"] = step
            jobs[f"{model.name}: elastic"] = elastic(model, None)
            jobs[f"{model.name}: elastic, fixed order"] = elastic(model, 4)
        yield jobs
        rpc.shutdown()


def timed_step(call: Callable[[], Any], calls: int) -> Spent:
    """The time of a step of `train_step` in a loop."""
    return timed(call, jax.block_until_ready, calls)


def plain(model: Model, mesh: Mesh, rank: int) -> Callable[[], Any]:
    """A step over two processes, each of which places its own rows."""
    step = data_parallel.train_step(losses, optim.sgd(lr=RATE), mesh)
    state = step.init(model.weights())
    examples = model.examples(rank)

    def call() -> Any:
        nonlocal state
        batch, weights = data_parallel.shard_batch(examples, mesh, rows=model.batch)
        state, metrics = step(state, batch, weights)
        return state, metrics

    return call


def elastic(model: Model, slots: int | None) -> Job:
    """The job of an elastic run whose first steps do not count."""
    run = elastic_run(model, slots=slots)
    x, y = examples(model)
    numbers = itertools.count()

    def job(calls: int) -> Spent:
        data = (Watched(x), y)
        # The name of a run must be unique in the group.
        run.run(
            model.weights(),
            data,
            epochs=SKIPPED + calls + 1,
            min_replicas=2,
            name=f"{model.name} {slots} {next(numbers)}",
        )
        # Each of two replicas reads half of the slots, one by one, in every step.
        share = (slots or 2) // 2
        first, *_, last = data[0].read[::share][-calls - 1 :]
        return Spent(
            (last.elapsed - first.elapsed) / calls,
            (last.processor - first.processor) / calls,
        )

    return job


def elastic_run(model: Model, **options: Any) -> data_parallel.Elastic:
    """An elastic run whose steps have the examples of both replicas, in order."""
    batch = 2 * model.batch
    sampler = data_parallel.Sampler(batch, batch, shuffle=False)
    return data_parallel.Elastic(losses, optim.sgd(lr=RATE), sampler, **options)


def examples(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of both replicas, concatenated."""
    both = zip(model.examples(0), model.examples(1), strict=True)
    x, y = (np.concatenate(parts) for parts in both)
    return x, y


class Mortal(Watched):
    """Data that kills the process when its share of a step is read.

    Args:
      array: The data.
      steps: The number of shares that are read before.
      note: The file to which the time of the death is written.
    """

    def __init__(self, array: np.ndarray, steps: int, note: Path) -> None:
        """Sets the number of reads before the death."""
        super().__init__(array)
        self._steps, self._note = steps, note

    def before(self, read: Read) -> None:
        """Kills the process after the last of its reads."""
        if len(self.read) > self._steps:
            self._note.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


class Place(NamedTuple):
    """The coordinates of a replica that joins.

    Attributes:
      number: The number of the replica.
      rank: The rank of its worker.
      port: The port of the group's coordinator.
      key: The cluster key of the group.
    """

    number: int
    rank: int
    port: int
    key: bytes


def replica(
    _: int,
    place: Place,
    model: Model,
    epochs: int,
    dies_after: int | None,
    folder: Path,
) -> tuple[list[Read], float]:
    """A replica in a process of its own.

    Returns:
      The shares that it read, and the seconds that it took to fetch the state.
    """
    make, follow = Follower.__init__, Follower.follow
    began, took = time.monotonic(), 0.0

    def make_timed(self: Follower, *arguments: Any) -> None:
        nonlocal began
        began = time.monotonic()
        make(self, *arguments)

    def follow_timed(self: Follower, directive: Any, *rest: Any) -> Any:
        nonlocal took
        if directive.fetch:
            took = time.monotonic() - began
        return follow(self, directive, *rest)

    # Patched, because a run does not report how long the transfer of a state took. It
    # asks for it when it has made its follower.
    Follower.__init__ = make_timed  # type: ignore[method-assign, assignment]
    Follower.follow = follow_timed  # type: ignore[method-assign, assignment]
    rpc.init_rpc(
        f"worker{place.number}",
        rank=place.rank,
        world_size=0,
        coordinator=("127.0.0.1", place.port),
        options=rpc.RpcOptions(key=place.key),
    )
    x, y = examples(model)
    note = folder / f"death{place.number}"
    data = Watched(x) if dies_after is None else Mortal(x, dies_after, note)
    run = elastic_run(model, folder=folder / "saved", save_every=5)
    # An epoch has one batch.
    run.run(model.weights(), (data, y), epochs=epochs)
    rpc.shutdown()
    return data.read, took

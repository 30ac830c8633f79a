"""A sampler: the examples of each replica at each step of an epoch.

An epoch visits every example exactly once. PyTorch's `DistributedSampler` makes shards
equal by visiting some examples twice, or not at all (`drop_last`), which biases the
epoch's gradient and any metric over it; here the last batch is smaller, its shards may
differ by one example, and weights say so.

    10 examples, 3 replicas, 6 a step, without shuffling
    step 0:  0 1 | 2 3 | 4 5          step 1:  6 7 | 8 . | 9 .        . has weight 0

The order depends on seed and epoch alone, so that every process computes the same one
and a run can resume in mid-epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._errors import (
    check_at_least,
    check_flags,
    check_number,
    check_sequence,
    value_error,
)
from jdist._tree import PyTree, examples_in
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import sharded


class Shards(NamedTuple):
    """The examples of some replicas at one step."""

    rows: np.ndarray
    """Indices of examples, concatenated replica after replica."""

    sizes: tuple[int, ...]
    """Number of examples of each replica."""

    weights: np.ndarray
    """Weights of the examples: 1 each, and 0 for one that only fills a place."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Batches of an epoch, shuffled and divided over replicas.

    Attributes:
      examples: Number of examples.
      batch: Number of examples per step, over all replicas.
      seed: Seed of the order.
      shuffle: False keeps the order of the data.

    Raises:
      ValueError: A number is below 1, or the seed below 0.

    Example:
      >>> sampler = Sampler(examples=10, batch=6, shuffle=False)
      >>> [(s.rows.tolist(), s.sizes) for s in sampler.shards(replicas=3)]
      [([0, 1, 2, 3, 4, 5], (2, 2, 2)), ([6, 7, 8, 9], (2, 1, 1))]

    References:
      `torch.utils.data.DistributedSampler`.
    """

    examples: int
    batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, least in (("examples", 1), ("batch", 1), ("seed", 0)):
            check_at_least(f"Sampler({name}=...)", getattr(self, name), least)
        check_flags("Sampler", shuffle=self.shuffle)

    @property
    def steps(self) -> int:
        """Batches in an epoch, the smaller last one included."""
        return -(-self.examples // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """All examples, each once, in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.examples)
        # NumPy guarantees the numbers of `RandomState`, but not those of `Generator`.
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        return np.random.RandomState(bits).permutation(self.examples)

    def shards(
        self,
        replicas: int,
        epoch: int = 0,
        *,
        ranks: Sequence[int] | None = None,
        start: int = 0,
    ) -> Iterator[Shards]:
        """The steps of an epoch, as indices.

        Args:
          replicas: Number of replicas.
          epoch: Number of the epoch.
          ranks: The replicas whose examples are wanted; None for all. If they have none
            at a step, they get one example with weight 0.
          start: Steps to skip, for a run that resumes.

        Raises:
          ValueError: `start` is negative or beyond the epoch; `ranks` names none, or
            one that there is not.
        """
        check_at_least("shards(replicas=...)", replicas, 1)
        check_at_least("shards(epoch=...)", epoch, 0)
        rule = f"must be from 0 to the epoch's {self.steps} steps"
        check_number(
            "shards(start=...)", start, rule, lambda n: 0 <= n <= self.steps, whole=True
        )
        if ranks is not None:
            rule = "must be numbers of replicas"
            check_sequence("shards(ranks=...)", ranks, Integral, rule)
        order = self.order(epoch)
        wanted = range(replicas) if ranks is None else ranks
        if not wanted or not set(wanted) <= set(range(replicas)):
            rule = f"must be some of the {replicas} replicas"
            raise value_error("shards(ranks=...)", rule, list(wanted))
        for step in range(start, self.steps):
            rows = order[step * self.batch : (step + 1) * self.batch]
            parts = np.array_split(rows, replicas)
            own = [parts[rank] for rank in wanted]
            sizes = tuple(len(part) for part in own)
            if any(sizes):
                found = np.concatenate(own)
                yield Shards(found, sizes, np.ones(len(found), np.float32))
            else:
                # A program takes rows of every process: one row with weight 0.
                sizes = (1, *sizes[1:])
                yield Shards(rows[:1], sizes, np.zeros(1, np.float32))

    def batches(
        self,
        data: PyTree,
        mesh: Mesh | None = None,
        epoch: int = 0,
        *,
        replicas: int | None = None,
        start: int = 0,
        rows: int | None = None,
        data_axis: str = "data",
    ) -> Iterator[tuple[PyTree, jax.Array]]:
        """The steps of an epoch, as batches and weights for `train_step`.

        Each process reads only what its own replicas need; all batches have one shape.

        Args:
          data: Pytree of arrays, each `(examples, ...)`; anything that takes an array
            of indices, such as a memory-mapped file.
          mesh: The devices.
          epoch: Number of the epoch.
          replicas: In place of a mesh: a number of replicas that share one device.
          start: Steps to skip, for a run that resumes.
          rows: Rows per replica, padding included, such as a multiple of the
            micro-batches of `train_step(accumulate=...)`; None for as few as hold a
            replica's part of a batch.
          data_axis: The mesh axis that counts replicas.

        Raises:
          ValueError: `data` has another number of examples; `start` is not a step;
            no such axis; a mesh and replicas are given; `rows` are too few; this
            process has no device of the mesh.
          TypeError: `rows` is not an integer; neither a mesh nor replicas are given.

        Example:
          >>> import numpy as np
          >>> sampler = Sampler(examples=5, batch=3, shuffle=False)
          >>> for batch, weights in sampler.batches(
          ...     np.arange(5.0), replicas=2, rows=4
          ... ):
          ...     print(batch, weights)
          [0. 1. 1. 1. 2. 2. 2. 2.] [1. 1. 0. 0. 1. 0. 0. 0.]
          [3. 3. 3. 3. 4. 4. 4. 4.] [1. 0. 0. 0. 1. 0. 0. 0.]
        """
        count = examples_in(data, "Sampler.batches(data=...)")
        if count != self.examples:
            rule = f"must have the sampler's {self.examples} examples"
            raise value_error("batches(data=...)", rule, count)
        placement = Placement.of("batches", mesh, replicas, data_axis)
        fewest = -(-self.batch // placement.count)
        if rows is None:
            rows = fewest
        reason = f", a replica's part of a batch of {self.batch} over {placement.count}"
        check_at_least("batches(rows=...)", rows, fewest, reason)
        for shard in self.shards(
            placement.count, epoch, ranks=placement.own(), start=start
        ):
            taken = jax.tree.map(lambda x, rows=shard.rows: x[rows], data)
            yield sharded(taken, placement, shard.sizes, shard.weights, rows)

"""The arithmetic of an elastic run: sums of shards, their total, and the step.

The gradient of a step is that of its whole batch, for any division into shards (see
`jdist.reduction`). In a fixed order a batch is divided into slots, each computed alone
by one program, and their partials are summed along a binary tree. Its shape depends on
their number only, so that a sum has the same bits for any assignment of slots to
replicas, and for any place where parts of it were computed.

    slots 0..5:  ((0 + (1 + 2)) + (3 + (4 + 5)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction as reductions
from jdist._tree import PyTree, split_inexact
from jdist.data_parallel.data.checkpoint import TrainCheckpoints
from jdist.data_parallel.data.sampler import Sampler
from jdist.data_parallel.elasticity.leader import Part
from jdist.data_parallel.step.train_state import TrainState
from jdist.optim import Optimizer
from jdist.reduction import Partial
from jdist.segment.internal import GuardedJit

Value = TypeVar("Value")


class Snapshot(NamedTuple):
    """A state, with its step."""

    held: int | None
    """Number of steps that its state has taken; None without a state."""

    state: TrainState | None
    """The state."""


class Programs:
    """The compiled functions of an elastic run; replicas of one process share them.

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`.
      optimizer: The optimizer.
      reduction: See `jdist.reduction`.
    """

    def __init__(
        self, loss_fn: Callable[..., jax.Array], optimizer: Optimizer, reduction: str
    ) -> None:
        def shard_sum(
            params: PyTree, batch: PyTree, weights: jax.Array, total: jax.Array
        ) -> Partial:
            weights = reductions.shares(weights, reduction, total)
            return reductions.partial(loss_fn, params, batch, weights, reduction)

        def stepped(state: TrainState, total: Partial) -> tuple[TrainState, jax.Array]:
            # Masters take the gradient in the precision of the sum.
            wide = optimizer.precision is not None
            like = total.gradient if wide else state.params
            loss, grads = reductions.finish(total, reduction, like)
            params, kept = optimizer.step(state.params, grads, state.opt_state)
            return TrainState(state.step + 1, params, kept), loss

        self.shard_sum = GuardedJit(shard_sum, "elastic", {"loss_fn": loss_fn})
        self.combined = jax.jit(partial(reductions.combine, reduction=reduction))
        # Nothing is donated: another thread may be sending the state to a newcomer.
        self.stepped = GuardedJit(stepped, "elastic", {"optimizer": optimizer})


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run, by step.

    Attributes:
      data: Pytree of arrays, each `(examples, ...)`.
      weights: `(examples,)`.
      sampler: The order of the examples.
      slots: Number of slots of a batch in a fixed order; None without one.
    """

    data: PyTree
    weights: np.ndarray
    sampler: Sampler
    slots: int | None

    def rows(self, step: int) -> np.ndarray:
        """The examples of a step."""
        epoch, within = divmod(step, self.sampler.steps)
        size = self.sampler.batch
        return _order(self.sampler, epoch)[within * size : (within + 1) * size]

    def units(self, step: int) -> int:
        """Number of units of a step: its slots, or its examples."""
        return len(self.rows(step)) if self.slots is None else self.slots

    def shard(self, step: int, part: Part) -> tuple[PyTree, np.ndarray, np.float64]:
        """Examples and weights of a part of a step, padded, and the step's weight."""
        rows = self.rows(step)
        total = self.weights[rows].sum(dtype=np.float64)
        if self.slots is None:
            own = rows[part.start : part.stop]
            # A power of two, so that few programs are compiled.
            size = 1 << (len(own) - 1).bit_length()
        else:
            own = np.array_split(rows, self.slots)[part.start]
            # One size for all slots, so that one program computes them with equal
            # rounding.
            size = -(-self.sampler.batch // self.slots)
        # Padded by a real example of weight 0: a row of zeros could give NaN.
        places = np.concatenate([own, np.repeat(rows[:1], size - len(own))])
        weights = np.where(np.arange(size) < len(own), self.weights[places], 0)
        batch = jax.tree.map(lambda x: np.asarray(x[places]), self.data)
        return batch, weights.astype(self.weights.dtype), total


@lru_cache(maxsize=4)  # Each step asks several times for that of its epoch.
def _order(sampler: Sampler, epoch: int) -> np.ndarray:
    return sampler.order(epoch)


@dataclass(slots=True)
class ReplicaWork:
    """The computation of one replica, without the protocol.

    Attributes:
      programs: The compiled functions.
      batches: The batches.
      first: The state before the first step, on the device of this replica.
      device: That device; None for JAX's default.
      folder: The folder of checkpoints; None for none.
      losses: The losses of the steps that were applied here.
    """

    programs: Programs
    batches: Batches
    first: TrainState
    device: jax.Device | None
    folder: Path | None
    losses: dict[int, jax.Array] = field(default_factory=dict)
    # One thread, so that checkpoints are written in the order of their steps.
    _writer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "checkpoint")
    )

    def restore(self) -> Snapshot:
        """The last checkpoint, or the first state."""
        if self.folder is None:
            return Snapshot(0, self.first)
        with TrainCheckpoints(self.folder) as saved:
            if not saved.steps():
                return Snapshot(0, self.first)
            state = saved.restore(self.first)
        return Snapshot(int(state.step), state)

    def apply(self, state: TrainState, step: int, total: Partial) -> TrainState:
        """The state after a step, from the sum of its parts."""
        state, self.losses[step] = self.programs.stepped(state, total)
        return state

    def compute(
        self, state: TrainState, step: int, part: Part
    ) -> list[tuple[Part, Partial]]:
        """The sums of a part, each with its range of units."""
        if self.batches.slots is None:
            return [(part, self._shard_sum(state, step, part))]
        slots = [Part(slot, slot + 1) for slot in range(part.start, part.stop)]
        sums = {slot: self._shard_sum(state, step, slot) for slot in slots}
        nodes = nodes_within(part, self.batches.slots)
        return [(node, tree_sum(sums, node, self.programs.combined)) for node in nodes]

    def total(self, sums: Mapping[Part, Partial]) -> Partial:
        """The sum of all parts of a step."""
        if self.batches.slots is not None:
            whole = Part(0, self.batches.slots)
            return tree_sum(sums, whole, self.programs.combined)
        # In the order of examples, not of arrival.
        first, *others = (sums[part] for part in sorted(sums))
        for other in others:
            first = self.programs.combined(first, other)
        return first

    def save(self, step: int, state: TrainState) -> Future[None]:
        """Begins to write a checkpoint; the future is done when it is complete."""
        return self._writer.submit(self.write, step, state)

    def write(self, step: int, state: TrainState) -> None:
        """Writes a checkpoint, unless another replica has written that step or more."""
        assert self.folder is not None
        with TrainCheckpoints(self.folder) as saved:
            if step <= (saved.latest() or 0):
                return
            try:
                saved.save(state)
            except Exception:
                # Another replica that was named heir may have written it as well.
                if step > (saved.latest() or 0):
                    raise

    def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        self._writer.shutdown()

    @property
    def sum_structure(self) -> Any:
        """The structure of a sum, of which messages carry the leaves."""
        trainable, _ = split_inexact(self.first.params)
        scalar = jnp.zeros(())
        return jax.tree.structure(Partial(scalar, trainable, scalar))

    def _shard_sum(self, state: TrainState, step: int, part: Part) -> Partial:
        batch, weights, total = self.batches.shard(step, part)
        placed = jax.device_put((batch, weights, total), self.device)
        found = self.programs.shard_sum(state.params, *placed)
        # A report, for which there is a deadline, states that the result is computed.
        return jax.block_until_ready(found)


def nodes_within(part: Part, units: int) -> list[Part]:
    """The smallest set of tree nodes that make up a part, in order.

    Example:
      >>> [tuple(node) for node in nodes_within(Part(1, 6), 6)]
      [(1, 3), (3, 6)]
    """
    return list(_within(Part(0, units), part))


def _within(node: Part, part: Part) -> list[Part]:
    if part.start <= node.start and node.stop <= part.stop:
        return [node]
    if node.stop <= part.start or part.stop <= node.start:
        return []
    return [each for half in _halves(node) for each in _within(half, part)]


def tree_sum(
    values: Mapping[Part, Value], node: Part, add: Callable[[Value, Value], Value]
) -> Value:
    """The sum of a node, from values of nodes below that make it up.

    Raises:
      KeyError: They do not make it up.

    Example:
      >>> values = {Part(0, 1): "a", Part(1, 3): "(b c)"}
      >>> tree_sum(values, Part(0, 3), lambda left, right: f"({left} {right})")
      '(a (b c))'
    """
    # At a leaf the look-up raises KeyError if its value is missing.
    if node in values or node.stop - node.start == 1:
        return values[node]
    left, right = (tree_sum(values, half, add) for half in _halves(node))
    return add(left, right)


def _halves(node: Part) -> tuple[Part, Part]:
    middle = (node.start + node.stop) // 2
    return Part(node.start, middle), Part(middle, node.stop)

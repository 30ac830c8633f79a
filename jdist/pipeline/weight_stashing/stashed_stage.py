"""The weight versions and updates of one stage during an epoch."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

import jax

from jdist._tree import PyTree
from jdist.optim import Optimizer
from jdist.pipeline.run.stage_run import (
    MicroBatchShare,
    StageRun,
    UpdateInBackward,
    contribution,
    gradient_of,
)
from jdist.pipeline.weight_stashing.optimizer import StashState, WeightStashing
from jdist.reduction import Partial


class VersionRule(NamedTuple):
    """The versions that a worker of a stage uses, and how it makes new ones.

    Attributes:
      stashing: The optimizer, and the number of versions that it keeps.
      version: Maps a micro-batch to the version that it uses here.
      length: Number of micro-batches in the epoch.
      turn: Number of the first micro-batch of this worker.
      replicas: Number of workers of the stage, which take micro-batches in turn.
      in_backward: Makes the update within the backward pass, where it needs the
        gradient of that pass alone; see `update_in_backward`. None: it comes later.
    """

    stashing: WeightStashing
    version: Callable[[int], int]
    length: int
    turn: int
    replicas: int
    in_backward: Callable[..., PyTree] | None = None


@final
class StashedStage:
    """A stage on one worker, with the versions of its weights and its optimizer.

    Before each pass it loads the version that the micro-batch uses.

    Args:
      run: The passes of the stage, with version 0 of its parameters.
      rule: The versions that its micro-batches use.
      opt_state: State of its optimizer; donated by the first update.

    Attributes:
      run: The argument of the same name.
      stash: All versions that are kept, and the optimizer's state.
      grown: Number of micro-batches in the accumulated gradient.
      used: The version that each micro-batch uses whose backward pass is to come here,
        as far as versions are made.
    """

    def __init__(self, run: StageRun, rule: VersionRule, opt_state: PyTree) -> None:
        self.run = run
        # A reference and no copy, because JAX arrays are immutable.
        self.stash = StashState(0, {0: run.params}, opt_state)
        self.grown = 0
        self.used: dict[int, int] = {}
        self._rule = rule
        self._next = rule.turn  # The first micro-batch whose version is not in `used`.
        self._look_ahead()
        # In the constructor too, so that a rehearsal of the passes traces the backward
        # pass with its update.
        self._prepare()

    def arrays(self) -> PyTree:
        """All arrays of the stage at the moment, except keys."""
        return self.run.arrays(), self.stash.kept, self.stash.opt_state

    def begin_forward(self, micro: int) -> None:
        """Loads the version that a micro-batch uses."""
        self._load(self.used[micro])

    def begin_backward(self, micro: int) -> None:
        """Loads the version that the forward pass has used."""
        self._load(self.used[micro])
        self._prepare()

    def _prepare(self) -> None:
        """Makes the next backward pass include the update, if the rule has one."""
        update, stash = self._rule.in_backward, self.stash
        if update is not None:
            # The gradient is that of an older version; it updates the newest one.
            newest = self._rule.stashing.load_new_params(stash)
            self.run.update = UpdateInBackward(update, stash.opt_state, newest)

    def end_backward(self, micro: int) -> None:
        """Drops the versions that no micro-batch needs any more."""
        self.grown += 1
        # Its reference would keep the version that was updated in memory.
        self.run.update = None
        del self.used[micro]
        # An update within the pass drops them where it appends its version.
        if self._rule.in_backward is None:
            self.stash = self._rule.stashing.release(self.stash, self._needed())
            self._load(self.stash.version)

    def update(self, others: Mapping[int, Partial], rank: int) -> None:
        """Makes the next version, from the gradients of all workers of the stage.

        Args:
          others: The partials of other workers, by rank.
          rank: Rank of this worker.
        """
        if self._rule.in_backward is not None:
            self.grown = 0
            (params, opt_state), self.run.updated = self.run.updated, None
            self._append(params, opt_state)
            return
        joined = self._joined(others, rank)
        stashing = self._rule.stashing
        before = stashing.load_new_params(self.stash)
        params, opt_state = updated(
            stashing.optimizer, before, joined, self.stash.opt_state, self.run.kind
        )
        self._append(params, opt_state)

    def _joined(self, others: Mapping[int, Partial], rank: int) -> Partial:
        # The last update of an epoch may have no micro-batch of this worker.
        found = {**others, rank: self.run.partial()} if self.grown else others
        joined = self.run.joined(found)
        self.run.clear()
        self.grown = 0
        return joined

    def _append(self, params: PyTree, opt_state: PyTree) -> None:
        stashing, needed = self._rule.stashing, self._needed()
        self.stash = stashing.append(self.stash, params, opt_state, needed)
        self._load(self.stash.version)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Notes which micro-batches use the newest version."""
        while self._next < self._rule.length:
            version = self._rule.version(self._next)
            # Versions do not decrease with the micro-batch.
            if version > self.stash.version:
                return
            self.used[self._next] = version
            self._next += self._rule.replicas

    def _needed(self) -> set[int]:
        """Existing versions that a micro-batch of this worker will still use."""
        return set(self.used.values())

    def _load(self, version: int) -> None:
        self.run.params = self._rule.stashing.load_old_params(self.stash, version)


# Cached, so that equal arguments give one function: it is part of the key by which a
# compiled backward pass is found.
@functools.lru_cache(maxsize=256)
def update_in_backward(
    optimizer: Optimizer, kind: str
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Makes an update that is a part of the backward pass; see `UpdateInBackward`.

    Args:
      optimizer: The optimizer of the stage.
      kind: As for `StageRun`.
    """

    # Each gradient is used while it is in the cache: with SGD an update takes half of
    # the time of a program of its own, which reads all gradients from memory.
    def update(
        opt_state: PyTree, d_params: PyTree, given: tuple[PyTree, MicroBatchShare]
    ) -> tuple[PyTree, PyTree]:
        params, share = given
        part = contribution(kind, d_params, share)
        grads = _finished(optimizer, params, part, kind)
        return optimizer.step(params, grads, opt_state)

    return update


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def updated(
    optimizer: Optimizer, params: PyTree, part: Partial, opt_state: PyTree, kind: str
) -> tuple[PyTree, PyTree]:
    """Divides the sum of gradients and makes the optimizer's step."""
    # One program for both reads each array from memory once.
    grads = _finished(optimizer, params, part, kind)
    return optimizer.step(params, grads, opt_state)


def _finished(optimizer: Optimizer, params: PyTree, part: Partial, kind: str) -> PyTree:
    # Master weights take the gradient in the precision of the sum.
    rounded_as = params if optimizer.precision is None else part.gradient
    return gradient_of(part, kind, rounded_as)

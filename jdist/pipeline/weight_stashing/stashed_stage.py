"""The weight versions and updates of one stage during an epoch."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import final

import jax

from jdist._tree import PyTree
from jdist.optim import Optimizer
from jdist.pipeline.run.stage_run import (
    StageRun,
    UpdateInBackward,
    contribution,
    gradient_of,
)
from jdist.pipeline.weight_stashing.optimizer import StashState, WeightStashing
from jdist.reduction import Partial


@final
class StashedStage:
    """A stage on one worker, with the versions of its weights and its optimizer.

    Before each pass it loads the version that the micro-batch uses.

    Args:
      run: The passes of the stage, with version 0 of its parameters.
      stashing: The optimizer, and the number of versions that it keeps.
      used: The version that each micro-batch of this worker uses.
      opt_state: State of its optimizer; donated by the first update.
      in_backward: Makes the update within the backward pass, where it needs the
        gradient of that pass alone; see `update_in_backward`. None: it comes later.

    Attributes:
      run: The argument of the same name.
      used: The argument of the same name.
      stash: All versions that are kept, and the optimizer's state.
      grown: Number of micro-batches in the accumulated gradient.
    """

    def __init__(
        self,
        run: StageRun,
        stashing: WeightStashing,
        used: Mapping[int, int],
        opt_state: PyTree,
        in_backward: Callable[..., PyTree] | None = None,
    ) -> None:
        self.run = run
        self.used = used
        # A reference and no copy, because JAX arrays are immutable.
        self.stash = StashState(0, {0: run.params}, opt_state)
        self.grown = 0
        self._stashing = stashing
        self._in_backward = in_backward
        # By version, the number of micro-batches whose backward pass is to come.
        self._needed = Counter(used.values())
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
        """Makes the next backward pass include the update, if it is to."""
        if self._in_backward is not None:
            # The gradient is that of an older version; it updates the newest one.
            newest = self._stashing.load_new_params(self.stash)
            opt_state = self.stash.opt_state
            self.run.update = UpdateInBackward(self._in_backward, opt_state, newest)

    def end_backward(self, micro: int) -> None:
        """Drops the versions that no micro-batch needs any more."""
        self.grown += 1
        # Its reference would keep the version that was updated in memory.
        self.run.update = None
        version = self.used[micro]
        self._needed[version] -= 1
        if not self._needed[version]:
            del self._needed[version]
        # An update within the pass drops them where it appends its version.
        if self._in_backward is None:
            self.stash = self._stashing.release(self.stash, self._needed)
            self._load(self.stash.version)

    def update(self, others: Mapping[int, Partial], rank: int) -> None:
        """Makes the next version, from the gradients of all workers of the stage.

        Args:
          others: The partials of other workers, by rank.
          rank: Rank of this worker.
        """
        if self._in_backward is not None:
            (params, opt_state), self.run.updated = self.run.updated, None
        else:
            # The last update of an epoch may have no micro-batch of this worker.
            found = {**others, rank: self.run.partial()} if self.grown else others
            joined = self.run.joined(found)
            self.run.clear()
            optimizer, kind = self._stashing.optimizer, self.run.kind
            before = self._stashing.load_new_params(self.stash)
            opt_state = self.stash.opt_state
            params, opt_state = updated(optimizer, before, joined, opt_state, kind)
        self.grown = 0
        self.stash = self._stashing.append(self.stash, params, opt_state, self._needed)
        self._load(self.stash.version)

    def _load(self, version: int) -> None:
        self.run.params = self._stashing.load_old_params(self.stash, version)


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
        opt_state: PyTree, d_params: PyTree, given: tuple[PyTree, Partial]
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

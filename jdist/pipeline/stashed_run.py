"""One stage on one worker during an epoch: passes with versions, and its updates."""

import functools
from collections import deque
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._tree import wide_dtype
from jdist.optim import Optimizer
from jdist.pipeline.stage_run import Share, StageRun, added
from jdist.pipeline.weight_stashing import StashState, WeightStashing
from jdist.reduction import Partial


class Rule(NamedTuple):
    """Which versions a worker of a stage uses, and how it makes new ones.

    Attributes:
      stashing: The optimizer, and how many versions it keeps.
      versions: The version that each micro-batch meets here; -1 for those of others.
      consistent: Whether a backward pass uses what its forward pass used. Otherwise it
        takes the newest weights with the other's activations, which is no gradient.
      scaled: Whether what comes back is of a micro-batch's mean, times a loss scale,
        which the optimizer takes off.
      single: Whether each update is made of a single micro-batch of this worker.
    """

    stashing: WeightStashing
    versions: np.ndarray
    consistent: bool
    scaled: bool = False
    single: bool = False


class StashedRun(StageRun):
    """The passes of one stage, each with its version of the weights.

    Args:
      plain: The stage on its worker, with version 0 of its parameters.
      rule: Which version when.
      opt_state: Of its optimizer; donated by the first update.

    Attributes:
      stash: All versions that are kept, and the optimizer's state.
      grown: Micro-batches in the gradient so far.
      used: By micro-batch under way, the version that its last pass has used.
    """

    def __init__(self, plain: StageRun, rule: Rule, opt_state: Any) -> None:
        made_of = plain._stage, plain._compiled, plain.params, plain.state
        super().__init__(*made_of, plain._key, plain._kind, rule.single)
        self.stash = StashState(0, {0: plain.params}, opt_state)
        self.grown = 0
        self.used: dict[int, int] = {}
        self._rule = rule
        if rule.scaled:
            self._add = _weighted
        self._to_come = deque(np.flatnonzero(rule.versions >= 0).tolist())

    def arrays(self) -> Any:
        """See `StageRun`; and all versions."""
        return super().arrays(), self.stash.kept, self.stash.opt_state

    def forward(self, micro: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """See `StageRun`."""
        self.used[micro] = int(self._rule.versions[micro])
        self._load(self.used[micro])
        return super().forward(micro, inputs)

    def backward(
        self, micro: int, cotangents: Mapping[str, Any], share: Share, split: bool
    ) -> dict[str, Any]:
        """See `StageRun`. Versions that nobody needs any more are forgotten."""
        newest = self.stash.version
        if not self._rule.consistent:
            self.used[micro] = newest
            residuals = self._residuals[micro]
            # Taken apart and put together, they do not know whose they are.
            self._residuals[micro] = jax.tree.map(lambda x: x, residuals)
        self._load(self.used[micro])
        d_inputs = super().backward(micro, cotangents, share, split)
        self.grown += 1
        self._to_come.popleft()
        self.stash = self._rule.stashing.release(self.stash, self._needed())
        self._load(newest)
        return d_inputs

    def update(self, others: Mapping[int, Partial], rank: int) -> None:
        """The next version, from the gradients of all workers of the stage.

        Args:
          others: What other workers found, by rank.
          rank: This worker's.
        """
        found = {**others, rank: self.partial()} if self.grown else others
        joined = self.joined(found)
        self.clear()
        self.grown = 0
        stashing = self._rule.stashing
        before = stashing.load_new_params(self.stash)
        params, opt_state = _updated(
            stashing.optimizer, before, joined, self.stash.opt_state, self._kind
        )
        self.stash = stashing.append(self.stash, params, opt_state, self._needed())
        self._load(self.stash.version)

    def _needed(self) -> set[int]:
        """Versions that are there, and that some micro-batch will still use."""
        if not self._rule.consistent:
            return set()
        coming = (int(self._rule.versions[micro]) for micro in self._to_come)
        # They do not decrease: what comes later needs versions that come later.
        return set(takewhile(lambda version: version <= self.stash.version, coming))

    def _load(self, version: int) -> None:
        self.params = self._rule.stashing.load_old_params(self.stash, version)


def _weighted(so_far: Partial | None, d_params: Any, share: Share) -> Partial:
    """The gradient with that of another micro-batch's mean, times what it weighs.

    In full precision: 16 bits hold a mean times the scale, but not any sum.
    """

    def of_sum(mean: jax.Array) -> jax.Array:
        wide = mean.astype(wide_dtype(mean.dtype))
        return wide * jnp.asarray(share.weight, wide.dtype)

    return added("mean", so_far, jax.tree.map(of_sum, d_params), share)


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def _updated(
    optimizer: Optimizer, params: Any, part: Partial, opt_state: Any, kind: str
) -> tuple[Any, Any]:
    """The division and the step in one: each array is read once."""
    rounded_as = params if optimizer.precision is None else part.gradient
    grads = reduction.finish(part, kind, rounded_as)[1]
    return optimizer.step(params, grads, opt_state)

"""Weight stashing: an optimizer that keeps numbered versions of the weights.

A stage of an asynchronous pipeline updates its weights while micro-batches are in
flight, and their backward passes need the weights of their forward passes. JAX arrays
are immutable, so that a version is a reference and not a copy: k versions take at most
k times the memory of the weights.

Version v is the result of v updates of the initial weights. There is no version below
0: a request for one returns w(0), as in the first steps of the published rule.

    stash = with_weight_stashing(optim.adam(), versions=3)
    state = stash.init(params)
    old = stash.load_old_params(state)          weights of the oldest micro-batch
    state = stash.step(grads, state)            appends a version, drops the oldest
    new = stash.load_new_params(state)
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdist._errors import requirement
from jdist._tree import PyTree, owned
from jdist.optim import Optimizer
from jdist.optim.internal import check_optimizer, started
from jdist.pipeline.schedule.actions import check_counts


class StashState(NamedTuple):
    """The kept versions of the weights, and the state of the optimizer.

    Attributes:
      version: Number of the newest version.
      kept: The versions by number, including the newest.
      opt_state: The state of the optimizer after the newest version.
    """

    version: int
    kept: dict[int, PyTree]
    opt_state: PyTree


@dataclass(frozen=True, slots=True)
class WeightStashing:
    """An optimizer that keeps versions of the weights; see `with_weight_stashing`.

    Attributes:
      optimizer: The optimizer.
      versions: The largest number of versions kept.
    """

    optimizer: Optimizer
    versions: int

    def init(self, params: PyTree) -> StashState:
        """The state of version 0, which refers to arrays of JAX and copies NumPy's.

        Parameters in full precision: with masters the versions are compute copies.
        """
        params, opt_state = started(self.optimizer, owned(params))
        return StashState(0, {0: params}, opt_state)

    def load_new_params(self, state: StashState) -> PyTree:
        """The newest version, for forward passes and the next update."""
        return state.kept[state.version]

    def load_old_params(self, state: StashState, version: int | None = None) -> PyTree:
        """An older version, for a backward pass.

        Args:
          state: The return value of `init` or of the last step.
          version: Its number; below 0 it is w(0). None: `versions` - 1 updates before
            the newest, for a stage that runs as many micro-batches ahead and updates
            after each of them.

        Raises:
          ValueError: It is not kept any more, or not made yet.
        """
        if version is None:
            version = state.version - self.versions + 1
        # Early micro-batches would use versions from before the first update.
        version = max(version, 0)
        if version not in state.kept:
            rule = f"must be one of {sorted(state.kept)}, which are kept"
            remedy = "Keep more versions, if a micro-batch under way still needs it."
            call = "load_old_params(version=...)"
            raise ValueError(requirement(call, rule, version, remedy))
        return state.kept[version]

    def step(self, grads: PyTree, state: StashState, **overrides: Any) -> StashState:
        """Updates the newest version, which makes another one.

        The state of the optimizer is donated, and no version is. Of more than
        `versions` the oldest is dropped.

        Args:
          grads: Tree like the parameters, with respect to any of the versions.
          state: The return value of `init` or of the last step.
          **overrides: As for `Optimizer.step`.
        """
        params, opt_state = _stepped(
            self.optimizer,
            self.load_new_params(state),
            grads,
            state.opt_state,
            overrides,
        )
        # One less than `versions`, because `append` adds the new one.
        last = range(state.version + 2 - self.versions, state.version + 1)
        return self.append(state, params, opt_state, last)

    def append(
        self,
        state: StashState,
        params: PyTree,
        opt_state: PyTree,
        needed: Collection[int],
    ) -> StashState:
        """Appends a version that was computed elsewhere as the newest.

        Args:
          state: The return value of `init` or of the last step.
          params: The weights of the version.
          opt_state: The state of the optimizer after it.
          needed: Numbers of the older versions that are still needed.

        Raises:
          ValueError: With the new one these are more than `versions`.
        """
        kept = {v: state.kept[v] for v in state.kept if v in needed}
        if len(kept) >= self.versions:
            rule = f"must be less than the {self.versions} versions that are kept"
            raise ValueError(requirement("append(needed)", rule, sorted(kept)))
        kept[state.version + 1] = params
        return StashState(state.version + 1, kept, opt_state)

    def release(self, state: StashState, needed: Collection[int]) -> StashState:
        """Drops versions that no micro-batch needs; the newest one stays.

        Args:
          state: The return value of `init` or of the last step.
          needed: Numbers of the versions that are still needed.
        """
        newest = state.version
        kept = {v: state.kept[v] for v in state.kept if v in needed or v == newest}
        return state._replace(kept=kept)

    def drain(self, state: StashState) -> StashState:
        """Keeps the newest version only, as number 0; no micro-batch is in flight."""
        return StashState(0, {0: self.load_new_params(state)}, state.opt_state)


def with_weight_stashing(optimizer: Optimizer, versions: int) -> WeightStashing:
    """Makes an optimizer that keeps older versions of the parameters.

    A stage j of n that updates after each backward pass needs n - j versions; one that
    runs w micro-batches ahead and updates after every k-th, 1 + ceil(w / k).

    Args:
      optimizer: Any of `jdist.optim`.
      versions: The largest number of versions kept, including the newest.

    Returns:
      Pure functions on a `StashState`.

    Raises:
      TypeError: `optimizer` was not made by `jdist.optim`.
      ValueError: `versions` is no positive integer.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.3.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> stash = with_weight_stashing(optim.sgd(lr=0.5), versions=2)
      >>> state = stash.init(jnp.array(1.0))
      >>> for _ in range(3):
      ...     state = stash.step(jnp.array(1.0), state)
      >>> state.version, stash.load_new_params(state), stash.load_old_params(state)
      (3, Array(-0.5, dtype=float32), Array(0., dtype=float32))
    """
    check_optimizer("with_weight_stashing(optimizer)", optimizer)
    check_counts("with_weight_stashing", versions=versions)
    return WeightStashing(optimizer, versions)


# The state is donated and the parameters are not: a micro-batch in flight may need
# them. Optimizers compare by identity, so that each has its own program.
@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _stepped(
    optimizer: Optimizer,
    params: PyTree,
    grads: PyTree,
    opt_state: PyTree,
    overrides: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    return optimizer.step(params, grads, opt_state, **overrides)

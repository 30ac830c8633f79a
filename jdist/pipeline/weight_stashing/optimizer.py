"""Weight stashing: an optimizer that keeps numbered versions of what it updates.

A stage of an asynchronous pipeline updates while micro-batches are under way, and their
backward passes need the weights of their forward passes. JAX arrays do not change, so
that a version is a reference and not a copy: k versions cost k times the weights if all
differ, and nothing where they do not.

Version v is what v updates have made of the first weights. There is no version below 0:
a request for one gets w(0), as in the first steps of the published rule.

    stash = with_weight_stashing(optim.adam(), versions=3)
    state = stash.init(params)
    old = stash.load_old_params(state)          what the oldest micro-batch has met
    state = stash.step(grads, state)            appends a version, drops the oldest
    new = stash.load_new_params(state)
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.optim import Optimizer
from jdist.pipeline.run.update import optimizers_for
from jdist.pipeline.schedule.actions import check_counts


class StashState(NamedTuple):
    """The versions that are kept, and the state of the optimizer.

    Attributes:
      version: Number of the newest one.
      kept: The versions by number, the newest among them.
      opt_state: As the optimizer left it.
    """

    version: int
    kept: dict[int, PyTree]
    opt_state: PyTree


@dataclass(frozen=True, slots=True)
class WeightStashing:
    """An optimizer and how many versions it keeps; see `with_weight_stashing`.

    Attributes:
      optimizer: The optimizer.
      versions: How many versions are kept at most.
    """

    optimizer: Optimizer
    versions: int

    def init(self, params: PyTree) -> StashState:
        """Version 0. Refers to the parameters, and never donates them."""
        return StashState(0, {0: params}, self.optimizer.init(params))

    def load_new_params(self, state: StashState) -> PyTree:
        """The newest version: what a forward pass uses, and what a step starts from."""
        return state.kept[state.version]

    def load_old_params(self, state: StashState, version: int | None = None) -> PyTree:
        """An older version: what a backward pass uses.

        Args:
          state: What `init` or the last step returned.
          version: Its number; anything below 0 is w(0). None: `versions` - 1 updates
            before the newest, which is what a stage that runs so many micro-batches
            ahead and updates after each needs.

        Raises:
          ValueError: It is not kept any more, or not there yet.
        """
        if version is None:
            version = state.version - self.versions + 1
        version = max(version, 0)
        if version not in state.kept:
            rule = f"must be one of {sorted(state.kept)}, which are kept"
            remedy = "Keep more versions, if a micro-batch under way still needs it."
            call = "load_old_params(version=...)"
            raise ValueError(requirement(call, rule, version, remedy))
        return state.kept[version]

    def step(self, grads: PyTree, state: StashState, **overrides: Any) -> StashState:
        """An update of the newest version, which becomes another version.

        No version is donated, since a micro-batch may be using it; the optimizer's
        own state, which none uses, is. Of more than `versions` the oldest is dropped.

        Args:
          grads: Tree like the parameters, with respect to any of the versions.
          state: What `init` or the last step returned.
          **overrides: As for `Optimizer.step`.
        """
        params, opt_state = _stepped(
            self.optimizer,
            self.load_new_params(state),
            grads,
            state.opt_state,
            overrides,
        )
        # One less than `versions`: the new one is the last.
        last = range(state.version + 2 - self.versions, state.version + 1)
        return self.append(state, params, opt_state, last)

    def append(
        self,
        state: StashState,
        params: PyTree,
        opt_state: PyTree,
        needed: Collection[int],
    ) -> StashState:
        """A version that was made elsewhere becomes the newest.

        Args:
          state: What `init` or the last step returned.
          params: The version.
          opt_state: What the optimizer left.
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
        """Forgets what no micro-batch needs any more; the newest version stays.

        Args:
          state: What `init` or the last step returned.
          needed: Numbers of the versions that are still needed.
        """
        wanted = {*needed, state.version}
        kept = {v: params for v, params in state.kept.items() if v in wanted}
        return state._replace(kept=kept)

    def drain(self, state: StashState) -> StashState:
        """No micro-batch is under way: the newest version is number 0 from now on."""
        return StashState(0, {0: self.load_new_params(state)}, state.opt_state)


def with_weight_stashing(optimizer: Optimizer, versions: int) -> WeightStashing:
    """An optimizer that keeps older versions of the parameters.

    A stage j of n that updates after each backward pass needs n - j versions; one that
    runs w micro-batches ahead and updates after every k-th, 1 + ceil(w / k).

    Args:
      optimizer: Any of `jdist.optim`.
      versions: How many are kept at most, the newest included.

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
    optimizers_for([optimizer], 1, "with_weight_stashing(optimizer)")
    check_counts("with_weight_stashing", versions=versions)
    return WeightStashing(optimizer, versions)


# The state is donated and the parameters are not: a micro-batch under way may need
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

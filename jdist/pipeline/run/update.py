"""The training state and the update of each stage.

Two quantities depend on the gradients of all stages: the norm that clipping bounds, and
whether a gradient has overflowed. With a loss scale

    the last stage    multiplies the losses' cotangents by the scale,
    every stage       looks for infinities and NaN in its own gradient, and sends the
                      result to all,
    every stage       steps if none was found, else skips; and adjusts its own copy of
                      the scale by the same rule, so that all copies stay equal.

`Optimizer.step` removes the scale, in float32. Norms are those without it.
"""

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import value_error
from jdist._tree import PyTree
from jdist.optim import DynamicLossScale, Optimizer
from jdist.optim.internal import (
    all_finite,
    check_optimizer,
    check_overrides,
    loss_scaling,
    scaled,
    shrinking,
    square,
    sum_of,
)
from jdist.segment.internal import Invoke


class PipelineState(NamedTuple):
    """The training state of a pipeline; made by `Pipeline.init`.

    Every field but `step` and `key` has one entry per stage, None for stages that run
    in other processes.
    """

    step: int
    """Steps taken."""

    params: list[PyTree]
    """The parameters of each stage, on its device."""

    opt_states: list[PyTree]
    """The state of each stage's optimizer."""

    states: list[PyTree]
    """The states of stateful stages; None for the others."""

    key: jax.Array | None = None
    """The PRNG key of the whole run, which does not change, or None."""


class GradientStats(NamedTuple):
    """Statistics of one stage's gradient, or of all stages' together.

    Attributes:
      square: The sum of |g|^2, with the loss scale; None without clipping.
      finite: Whether there is no infinity and no NaN; None without a loss scale.
    """

    square: jax.Array | None
    finite: jax.Array | None


NO_STATS = GradientStats(None, None)
"""Statistics for stages whose updates do not depend on each other."""


class StepResult(NamedTuple):
    """The result of the passes of one step.

    Attributes:
      loss: The loss of the batch.
      grads: The gradient of each stage of this process; None for the others.
      stats: Statistics of all stages' gradients together, if an update needs them.
      states: The final states of this process's stateful stages.
      aux: Auxiliary outputs of the loss function; see `Metrics`.
    """

    loss: jax.Array
    grads: list[PyTree]
    stats: GradientStats
    states: list[PyTree]
    aux: PyTree = None


@final
@dataclass(eq=False, repr=False)
class StageUpdates:
    """The updates of one step, with the parameters and states that they start from.

    Args:
      optimizers: The optimizers of all stages.
      params: The parameters of each stage; None for stages of other processes.
      opt_states: The optimizer states, likewise.
      max_norm: Bound of the norm over all stages; None for no clipping.
      overrides: Values of hyperparameters for this step.
      invoke: Calls compiled functions; see `Segment.through`.

    Attributes:
      loss_scale: The loss scaling of all stages; None without one.
      unrounded: By stage, whether its gradient is for master weights, which take the
        sum unrounded.

    Raises:
      ValueError: A number breaks its rule.
      TypeError: An override is no numeric hyperparameter of one of the optimizers.
    """

    optimizers: Sequence[Optimizer]
    params: Sequence[PyTree]
    opt_states: Sequence[PyTree]
    max_norm: float | None
    overrides: Mapping[str, PyTree]
    invoke: Invoke = operator.call

    def __post_init__(self) -> None:
        """Checks the optimizers and the overrides."""
        self.loss_scale = loss_scale_of(self.optimizers)
        self.unrounded = [one.precision is not None for one in self.optimizers]
        # Checked before any stage computes, so that all of them refuse, or none.
        for one in self.optimizers if self.overrides else ():
            check_overrides(f"{one.name}.step", one.hyperparameters, self.overrides)
        # On the host: an array on one stage's device could not enter the update of
        # another stage, on another device.
        self.overrides = {
            name: np.asarray(number) if isinstance(number, jax.Array) else number
            for name, number in self.overrides.items()
        }

    def through(self, invoke: Invoke) -> "StageUpdates":
        """A copy that calls compiled functions through another function.

        Args:
          invoke: See `Segment.through`.
        """
        made = copy.copy(self)
        made.invoke = invoke
        return made

    @property
    def together(self) -> bool:
        """Whether an update depends on the gradients of other stages."""
        return self.max_norm is not None or self.loss_scale is not None

    def stats(self, stage: int, grads: PyTree, counted: PyTree) -> GradientStats:
        """The statistics of one stage's gradient, for all stages.

        Args:
          stage: Number of the stage.
          grads: Its gradient.
          counted: The leaves of it that count for the norm.
        """
        return GradientStats(
            None if self.max_norm is None else self.invoke(square_of, counted),
            None
            if self.loss_scale is None
            else self.invoke(
                _all_finite, self.params[stage], grads, self.opt_states[stage]
            ),
        )

    def check(self, stage: int, grads: PyTree, stats: GradientStats) -> None:
        """Traces one stage's step, so that it refuses before any stage has stepped.

        Args:
          stage: Number of the stage.
          grads: Its gradient.
          stats: Statistics of any stage, of which only shapes and dtypes matter.

        Raises: what `Optimizer.step` raises.
        """
        # JAX finds the trace again, in the next step and in the update itself.
        _update.trace(*self._given(stage, grads, stats))

    def apply(
        self, stage: int, grads: PyTree, stats: GradientStats
    ) -> tuple[PyTree, PyTree, jax.Array | None]:
        """One stage's step; its parameters and the optimizer's state are donated.

        Args:
          stage: Number of the stage.
          grads: Its gradient.
          stats: Statistics of all stages together, on the stage's device.

        Returns:
          The parameters, the optimizer's state, and the norm without the loss scale.
        """
        found: tuple[PyTree, PyTree, jax.Array | None]
        found = self.invoke(_update, *self._given(stage, grads, stats))
        return found

    def _given(
        self, stage: int, grads: PyTree, stats: GradientStats
    ) -> tuple[PyTree, ...]:
        """The arguments of `_update`."""
        return (
            self.optimizers[stage],
            self.params[stage],
            grads,
            self.opt_states[stage],
            stats,
            self.max_norm,
            self.overrides,
        )


def optimizers_for(
    optimizer: Optimizer | Sequence[Optimizer] | None, stages: int
) -> list[Optimizer]:
    """One optimizer for each stage.

    Raises:
      ValueError: None was given, or not one for each stage.
      TypeError: Something is no optimizer.
    """
    call = "Pipeline(optimizer=...)"
    if optimizer is None:
        raise value_error(call, "must be given for training", "None")
    found: list[PyTree] = [optimizer] * stages
    # An optax transformation is a tuple of two functions, not a sequence of optimizers.
    if isinstance(optimizer, tuple | list) and not hasattr(optimizer, "update"):
        found = list(optimizer)
    if len(found) != stages:
        rule = f"must be one optimizer, or one for each of the {stages} stages"
        raise value_error(call, rule, f"{len(found)} of them")
    for one in found:
        check_optimizer(call, one)
    return found


def loss_scale_of(optimizers: Sequence[Optimizer]) -> DynamicLossScale | None:
    """The loss scaling of all stages; None without one.

    Raises:
      ValueError: It is not the same in all stages.
    """
    found = list(map(loss_scaling, optimizers))
    # Cotangents of the scaled loss reach all stages, so that each has to divide by it.
    if any(scale != found[0] for scale in found):
        rule = "must scale the loss in all stages alike, or in none"
        remedy = "Give every stage with_master_weights(..., loss_scale=...) of one "
        remedy += "scale; its compute_dtype may differ, and may be float32."
        raise value_error("Pipeline(optimizer=...)", rule, found, remedy)
    return found[0]


def static_loss_scale_of(optimizers: Sequence[Optimizer]) -> DynamicLossScale | None:
    """The loss scaling of stages that skip updates on their own: a constant one.

    Raises:
      ValueError: What `loss_scale_of` raises; the scale follows overflows.
    """
    found = loss_scale_of(optimizers)
    # Stages that skip different updates would adjust their copies differently.
    if found is not None and (found.growth_factor, found.backoff_factor) != (1, 1):
        rule = "must scale the loss by a constant: each stage skips its own updates, "
        rule += "so that copies of a scale that follows overflows would part"
        remedy = "Give a number, loss_scale=1024.0 for example; or a synchronous "
        remedy += "schedule, whose stages skip together."
        raise value_error("Pipeline(optimizer=...)", rule, found, remedy)
    return found


def scale_in(opt_states: Sequence[PyTree]) -> PyTree:
    """The loss scale; 1 where the last stage is in another process."""
    last = opt_states[-1]
    return 1.0 if last is None else last.loss_scale.scale


def skipped_in(opt_states: Sequence[PyTree]) -> list[PyTree]:
    """Number of updates that each stage has skipped; None for other processes'."""
    return [None if each is None else each.loss_scale.skipped for each in opt_states]


@jax.jit
def joined(stats: Sequence[GradientStats]) -> GradientStats:
    """The statistics of all stages together, added in the order of the stages."""
    squares = [one.square for one in stats if one.square is not None]
    flags = [one.finite for one in stats if one.finite is not None]
    return GradientStats(
        sum_of(squares) if squares else None,
        jnp.all(jnp.stack(flags)) if flags else None,
    )


@jax.jit
def square_of(grads: PyTree) -> jax.Array:
    """The sum of |g|^2 over one stage's gradient; 0 for a stage without one."""
    squares = [square(leaf) for leaf in jax.tree.leaves(grads)]
    return sum_of([jnp.zeros((), jnp.float32), *squares])


_all_finite = jax.jit(all_finite)


# Parameters and state are donated, so that a step needs no second copy of them. The
# optimizer is static: its functions decide the program.
@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def _update(
    optimizer: Optimizer,
    params: PyTree,
    grads: PyTree,
    opt_state: PyTree,
    stats: GradientStats,
    max_norm: float | None,
    overrides: dict[str, PyTree],
) -> tuple[PyTree, PyTree, jax.Array | None]:
    norm = None
    if stats.square is not None and max_norm is not None:
        norm = jnp.sqrt(stats.square)
        if optimizer.loss_factor is not None:
            # The squares are those of scaled gradients; `max_norm` bounds the norm
            # without the scale.
            norm = norm / optimizer.loss_factor(opt_state).astype(norm.dtype)
        factor = shrinking(norm, max_norm)
        grads = jax.tree.map(lambda g: scaled(g, factor), grads)
    finite = {} if stats.finite is None else {"finite": stats.finite}
    return *optimizer.step(params, grads, opt_state, **overrides, **finite), norm

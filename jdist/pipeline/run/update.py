"""The training state and its update: together where it must be, else by stage.

Two things depend on the gradients of all stages, wherever they are: the norm to which
they are clipped, and whether one of them has overflowed. With a loss scale

    the last stage    multiplies the losses' cotangents by it,
    every stage       looks for infinities and NaN in its own gradient, and tells all,
    every stage       steps if none found any, else skips; and adjusts its own copy of
                      the scale by the same rule, so that all copies stay equal.

The scale is taken off in `Optimizer.step`, in float32. Norms are those without it.
"""

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.optim import (
    DynamicLossScale,
    Optimizer,
    all_finite,
    check_optimizer,
    compute_copies,
)
from jdist.optim.internal import check_overrides, scaled, shrinking, square, sum_of
from jdist.pipeline.run.stage_channels import Transfer
from jdist.segment.internal import Invoke


class PipelineState(NamedTuple):
    """All that one step hands to the next; made by `Pipeline.init`.

    Every field but `step` and `key` has one entry per stage, None for those that run in
    other processes.
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
"""Of stages whose updates do not depend on each other."""


class StepResult(NamedTuple):
    """The result of the passes of one step.

    Attributes:
      loss: Of the batch.
      grads: Of each stage of this process; None for the others.
      stats: Of all stages' gradients together, as far as it is asked for.
      states: What stateful stages of this process were left with.
      aux: Auxiliary outputs of the loss function; see `Metrics`.
      transfers: What this process sent.
    """

    loss: jax.Array
    grads: list[PyTree]
    stats: GradientStats
    states: list[PyTree]
    aux: PyTree = None
    transfers: Sequence[Transfer] = ()


@final
class StageUpdates:
    """The updates of one step, and what they start from.

    Args:
      optimizers: Of all stages.
      params: Of each stage; None for those of other processes.
      opt_states: Likewise.
      max_norm: Of the gradient of all stages; None: it is not clipped.
      overrides: Of the optimizers' numbers, for this step.

    Attributes:
      loss_scale: How the loss is scaled, the same in all stages; None: it is not.
      unrounded: By stage, whether its gradient is for masters, which take it as it was
        added up.
      opt_states: As above.

    Raises:
      ValueError: A number breaks its rule.
      TypeError: An override is no numeric hyperparameter of one of the optimizers.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: Sequence[PyTree],
        opt_states: Sequence[PyTree],
        max_norm: float | None,
        overrides: Mapping[str, PyTree],
    ) -> None:
        self.loss_scale = loss_scale_of(optimizers)
        self.unrounded = [optimizer.precision is not None for optimizer in optimizers]
        self._optimizers = optimizers
        self._params = params
        self.opt_states = opt_states
        self._max_norm = max_norm
        self._invoke: Invoke = operator.call
        # Before any stage computes: all of them refuse, or none.
        for one in optimizers if overrides else ():
            check_overrides(f"{one.name}.step", one.hyperparameters, overrides)
        # On the host: every stage takes them to its own device.
        self._overrides = {
            name: np.asarray(number) if isinstance(number, jax.Array) else number
            for name, number in overrides.items()
        }

    def through(self, invoke: Invoke) -> "StageUpdates":
        """The same updates, whose compiled functions are called by another function.

        Args:
          invoke: See `Segment.through`.
        """
        made = copy.copy(self)
        made._invoke = invoke
        return made

    @property
    def settings(self) -> dict[str, str]:
        """This step's numbers, which must be the same on all workers."""
        return {
            name: str(np.asarray(number)) for name, number in self._overrides.items()
        }

    @property
    def together(self) -> bool:
        """Whether a stage needs to know of the others' gradients."""
        return self._max_norm is not None or self.loss_scale is not None

    @property
    def scale(self) -> PyTree:
        """The loss scale; 1 where the last stage is in another process."""
        return scale_in(self.opt_states)

    def stats(self, stage: int, grads: PyTree, counted: PyTree) -> GradientStats:
        """The statistics of one stage's gradient, for all others.

        Args:
          stage: Its number.
          grads: Its gradient.
          counted: What of it counts for the norm.
        """
        return GradientStats(
            None if self._max_norm is None else self._invoke(square_of, counted),
            None
            if self.loss_scale is None
            else self._invoke(
                _all_finite, self._params[stage], grads, self.opt_states[stage]
            ),
        )

    def check(
        self, stage: int, grads: PyTree, stats: GradientStats, known: set[Any]
    ) -> None:
        """Traces one stage's step, so that it refuses before any stage has stepped.

        Args:
          stage: Its number.
          grads: Its gradient.
          stats: Of all stages together, or of one: its numbers do not matter.
          known: Of which steps that is known; grows.

        Raises: what `Optimizer.step` raises.
        """
        given = self._given(stage, grads, stats)
        leaves, structure = jax.tree.flatten(given[1:])
        kinds = tuple([(np.shape(x), str(jnp.result_type(x))) for x in leaves])
        step = given[0], structure, kinds
        # Tracing costs milliseconds, and shapes are the same in almost every step.
        if step not in known:
            _update.trace(*given)
            known.add(step)

    def apply(
        self, stage: int, grads: PyTree, stats: GradientStats
    ) -> tuple[PyTree, PyTree, jax.Array | None]:
        """One stage's step; its parameters and the optimizer's state are donated.

        Args:
          stage: Its number.
          grads: Its gradient.
          stats: Of all stages together, on the stage's device.

        Returns:
          The parameters, the optimizer's state, and the norm without the loss scale.
        """
        found: tuple[PyTree, PyTree, jax.Array | None]
        found = self._invoke(_update, *self._given(stage, grads, stats))
        return found

    def _given(
        self, stage: int, grads: PyTree, stats: GradientStats
    ) -> tuple[PyTree, ...]:
        """The arguments of `_update`."""
        return (
            self._optimizers[stage],
            self._params[stage],
            grads,
            self.opt_states[stage],
            stats,
            self._max_norm,
            self._overrides,
        )


def optimizers_for(
    optimizer: Optimizer | Sequence[Optimizer] | None,
    stages: int,
    call: str = "Pipeline(optimizer=...)",
) -> list[Optimizer]:
    """One optimizer for each stage; `call` is named in errors.

    Raises:
      ValueError: None was given, or not one for each stage.
      TypeError: Something is no optimizer.
    """
    if optimizer is None:
        rule = "must be given for training"
        raise ValueError(requirement(call, rule, "None"))
    found: list[PyTree] = [optimizer] * stages
    # An optax transformation is a tuple, of two functions.
    if isinstance(optimizer, Sequence) and not hasattr(optimizer, "update"):
        found = list(optimizer)
    else:
        check_optimizer(call, optimizer)
    if len(found) != stages:
        rule = f"must be one optimizer, or one for each of the {stages} stages"
        raise ValueError(requirement(call, rule, f"{len(found)} of them"))
    for one in found:
        check_optimizer(call, one)
    return found


def started(optimizer: Optimizer, params: PyTree) -> tuple[PyTree, PyTree]:
    """One stage's parameters as they are computed with, and its optimizer's state.

    Args:
      optimizer: Of the stage.
      params: In full precision; they become compute copies if there are masters.
    """
    opt_state = optimizer.init(params)
    if optimizer.precision is not None:
        params = compute_copies(params, optimizer.precision.compute_dtype)
    return params, opt_state


def loss_scale_of(optimizers: Sequence[Optimizer]) -> DynamicLossScale | None:
    """How the loss is scaled; None where it is not.

    Raises:
      ValueError: Differently in different stages: cotangents of a scaled loss reach
        all of them.
    """
    precisions = [optimizer.precision for optimizer in optimizers]
    found = [None if p is None else p.loss_scale for p in precisions]
    if any(scale != found[0] for scale in found):
        rule = "must scale the loss in all stages alike, or in none"
        remedy = "Give every stage with_master_weights(..., loss_scale=...) of one "
        remedy += "scale; its compute_dtype may differ, and may be float32."
        call = "Pipeline(optimizer=...)"
        raise ValueError(requirement(call, rule, found, remedy))
    return found[0]


def static_loss_scale_of(optimizers: Sequence[Optimizer]) -> DynamicLossScale | None:
    """The same where each stage skips by itself, so that copies of a scale would part.

    Raises:
      ValueError: What `loss_scale_of` raises; the scale follows overflows.
    """
    found = loss_scale_of(optimizers)
    if found is not None and (found.growth_factor, found.backoff_factor) != (1, 1):
        rule = "must scale the loss by a constant: each stage skips its own updates, "
        rule += "so that copies of a scale that follows overflows would part"
        remedy = "Give a number, loss_scale=1024.0 for example; or a synchronous "
        remedy += "schedule, whose stages skip together."
        call = "Pipeline(optimizer=...)"
        raise ValueError(requirement(call, rule, found, remedy))
    return found


def scale_in(opt_states: Sequence[PyTree]) -> PyTree:
    """The loss scale; 1 where the last stage is in another process."""
    last = opt_states[-1]
    return 1.0 if last is None else last.loss_scale.scale


def skipped_in(opt_states: Sequence[PyTree]) -> list[PyTree]:
    """How many updates each stage has skipped in all; None for stages elsewhere."""
    return [None if each is None else each.loss_scale.skipped for each in opt_states]


@jax.jit
def joined(stats: Sequence[GradientStats]) -> GradientStats:
    """Of all stages together; squares are added in the order of the stages."""
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


sum_of_squares = jax.jit(sum_of)
"""Of all stages, in order."""


_all_finite = jax.jit(all_finite)


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
            # The squares are of scaled gradients; the limit is for those without the
            # scale.
            norm = norm / optimizer.loss_factor(opt_state).astype(norm.dtype)
        factor = shrinking(norm, max_norm)
        grads = jax.tree.map(lambda g: scaled(g, factor), grads)
    finite = {} if stats.finite is None else {"finite": stats.finite}
    return *optimizer.step(params, grads, opt_state, **overrides, **finite), norm

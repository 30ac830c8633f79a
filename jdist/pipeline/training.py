"""What a pipeline's training step hands to the next, and how its stages are updated."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist.optim import Optimizer
from jdist.optim.clipping import scaled, shrinking, square, sum_of


class PipelineState(NamedTuple):
    """All that one step hands to the next; made by `Pipeline.init`.

    Every field but `step` and `key` has one entry per stage, None for those that run in
    other processes.
    """

    step: int
    """Steps taken."""

    params: list[Any]
    """The parameters of each stage, on its device."""

    opt_states: list[Any]
    """The state of each stage's optimizer."""

    states: list[Any]
    """What stateful stages keep; None for the others."""

    key: Any = None
    """The PRNG key of the whole run, which does not change, or None."""


class Metrics(NamedTuple):
    """What a step found out, before it moved the parameters."""

    loss: jax.Array
    """The whole batch's loss, scalar, the same on every worker."""

    grad_norm: jax.Array | None = None
    """Norm of the gradient over all stages before clipping; None without clipping."""


class Found(NamedTuple):
    """What the passes of one step have found.

    Attributes:
      loss: Of the batch.
      grads: Of each stage of this process; None for the others.
      norm: Of all stages' gradients together, if it is asked for.
      states: What stateful stages of this process were left with.
    """

    loss: jax.Array
    grads: list[Any]
    norm: jax.Array | None
    states: list[Any]


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
        rule = "must be given for training"
        raise ValueError(requirement(call, rule, "None"))
    found = (
        [optimizer] * stages if isinstance(optimizer, Optimizer) else list(optimizer)
    )
    if len(found) != stages:
        rule = f"must be one optimizer, or one for each of the {stages} stages"
        raise ValueError(requirement(call, rule, f"{len(found)} of them"))
    strangers = [type(one).__name__ for one in found if not isinstance(one, Optimizer)]
    if strangers:
        rule = "must be made by jdist.optim"
        raise TypeError(requirement(call, rule, f"a {strangers[0]}"))
    return found


@jax.jit
def square_of(grads: Any) -> jax.Array:
    """The sum of |g|^2 over one stage's gradient; 0 for a stage without one."""
    squares = [square(leaf) for leaf in jax.tree.leaves(grads)]
    return sum_of([jnp.zeros((), jnp.float32), *squares])


@jax.jit
def norm_of(squares: Sequence[jax.Array]) -> jax.Array:
    """The norm over all stages, their squares added in the order of the stages."""
    return jnp.sqrt(sum_of(squares))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def update(
    optimizer: Optimizer,
    params: Any,
    grads: Any,
    opt_state: Any,
    clipping: tuple[jax.Array, float] | None,
) -> tuple[Any, Any]:
    """One stage's step, after clipping by the norm over all stages.

    The parameters and the optimizer's state are donated: nothing is in flight any more.
    """
    if clipping is not None:
        factor = shrinking(*clipping)
        grads = jax.tree.map(lambda g: scaled(g, factor), grads)
    return optimizer.step(params, grads, opt_state)

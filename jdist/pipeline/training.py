"""What a pipeline's training step hands to the next, and how its stages are updated."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist._tree import is_none, wide_dtype
from jdist.optim import Optimizer
from jdist.optim.clipping import TORCH_EPS


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
def square(grads: Any) -> jax.Array:
    """The sum of the squares of all elements, in float32 or wider."""
    leaves = [g.astype(wide_dtype(g.dtype)) for g in jax.tree.leaves(grads)]
    squares = [jnp.sum(jnp.real(g * jnp.conj(g))) for g in leaves]
    widest = max([s.dtype for s in squares] + [jnp.dtype(jnp.float32)], key=_width)
    return sum((s.astype(widest) for s in squares), jnp.zeros((), widest))


def _width(dtype: Any) -> int:
    return int(dtype.itemsize)


@jax.jit
def norm_of(squares: Sequence[jax.Array]) -> jax.Array:
    """The norm over all stages, their squares added in the order of the stages."""
    widest = max([s.dtype for s in squares], key=_width)
    total = sum((s.astype(widest) for s in squares), jnp.zeros((), widest))
    return jnp.sqrt(total)


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
        norm, max_norm = clipping
        factor = jnp.minimum(max_norm / (norm + TORCH_EPS), 1)
        grads = jax.tree.map(
            lambda g: None if g is None else g * factor.astype(g.real.dtype),
            grads,
            is_leaf=is_none,
        )
    return optimizer.step(params, grads, opt_state)

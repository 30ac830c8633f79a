"""Adagrad: each coordinate divided by the root of the sum of its squared gradients.

g   <- -g                       if maximize
g   <- g + weight_decay * p
s   <- s + g^2                  from initial_accumulator_value
p   <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import (
    AT_LEAST_0,
    NotNegative,
    check_scalar,
    known_zero,
    scheduled,
)
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import counted, penalized
from jdist.optim.registry import LeafRule, constructor


class AdagradState(NamedTuple):
    """State of one parameter."""

    step: jax.Array | None
    """Steps taken with a gradient, int32 scalar. None where nothing reads it: without
    a schedule, and with an lr_decay of 0."""

    sum: jax.Array
    """Sum of squared gradients; shape and dtype of the parameter."""


@constructor("Adagrad")
def adagrad(
    *,
    lr: NotNegative = 1e-2,
    lr_decay: NotNegative = 0.0,
    weight_decay: NotNegative = 0.0,
    initial_accumulator_value: NotNegative = 0.0,
    eps: NotNegative = 1e-10,
    maximize: bool = False,
) -> LeafRule:
    """Adagrad, as `torch.optim.Adagrad` and `_FunctionalAdagrad`.

    torch's functional class fails when a gradient is None; here, as everywhere, that
    parameter is skipped. Its warm-up arguments, which it never uses, are left out.

    Args:
      lr: Learning rate, at least 0.
      lr_decay: At least 0; the rate falls as 1 / (1 + (t - 1) * lr_decay). With a plain
        0 and no schedule no steps are counted, and no step can override it.
      weight_decay: L2 penalty, at least 0.
      initial_accumulator_value: Initial value of the sum, at least 0. Only `init` uses
        it, so it cannot be a schedule or be overridden. Both parts of a complex
        parameter start with it.
      eps: At least 0; added outside the square root.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, or a flag not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adagrad(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))[0]
      Array([0.9, 2.1], dtype=float32)

    References:
      `torch.optim.adagrad._single_tensor_adagrad`, torch 2.13; Duchi et al., Adaptive
      subgradient methods, JMLR 12, 2011.
    """

    argument = "adagrad(initial_accumulator_value=...)"
    check_scalar(argument, AT_LEAST_0, initial_accumulator_value)
    # A count is one more array in and out of a step for each leaf.
    counts = not known_zero(lr_decay) or scheduled(lr, weight_decay, eps)

    def init_leaf(param: jax.Array) -> AdagradState:
        start = jnp.asarray(initial_accumulator_value, param.dtype)
        return AdagradState(
            count_zero() if counts else None, jnp.full_like(param, start)
        )

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: AdagradState, h: SimpleNamespace
    ) -> tuple[Update, AdagradState]:
        grad = penalized(param, grad, h)
        total = state.sum + grad * grad
        size = h.lr
        if state.step is not None:
            # The count before this step: the first step has the undecayed rate.
            size = h.lr / (1 + state.step.astype(param.dtype) * h.lr_decay)
        delta = -size * (grad / (jnp.sqrt(total) + h.eps))
        return Update(delta), AdagradState(counted(state.step), total)

    fixed = {"initial_accumulator_value": "only `init` uses it"}
    if not counts:
        fixed["lr_decay"] = "built with lr_decay 0, it counts no steps"
    return LeafRule(init_leaf, step_leaf, fixed=fixed)

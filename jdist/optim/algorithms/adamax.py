"""Adamax: Adam with the infinity norm of past gradients in place of the second moment.

g   <- -g                                 if maximize
g   <- g + weight_decay * p
m   <- beta1 * m + (1 - beta1) * g
u   <- max(beta2 * u, |g| + eps)          eps here, none in the division
p   <- p - lr / (1 - beta1^t) * m / u
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import Betas, NotNegative
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import average, one_minus_power, penalized
from jdist.optim.registry import LeafRule, constructor


class AdamaxState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    exp_avg: jax.Array
    """Moving average of the gradient, m."""

    exp_inf: jax.Array
    """Decaying maximum of its magnitude, u."""


@constructor("Adamax")
def adamax(
    *,
    lr: NotNegative = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    maximize: bool = False,
) -> LeafRule:
    """Adamax, as `torch.optim.Adamax` and `_FunctionalAdamax`.

    Args:
      lr: Learning rate, at least 0. (torch's functional class has 1e-3, like this;
        `torch.optim.Adamax` has 2e-3.)
      betas: Decays of the average and of the maximum, in [0, 1).
      eps: At least 0; added to the magnitude of the gradient.
      weight_decay: L2 penalty, at least 0.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, `betas` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adamax(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))[0]
      Array([0.9, 2.1], dtype=float32)

    References:
      `torch.optim.adamax._single_tensor_adamax`, torch 2.13; Kingma and Ba, Adam, ICLR
      2015, algorithm 2.
    """

    # Two arrays of zeros, because a buffer can be donated once.
    def init_leaf(param: jax.Array) -> AdamaxState:
        return AdamaxState(count_zero(), jnp.zeros_like(param), jnp.zeros_like(param))

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: AdamaxState, h: SimpleNamespace
    ) -> tuple[Update, AdamaxState]:
        grad = penalized(param, grad, h)
        beta1, beta2 = h.betas
        step = state.step + 1
        m = average(state.exp_avg, grad, beta1)
        # eps inside the maximum, as in torch, keeps the divisor above 0.
        peak = jnp.maximum(beta2 * state.exp_inf, jnp.abs(grad) + h.eps)
        # A maximum needs no bias correction; the average does.
        size = h.lr / one_minus_power(beta1, step.astype(param.dtype))
        return Update(-size * (m / peak)), AdamaxState(step, m, peak)

    return LeafRule(init_leaf, step_leaf)

"""RMSprop, plain and centered, with momentum, as torch computes it.

    g   <- -g                                         if maximize
    g   <- g + weight_decay * p
    s   <- alpha * s + (1 - alpha) * g^2
    a   <- alpha * a + (1 - alpha) * g                if centered
    q   =  sqrt(s - a^2) if centered, else sqrt(s)
    b   <- momentum * b + g / (q + eps)               with momentum
    p   <- p - lr * b                                 lr after the buffer
           p - lr * g / (q + eps)                     without

eps is *outside* the root; `optax.rmsprop` has it inside by default. s - a^2 is a
variance, but the difference of rounded numbers can be negative, which makes the
parameter NaN, as in torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import NotNegative, known_zero, scheduled
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import (
    average,
    average_square,
    counted,
    penalized,
)
from jdist.optim.registry import LeafRule, constructor


class RMSpropState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype."""

    step: jax.Array | None
    """Steps taken with a gradient, int32 scalar. None without a schedule: nothing else
    reads it."""

    square_avg: jax.Array
    """Moving average of the squared gradient."""

    grad_avg: jax.Array | None
    """Moving average of the gradient; None unless centered."""

    momentum_buffer: jax.Array | None
    """None when built with momentum 0."""


@constructor("RMSprop")
def rmsprop(
    *,
    lr: NotNegative = 1e-2,
    alpha: NotNegative = 0.99,
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    momentum: NotNegative = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> LeafRule:
    """RMSprop, as `torch.optim.RMSprop` and `_FunctionalRMSprop`.

    Args:
      lr: Learning rate, at least 0.
      alpha: Decay of the averages, at least 0. (torch sets no upper bound.)
      eps: At least 0; added outside the square root.
      weight_decay: L2 penalty, at least 0.
      momentum: At least 0. With a plain 0 no buffer is kept, and no step can override
        it.
      centered: Divide by the standard deviation instead of the root mean square.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, or a flag not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = rmsprop(lr=0.05)
      >>> params = jnp.array([1.0, 2.0])
      >>> new, _ = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> [f"{p:.4f}" for p in new]
      ['0.5000', '2.5000']

    References:
      `torch.optim.rmsprop._single_tensor_rmsprop`, torch 2.13; Hinton, Neural networks
      for machine learning, lecture 6e; Graves, arXiv:1308.0850, equations 38 to 45.
    """
    # As in torch: an unused buffer would take the memory of a parameter.
    has_buffer = not known_zero(momentum)
    # A count is one more array in and out of a step for each leaf.
    counts = scheduled(lr, alpha, eps, weight_decay, momentum)

    def init_leaf(param: jax.Array) -> RMSpropState:
        return RMSpropState(
            count_zero() if counts else None,
            jnp.zeros_like(param),
            jnp.zeros_like(param) if centered else None,
            jnp.zeros_like(param) if has_buffer else None,
        )

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: RMSpropState, h: SimpleNamespace
    ) -> tuple[Update, RMSpropState]:
        grad = penalized(param, grad, h)
        square = average_square(state.square_avg, grad, h.alpha)
        mean, variance = None, square
        if state.grad_avg is not None:
            mean = average(state.grad_avg, grad, h.alpha)
            variance = square - mean * mean
        # Not clamped at 0: torch returns NaN for a negative variance, too.
        update = grad / (jnp.sqrt(variance) + h.eps)
        buffer = state.momentum_buffer
        if buffer is not None:
            # lr is applied after the buffer, so that an override scales old gradients
            # too.
            update = buffer = h.momentum * buffer + update
        return Update(-h.lr * update), RMSpropState(
            counted(state.step), square, mean, buffer
        )

    fixed = {}
    if not has_buffer:
        fixed["momentum"] = "built with momentum 0, it keeps no buffer"
    return LeafRule(init_leaf, step_leaf, fixed=fixed)

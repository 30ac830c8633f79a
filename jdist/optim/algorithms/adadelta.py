"""Adadelta: steps scaled by the ratio of past steps to past gradients, in RMS.

g   <- -g                                         if maximize
g   <- g + weight_decay * p
s   <- rho * s + (1 - rho) * g^2
d   =  sqrt(a + eps) / sqrt(s + eps) * g          with a from before this step
a   <- rho * a + (1 - rho) * d^2                  of d before lr
p   <- p - lr * d
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import UP_TO_1, NotNegative, Number, scheduled
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import average_square, counted, penalized
from jdist.optim.registry import LeafRule, constructor


class AdadeltaState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype."""

    step: jax.Array | None
    """Steps taken with a gradient, int32 scalar. None without a schedule: nothing else
    reads it."""

    square_avg: jax.Array
    """Moving average of the squared gradient."""

    acc_delta: jax.Array
    """Moving average of the squared step, before lr."""


@constructor("Adadelta")
def adadelta(
    *,
    lr: NotNegative = 1.0,
    rho: Annotated[Number, UP_TO_1] = 0.9,
    eps: NotNegative = 1e-6,
    weight_decay: NotNegative = 0.0,
    maximize: bool = False,
) -> LeafRule:
    """Adadelta, as `torch.optim.Adadelta` and `_FunctionalAdadelta`.

    Args:
      lr: Factor of the step, at least 0.
      rho: Decay of both averages, in [0, 1].
      eps: At least 0; added inside both square roots. It determines the length of the
        first step.
      weight_decay: L2 penalty, at least 0.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, or a flag not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adadelta(eps=1e-2)
      >>> params = jnp.array([1.0, 2.0])
      >>> new, _ = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> [f"{p:.4f}" for p in new]
      ['0.6855', '2.2673']

    References:
      `torch.optim.adadelta._single_tensor_adadelta`, torch 2.13; Zeiler, Adadelta,
      arXiv:1212.5701, algorithm 1.
    """

    # A count is one more array in and out of a step for each leaf.
    counts = scheduled(lr, rho, eps, weight_decay)

    def init_leaf(param: jax.Array) -> AdadeltaState:
        step = count_zero() if counts else None
        # Two arrays of zeros: a buffer can be donated once.
        return AdadeltaState(step, jnp.zeros_like(param), jnp.zeros_like(param))

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: AdadeltaState, h: SimpleNamespace
    ) -> tuple[Update, AdadeltaState]:
        grad = penalized(param, grad, h)
        square = average_square(state.square_avg, grad, h.rho)
        # eps in both roots: at the first step acc_delta is 0 and nothing would move.
        # The barrier keeps XLA from making a product with a reciprocal root of the
        # quotient: on CPU it then wrote both roots to memory, and a large leaf took
        # more than twice as long.
        root = jax.lax.optimization_barrier(jnp.sqrt(square + h.eps))
        delta = jnp.sqrt(state.acc_delta + h.eps) / root * grad
        # Averages the step before lr, so that an override of lr changes no later step.
        acc_delta = average_square(state.acc_delta, delta, h.rho)
        new = AdadeltaState(counted(state.step), square, acc_delta)
        return Update(-h.lr * delta), new

    return LeafRule(init_leaf, step_leaf)

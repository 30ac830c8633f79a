"""ASGD: gradient descent with a decaying rate, and an average of its iterates.

    g    <- -g                                 if maximize
    g    <- g + weight_decay * p
    p    <- p * (1 - lambd * eta) - eta * g    eta from the step before; lr at first
    a    <- a + mu * (p - a)                   mu from the step before; 1 at first
    eta  <- lr / (1 + lambd * lr * t)^alpha
    mu   <- 1 / max(1, t - t0)

The average a, in the state, is the result of the method.

eta and mu are computed and kept in the parameter's precision, float32 at least. torch
keeps them in its *default* dtype: for float64 parameters its runs are these to rounding
only under `torch.set_default_dtype(torch.float64)`. Under its own default, float32, the
rate is rounded to float32 (`foreach=True` computes it so), and a parameter differs by
up to 6 * 2^-24 of the length of its path.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist._tree import wide_dtype
from jdist.optim._hyperparameters import NotNegative, Number
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import penalized
from jdist.optim.registry import LeafRule, constructor


class ASGDState(NamedTuple):
    """State of one parameter."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    eta: jax.Array
    """The rate of the next step: scalar, float32 or wider. 0 before the first step,
    which uses lr."""

    mu: jax.Array
    """The weight of the next iterate in the average: scalar, float32 or wider."""

    ax: jax.Array
    """The average; shape and dtype of the parameter."""


@constructor("ASGD")
def asgd(
    *,
    lr: NotNegative = 1e-2,
    lambd: Number = 1e-4,
    alpha: Number = 0.75,
    t0: Number = 1e6,
    weight_decay: NotNegative = 0.0,
    maximize: bool = False,
) -> LeafRule:
    """Averaged SGD, as `torch.optim.ASGD`. (torch has no functional class for it.)

    Args:
      lr: Learning rate of the first step, at least 0. Each step sets the rate of the
        next, so that an override or a schedule takes effect one step later, as in
        torch.
      lambd: Decay of the rate and of the parameter.
      alpha: Exponent of the decay of the rate.
      t0: Number of steps before averaging begins; until then the average equals the
        iterate.
      weight_decay: L2 penalty, at least 0.
      maximize: Ascend. Both decays still shrink the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, or a flag not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = asgd(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))[0]
      Array([0.69999, 2.04998], dtype=float32)

    References:
      `torch.optim.asgd._single_tensor_asgd`, torch 2.13; Polyak and Juditsky,
      Acceleration of stochastic approximation by averaging, SIAM J. Control 30, 1992.
    """

    def init_leaf(param: jax.Array) -> ASGDState:
        # bfloat16 has a spacing of up to 0.8 %, too coarse for a rate.
        real = wide_dtype(param.dtype)
        eta, mu = jnp.zeros((), real), jnp.ones((), real)
        return ASGDState(count_zero(), eta, mu, jnp.zeros_like(param))

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: ASGDState, h: SimpleNamespace
    ) -> tuple[Update, ASGDState]:
        grad = penalized(param, grad, h)
        # torch creates the state in the first step, with the rate of that step.
        eta = jnp.where(state.step == 0, h.lr, state.eta).astype(param.dtype)
        # As a decay, because torch multiplies first and rounds before it adds.
        update = Update(-eta * grad, decay=h.lambd * eta)
        new = update.applied(param)
        # torch copies where mu is 1, because a + (p - a) rounds.
        ax = jnp.where(state.mu == 1, new, state.ax + state.mu * (new - state.ax))
        step = state.step + 1
        t = step.astype(param.dtype)
        # For the next step, because torch updates the rate at the end of a step.
        next_eta = h.lr / (1 + h.lambd * h.lr * t) ** h.alpha
        next_mu = 1 / jnp.maximum(1, t - h.t0)
        return update, ASGDState(step, next_eta, next_mu, ax)

    return LeafRule(init_leaf, step_leaf)

"""NAdam: Adam with Nesterov momentum and torch's schedule of the momentum.

    g    <- -g                                 if maximize
    g    <- g + weight_decay * p               unless decoupled
    p    <- p * (1 - lr * weight_decay)        if decoupled
    mu   =  beta1 * (1 - 0.96^(t * momentum_decay) / 2),     mu' the same at t + 1
    M    <- M * mu                             1 before the first step
    m    <- beta1 * m + (1 - beta1) * g
    v    <- beta2 * v + (1 - beta2) * g^2
    q    =  sqrt(v / (1 - beta2^t)) + eps
    p    <- p - lr * (1 - mu) / (1 - M) * g / q - lr * mu' / (1 - M * mu') * m / q

`optax.nadam` has no such schedule and differs from the first step on.

M is kept in the parameter's precision, float32 at least. torch keeps it in its
*default* dtype: for float64 parameters its runs are these to rounding only under
`torch.set_default_dtype(torch.float64)`; under its own default, float32, they differ by
the rounding of M and of nothing else, up to 1e-7.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist._tree import wide_dtype
from jdist.optim._hyperparameters import Betas, NotNegative
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import (
    ascending,
    average,
    average_square,
    decay,
    log,
    one_minus_power,
    penalized,
)
from jdist.optim.registry import LeafRule, constructor


class NAdamState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype unless said."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    mu_product: jax.Array
    """Product of the momenta so far, M: scalar, float32 or wider."""

    exp_avg: jax.Array
    """Moving average of the gradient, m."""

    exp_avg_sq: jax.Array
    """Moving average of its square, v."""


@constructor("NAdam")
def nadam(
    *,
    lr: NotNegative = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    momentum_decay: NotNegative = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> LeafRule:
    """NAdam, as `torch.optim.NAdam`. (torch has no functional class for it.)

    Args:
      lr: Learning rate, at least 0.
      betas: Decays of the averages of the gradient and of its square, in [0, 1).
      eps: At least 0; added outside the square root.
      weight_decay: At least 0: an L2 penalty, or decoupled.
      momentum_decay: At least 0; how fast mu rises from beta1 / 2 to beta1.
      decoupled_weight_decay: Shrink the parameter instead of adding to the gradient.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, `betas` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = nadam(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> new, _ = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> [f"{p:.4f}" for p in new]
      ['0.8944', '2.1056']

    References:
      `torch.optim.nadam._single_tensor_nadam`, torch 2.13; Dozat, Incorporating
      Nesterov momentum into Adam, ICLR workshop 2016, algorithm 2.
    """

    def init_leaf(param: jax.Array) -> NAdamState:
        # A product over all steps: in 16 bits its rounding errors would add up.
        one = jnp.ones((), wide_dtype(param.dtype))
        return NAdamState(
            count_zero(), one, jnp.zeros_like(param), jnp.zeros_like(param)
        )

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: NAdamState, h: SimpleNamespace
    ) -> tuple[Update, NAdamState]:
        decoupled = decoupled_weight_decay
        grad = ascending(grad, h) if decoupled else penalized(param, grad, h)
        beta1, beta2 = h.betas
        step = state.step + 1
        t = step.astype(param.dtype)
        # By the logarithm of 0.96, computed on the host in double precision: float32
        # would lose digits of it.
        mu, mu_next = (
            beta1 * (1 - 0.5 * jnp.exp(count * h.momentum_decay * log(0.96)))
            for count in (t, t + 1)
        )
        product = state.mu_product * mu
        m = average(state.exp_avg, grad, beta1)
        v = average_square(state.exp_avg_sq, grad, beta2)
        of_grad = h.lr * (1 - mu) / (1 - product)
        of_m = h.lr * mu_next / (1 - product * mu_next)
        denominator = jnp.sqrt(v / one_minus_power(beta2, t)) + h.eps
        # One division per element instead of torch's two: the divisors are equal.
        delta = -((of_grad * grad + of_m * m) / denominator)
        update = Update(delta, decay(h) if decoupled else 0)
        return update, NAdamState(step, product, m, v)

    return LeafRule(init_leaf, step_leaf)

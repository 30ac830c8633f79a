"""Adam, its AMSGrad form, and decoupled weight decay (AdamW), as torch computes them.

    g  <- -g                              if maximize
    g  <- g + weight_decay * p            unless decoupled
    p  <- p * (1 - lr * weight_decay)     if decoupled: before the moments, g unchanged
    m  <- beta1 * m + (1 - beta1) * g
    v  <- beta2 * v + (1 - beta2) * g^2
    u  <- max(u, v)                       if amsgrad: of the *uncorrected* v; else v
    p  <- p - lr / c1 * m / (sqrt(u) / sqrt(c2) + eps)
    where c1 = 1 - beta1^t,  c2 = 1 - beta2^t,  t = 1 at the first step

The last line is computed as p - (lr * sqrt(c2) / c1) * m / (sqrt(u) + eps * sqrt(c2)):
the same number with one division per element.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import Betas, NotNegative
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import (
    ascending,
    average,
    average_square,
    decay,
    one_minus_power,
    penalized,
)
from jdist.optim.registry import LeafRule, constructor


class AdamState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    exp_avg: jax.Array
    """Moving average of the gradient, m."""

    exp_avg_sq: jax.Array
    """Moving average of its square, v."""

    max_exp_avg_sq: jax.Array | None
    """Largest v so far; None without amsgrad."""


@constructor("Adam")
def adam(
    *,
    lr: NotNegative = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> LeafRule:
    """Adam, as `torch.optim.Adam` and `_FunctionalAdam`.

    Args:
      lr: Learning rate, at least 0.
      betas: Decays of the averages of the gradient and of its square, in [0, 1).
      eps: At least 0; added outside the square root.
      weight_decay: At least 0: an L2 penalty, or decoupled.
      amsgrad: Divide by the largest v so far.
      maximize: Ascend. The weight decay still shrinks the parameter.
      decoupled_weight_decay: Shrink the parameter instead of adding to the gradient.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, `betas` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adam(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> params, state = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> params                                 # the first step has length lr
      Array([0.9, 2.1], dtype=float32)

    References:
      `torch.optim.adam._single_tensor_adam`, torch 2.13; Kingma and Ba, Adam, ICLR
      2015, algorithm 1; Reddi et al., On the convergence of Adam and beyond, ICLR 2018.
    """
    return adam_form(adam_delta, amsgrad=amsgrad, decoupled=decoupled_weight_decay)


def adam_form(
    delta: Callable[..., jax.Array], *, decoupled: bool, amsgrad: bool = False
) -> LeafRule:
    """The rule of an optimizer with Adam's averages.

    Args:
      delta: `delta(m, v, t, h)`: the change of the parameter, apart from a decoupled
        decay. With amsgrad v is the largest so far.
      decoupled: Whether the weight decay is.
      amsgrad: Whether the largest v is kept.
    """

    def init_leaf(param: jax.Array) -> AdamState:
        # Not one array of zeros for both: a buffer can be donated once.
        m, v = jnp.zeros_like(param), jnp.zeros_like(param)
        return AdamState(count_zero(), m, v, jnp.zeros_like(param) if amsgrad else None)

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: AdamState, h: SimpleNamespace
    ) -> tuple[Update, AdamState]:
        grad = ascending(grad, h) if decoupled else penalized(param, grad, h)
        beta1, beta2 = h.betas
        step = state.step + 1
        m = average(state.exp_avg, grad, beta1)
        v = average_square(state.exp_avg_sq, grad, beta2)
        largest = state.max_exp_avg_sq
        # Before the bias correction, as in the paper and in torch, not as in optax.
        largest = None if largest is None else jnp.maximum(largest, v)
        # In the leaf's precision: float64 parameters get float64 corrections.
        t = step.astype(param.dtype)
        change = delta(m, v if largest is None else largest, t, h)
        update = Update(change, decay(h) if decoupled else 0)
        return update, AdamState(step, m, v, largest)

    return LeafRule(init_leaf, step_leaf)


def adam_delta(
    m: jax.Array, v: jax.Array, t: jax.Array, h: SimpleNamespace
) -> jax.Array:
    """Adam's change of a parameter."""
    beta1, beta2 = h.betas
    # The corrections go into scalars, which leaves one division per element.
    root_c2 = jnp.sqrt(one_minus_power(beta2, t))
    size = h.lr * root_c2 / one_minus_power(beta1, t)
    return -size * (m / (jnp.sqrt(v) + h.eps * root_c2))

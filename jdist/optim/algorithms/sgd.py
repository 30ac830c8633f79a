"""Stochastic gradient descent with torch's momentum, dampening and Nesterov forms.

    g  <- -g                                    if maximize
    g  <- g + weight_decay * p
    b  <- g                                     at the first step: not dampened
          momentum * b + (1 - dampening) * g    later
    g  <- g + momentum * b                      if nesterov, else b
    p  <- p - lr * g

Without momentum, b is g and no buffer is kept. Without dampening, both forms of b are
equal for a buffer that starts as -0, and no count is kept either.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import (
    NotNegative,
    Number,
    Rule,
    known_zero,
    scheduled,
)
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import counted, penalized
from jdist.optim.registry import LeafRule, constructor

ABOVE_0 = Rule("must be above 0 with nesterov", lambda x: x > 0)
EXACTLY_0 = Rule("must be 0 with nesterov", lambda x: x == 0)


class SGDState(NamedTuple):
    """State of one parameter."""

    step: jax.Array | None
    """Steps taken with a gradient, int32 scalar. None where nothing reads it: without
    a schedule, and with a momentum or a dampening of 0."""

    momentum_buffer: jax.Array | None
    """Shape and dtype of the parameter; None when built with momentum 0."""


@constructor("SGD")
def sgd(
    *,
    lr: NotNegative = 1e-2,
    momentum: NotNegative = 0.0,
    dampening: Number = 0.0,
    weight_decay: NotNegative = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> LeafRule:
    """Stochastic gradient descent, as `torch.optim.SGD` and `_FunctionalSGD`.

    Args:
      lr: Learning rate, at least 0. (torch's functional class has 1e-2, like this;
        `torch.optim.SGD` has 1e-3.)
      momentum: At least 0. With a plain 0 no buffer is kept, and no step can override
        it. An override of 0 in an optimizer with a buffer replaces the buffer by the
        (dampened) gradient.
      dampening: The gradient enters the buffer with a factor of 1 - dampening, except
        in the first step, where the factor is 1. With a momentum and a plain 0 here no
        step can override it, because the first step is not counted.
      weight_decay: L2 penalty, at least 0; added to the gradient.
      nesterov: Look ahead by one momentum step; needs momentum and no dampening.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range, or nesterov without momentum or
        with dampening.
      TypeError: A hyperparameter is not a number, or a flag not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = sgd(lr=0.1, momentum=0.9)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = opt.init(params)
      >>> params, state = opt.step(params, {"w": jnp.array([1.0, -1.0])}, state)
      >>> params["w"]
      Array([0.9, 2.1], dtype=float32)

    References:
      `torch.optim.sgd._single_tensor_sgd`, torch 2.13; Sutskever et al., On the
      importance of initialization and momentum in deep learning, ICML 2013.
    """
    # An array may be 0 now and another number later; only a Python 0 rules that out.
    has_buffer = not known_zero(momentum)
    # A count is one more array in and out per leaf: 1.26 of the time of 1000 leaves.
    counts = scheduled(lr, momentum, dampening, weight_decay) or (
        has_buffer and not known_zero(dampening)
    )

    def init_leaf(param: jax.Array) -> SGDState:
        # -0, because momentum * -0 + g is g also for g = -0, where 0 + -0 is 0.
        buffer = jnp.full_like(param, -0.0) if has_buffer else None
        return SGDState(count_zero() if counts else None, buffer)

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: SGDState, h: SimpleNamespace
    ) -> tuple[Update, SGDState]:
        grad = penalized(param, grad, h)
        buffer = state.momentum_buffer
        if buffer is not None and state.step is None:
            buffer = h.momentum * buffer + grad
        elif buffer is not None:
            # Selected, not branched: the count is on the device.
            later = h.momentum * buffer + (1 - h.dampening) * grad
            # torch does not dampen the first gradient of a parameter.
            buffer = jnp.where(state.step == 0, grad, later)
        if buffer is not None:
            grad = grad + h.momentum * buffer if nesterov else buffer
        return Update(-h.lr * grad), SGDState(counted(state.step), buffer)

    fixed = {}
    if not has_buffer:
        fixed["momentum"] = "built with momentum 0, it keeps no buffer"
    elif not (counts or nesterov):  # With nesterov the rule says it already.
        fixed["dampening"] = (
            "built with dampening 0, it cannot tell the first step apart"
        )
    # As in torch: the look-ahead is a step of the momentum.
    rules = {"momentum": ABOVE_0, "dampening": EXACTLY_0} if nesterov else {}
    return LeafRule(init_leaf, step_leaf, rules=rules, fixed=fixed)

"""Stochastic gradient descent with torch's momentum, dampening and Nesterov forms.

    g  <- -g                                if maximize
    g  <- g + weight_decay * p
    b  <- g                                 at the first step: not dampened
          momentum * b + (1 - dampening) * g    later
    g  <- g + momentum * b                  if nesterov, else b
    p  <- p - lr * g

Without momentum, g is used as it is and no buffer is kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist.optim._base import Optimizer, at_least_zero


class SGDState(NamedTuple):
    """State of one parameter."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    momentum_buffer: jax.Array | None
    """Shape and dtype of the parameter; None when built with momentum 0."""


def sgd(
    *,
    lr: float | jax.Array = 1e-2,
    momentum: float | jax.Array = 0.0,
    dampening: float | jax.Array = 0.0,
    weight_decay: float | jax.Array = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD` and `_FunctionalSGD`.

    Args:
      lr: Learning rate, at least 0. (torch's functional class has 1e-2, like this;
        `torch.optim.SGD` has 1e-3.)
      momentum: At least 0. With 0 no buffer is kept, and no step can override it.
      dampening: Subtracted from 1 to scale what enters the buffer, except at the first
        step, when the gradient enters whole.
      weight_decay: L2 penalty, at least 0; added to the gradient.
      nesterov: Look ahead by one momentum step; needs momentum and no dampening.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range, or nesterov without momentum or
        with dampening.

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
    has_momentum = is_traced(momentum) or momentum != 0
    if nesterov and not (has_momentum and _is_zero(dampening)):
        rule = "needs a momentum above 0 and a dampening of 0"
        got = f"momentum={momentum!r}, dampening={dampening!r}"
        raise ValueError(requirement("sgd(nesterov=True)", rule, got))

    def init_leaf(param: jax.Array) -> SGDState:
        buffer = jnp.zeros_like(param) if has_momentum else None
        return SGDState(jnp.zeros((), jnp.int32), buffer)

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: SGDState, h: Any
    ) -> tuple[jax.Array, SGDState]:
        if maximize:
            grad = -grad
        if not _is_zero(h.weight_decay):
            grad = grad + h.weight_decay * param
        buffer = state.momentum_buffer
        if buffer is not None:
            later = h.momentum * buffer + (1 - h.dampening) * grad
            buffer = jnp.where(state.step == 0, grad, later)
            grad = grad + h.momentum * buffer if nesterov else buffer
        return param - h.lr * grad, SGDState(state.step + 1, buffer)

    return Optimizer(
        name="sgd",
        hyperparameters={
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        },
        init_leaf=init_leaf,
        step_leaf=step_leaf,
        rules=at_least_zero("lr", "momentum", "weight_decay"),
        fixed={} if has_momentum else {"momentum": "built with momentum 0, no buffer"},
    )


def _is_zero(value: Any) -> bool:
    """Whether a hyperparameter is *known* to be 0, so that its term can be left out."""
    return not is_traced(value) and bool(value == 0)

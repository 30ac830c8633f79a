"""Rprop: a step length per coordinate that grows while the gradient keeps its sign.

    g     <- -g                                       if maximize
    f     =  eta+ if g * g' > 0,  eta- if g * g' < 0,  else 1
    l     <- clamp(l * f, smallest, largest)          l = lr before the first step
    g     <- 0  where f = eta-                        no move after a change of sign
    p     <- p - sign(g) * l                          the sign of NaN is 0
    g'    <- g                                        0 before the first step

The first step moves by lr. (`optax.rprop` makes no move there.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import AT_LEAST_0, NotNegative, Number, Rule
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import ascending
from jdist.optim.registry import LeafRule, constructor

SHRINKS = Rule("must be above 0 and below 1", lambda x: x > 0 and x < 1)
GROWS = Rule("must be above 1", lambda x: x > 1)

Etas: TypeAlias = Annotated[tuple[Number, Number], SHRINKS, GROWS]
StepSizes: TypeAlias = Annotated[tuple[Number, Number], AT_LEAST_0, AT_LEAST_0]


class RpropState(NamedTuple):
    """State of one parameter; arrays have its shape and dtype."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    prev: jax.Array
    """The last gradient; 0 where the last step saw a change of sign."""

    step_size: jax.Array
    """The length of the next step, before its factor; 0 before the first step."""


@constructor("Rprop")
def rprop(
    *,
    lr: NotNegative = 1e-2,
    etas: Etas = (0.5, 1.2),
    step_sizes: StepSizes = (1e-6, 50.0),
    maximize: bool = False,
) -> LeafRule:
    """Rprop, as `torch.optim.Rprop` and `_FunctionalRprop`.

    Args:
      lr: The length of a leaf's first step, at least 0, subject to `step_sizes`; no
        later step uses it.
      etas: Factors of the length: in (0, 1) after a change of sign, above 1 without.
      step_sizes: Smallest and largest length, at least 0.
      maximize: Ascend.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, a pair not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = rprop(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))[0]
      Array([0.9, 2.1], dtype=float32)

    References:
      `torch.optim.rprop._single_tensor_rprop`, torch 2.13; Riedmiller and Braun, A
      direct adaptive method for faster backpropagation learning, ICNN 1993; the form
      without backtracking of Igel and Huesken, 2000 (iRprop-).
    """

    # Two arrays of zeros, because a buffer can be donated once.
    def init_leaf(param: jax.Array) -> RpropState:
        return RpropState(count_zero(), jnp.zeros_like(param), jnp.zeros_like(param))

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: RpropState, h: SimpleNamespace
    ) -> tuple[Update, RpropState]:
        grad = ascending(grad, h)
        # `where` of two Python numbers is float64 if x64 is enabled.
        shrink, grow, same = (jnp.asarray(x, param.dtype) for x in (*h.etas, 1.0))
        # At the first step prev is 0 and so is the product: the length stays lr.
        agreement = grad * state.prev
        factor = jnp.where(agreement > 0, grow, jnp.where(agreement < 0, shrink, same))
        # torch creates the state in the first step, with the rate of that step.
        length = jnp.where(state.step == 0, h.lr, state.step_size).astype(param.dtype)
        # torch clips the length of the first step too.
        length = jnp.clip(length * factor, *h.step_sizes)
        # The zero is stored too: the product in the next step is then 0, which keeps
        # the length.
        grad = jnp.where(agreement < 0, 0, grad)
        # By comparison: torch's sign of NaN is 0, which leaves the parameter alone.
        sign = jnp.where(grad > 0, 1, jnp.where(grad < 0, -1, 0)).astype(param.dtype)
        return Update(-sign * length), RpropState(state.step + 1, grad, length)

    return LeafRule(init_leaf, step_leaf)

"""Adafactor: RMSprop whose averages of squares are kept by rows and by columns only.

    g   <- -g                                         if maximize
    b   =  t^beta2_decay                              1 at the first step, t = 1
    a   =  max(eps2, rms(p)) * min(lr, 1 / sqrt(t))   of p before the decay
    p   <- p * (1 - lr * weight_decay)
    r   <- (1 - b) * r + b * mean of g^2 over a row
    c   <- (1 - b) * c + b * mean of g^2 over a column
    v   =  r c / max(mean of r, eps1)
    u   =  g / sqrt(max(v, eps1^2))
    p   <- p - a * u / max(1, rms(u) / d)

Rows and columns are those of the last two dimensions. A parameter of one dimension or
none keeps v itself, as the average of g^2. The root mean square is that of the whole
parameter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import AT_LEAST_0, NotNegative, Number, Rule
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import ascending, average, decay
from jdist.optim.registry import LeafRule, constructor

UP_TO_0 = Rule("must be at most 0", lambda x: x <= 0)
AT_LEAST_1 = Rule("must be at least 1", lambda x: x >= 1)
OR_NONE = Rule(f"{AT_LEAST_0.says}, or None", AT_LEAST_0.holds, optional=True)

Eps: TypeAlias = Annotated[tuple[Number | None, Number], OR_NONE, AT_LEAST_0]


class AdafactorState(NamedTuple):
    """State of one parameter; arrays have its dtype."""

    step: jax.Array
    """Steps taken with a gradient, int32 scalar."""

    row_var: jax.Array | None
    """Moving average of the squared gradient's means over rows: the parameter's shape
    with 1 as the last dimension. None for a parameter of one dimension or none."""

    col_var: jax.Array | None
    """The same over columns, with 1 as the last dimension but one."""

    variance: jax.Array | None
    """Moving average of the squared gradient; None for two dimensions or more."""


@constructor("Adafactor")
def adafactor(
    *,
    lr: NotNegative = 1e-2,
    beta2_decay: Annotated[Number, UP_TO_0] = -0.8,
    eps: Eps = (None, 1e-3),
    d: Annotated[Number, AT_LEAST_1] = 1.0,
    weight_decay: NotNegative = 0.0,
    maximize: bool = False,
) -> LeafRule:
    """Adafactor, as `torch.optim.Adafactor`.

    The update is that of the whole parameter, however it is sharded.

    Args:
      lr: The largest step, relative to the parameter's root mean square; at least 0.
      beta2_decay: At most 0. The average of squares weighs the newest gradient by the
        number of steps to this power.
      eps: The least root of the average of squares, or None for the spacing of the
        parameter's dtype at 1; and the least root mean square of the parameter. At
        least 0.
      d: The largest root mean square of an update before its rate, at least 1.
      weight_decay: At least 0; decoupled.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range. In `init` and `step`: a parameter is
        complex; inside shard_map, it may be a shard.
      TypeError: A hyperparameter is not a number, `eps` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adafactor(lr=0.1)
      >>> params = jnp.array([[1.0, 2.0], [3.0, 1.0]])
      >>> state = opt.init(params)
      >>> state.row_var.shape, state.col_var.shape  # 4 numbers; of 500 x 500, 1000
      ((2, 1), (1, 2))
      >>> grads = jnp.array([[1.0, 2.0], [-3.0, 1.0]])
      >>> new, state = opt.step(params, grads, state)
      >>> [f"{p:.2f}" for p in new.ravel()]
      ['0.90', '1.71', '3.22', '0.90']

    References:
      `torch.optim._adafactor._single_tensor_adafactor`, torch 2.13, which says how it
      departs from Shazeer and Stern, Adafactor, ICML 2018, in eps.
    """

    def init_leaf(param: jax.Array) -> AdafactorState:
        if param.ndim < 2:
            return AdafactorState(count_zero(), None, None, jnp.zeros_like(param))
        *stack, rows, columns = param.shape
        row_var = jnp.zeros((*stack, rows, 1), param.dtype)
        col_var = jnp.zeros((*stack, 1, columns), param.dtype)
        return AdafactorState(count_zero(), row_var, col_var, None)

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: AdafactorState, h: SimpleNamespace
    ) -> tuple[Update, AdafactorState]:
        grad = ascending(grad, h)
        eps1, eps2 = h.eps
        # In the dtype that the parameter is kept in, as in torch.
        eps1 = float(jnp.finfo(h.dtype).eps) if eps1 is None else eps1
        step = state.step + 1
        t = step.astype(param.dtype)
        fresh = t**h.beta2_decay
        size = _larger(_rms(param), eps2) * jnp.minimum(h.lr, 1 / jnp.sqrt(t))
        square = grad * grad
        row_var, col_var, variance = state.row_var, state.col_var, state.variance
        if row_var is not None and col_var is not None:
            row_var = average(row_var, square.mean(-1, keepdims=True), 1 - fresh)
            col_var = average(col_var, square.mean(-2, keepdims=True), 1 - fresh)
            total = jnp.maximum(row_var.mean(-2, keepdims=True), eps1)
            estimate = row_var * col_var / total
        else:
            variance = average(cast(jax.Array, variance), square, 1 - fresh)
            estimate = variance
        update = grad / jnp.sqrt(jnp.maximum(estimate, eps1 * eps1))
        size = size / _larger(_rms(update) / h.d, 1)
        new = AdafactorState(step, row_var, col_var, variance)
        return Update(-size * update, decay(h)), new

    return LeafRule(init_leaf, step_leaf, elementwise=False)


def _rms(array: jax.Array) -> jax.Array:
    """The root mean square."""
    return jnp.sqrt(jnp.mean(array * array))


def _larger(x: jax.Array, least: float | jax.Array) -> jax.Array:
    """The larger of both; `least` where the number is NaN, as Python's `max`."""
    return jnp.where(x > least, x, least)

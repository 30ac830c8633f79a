"""Terms that several algorithms share, each with the precision it needs.

torch computes bias corrections on the host in float64. A compiled step has only the
parameter's precision, and `1 - b**t` in float32 has lost half of its digits at t = 1
(a relative error of 1e-5 for b = 0.999). They are therefore computed by `expm1`.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import known_zero


def penalized(param: jax.Array, grad: jax.Array, h: SimpleNamespace) -> jax.Array:
    """The gradient to descend, with the L2 penalty: -g if maximize, then + wd * p."""
    # The sign first, as in torch: the penalty shrinks the parameter under maximize too.
    grad = ascending(grad, h)
    return grad if known_zero(h.weight_decay) else grad + h.weight_decay * param


def ascending(grad: jax.Array, h: SimpleNamespace) -> jax.Array:
    """-g if maximize, else g."""
    return -grad if h.maximize else grad


def decay(h: SimpleNamespace) -> float | jax.Array:
    """The fraction by which decoupled weight decay shrinks the parameter, lr * wd."""
    # A Python 0 lets the program omit the product.
    return 0 if known_zero(h.weight_decay) else h.lr * h.weight_decay


def average(old: jax.Array, new: jax.Array, decay: float | jax.Array) -> jax.Array:
    """One step of an exponential moving average: decay * old + (1 - decay) * new."""

    # torch's `lerp`, not the sum of two products: once the average is infinite, the
    # next number makes it NaN.
    def below_half() -> jax.Array:
        return old + (1 - decay) * (new - old)

    def above_half() -> jax.Array:
        return new - decay * (new - old)

    if isinstance(decay, int | float):
        return below_half() if 1 - decay < 0.5 else above_half()
    return jnp.where(1 - decay < 0.5, below_half(), above_half())


def average_square(
    old: jax.Array, new: jax.Array, decay: float | jax.Array
) -> jax.Array:
    """One step of an exponential moving average of squares."""
    # The factor first, as in torch: the square of 1e20 is infinite in float32.
    return decay * old + (1 - decay) * new * new


def counted(step: jax.Array | None) -> jax.Array | None:
    """The step count after one more step; None where no steps are counted."""
    return None if step is None else step + 1


def log(x: float | jax.Array) -> float | jax.Array:
    """Natural logarithm, on the host in double precision for a Python number."""
    if isinstance(x, int | float):
        # `math.log(0)` raises; a beta may be 0.
        return math.log(x) if x > 0 else -math.inf
    return jnp.log(x)


def one_minus_power(base: float | jax.Array, exponent: jax.Array) -> jax.Array:
    """1 - base**exponent to full relative precision, for 0 <= base < 1."""
    # 1 - base**t would lose three digits in float32 where base is 0.999.
    return -jnp.expm1(exponent * log(base))

"""RAdam: Adam whose adaptive rate begins once its variance is tractable.

    g    <- -g                                 if maximize
    g    <- g + weight_decay * p               unless decoupled
    p    <- p * (1 - lr * weight_decay)        if decoupled
    m    <- beta1 * m + (1 - beta1) * g
    v    <- beta2 * v + (1 - beta2) * g^2
    rho  =  R - 2 t beta2^t / (1 - beta2^t),   R = 2 / (1 - beta2) - 1
    r    =  sqrt((rho - 4) (rho - 2) R / ((R - 4) (R - 2) rho))
    p    <- p - lr * m / (1 - beta1^t) * r * sqrt(1 - beta2^t) / (sqrt(v) + eps)
                                               if rho > 5
            p - lr * m / (1 - beta1^t)         else

In this form rho is the small difference of two large numbers: about 5 out of 2000 in
the early steps, where r is smallest and float32 would keep three digits of it. With
x = -log(beta2) and L(y) = coth(y) - 1/y, which is small for small y, it is also

    rho  =  t + L(x/2) - t L(x t/2)

because R = coth(x/2) and 2 beta2^t / (1 - beta2^t) = coth(x t/2) - 1; the poles cancel.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jdist.optim._hyperparameters import Betas, NotNegative
from jdist.optim.algorithms.adam import adam_form
from jdist.optim.algorithms.terms import log, one_minus_power
from jdist.optim.registry import LeafRule, constructor


@constructor("RAdam")
def radam(
    *,
    lr: NotNegative = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> LeafRule:
    """RAdam, as `torch.optim.RAdam`. (torch has no functional class for it.)

    Args:
      lr: Learning rate, at least 0. The first steps, up to the fifth with the default
        betas, are plain momentum steps, proportional to the gradient.
      betas: Decays of the averages of the gradient and of its square, in [0, 1).
      eps: At least 0; added outside the square root, before the bias correction.
      weight_decay: At least 0: an L2 penalty, or decoupled.
      decoupled_weight_decay: Shrink the parameter instead of adding to the gradient.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, `betas` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = radam(lr=0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> new, _ = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> [f"{p:.4f}" for p in new]
      ['0.7000', '2.0500']

    References:
      `torch.optim.radam._single_tensor_radam`, torch 2.13; Liu et al., On the variance
      of the adaptive learning rate and beyond, ICLR 2020, algorithm 2.
    """
    return adam_form(_delta, decoupled=decoupled_weight_decay)


def _delta(m: jax.Array, v: jax.Array, t: jax.Array, h: SimpleNamespace) -> jax.Array:
    beta1, beta2 = h.betas
    rho, rectifier = _rectifier(beta2, t)
    size = h.lr / one_minus_power(beta1, t)
    rectified = rectifier * jnp.sqrt(one_minus_power(beta2, t))
    # Selected, not branched: the count is on the device. 5 is torch's bound; the
    # paper's is 4, where r is 0.
    return -size * jnp.where(rho > 5, m * (rectified / (jnp.sqrt(v) + h.eps)), m)


def _rectifier(beta2: float | jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """rho and r at step t; r is meaningful only where rho > 5."""
    longest = (1 + beta2) / (1 - beta2)
    x = -log(beta2)
    # Each form where it is accurate: the series only for small x t / 2, where the
    # poles of the other cancel.
    rho = jnp.where(
        x * t < 0.2,
        t + _langevin(jnp.asarray(x / 2, t.dtype)) - t * _langevin(x * t / 2),
        longest - 2 * t / jnp.expm1(x * t),
    )
    square = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
    # Where rho <= 5 the product may be negative, and a NaN would pass through `where`
    # into derivatives.
    return rho, jnp.sqrt(jnp.maximum(square, 0))


def _langevin(y: jax.Array) -> jax.Array:
    """coth(y) - 1/y for 0 < y <= 0.1, by its series: the next term is below 1e-15."""
    # The definition would subtract nearly equal large terms here.
    z = y * y
    return y * (1 / 3 - z * (1 / 45 - z * (2 / 945 - z * (1 / 4725 - z * 2 / 93555))))

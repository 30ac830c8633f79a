"""AdamW: Adam with decoupled weight decay; the formula is in `adam`."""

from __future__ import annotations

from jdist.optim._hyperparameters import Betas, NotNegative
from jdist.optim.algorithms.adam import adam_delta, adam_form
from jdist.optim.registry import LeafRule, constructor


@constructor("AdamW")
def adamw(
    *,
    lr: NotNegative = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> LeafRule:
    """AdamW, as `torch.optim.AdamW` and `_FunctionalAdamW`.

    The parameter is multiplied by 1 - lr * weight_decay before the moments are updated,
    and the gradient does not change. (optax's default decay is 1e-4, torch's 1e-2.)

    Args:
      lr: Learning rate, at least 0.
      betas: Decays of the averages of the gradient and of its square, in [0, 1).
      eps: At least 0; added outside the square root.
      weight_decay: At least 0.
      amsgrad: Divide by the largest v so far.
      maximize: Ascend. The weight decay still shrinks the parameter.

    Raises:
      ValueError: A hyperparameter is out of range.
      TypeError: A hyperparameter is not a number, `betas` not a pair, or a flag not a
        bool.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = adamw(lr=0.1, weight_decay=0.5)
      >>> params = jnp.array([1.0, 2.0])
      >>> new, _ = opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))
      >>> [f"{p:.4f}" for p in new]
      ['0.8500', '2.0000']

    References:
      `torch.optim.adamw.AdamW`, torch 2.13; Loshchilov and Hutter, Decoupled weight
      decay regularization, ICLR 2019, algorithm 2.
    """
    return adam_form(adam_delta, amsgrad=amsgrad, decoupled=True)

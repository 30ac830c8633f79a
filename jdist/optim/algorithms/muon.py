"""Muon: steps along the orthogonal factor of the momentum of a matrix.

    m   <- momentum * m + (1 - momentum) * g
    u   =  (1 - momentum) * g + momentum * m   if nesterov, else m
    x   =  u / max(|u|, eps)                   |.| is the Frobenius norm
    x   <- a x + (b S + c S^2) x               ns_steps times, with S = x x^T
    p   <- p * (1 - lr * weight_decay) - lr * r * x
    where r = sqrt(max(1, rows / columns))     adjust_lr_fn "original"
              0.2 * sqrt(max(rows, columns))   adjust_lr_fn "match_rms_adamw"

The fourth line is a Newton-Schulz iteration: it moves all singular values of x to about
1, between 0.7 and 1.2 with the default coefficients, and leaves its singular vectors.
x and S are transposed where there are more rows than columns, which makes S smaller and
x the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jdist._compat import alike, gathered
from jdist._errors import check_choice, check_number
from jdist.optim._hyperparameters import A_NUMBER, NotNegative, Number, scheduled
from jdist.optim._optimizer import Update, count_zero
from jdist.optim.algorithms.terms import average, counted, decay
from jdist.optim.registry import LeafRule, constructor

ThreeNumbers: TypeAlias = Annotated[
    tuple[Number, Number, Number], A_NUMBER, A_NUMBER, A_NUMBER
]

ADJUSTMENTS = (None, "original", "match_rms_adamw")


class MuonState(NamedTuple):
    """State of one parameter."""

    step: jax.Array | None
    """Steps taken with a gradient, int32 scalar. None without a schedule: nothing else
    reads it."""

    momentum_buffer: jax.Array
    """Moving average of the gradient, of the parameter's shape and dtype."""


@constructor("Muon")
def muon(
    *,
    lr: NotNegative = 1e-3,
    weight_decay: NotNegative = 0.1,
    momentum: NotNegative = 0.95,
    nesterov: bool = True,
    ns_coefficients: ThreeNumbers = (3.4445, -4.7750, 2.0315),
    eps: NotNegative = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> LeafRule:
    """Muon, as `torch.optim.Muon`; for matrices only.

    Give other parameters, and usually embeddings and the output layer, another
    optimizer: see `by_label`. The update is that of the whole matrix, however the
    matrix is sharded.

    Args:
      lr: Learning rate, at least 0.
      weight_decay: At least 0; decoupled, and scaled by `lr` without adjustment.
      momentum: At least 0.
      nesterov: Look ahead by one momentum step.
      ns_coefficients: a, b and c of the iteration.
      eps: The least norm by which a matrix is divided, at least 0.
      ns_steps: Iterations, fewer than 100. In the precision of the step: float32, or
        float64 for float64 parameters, where torch rounds them to bfloat16.
        `jax.default_matmul_precision` applies.
      adjust_lr_fn: "original", the same as None, or "match_rms_adamw", with which the
        rate and decay of AdamW fit. torch keeps a layer's weight as (outputs, inputs);
        "original" gives its transpose, such as a kernel of Flax, another step.

    Raises:
      ValueError: A hyperparameter is out of range. In `init` and `step`: a parameter
        does not have two dimensions or is complex; inside shard_map, it may be a shard.
      TypeError: A hyperparameter is not a number, `ns_coefficients` not three, or
        `nesterov` not a bool.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> opt = optim.by_label(
      ...     {"matrix": muon(lr=0.1), "other": optim.adamw()},
      ...     {"w": "matrix", "b": "other"},
      ... )
      >>> params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
      >>> grads = {"w": jnp.array([[3.0, 0.0], [0.0, -0.1]]), "b": jnp.ones(2)}
      >>> params, state = opt.step(params, grads, opt.init(params))
      >>> params["w"].round(2)      # both directions move, whatever their size
      Array([[-0.07,  0.  ],
             [ 0.  ,  0.11]], dtype=float32)

    References:
      `torch.optim._muon._single_tensor_muon`, torch 2.13; Jordan et al., Muon: an
      optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is scalable
      for LLM training, arXiv:2502.16982.
    """
    rule = "must be a number of iterations, fewer than 100"
    check_number(
        "muon(ns_steps=...)", ns_steps, rule, lambda n: 0 <= n < 100, whole=True
    )
    check_choice("muon(adjust_lr_fn=...)", adjust_lr_fn, ADJUSTMENTS)
    counts = scheduled(lr, weight_decay, momentum, *ns_coefficients, eps)

    def init_leaf(param: jax.Array) -> MuonState:
        return MuonState(count_zero() if counts else None, jnp.zeros_like(param))

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: MuonState, h: SimpleNamespace
    ) -> tuple[Update, MuonState]:
        buffer = average(state.momentum_buffer, grad, h.momentum)
        moving = average(grad, buffer, 1 - h.momentum) if nesterov else buffer
        direction = _orthogonalized(moving, h.ns_coefficients, ns_steps, h.eps)
        size = h.lr * _ratio(adjust_lr_fn, *param.shape)
        return Update(-size * direction, decay(h)), MuonState(
            counted(state.step), buffer
        )

    return LeafRule(init_leaf, step_leaf, elementwise=False, dimensions=2)


def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this shape."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _orthogonalized(
    matrix: jax.Array,
    coefficients: Sequence[float | jax.Array],
    steps: int,
    eps: float | jax.Array,
) -> jax.Array:
    """The matrix with all singular values moved to about 1."""
    a, b, c = coefficients
    # JAX multiplies no matrices that are divided over explicit axes in any way. Over
    # automatic ones the compiler adds the communication.
    whole = gathered(matrix)
    tall = whole.shape[0] > whole.shape[1]
    x = whole.T if tall else whole
    # Scaled to a norm of at most 1: the iteration diverges for singular values > 1.3.
    x = x / jnp.maximum(jnp.linalg.norm(x), eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    x = x.T if tall else x
    return x if whole is matrix else alike(x, matrix)

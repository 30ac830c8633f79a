"""Basis rotation: Adam in bases that follow the gradient's second moments.

For a matrix w with the gradient g of update t, counted from 1:

    L <- b2 L + (1 - b2) g g^T,   R <- b2 R + (1 - b2) g^T g     source "second"
    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) (U^T g V)^2
    w <- w - rate c U (U^T m V / (sqrt(v) + eps)) V^T,   c = sqrt(1 - b2^t) / (1 - b1^t)

U and V change before v does. At t = 1 they are eigenvectors of L and of R, by falling
eigenvalues; with the source "first", which keeps no L and R, the singular vectors of m.
At each t that `every` divides they take a step of power iteration. Their columns are
sorted, with the rows and columns of v: by falling diagonals of U^T L U and V^T R V, or
by falling lengths of the columns of m^T U and m V. Then U and V are the orthogonal
factors of L U and R V, or of m V and m^T U.

Between equal eigenvalues no formula chooses: after the first gradient L or R has zeros
where w is not square or g not of full rank, and the library that computes eigenvectors
chooses among theirs. Signs do not matter, for U and V come twice.
"""

from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jdist import optim

Source = Literal["second", "first"]
Form = Literal["code", "algorithm"]


class RotatedState(NamedTuple):
    """The state of a matrix of `(rows, columns)`."""

    step: jax.Array
    """Updates, int32 scalar."""

    exp_avg: jax.Array
    """m, like the matrix."""

    exp_avg_sq: jax.Array
    """v, like the matrix."""

    row_basis: jax.Array
    """U, `(rows, rows)`."""

    column_basis: jax.Array
    """V, `(columns, columns)`."""

    row_moment: jax.Array | None
    """L, `(rows, rows)`; None with the source "first"."""

    column_moment: jax.Array | None
    """R, `(columns, columns)`; None with the source "first"."""


def rotated_adam(
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    every: int = 10,
    source: Source = "second",
    form: Form = "code",
) -> optim.Optimizer:
    """Adam with rotated bases, for matrices; other parameters take Adam.

    Args:
      lr: The learning rate.
      betas: b1 and b2.
      eps: Added to the root.
      every: Updates between steps of power iteration, at least 1.
      source: "second": moments of the gradient; "first": its moving average.
      form: "code", or "algorithm": c = 1 and the divisor is sqrt(v + eps).

    Raises:
      ValueError: A choice is unknown, or `every` is below 1.

    Source:
      Jung et al., Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis
      Rotation, ICML 2026, arXiv:2602.03515, algorithms 1 and 2. Read in a public copy
      of the authors' code; the form "algorithm" in another's account. The rotation of
      one side alone, and stages that renew their bases more often, are not here.
    """
    for name, value, known in (("source", source, Source), ("form", form, Form)):
        if value not in get_args(known):
            rule = f"rotated_adam({name}=...) must be one of {get_args(known)}"
            raise ValueError(f"{rule}: {value!r}")
    if every < 1:
        raise ValueError(f"rotated_adam(every=...) must be at least 1: {every}")
    b1, b2 = betas

    def init_leaf(param: jax.Array) -> RotatedState:
        squares = [jnp.eye(size, dtype=param.dtype) for size in param.shape]
        moments = [0 * x if source == "second" else None for x in squares]
        zeros = [jnp.zeros_like(param) for _ in range(2)]
        return RotatedState(jnp.zeros((), jnp.int32), *zeros, *squares, *moments)

    def step_leaf(
        param: jax.Array, grad: jax.Array, state: RotatedState, h: SimpleNamespace
    ) -> tuple[optim.Update, RotatedState]:
        step = state.step + 1
        mean = b1 * state.exp_avg + (1 - b1) * grad
        state = state._replace(step=step, exp_avg=mean)
        if state.row_moment is not None and state.column_moment is not None:
            state = state._replace(
                row_moment=b2 * state.row_moment + (1 - b2) * grad @ grad.T,
                column_moment=b2 * state.column_moment + (1 - b2) * grad.T @ grad,
            )
        which = jnp.where(step == 1, 2, (step % every == 0).astype(jnp.int32))
        state = jax.lax.switch(which, [lambda x: x, _iterated, _decomposed], state)
        u, v = state.row_basis, state.column_basis
        squares = b2 * state.exp_avg_sq + (1 - b2) * (u.T @ grad @ v) ** 2
        size, divisor = h.lr, jnp.sqrt(squares + eps)
        if form == "code":
            t = step.astype(param.dtype)
            size = size * jnp.sqrt(1 - b2**t) / (1 - b1**t)
            divisor = jnp.sqrt(squares) + eps
        delta = -size * (u @ ((u.T @ mean @ v) / divisor) @ v.T)
        return optim.Update(delta), state._replace(exp_avg_sq=squares)

    rate = optim.Hyperparameter("lr", lr)
    return optim.leafwise(
        "rotated_adam", [rate], init_leaf, step_leaf, elementwise=False, dimensions=2
    )


def _decomposed(state: RotatedState) -> RotatedState:
    """The first bases."""
    if state.row_moment is None or state.column_moment is None:
        left, _, right = jnp.linalg.svd(state.exp_avg, full_matrices=True)
        return state._replace(row_basis=left, column_basis=right.T)
    rows, columns = (
        jnp.linalg.eigh(moment)[1][:, ::-1]
        for moment in (state.row_moment, state.column_moment)
    )
    return state._replace(row_basis=rows, column_basis=columns)


def _iterated(state: RotatedState) -> RotatedState:
    """A step of power iteration, and v in the order of the new columns."""
    m, u, v = state.exp_avg, state.row_basis, state.column_basis
    if state.row_moment is None or state.column_moment is None:
        rows, columns = (_falling((x**2).sum(0)) for x in (m.T @ u, m @ v))
        powers = m @ v[:, columns], m.T @ u[:, rows]
    else:
        moments = state.row_moment, state.column_moment
        rows, columns = (
            _falling(jnp.diag(basis.T @ moment @ basis))
            for basis, moment in zip((u, v), moments, strict=True)
        )
        powers = moments[0] @ u[:, rows], moments[1] @ v[:, columns]
    bases = [jnp.linalg.qr(power, mode="complete")[0] for power in powers]
    return state._replace(
        row_basis=bases[0],
        column_basis=bases[1],
        exp_avg_sq=state.exp_avg_sq[rows][:, columns],
    )


def _falling(x: jax.Array) -> jax.Array:
    """The order of falling numbers."""
    return jnp.argsort(-x)

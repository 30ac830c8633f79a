"""A least-squares estimate of how often each example counts: 0 if lost, 2 if doubled.

Where every tap is right, what is wrong is how gradients were added up. The wrong leaves
are then fitted by the gradients of the calls that the backward pass was made in, by
least squares.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import fast_in_loops
from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.bound import EXTRA, in_double, unit_roundoff
from jdist.verify.oracle import LossFn, seeded

ENTRIES = 1 << 16
"""Number of the gradient's entries that are fitted; a larger gradient is sampled."""

# The largest unexplained share of the difference in a fit that is believed.
EXPLAINED = 0.05

# A share within this distance of a whole number is that number; or within the roundings
# of a part's gradient and of its sum, or within this many standard errors of the fit,
# where these are larger.
EXACT = 1e-3
DEVIATIONS = 4


def example_gradients(
    loss_fn: LossFn, params: PyTree, batch: PyTree, factors: np.ndarray
) -> dict[str, np.ndarray]:
    """Each example's gradient by leaf, `(examples, entries)`: some entries of each.

    Args:
      loss_fn: The loss, the sum of which is differentiated.
      params: The parameters.
      batch: Each leaf `(examples, ...)`.
      factors: `(examples,)`: the cotangent with which each backward pass begins.
    """
    sizes = {p: np.size(x) for p, x in named_leaves(params).items() if is_inexact(x)}
    count = max(ENTRIES // len(sizes), 1)
    picks = {path: _picked(size, count) for path, size in sizes.items()}

    def total(own: PyTree, row: PyTree) -> jax.Array:
        return jnp.sum(loss_fn(own, jax.tree.map(lambda x: x[None], row)))

    def one(params: PyTree, given: tuple[PyTree, jax.Array]) -> dict[str, jax.Array]:
        row, factor = given
        seed = factor.astype(jax.eval_shape(total, params, row).dtype)
        leaves = named_leaves(seeded(total)(seed, params, row)[1])
        return {path: leaves[path].ravel()[own] for path, own in picks.items()}

    # One example after the other: the memory is that of one gradient.
    each = jax.jit(fast_in_loops(lambda p, rows: jax.lax.map(partial(one, p), rows)))
    found = each(params, jax.tree.map(jnp.asarray, (batch, factors)))
    # What does not count has no part, also where 0 times its gradient is NaN.
    counts = factors[:, None] > 0
    return {path: np.where(counts, in_double(x), 0) for path, x in found.items()}


def shares(
    gradient: PyTree,
    paths: Sequence[str],
    parts: Mapping[str, np.ndarray],
    groups: Sequence[tuple[int, ...]],
) -> list[float] | None:
    """The share of each group of examples in some leaves; None if no shares fit.

    Args:
      gradient: The wrong gradient.
      paths: The leaves that are wrong.
      parts: `example_gradients`, each multiplied by its share.
      groups: Examples, each in one group.
    """
    leaves = named_leaves(gradient)
    each = np.concatenate([parts[p] for p in paths], axis=1)
    own = np.concatenate([
        in_double(leaves[p]).ravel()[_picked(np.size(leaves[p]), parts[p].shape[1])]
        for p in paths
    ])  # fmt: skip
    # The excess over one count each is fitted, so that right groups have 0.
    difference = own - each.sum(axis=0)
    columns = np.stack([each[list(group)].sum(axis=0) for group in groups], axis=1)
    # With few entries, any difference would be a sum of so many columns.
    if 2 * len(groups) > len(difference) or not np.isfinite(difference).all():
        return None
    excess, *_ = np.linalg.lstsq(columns, difference)
    rest = float(np.linalg.norm(difference - columns @ excess))
    if rest > EXPLAINED * np.linalg.norm(difference):
        return None
    rounding = EXTRA * max(unit_roundoff(leaves[p].dtype) for p in paths)
    # Standard errors of the fit: shares of groups with small gradients are less
    # certain.
    spread = rest / math.sqrt(len(difference) - len(groups))
    inverse = np.linalg.pinv(columns.conj().T @ columns)
    errors = spread * np.sqrt(np.abs(np.diagonal(inverse)))
    near = np.maximum(max(EXACT, rounding), DEVIATIONS * errors)
    counts = [float(1 + x) for x in excess.real]
    return [
        float(round(x)) if abs(x - round(x)) <= limit else x
        for x, limit in zip(counts, near, strict=True)
    ]


def _picked(size: int, count: int) -> np.ndarray:
    """The entries of a leaf that are fitted, whatever the other leaves are."""
    if size <= count:
        return np.arange(size)
    # The same entries of the gradient and of each example's part of it.
    return np.sort(np.random.default_rng(0).choice(size, count, replace=False))

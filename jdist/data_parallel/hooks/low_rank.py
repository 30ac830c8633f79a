"""Gradients of matrices as two low-rank factors, by one step of power iteration.

For the sum M of the replicas' matrices M_i (n x m), with Q (m x r) the same on all:

    P = orthogonal basis of sum_i M_i Q          n r numbers are sent
    Q = sum_i M_i^T P                            m r numbers are sent
    M ~ P Q^T = P P^T M                          replica i's part of it is P P^T M_i

P P^T is a projection. Its error on replica i is M_i - P P^T M_i, which error feedback
adds to the next step. Q starts the next step's iteration (warm start), so that over
steps P converges to the leading directions of M. A matrix of rank r or less is sent
exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import check_at_least, check_flags, check_number
from jdist._tree import PyTree, wide_dtype
from jdist.data_parallel.hooks import hook as hooks
from jdist.data_parallel.hooks.hook import Bucket, Hook, flatten, require_real, split
from jdist.data_parallel.hooks.hook_switch import switch
from jdist.data_parallel.replicas.mapping import summed


def power_sgd(
    *,
    rank: int = 1,
    start: int = 1000,
    min_compression_rate: float = 2,
    error_feedback: bool = True,
    warm_start: bool = True,
    seed: int = 0,
) -> Hook:
    """PowerSGD: an exact sum for the first steps, then factors of low rank.

    A gradient of shape (n, a, b, ..) is an n x (a b ..) matrix. It is compressed if
    `(n + m) r * min_compression_rate < n m`; vectors never are, and are sent with the
    first factors. Each bucket takes two collectives. Inside `fp16` factors are float16,
    too: each number of one is a sum over a row or column, and where that is beyond
    65504 the result is infinite or NaN, although the gradient need not be.

    Args:
      rank: Columns r of the factors, at most n and m.
      start: Steps with an exact sum first, while gradients change quickly.
      min_compression_rate: How many times smaller the factors must be.
      error_feedback: Whether the error is added to the next step.
      warm_start: Whether Q is kept; otherwise it is drawn anew in each step.
      seed: The seed of Q.

    Raises:
      ValueError: `rank` is below 1, `start` below 0, or the rate not above 0.

    References:
      Vogels et al., PowerSGD, NeurIPS 2019; `torch.distributed.algorithms
      .ddp_comm_hooks.powerSGD_hook`. torch keeps as error replica i's matrix without
      the *mean* result, which differs between replicas by what cancels in their sum,
      and grows where their data differ.
    """
    for argument, value, least in (("rank", rank, 1), ("start", start, 0)):
        check_at_least(f"power_sgd({argument}=...)", value, least)
    argument = "power_sgd(min_compression_rate=...)"
    check_number(argument, min_compression_rate, "must be above 0", lambda x: x > 0)
    check_flags("power_sgd", error_feedback=error_feedback, warm_start=warm_start)
    low_rank = _low_rank(rank, min_compression_rate, warm_start, seed)
    compressed = hooks.error_feedback(low_rank) if error_feedback else low_rank
    return switch(hooks.all_reduce(), compressed, at=start)


class _Matrix(NamedTuple):
    """One of a bucket's gradients that is compressed."""

    place: int
    """Its index in the bucket."""

    shape: tuple[int, int]
    """Its rows and columns."""

    start: tuple[int, int]
    """The shape of Q."""


def _compressible(bucket: Bucket, rank: int, rate: float) -> list[_Matrix]:
    found = []
    for place, shape in enumerate(bucket.shapes):
        if not shape or not np.prod(shape):
            continue
        n, m = shape[0], int(np.prod(shape[1:], dtype=int))
        r = min(n, m, rank)
        if (n + m) * r * rate < n * m:
            found.append(_Matrix(place, (n, m), (m, r)))
    return found


def _low_rank(rank: int, rate: float, warm_start: bool, seed: int) -> Hook:
    def init(bucket: Bucket) -> PyTree:
        require_real("power_sgd", bucket)
        matrices = _compressible(bucket, rank, rate)
        if not warm_start:
            # A count of steps, by which `_drawn` makes another Q for each.
            return jnp.zeros((), jnp.uint32)
        # NumPy draws the same numbers on every replica and under every version of JAX.
        rng = np.random.default_rng((seed, bucket.index))
        dtype = _real(bucket)
        return [jnp.asarray(rng.normal(size=each.start), dtype) for each in matrices]

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        require_real("power_sgd", bucket)
        matrices = _compressible(bucket, rank, rate)
        starts = state if warm_start else _drawn(state, bucket, matrices, seed)
        new_starts, result = _projected(starts, bucket, matrices)
        # Without a warm start the state only counts steps, for a new draw in each.
        return new_starts if warm_start else state + 1, result

    return Hook(f"power_sgd(rank={rank})", reduce, init)


def _projected(
    starts: list[jax.Array], bucket: Bucket, matrices: list[_Matrix]
) -> tuple[list[jax.Array], Bucket]:
    """One step of power iteration for each matrix of a bucket; the rest is summed."""
    gradients = bucket.gradients()
    dtype = _real(bucket)
    places = [each.place for each in matrices]
    own = [gradients[i].reshape(shape).astype(dtype) for i, shape, _ in matrices]
    others = [i for i in range(len(gradients)) if i not in places]
    # An orthonormal start keeps the products in the range of the gradient's numbers.
    left = [_product(m, _basis(q)) for m, q in zip(own, starts, strict=True)]
    # Vectors are sent with the first factors, to save a collective.
    given = [*(p.astype(bucket.buffer.dtype) for p in left)]
    given += [gradients[i] for i in others]
    summed = _summed(given, bucket)
    # Every replica decomposes the same sums, and so gets the same bases.
    bases = [_basis(p.astype(dtype)) for p in summed[: len(left)]]
    right = [_product(m.T, p) for m, p in zip(own, bases, strict=True)]
    factors = _summed([q.astype(bucket.buffer.dtype) for q in right], bucket)
    factors = [q.astype(dtype) for q in factors]
    results = dict(zip(others, summed[len(left) :], strict=True))
    sent = {i: gradients[i] for i in others}
    for place, p, q, own_q in zip(places, bases, factors, right, strict=True):
        results[place] = _product(p, q.T)
        # This replica's part of the result: error feedback keeps the rest.
        sent[place] = _product(p, own_q.T)
    everything = (
        flatten([x[i].astype(bucket.buffer.dtype) for i in range(len(gradients))])
        for x in (results, sent)
    )
    return factors, bucket.replaced(*everything)


def _summed(arrays: list[jax.Array], bucket: Bucket) -> list[jax.Array]:
    """The sums over replicas of several arrays, by one collective."""
    if not arrays:
        return []
    total = summed(flatten(arrays), bucket.axis_name)
    return split(total, [x.shape for x in arrays])


def _drawn(
    count: jax.Array, bucket: Bucket, matrices: list[_Matrix], seed: int
) -> list[jax.Array]:
    """Q of this step, the same on all replicas; one draw, which compiles once."""
    shapes = [each.start for each in matrices]
    # The kind of generator that gives each replica of a `vmap` the same numbers.
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, bucket.index), count)
    total = sum(m * r for m, r in shapes)
    return split(jax.random.normal(key, (total,), _real(bucket)), shapes)


def _basis(columns: jax.Array) -> jax.Array:
    """Orthonormal columns that span the given ones, or more if these are dependent."""
    return jnp.linalg.qr(columns)[0]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # TPUs multiply float32 in bfloat16 by default, which would spoil the projection.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _real(bucket: Bucket) -> PyTree:
    """The dtype of the factors: XLA has no QR decomposition in 16 bits."""
    return wide_dtype(bucket.buffer.dtype)

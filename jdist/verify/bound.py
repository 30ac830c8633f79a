"""Derivation of a rounding-error bound on the difference of two right gradients.

One entry of a gradient is a sum g = t_1 + .. + t_n over examples: t_i is what a
backward pass makes of the example's share c_i of the loss (w_i / sum w for a mean),
c_i times its gradient if all rules are linear. A program computes the terms, adds them
in some order, and each rounding adds an error of at most u |p|, where u is the
dtype's rounding unit and p what is rounded. Taken as independent with mean zero, such
errors e_k stay below lambda sqrt(sum e_k^2) but with a probability of
2 exp(-lambda^2 / 2): Hoeffding's inequality (Higham and Mary 2019). An error that is
spread evenly over [-e, e], as roundings are, needs e / sqrt(3) only: it is
sub-Gaussian with its own variance. Reference and candidate err independently: sqrt(2).

1.  *The sum*, at most n + EXTRA roundings in the dtype that is accumulated in, with
    unit a. Whatever the order, |p| <= S = |t_1| + .. + |t_n|:

        A = sqrt(2) lambda a sqrt(n + EXTRA) S

    Sixteen-bit types are accumulated in float32 by XLA's reductions and dot products,
    so a = 2^-24 for them unless the judge is told otherwise.
2.  *Partial results* in the leaf's own dtype, with unit u. A program may split the
    batch into parts and round each part's gradient, or round a weight, the total, the
    result. For a random split into k parts the squares of the parts' sums add up to
    g^2 / k + (1 - 1 / k) sum t_i^2 on average, which is at most
    P^2 = max(g^2, sum t_i^2), from one rounding of the whole to one of every term.
    EXTRA of them, for programs differ in what they round:

        B = sqrt(2) lambda u sqrt(EXTRA / 3) P

    Where the terms inside one t_i cancel (over time, over pixels), the square root of
    the sum of their squares stands for t_i: a program may split that sum as well.
3.  *The terms*. They are measured, not modelled: each example's gradient is evaluated
    in float64, and in float64 with every equation's result perturbed as a rounding
    would (Monte Carlo arithmetic, see `lockstep`). From these comes V, the variance of
    the sum of the terms' errors, which add up as a random walk. What a program rounds
    the same way for all examples, such as a cast of the parameters, adds up in D, the
    error of the reference: see below. An entry is not trusted to round more finely than
    its leaf does, relative to the magnitudes: s^2 = sum V / sum S^2 over the leaf.

        C = sqrt(2) tau max(sqrt(V), s S)

    V is itself estimated, from few draws, d of each example. For a normal error over an
    independent estimate of its deviation, P(|error| > tau sqrt(V)) is at most the mean
    of 2 exp(-tau^2 X / (2 nu)) with X chi-squared, which is
    2 (1 + tau^2 / nu)^(-nu/2), as in Student's distribution. It is the risk for
    tau(nu) = sqrt(nu (exp(lambda^2 / nu) - 1)), which tends to lambda.

    Where examples contribute alike to an entry, nu is the number of draws of all of
    them. An entry to which one example alone contributes, such as a row of an
    embedding, has nu = d; no entry has fewer, since the mean above is largest if one
    example has all the variance. So there are two limits. *Below* the bound a leaf
    passes. For it nu is taken as at least POOLED, and V is at least the product of its
    means over the entry's row and over its column, divided by that over the leaf: a
    pooled estimate, of many draws. It may be too small for single entries, so it
    condemns none. *Above* tau(d) / tau(nu) bounds a leaf fails, whatever the
    distribution of V over examples and entries. In between a leaf is *in doubt*, and
    more draws decide; and wherever C and D are more than CHAOTIC roundings wide,
    where a loss may be chaotic, so that errors are not normal and few draws show
    nothing of them.

    A leaf as a whole fails sooner. The square of the error's 2-norm is
    T = sum l_j z_j^2 with z_j normal and W = sum l_j its mean. For 0 < s < 1/2, T
    exceeds x W with a probability of at most exp(-s x) prod (1 - 2 s l_j / W)^(-1/2),
    and the estimate of W from d draws has the mean of exp(-s x .) at most
    prod (1 + 2 s x l_j / (W d))^(-d/2). Both products are largest if one l_j is all of
    W, whatever the errors' correlations:

        P(T > x W_estimated) <= (1 - 2 s)^(-1/2) (1 + 2 s x / d)^(-d/2)

    There is one such test a leaf, not one an entry.
4.  Numbers below the smallest normal one may be flushed to zero, an absolute error.
5.  *Decisions*, such as a route or an argmax, are rounding's near a tie. They are the
    same in all of the above, so that a program that decides otherwise is beyond the
    bound. It is *not judged* if other choices explain the rest of its error, and fails
    if they do not. Example i changes the gradient by at most M_i, where it may decide
    otherwise at all, and v = sum_i E(change^2) for one program with natural errors;
    both are measured (see `evaluation.decisions`). Reference and candidate decide
    independently, so that the mean change is 0, the variance 2 v and, by Bernstein's
    inequality with M = max M_i and L = log(2 m / RISK), one for each entry:

        E = min(sum_i M_i, L M / 3 + sqrt((L M / 3)^2 + 4 v L))

    v is at least what was seen, in R runs: for a sum Y of R v / M^2 expected terms of
    at most 1, R v / M^2 <= Y + L + sqrt(L^2 + 2 L Y), by Chernoff's bound. The same
    holds for the leaf's 2-norm with m = 1, M_i and v of vectors (Pinelis 1994). Of a
    batch that is measured as one term, several decisions may coincide: 2 M.

The random parts are independent, so their variances add. In D = c + r, c is common to
all examples, which for a candidate may be s c with any s in [-1, 1], and r is random.
With its own r' a candidate differs by s c + r' - c - r = (s - 1) D + r' - s r: the last
two have the variance of two programs at most. D is the reference minus the exact
gradient where the random part explains that much. Otherwise the reference may not even
be a sum of the examples' terms, so D is measured without it: the sum of the terms'
errors in one run as the device rounds.

    bound = sqrt(A^2 + B^2 + C^2) + 2 |D| + (n + EXTRA) smallest

lambda is set by how often a right answer may be rejected: RISK per leaf of m entries,
so that m * 2 exp(-lambda^2 / 2) = RISK. No constant in it is fitted.

A bound can be so wide that it says nothing: where all digits are lost in the terms,
zero would pass for the gradient. Terms at random make a gradient of about the size of
P. So a leaf in which zero would pass, and whose bound is above BLIND P, is *not
judged*. Where the bound is far below P and zero passes all the same, the gradient is
zero to rounding: the terms cancel, as they do at an optimum, and that is judged.

References:
  Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.
  Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
  Comput. 41(5), 2019, theorem 2.4.
  Parker, Monte Carlo Arithmetic, UCLA CSD TR-970002, 1997.
  Pinelis, Optimum bounds for the distributions of martingales in Banach spaces, Ann.
  Probab. 22(4), 1994.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jdist._tree import wide_dtype

# Roundings besides those of the sum: programs differ in whether they round a weight,
# the total, the result.
EXTRA = 4
# How often a right leaf is rejected: even among a million leaves hardly once.
RISK = 1e-9
# A bound above this share of P says too little, see the end of the derivation.
BLIND = 1 / 8
# Draws to which a pooled estimate of a variance amounts at least.
POOLED = 128
# Most bounds are some tens of roundings of the gradient wide; and in float64 they would
# be narrower by the ratio of the units. Both with room to spare.
ROUNDINGS = 2.0**10
# Arrays with more entries are kept in single precision where that is enough, and have
# wide copies only while they are needed.
LARGE = 2**18
# Beyond so many the terms' errors may be chaotic; in a transformer of six layers they
# are a tenth as wide.
CHAOTIC = 2.0**13


class Undecided(NamedTuple):
    """What decisions within rounding may change in a leaf.

    Attributes:
      bound: E: the largest difference that other choices explain; float64, of the
        leaf's shape.
      in_norm: Likewise of the leaf's 2-norm.
      words: Which decisions these are.
    """

    bound: Any
    in_norm: float
    words: str


class Limit(NamedTuple):
    """The limit of a leaf's differences; float64, of the leaf's shape or a scalar."""

    bound: Any
    """The largest difference that rounding explains."""

    size: Any
    """P: the size of a gradient whose terms do not cancel; of a large leaf float32."""

    doubt: float = 1.0
    """The number of bounds up to which more draws might explain a difference."""

    doubt_in_norm: float = math.inf
    """Likewise in the 2-norm of the leaf."""

    undecided: Undecided | None = None
    """The error beyond the bound that other choices explain; None without any."""

    explained: bool = True
    """Whether the random part explains the reference's error that stands for D."""

    def widened(self) -> "Limit":
        """With the bound below which a leaf is in doubt, where that has an end."""
        if math.isinf(self.doubt):
            return self
        return self._replace(bound=self.bound * self.doubt, doubt=1.0)


class Sums(NamedTuple):
    """Measured sums over examples, for each entry of a leaf.

    All but the first are divided by the scale, squares by its square: so that they fit
    into single precision.

    Attributes:
      total: The exact gradient g.
      magnitude: S, the sum of |t_i|.
      square: The sum of |t_i|^2; if the terms inside t_i cancel, the sum of their
        squares.
      drift: D, the error of the terms as the device rounds; None where no program ran
        so, and the error of the reference stands for it.
      variance: V, the variance of the sum of the terms' errors.
      scale: The scale.
    """

    total: Any
    magnitude: Any
    square: Any
    drift: Any
    variance: Any
    scale: Any = 1.0


def unit_roundoff(dtype: DTypeLike) -> float:
    """The largest relative error of one rounding to nearest: 2^-24 for float32.

    Example:
      >>> unit_roundoff("float32") == 2.0**-24, unit_roundoff("bfloat16") == 2.0**-8
      (True, True)
    """
    return float(jnp.finfo(dtype).eps) / 2


def confidence(entries: int, draws: float = math.inf) -> float:
    """The number of deviations that a right leaf may reach: lambda, or tau.

    Args:
      entries: Number of entries in the leaf, m.
      draws: Number of draws from which the deviation was estimated, nu.

    Example:
      >>> round(confidence(1), 2), round(confidence(1, draws=64), 2)
      (6.54, 7.81)
    """
    squared = 2 * math.log(2 * max(entries, 1) / RISK)
    if math.isinf(draws):
        return math.sqrt(squared)
    if squared / draws > 700:  # Beyond floating numbers.
        return math.inf
    # `expm1`, because the exponent is small where there are many draws.
    return math.sqrt(draws * math.expm1(squared / draws))


def confidence_in_norm(draws: int) -> float:
    """The number of deviations that the 2-norm of a right leaf may reach.

    Args:
      draws: Number of draws of each example, d.

    Example:
      >>> round(confidence_in_norm(3)), round(confidence_in_norm(16))
      (2520, 16)
    """
    each = np.linspace(0.05, 0.495, 90)
    least = (1 - 2 * each) ** (-1 / draws) * RISK ** (-2 / draws) - 1
    return float(np.sqrt(np.min(draws * least / (2 * each))))


def bound(dtype: DTypeLike, entries: int, terms: int, scale: ArrayLike) -> np.ndarray:
    """The largest difference that the rounding of a sum explains: A alone.

    Args:
      dtype: The floating dtype that both sides computed and added in.
      entries: Number of entries in the leaf, m.
      terms: Number of terms in each sum, n.
      scale: S, of the leaf's shape or a scalar: the sum of magnitudes.

    Returns:
      float64, of the shape of `scale`.
    """
    roundings = terms + EXTRA
    relative = math.sqrt(2 * roundings) * confidence(entries) * unit_roundoff(dtype)
    return relative * np.asarray(scale, np.float64) + roundings * _flushed(dtype)


def measured_bound(
    dtype: DTypeLike,
    sums: Sums,
    terms: int,
    draws: tuple[int, int],
    accumulation: DTypeLike,
    reference: ArrayLike | None = None,
) -> Limit:
    """The whole bound, from measured sums.

    Args:
      dtype: The leaf's.
      sums: Each of the leaf's shape.
      terms: Number of examples, n.
      draws: Number of draws of each term's errors, and of all together: d and nu.
      accumulation: The dtype that is accumulated in.
      reference: The reference's leaf, if its error stands for D.
    """
    least, most = draws
    shape = np.shape(sums.total)
    given = sums if reference is None else sums._replace(drift=reference)
    tables = {name: _table(x) for name, x in zip(Sums._fields[:5], given, strict=False)}
    total, magnitude, _, _, variance = tables.values()
    width = confidence(total.size)
    tau = confidence(total.size, max(most, POOLED))
    # The squares of what S in A, P in B and the deviation in C are multiplied by.
    adding = 2 * (terms + EXTRA) * (width * unit_roundoff(accumulation)) ** 2
    partial = 2 / 3 * EXTRA * (width * unit_roundoff(dtype)) ** 2
    measured = 2 * tau**2
    relative = _relative(variance, magnitude)
    pooled = _pooled(variance, len(shape)) if most < POOLED else None
    allowed, squares, explained = np.empty(total.shape), np.zeros(3), True
    single = total.size > LARGE and jnp.finfo(dtype).bits <= 32
    size = np.empty(total.shape, np.float32 if single else np.float64)
    for block in blocks_of(*total.shape):
        own = sums._replace(**{k: in_double(x[block]) for k, x in tables.items()})
        if pooled is not None:
            by_row, by_column = (x[i] for x, i in zip(pooled, block, strict=True))
            likely = np.maximum(own.variance, by_row[:, None] * by_column)
            own = own._replace(variance=likely)
        power = (own.scale * own.magnitude) ** 2
        largest = np.maximum(np.abs(own.total) ** 2, own.scale**2 * own.square)
        of_terms = np.maximum(own.scale**2 * own.variance, relative * power)
        of_terms *= measured
        if reference is None:
            moved = own.scale * np.abs(own.drift)
        else:
            moved = np.abs(own.drift - own.total)
        found = np.sqrt(of_terms + adding * power + partial * largest) + 2 * moved
        found += (terms + EXTRA) * _flushed(dtype)
        # An entry that could not be measured has no bound, and is not judged.
        found[np.isnan(found)] = np.inf
        allowed[block] = found
        # 2 |D| of the bound are D's own. NaN is not explained.
        explained &= reference is None or bool((3 * moved <= found).all())
        size[block] = np.sqrt(largest)
        squares += [float(np.sum(x)) for x in (of_terms, moved**2, largest)]
    in_c, in_d, in_p = np.sqrt(squares).tolist()
    arrays = allowed.reshape(shape), size.reshape(shape)
    limit = Limit(*arrays, doubt=math.inf, explained=explained)
    # What was measured alone: the errors of a sum are not chaotic.
    chaotic = min(BLIND, CHAOTIC * unit_roundoff(dtype))
    if not in_c + 2 * in_d <= chaotic * in_p:
        return limit
    # The norms of the parts of a bound add up at most.
    in_norm = 1 + confidence_in_norm(least) / tau
    doubt = confidence(total.size, least) / tau
    return limit._replace(doubt=doubt, doubt_in_norm=in_norm)


def _relative(variance: np.ndarray, magnitude: np.ndarray) -> float:
    """s^2: by how much of S^2 the variance of an entry is at least.

    It is that of the whole leaf: an entry that happened to round well would have too
    narrow a bound by its own.
    """
    powers = np.zeros(2)
    for block in blocks_of(*variance.shape):
        squares = in_double(magnitude[block]) ** 2
        powers += [np.sum(in_double(variance[block])), np.sum(squares)]
    return float(powers[0] / powers[1]) if powers[1] > 0 else 0.0


BLOCK = 2**15
"""Entries of a block, a few of which in float64 are in a core's cache together."""


def blocks_of(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """The blocks of a table, each by its rows and its columns.

    NumPy's formulas of twenty operations read and write whole arrays twenty times. In
    blocks they take a fifth of the time; threads would wait for the interpreter's lock.

    Example:
      >>> list(blocks_of(2, 3))
      [(slice(0, 10922, None), slice(0, 3, None))]
    """
    width = max(1, min(columns, BLOCK))
    height = BLOCK // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def in_blocks(*arrays: ArrayLike) -> Iterator[list[np.ndarray]]:
    """Copies of arrays of one shape in double precision, block by block.

    Example:
      >>> [(x.size, y.sum()) for x, y in in_blocks(np.zeros((2, 3)), np.ones((2, 3)))]
      [(6, np.float64(6.0))]
    """
    flat = [np.asarray(x).reshape(-1) for x in arrays]
    for start in range(0, flat[0].size, BLOCK):
        yield [in_double(x[start : start + BLOCK]) for x in flat]


def inner(first: np.ndarray, second: np.ndarray) -> float:
    """The real part of the inner product of two blocks.

    Not by BLAS: to share a block among threads takes longer than to add it up, on a
    busy machine a hundred times as long.
    """
    return float(np.sum((first.conj() * second).real))


def _table(array: ArrayLike) -> np.ndarray:
    """The rows of an array, each with all of its other axes in one; a vector is one."""
    own = np.asarray(array)
    if own.ndim < 2:
        return own.reshape(1, own.size)
    return own.reshape(own.shape[0], math.prod(own.shape[1:]))


def _pooled(variance: np.ndarray, axes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Numbers of each row and of each column, whose products are the pooled variances.

    These are the means along the row and along the column, over the leaf's.
    """
    mean = float(np.mean(variance, dtype=np.float64)) if variance.size else 0.0
    # An entry that could not be measured makes it NaN.
    if not 0 < mean < math.inf:
        return None
    if axes < 2:
        return np.full(1, mean), np.ones(variance.size)
    rows = variance.mean(axis=1, dtype=np.float64)
    return rows, variance.mean(axis=0, dtype=np.float64) / mean


def choices_bound(
    entries: int,
    draws: int,
    total: ArrayLike,
    largest: ArrayLike,
    square: ArrayLike,
) -> np.ndarray:
    """The largest difference that other choices explain: E.

    Args:
      entries: Number of entries in the leaf, m.
      draws: Number of runs in which the squares were measured, R.
      total: The sum over examples of the largest changes, M_i.
      largest: The largest of these, M.
      square: The sum over examples of the mean squares of the changes, v.
    """
    log = math.log(2 * max(entries, 1) / RISK)
    most = np.asarray(largest, np.float64)
    unit = np.where(most > 0, most, 1.0) ** 2
    seen = draws * np.asarray(square) / unit
    variance = unit / draws * (seen + log + np.sqrt(log**2 + 2 * log * seen))
    third = log * most / 3
    random = third + np.sqrt(third**2 + 4 * variance * log)
    return np.minimum(total, random)


def accumulated(dtype: DTypeLike, accumulation: DTypeLike | None) -> np.dtype:
    """The dtype in which a sum of `dtype` is accumulated.

    Args:
      dtype: The dtype of the terms and of the result.
      accumulation: The user's choice for dtypes of less than 32 bits; None for float32.
    """
    if accumulation is None or jnp.finfo(dtype).bits >= 32:
        return wide_dtype(dtype)
    return jnp.dtype(accumulation)


def wide_of(dtype: DTypeLike) -> np.dtype:
    """The dtype of double precision that has room for a floating dtype."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(jnp.complex128 if is_complex else jnp.float64)


def single_of(dtype: DTypeLike) -> np.dtype:
    """The dtype of single precision for a floating dtype."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(jnp.complex64 if is_complex else jnp.float32)


def in_double(array: ArrayLike) -> np.ndarray:
    """A floating array on the host, in float64 or complex128."""
    host = np.asarray(array)
    return host.astype(wide_of(host.dtype))


def flushes(dtype: DTypeLike) -> bool:
    """Whether numbers below the smallest normal one may be flushed to zero."""
    # float16 and narrower types are computed in float32 and rounded, so that they keep
    # their subnormal numbers.
    return bool(jnp.finfo(dtype).nexp >= 8)


def _flushed(dtype: DTypeLike) -> float:
    """The largest error of one operation near zero."""
    info = jnp.finfo(dtype)
    return float(info.smallest_normal if flushes(dtype) else info.smallest_subnormal)

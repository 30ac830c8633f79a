"""How far apart two right answers may be: the bound, derived.

One entry of a gradient is a sum g = t_1 + .. + t_n over examples. A program computes it
in some order, and each of its roundings adds an error of at most u |p|, where u is the
dtype's rounding unit and p a partial sum. Whatever the order, |p| <= S = |t_1| + .. +
|t_n|, the *sum of magnitudes*; it can be far larger than |g| when terms cancel.

1.  Roundings per entry: n - 1 additions, and a few more per term that depend on the
    program: the weight, the division by the total, a collective's addition, the cast to
    the leaf's dtype. Together at most n + EXTRA.
2.  In the worst case they add up to (n + EXTRA) u S. They do not conspire: taken as
    independent with mean zero, Hoeffding's inequality says that their sum exceeds
    lambda sqrt(n + EXTRA) u S with a probability below 2 exp(-lambda^2 / 2)
    (Higham and Mary 2019).
3.  The terms are computed too. Their own errors, in units of u, are *measured*: each
    example's gradient is evaluated in the precision that is judged and in float64, and
    K = sum_i |difference_i| / u. No model of the network is needed, and hardware that
    rounds products more coarsely than their dtype says is seen for what it is.
4.  Reference and candidate both round, independently: sqrt(2).
5.  lambda is set by how often a right answer may be rejected: RISK per leaf of m
    entries, so that m * 2 exp(-lambda^2 / 2) = RISK.

        bound = sqrt(2) lambda(m) u (sqrt(n + EXTRA) S + K)

Numbers below the smallest normal one may be flushed to zero, which is an absolute
error and is added as such. No constant in it is fitted; a bound that is a thousand
times above every error seen is reported as suspicious, see `Report.notes`.

References:
  Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.
  Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
  Comput. 41(5), 2019, theorem 2.4.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

EXTRA = 4
RISK = 1e-9


def unit_roundoff(dtype: Any) -> float:
    """The largest relative error of one rounding to nearest: 2^-24 for float32.

    Example:
      >>> unit_roundoff("float32") == 2.0**-24, unit_roundoff("bfloat16") == 2.0**-8
      (True, True)
    """
    return float(jnp.finfo(dtype).eps) / 2


def confidence(entries: int) -> float:
    """lambda: how many standard widths a right leaf of so many entries may reach."""
    return math.sqrt(2 * math.log(2 * max(entries, 1) / RISK))


def bound(dtype: Any, entries: int, terms: int, scale: Any) -> np.ndarray:
    """The largest difference that rounding explains, per entry of a leaf.

    Args:
      dtype: The floating dtype that both sides computed in.
      entries: Number of entries in the leaf, m.
      terms: Number of terms in each sum, n.
      scale: S + K / sqrt(n + EXTRA), of the leaf's shape or a scalar: the sum of
        magnitudes, together with the terms' own measured rounding.

    Returns:
      float64, of the shape of `scale`.
    """
    roundings = terms + EXTRA
    relative = math.sqrt(2 * roundings) * confidence(entries) * unit_roundoff(dtype)
    return relative * np.asarray(scale, np.float64) + roundings * _flushed(dtype)


def _flushed(dtype: Any) -> float:
    """What one operation can lose near zero.

    float16 and narrower are computed in float32 and rounded, so their subnormal numbers
    exist; wider types may be flushed to zero below the smallest normal number.
    """
    info = jnp.finfo(dtype)
    return float(info.smallest_subnormal if info.nexp < 8 else info.smallest_normal)

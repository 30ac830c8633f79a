"""The bound holds for right sums in any order, and is not much larger than needed."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.bound import RISK, bound, confidence, unit_roundoff


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        ("float64", 2**-53),
        ("float32", 2**-24),
        ("float16", 2**-11),
        ("bfloat16", 2**-8),
    ],
)
def test_unit_roundoff_is_half_the_spacing_at_one(dtype, unit):
    """The largest relative error of rounding to nearest."""
    assert unit_roundoff(dtype) == unit
    one = jnp.asarray(1, dtype)
    assert one + jnp.asarray(2 * unit, dtype) > one
    assert one + jnp.asarray(unit, dtype) == one


def test_confidence_is_hoeffdings():
    """m entries, each beyond lambda with probability 2 exp(-lambda^2/2), give RISK."""
    for entries in (1, 7, 10**6):
        width = confidence(entries)
        assert math.isclose(entries * 2 * math.exp(-(width**2) / 2), RISK)


@pytest.mark.parametrize("count", [3, 64, 4096])
@pytest.mark.parametrize("signs", ["one sign", "both signs"])
def test_right_sums_pass_in_any_order_and_nearly_reach_the_bound(rng, count, signs):
    """Sequential, pairwise and shuffled float32 sums of 400 columns.

    All stay below the bound, and the worst of them comes within a factor of 20 of it
    when the terms have one sign, so that the bound is not idle. With both signs partial
    sums stay near sqrt(n) instead of n, which no count or magnitude can know: there the
    factor grows with sqrt(n).
    """
    terms = rng.uniform(0.5, 1, size=(count, 400)).astype(np.float32)
    if signs == "both signs":
        terms *= rng.choice([-1, 1], size=terms.shape).astype(np.float32)
    sums = [
        np.add.accumulate(terms[order])[-1]
        for order in (np.arange(count), np.arange(count)[::-1], rng.permutation(count))
    ]
    exact = np.add.accumulate(terms.astype(np.float64))[-1]
    limit = bound("float32", 400, count, np.abs(terms.astype(np.float64)).sum(axis=0))
    worst = max(float((np.abs(found - exact) / limit).max()) for found in sums)
    assert worst <= 1
    if count > 3:
        assert worst * 20 * (1 if signs == "one sign" else math.sqrt(count)) >= 1


def test_numbers_that_are_flushed_to_zero_are_explained():
    """A sum of nothing measurable may still be off by a few smallest numbers."""
    assert bound("float32", 1, 1, 0.0) == 5 * np.finfo(np.float32).smallest_normal
    assert bound("float16", 1, 1, 0.0) == 5 * np.finfo(np.float16).smallest_subnormal

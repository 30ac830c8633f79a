"""The bound holds for right sums in any order, and is not much larger than needed."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.verify.bound import (
    EXTRA,
    POOLED,
    RISK,
    ROUNDINGS,
    Sums,
    accumulated,
    bound,
    confidence,
    confidence_in_norm,
    flushes,
    in_double,
    measured_bound,
    unit_roundoff,
    wide_of,
)


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


def sums(shape=(2, 3), **parts):
    """What was measured of a leaf, 0 where nothing is given."""
    nothing = dict.fromkeys(Sums._fields[:5], 0.0)
    return Sums(*(np.broadcast_to(x, shape) for x in {**nothing, **parts}.values()))


def test_the_risk_of_an_estimated_deviation(rng):
    """Averaged over the estimates of so many draws, tau has the risk of lambda."""
    for draws in (16, 64, 256):
        for entries in (1, 1000):
            tau, width = confidence(entries, draws), confidence(entries)
            assert tau > width
            # The mean of 2 exp(-tau^2 X / (2 nu)) with X chi-squared of nu degrees.
            mean = 2 * (1 + tau**2 / draws) ** (-draws / 2)
            assert math.isclose(entries * mean, RISK, rel_tol=1e-9)
    assert math.isclose(confidence(7, 1e9), confidence(7), rel_tol=1e-6)
    # By simulation, at a risk that a simulation can see: 2 exp(-lambda^2 / 2) = 1 %.
    squared = 2 * math.log(2 / 0.01)
    for draws in (8, 32):
        tau = math.sqrt(draws * math.expm1(squared / draws))
        spread = np.sqrt(rng.chisquare(draws, size=400_000) / draws)
        beyond = np.mean(np.abs(rng.normal(size=400_000)) > tau * spread)
        assert beyond < 0.01


def test_many_terms_make_no_doubt_and_wide_errors_do():
    """The roundings of a sum are no chaos, however many it has: 1000 draws say no more.

    Only what was measured of the terms may be: deviation or drift.
    """
    unit, terms = unit_roundoff("float32"), 9973

    def limit(**measured):
        own = sums((7, 5), total=1.0, square=1.0, magnitude=100.0, **measured)
        return measured_bound("float32", own, terms, (3, 3 * terms), "float32")

    for quiet in (
        limit(variance=unit**2, drift=unit),
        limit(variance=(200 * unit) ** 2),  # As in a transformer of twelve layers.
    ):
        assert np.all(quiet.bound > ROUNDINGS * unit)
        assert quiet.doubt < 1e4
        assert quiet.doubt_in_norm < 1e4
    for chaotic in ({"variance": (1600 * unit) ** 2}, {"drift": 4800 * unit}):
        assert limit(**chaotic).doubt == np.inf


@pytest.mark.parametrize(("examples", "draws"), [(1, 32), (8, 16), (33, 4), (77, 2)])
def test_a_leaf_is_in_doubt_as_far_as_the_draws_of_one_example_allow(
    examples, draws, rng, monkeypatch
):
    """As for the row of an embedding that one of the examples reads: simulated.

    At a risk that a simulation can see. By the draws of all examples such rows would be
    condemned more often than that, where each has few.
    """
    monkeypatch.setattr("jdist.verify.bound.RISK", 0.01)
    given = sums((1,), variance=1.0, total=1e5)
    count = (draws, draws * examples)
    limit = measured_bound("float32", given, examples, count, "float32")
    estimated = np.sqrt(rng.chisquare(draws, size=400_000) / draws)
    # Two right answers, each with an error of this variance.
    differ = np.abs(rng.normal(size=400_000) - rng.normal(size=400_000))
    found = np.mean(differ > limit.bound * estimated)
    assert (found > 0.01) == (draws < 8)
    assert np.mean(differ > limit.doubt * limit.bound * estimated) < 0.01
    assert limit.doubt >= 1


def test_more_entries_more_terms_and_more_magnitude_widen_the_bound():
    """Each by itself, and never the other way."""
    base = bound("float32", 100, 50, 1.0)
    assert bound("float32", 1000, 50, 1.0) > base
    assert bound("float32", 100, 200, 1.0) > base
    assert bound("float32", 100, 50, 2.0) > 1.999 * base
    assert bound("float64", 100, 50, 1.0) < 1e-8 * base
    # With the square root of the number of roundings, not with the number.
    ratio = bound("float32", 100, 400 - EXTRA, 1.0) / bound(
        "float32", 100, 100 - EXTRA, 1.0
    )
    assert math.isclose(ratio, 2, rel_tol=1e-6)


def test_the_bound_has_the_shape_of_the_scale():
    """Entry by entry, in float64, without entries too."""
    found = bound("bfloat16", 6, 4, np.arange(6.0).reshape(2, 3))
    assert (found.shape, found.dtype) == ((2, 3), np.float64)
    assert (np.diff(found.ravel()) > 0).all()
    assert bound("float32", 0, 4, np.zeros((0, 3))).shape == (0, 3)


PARTS = {
    "adding": (
        {"magnitude": 3.0},
        lambda n, u, a, nu: confidence(6) * a * math.sqrt(n + EXTRA) * 3,
    ),
    "partial results, of one sum": (
        {"total": -2.0},
        lambda n, u, a, nu: confidence(6) * u * math.sqrt(EXTRA / 3) * 2,
    ),
    "partial results, of many terms": (
        {"total": 0.5, "square": 16.0},
        lambda n, u, a, nu: confidence(6) * u * math.sqrt(EXTRA / 3) * 4,
    ),
    # By a pooled estimate, of as many draws at least.
    "terms": ({"variance": 1e-12}, lambda n, u, a, nu: confidence(6, POOLED) * 1e-6),
}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_of_the_measured_bound(name):
    """By the formulas of the module's docstring, written again here."""
    given, formula = PARTS[name]
    n, nu, u, a = 20, 96, 2.0**-8, 2.0**-24
    found = measured_bound("bfloat16", sums(**given), n, (8, nu), "float32").bound
    tiny = (n + EXTRA) * float(jnp.finfo("bfloat16").smallest_normal)
    expected = math.sqrt(2) * formula(n, u, a, nu) + tiny
    np.testing.assert_allclose(found, np.full((2, 3), expected), rtol=1e-12)


def test_random_parts_add_as_variances_and_drift_as_it_is():
    """Two random errors seldom help each other; the reference's own error is known."""
    one = sums(magnitude=3.0)
    other = sums(variance=1e-12)
    both = sums(magnitude=3.0, variance=1e-12)
    a, b, c = (
        measured_bound("float32", x, 9, (8, 96), "float32").bound
        for x in (one, other, both)
    )
    np.testing.assert_allclose(c, np.hypot(a, b), rtol=1e-9)
    drifted = measured_bound(
        "float32", sums(magnitude=3.0, drift=-0.25), 9, (8, 96), "float32"
    )
    np.testing.assert_allclose(drifted.bound, a + 0.5, rtol=1e-12)


def test_an_entry_is_not_trusted_beyond_its_leaf():
    """No draw of one entry is small by luck: the leaf's own share of V counts too."""
    magnitude, variance = np.full(4, 2.0), np.array([0.0, 4e-12, 4e-12, 4e-12])
    given = Sums(np.zeros(4), magnitude, np.zeros(4), np.zeros(4), variance)
    found = measured_bound("float32", given, 5, (8, 96), "float32").bound
    # V of the whole leaf over S^2 of the whole leaf, times S^2 of the entry.
    share = 12e-12 / 16 * 4
    adding = confidence(4) * 2.0**-24 * math.sqrt(5 + EXTRA) * 2
    tau = confidence(4, POOLED)
    # The mean over the leaf is less than that.
    expected = math.sqrt(2) * math.hypot(adding, tau * math.sqrt(share))
    assert math.isclose(found[0], expected, rel_tol=1e-6)
    assert found[1] > found[0]


def test_what_could_not_be_measured_cannot_be_judged():
    """NaN in a sum makes the bound infinite, there and in no other entry."""
    total = np.array([1.0, np.nan, 2.0])
    given = Sums(total, np.abs(total), total**2, np.zeros(3), np.zeros(3))
    found = measured_bound("float32", given, 5, (8, 96), "float32")
    assert np.isfinite(found.bound).tolist() == [True, False, True]
    assert found.bound[1] == np.inf


def test_the_size_of_a_gradient_whose_terms_do_not_cancel():
    """The larger of the sum and of the root of its terms' squares."""
    given = sums((2,), total=np.array([-3.0, 0.1]), square=np.array([4.0, 4.0]))
    assert measured_bound("float32", given, 5, (8, 96), "float32").size.tolist() == [
        3,
        2,
    ]


def test_sixteen_bits_are_accumulated_in_thirty_two_unless_told():
    """float32 and wider are added up as they are, whatever is said."""
    assert accumulated(jnp.bfloat16, None) == jnp.float32
    assert accumulated(jnp.float16, "float16") == jnp.float16
    assert accumulated(jnp.float32, jnp.bfloat16) == jnp.float32
    assert accumulated(jnp.float64, None) == jnp.float64
    assert accumulated(jnp.complex64, None) == jnp.complex64


def test_what_may_be_flushed_to_zero():
    """Types of eight bits of exponent and more; narrower ones have subnormals."""
    assert [flushes(d) for d in ("float64", "float32", "bfloat16")] == [True] * 3
    assert not flushes("float16")
    assert not flushes("float8_e4m3fn")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_right_sum_in_parts_is_rejected(rng, dtype):
    """A thousand leaves, each summed in random parts that are rounded to its dtype."""
    count, columns = 24, 1000
    terms = jnp.asarray(rng.normal(size=(count, columns)), dtype)
    wide = np.asarray(terms, np.float64)
    given = Sums(
        wide.sum(0), np.abs(wide).sum(0), (wide**2).sum(0), np.zeros(columns),
        np.zeros(columns),
    )  # fmt: skip
    limit = measured_bound(dtype, given, count, (8, 96), accumulated(dtype, None)).bound
    worst = 0.0
    for parts in (1, 2, 5, 24):
        rows = np.array_split(rng.permutation(count), parts)
        rounded = [terms[r].astype(jnp.float32).sum(0).astype(dtype) for r in rows]
        found = sum(x.astype(jnp.float32) for x in rounded).astype(dtype)
        error = np.abs(np.asarray(found, np.float64) - given.total)
        worst = max(worst, float((error / limit).max()))
    assert worst < 1
    # And a bound of which nothing comes near would prove nothing.
    assert worst > 0.02


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.integers(2, 40),
    st.integers(0, 2**32 - 1),
)
def test_a_sum_along_any_tree_is_within_the_bound_of_its_exact_value(
    dtype, count, seed
):
    """In fractions: up to 40 terms even errors that all have one sign are.

    Of n terms any tree of additions errs by (n - 1) u S at most, and that is below the
    probabilistic bound as long as n < 2 lambda^2, which is 85 for one entry.
    """
    rng = np.random.default_rng(seed)
    # Of any magnitudes and signs; float16 has few exponents.
    terms = (rng.normal(size=count) * 2.0 ** rng.integers(-5, 5, size=count)).astype(
        dtype
    )
    parts = list(terms)
    while len(parts) > 1:
        left, right = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(dtype(left + right))
    exact = sum(map(Fraction, map(float, terms)), Fraction(0))
    magnitude = sum((abs(Fraction(float(x))) for x in terms), Fraction(0))
    error = abs(Fraction(float(parts[0])) - exact)
    limit = Fraction(float(bound(dtype, 1, count, float(magnitude))))
    # The scale itself was rounded to float64.
    unit = Fraction(unit_roundoff(dtype)) * (1 + Fraction(1, 2**50))
    assert error <= (count - 1) * unit * magnitude <= limit


def test_a_bound_is_never_below_what_one_more_rounding_needs():
    """Of one term, in each dtype: the value may be rounded once, and come out so."""
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn"):
        one = float(bound(dtype, 1, 1, 1.0))
        assert unit_roundoff(dtype) < one < 32 * unit_roundoff(dtype), dtype


def test_the_estimated_deviation_counts_no_more_than_it_must():
    """Fewer draws widen the bound, and none of its other parts."""
    only = sums(magnitude=3.0, total=2.0, square=9.0)
    few, many = (
        measured_bound("float32", only, 9, (n, n), "float32") for n in (8, 800)
    )
    np.testing.assert_array_equal(few.bound, many.bound)
    varying = sums(magnitude=3.0, variance=1e-12)
    few, many = (
        measured_bound("float32", varying, 9, (n, n), "float32") for n in (8, 800)
    )
    assert (few.bound > many.bound).all()


def test_a_leaf_of_nothing_but_zeros_has_the_bound_of_flushing():
    """There are no magnitudes to divide the variance by."""
    found = measured_bound("float32", sums(), 3, (8, 96), "float32")
    tiny = (3 + EXTRA) * float(np.finfo(np.float32).smallest_normal)
    np.testing.assert_array_equal(found.bound, np.full((2, 3), tiny))
    np.testing.assert_array_equal(found.size, np.zeros((2, 3)))


def test_double_precision_has_room_for_every_dtype():
    """Complex numbers keep both parts."""
    assert wide_of(jnp.bfloat16) == wide_of("float64") == np.float64
    assert wide_of("complex64") == wide_of("complex128") == np.complex128
    z = in_double(np.complex64([1 + 2j]))
    assert (z.dtype, z[0]) == (np.complex128, 1 + 2j)
    assert in_double(jnp.asarray([1.5], jnp.bfloat16)).dtype == np.float64


@pytest.mark.parametrize("draws", [2, 3, 16])
@pytest.mark.parametrize("spread", ["alike", "unlike", "one wild"])
def test_the_norm_of_a_right_leaf_is_not_condemned(draws, spread, rng, monkeypatch):
    """Entries whose variances differ by 1e6, and some that have nearly all: simulated.

    At a risk that a simulation can see, with errors that many entries have in common.
    """
    monkeypatch.setattr("jdist.verify.bound.RISK", 0.01)
    variances = {
        "alike": np.ones(5),
        "unlike": 10.0 ** np.linspace(0, 6, 7),
        "one wild": np.array([1.0, 1, 1, 1e12]),
    }[spread]

    def norms(count):
        return (rng.normal(size=(count, variances.size)) ** 2 * variances).sum(1)

    estimated = np.mean([norms(200_000) for _ in range(draws)], axis=0)
    off = np.mean(norms(200_000) > confidence_in_norm(draws) ** 2 * estimated)
    assert off < 0.01
    # Not beyond what it is for: the worst case is reached to an order of magnitude.
    if spread == "one wild":
        assert off > 0.0005

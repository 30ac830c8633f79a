"""What a failing leaf is said to look like, for each known mistake and for none."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.explanations.diagnosis import (
    BEGINNING,
    ENTRIES,
    LIKENESS,
    diagnose,
)


@pytest.fixture
def leaves(rng):
    """Three leaves, two of one shape and one square."""
    return {
        "first": rng.normal(size=(4, 3)),
        "second": rng.normal(size=(4, 3)),
        "square": rng.normal(size=(5, 5)),
    }


def said(leaves, path, found, bound=1.0):
    """The words for a leaf, with one bound at each entry."""
    with np.errstate(invalid="ignore"):
        ratio = np.abs(leaves[path] - found) / bound
    return diagnose(path, leaves, found, ratio)


@pytest.mark.parametrize("factor", [-1, 0, 0.125, 1.001, 4, 1e6, -3e-5])
def test_a_factor_is_named(leaves, factor):
    """Whatever its size and sign, to six digits."""
    words = said(leaves, "first", leaves["first"] * factor)
    assert words.endswith(f"it is {factor:.6g} times the reference")


@pytest.mark.parametrize(
    ("noise", "is_named"), [(LIKENESS / 4, True), (LIKENESS * 4, False)]
)
def test_a_factor_must_explain_nearly_all(leaves, rng, noise, is_named):
    """Rounding beside it is forgiven, another mistake is not."""
    rough = rng.normal(size=(4, 3))
    rough *= np.linalg.norm(leaves["first"]) / np.linalg.norm(rough)
    words = said(leaves, "first", 2 * (leaves["first"] + noise * rough), 1e-9)
    assert ("2 times the reference" in words) == is_named
    assert words.startswith("off by ")


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_likeness_does_not_depend_on_magnitude(leaves, size):
    """One entry in a hundred off is another mistake, among small numbers as well."""
    leaves = {path: size * leaf for path, leaf in leaves.items()}
    for found in (3 * leaves["first"], leaves["second"].copy()):
        assert "; it is " in said(leaves, "first", found, 1e-9 * size)
        found[1, 2] *= 1.01
        assert "; it is " not in said(leaves, "first", found, 1e-9 * size)


def test_a_factor_is_named_where_rounding_explains_the_rest(leaves, rng):
    """As in a program of 16 bits; not where an entry is off by more than that."""
    right = leaves["first"]
    found = 2 * right + 0.02 * rng.uniform(-1, 1, size=right.shape)
    assert said(leaves, "first", found, 0.02).endswith("it is 2 times the reference")
    assert "it is" not in said(leaves, "first", found, 0.005)
    found[1, 2] += 0.1
    assert "it is" not in said(leaves, "first", found, 0.02)
    # Where rounding is as large as the leaf, much of the error has to be explained.
    other = rng.normal(size=right.shape)
    assert "it is" not in said(leaves, "first", other, 9.0)


def test_sixteen_bits_are_compared_in_double_precision(leaves):
    """Squares of float16 numbers above 256 are infinite in float16."""
    large = {path: (300 * leaf).astype(np.float16) for path, leaf in leaves.items()}
    words = said(large, "first", 2 * large["first"])
    assert words.endswith("it is 2 times the reference")


def test_indices_are_those_of_the_whole_leaf(leaves):
    """Of a slice, beginning where its origin is."""
    found = leaves["first"].copy()
    found[2, 1] += 9
    ratio = np.abs(leaves["first"] - found)
    assert "bound at [6, 1]" in diagnose("first", leaves, found, ratio, (4, 0))
    found[2, 1] = np.nan
    assert "nan at [6, 1]" in diagnose("first", leaves, found, ratio, (4, 0))


def test_a_conjugate_is_no_factor(rng):
    """Of complex leaves a factor is real, and the angle of every entry counts."""
    leaf = rng.normal(size=6) + 1j * rng.normal(size=6)
    assert "times the reference" in said({"z": leaf}, "z", -2 * leaf)
    assert "times the reference" not in said({"z": leaf}, "z", leaf.conj())
    assert "times the reference" not in said({"z": leaf}, "z", 1j * leaf)


def test_a_single_number_has_no_factor():
    """Any number is a multiple of another: to say so would tell nothing."""
    words = said({"b": np.array([2.0])}, "b", np.array([6.0]))
    assert words == "off by 4 times the bound at [0]: expected 2, got 6"


def test_what_is_not_zero_where_the_reference_is(leaves):
    """Zero has no multiple but itself, and is like no other leaf."""
    zeros = {**leaves, "first": np.zeros((4, 3))}
    assert "it is" not in said(zeros, "first", np.full((4, 3), 0.5))
    assert said(zeros, "first", leaves["second"]).endswith("the reference's second")
    assert "reference's" not in said(zeros, "second", np.full((4, 3), 1e-9))


def test_a_transposed_and_a_swapped_leaf(leaves):
    """By their numbers, where shapes agree; the first other leaf that fits is named."""
    words = said(leaves, "square", leaves["square"].T)
    assert words.endswith("it is the reference transposed")
    symmetric = {"square": leaves["square"] + leaves["square"].T}
    doubled = said(symmetric, "square", 2 * symmetric["square"].T)
    assert doubled.endswith("it is 2 times the reference")
    words = said(leaves, "first", leaves["second"])
    assert words.endswith("it is the reference's second")
    others = {**leaves, "none": None, "third": leaves["second"].copy()}
    assert said(others, "first", leaves["second"]).endswith("the reference's second")


def test_large_leaves_are_told_apart_to_their_end(rng):
    """Those that begin alike too; and an error in their first entries is forgiven."""
    large = rng.normal(size=(2, 2 * BEGINNING // 3, 3))
    leaves = {"first": large[0], "second": large[1], "third": large[1].copy()}
    leaves["second"][-1] *= 2
    words = said(leaves, "first", leaves["third"])
    assert words.endswith("it is the reference's third")
    found = leaves["third"].copy()
    found[0] -= LIKENESS * np.linalg.norm(found) / 4
    assert said(leaves, "first", found).endswith("it is the reference's third")


def test_the_worst_entry_is_named(leaves):
    """With its index, what was expected and what was found."""
    found = leaves["first"].copy()
    found[0, 1] += 2
    found[3, 2] -= 5
    words = said(leaves, "first", found)
    expected, got = leaves["first"][3, 2], found[3, 2]
    assert words == (
        f"off by 5 times the bound at [3, 2]: expected {expected:.6g}, got {got:.6g}"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_first(leaves, value):
    """In the candidate, then in the reference; with its place."""
    found = 3 * leaves["first"]
    found[2, 1] = value
    assert said(leaves, "first", found) == f"not finite: {value:.6g} at [2, 1]"
    broken = {**leaves, "first": found}
    words = said(broken, "first", leaves["first"])
    assert words == f"the reference is not finite: {value:.6g} at [2, 1]"


def test_a_scalar_leaf_has_an_empty_index():
    """Its place needs no number."""
    words = said({"s": np.float64(1.0)}, "s", np.float64(3.0))
    assert words == "off by 2 times the bound at []: expected 1, got 3"


def rounded_to(narrow, x):
    """The numbers of a narrow dtype that are nearest, in the dtype of x."""
    sides = x.view(x.real.dtype)
    return np.asarray(jnp.asarray(sides, narrow), sides.dtype).view(x.dtype)


@pytest.mark.parametrize("own", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_sums_in_a_narrower_dtype_are_recognized(rng, own, narrow):
    """Each term is rounded to it, and each sum."""
    terms = rng.normal(size=(7, 5, 3)).astype(own)
    if own == "complex64":
        terms = terms * np.complex64(1 + 0.3j)
    total = np.zeros_like(terms[0])
    for term in terms:
        total = rounded_to(narrow, total + rounded_to(narrow, term))
    words = said({"leaf": terms.sum(0)}, "leaf", total)
    assert words.endswith(f"all its entries are {narrow} numbers, as of sums in it")
    # The mean of seven micro-batches is divided in the leaf's own precision.
    mean, wanted = total / total.real.dtype.type(7), terms.sum(0) / 7
    words = said({"leaf": wanted}, "leaf", mean)
    told = f"all its entries are {narrow} numbers, divided by 7, as of sums in it"
    assert words.endswith(told)
    assert "numbers" not in said({"leaf": wanted}, "leaf", mean * (1 + 1e-4))


def test_single_precision_in_double_is_recognized(leaves):
    words = said(leaves, "first", leaves["first"].astype("f4").astype("f8"))
    assert words.endswith("all its entries are float32 numbers, as of sums in it")


def test_other_numbers_of_few_digits_are_not_blamed_on_a_dtype(leaves, rng):
    """Signs, counts, few entries; a reference of such numbers; any other mistake."""
    own = leaves["first"].astype("f4")
    narrow = np.asarray(own.astype(jnp.bfloat16), "f4")
    few = narrow * (np.arange(own.size).reshape(own.shape) < ENTRIES - 1)
    wrong = {
        "signs": np.sign(own), "counts": np.round(own), "few": few,
        "others": np.asarray(rng.normal(size=own.shape).astype(jnp.bfloat16), "f4"),
        "one entry": np.where(np.arange(12).reshape(own.shape) == 5, own, narrow),
    }  # fmt: skip
    for name, found in wrong.items():
        assert "numbers" not in said({"leaf": own}, "leaf", found), name
    off = narrow + np.float32(2.0**-4) * (narrow == narrow.max())
    assert "numbers" not in said({"leaf": narrow}, "leaf", off)

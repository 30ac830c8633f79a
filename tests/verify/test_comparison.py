"""Every planted error is reported, by the path of its leaf; nothing else is."""

import json
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import VerificationError, verify
from jdist.verify.bound import Limit, bound
from jdist.verify.comparison import (
    _Judged,
    compare_leaves,
    described_shard,
    ulp_distance,
)
from jdist.verify.processes.shards import HeldArray, Shard


@pytest.fixture(params=[np.float32, np.float64])
def tree(request, rng):
    """Leaves of equal and of different shapes, one of them square."""
    leaf = lambda *shape: rng.normal(size=shape).astype(request.param)  # noqa: E731
    return {
        "layer1": {"w": leaf(4, 5), "b": leaf(5)},
        "layer2": {"w": leaf(4, 5), "square": leaf(3, 3)},
        "unused": np.zeros(2, request.param),
        "frozen": None,
    }


def planted(tree, **leaves):
    """A copy in which `layer__leaf=value` replaces a leaf."""
    copy = {key: dict(v) if isinstance(v, dict) else v for key, v in tree.items()}
    for path, value in leaves.items():
        layer, _, leaf = path.partition("__")
        if leaf:
            copy[layer][leaf] = value
        else:
            copy[layer] = value
    return copy


def test_what_is_equal_passes_and_is_called_bit_equal(tree):
    """All leaves are looked at; None is one that needs no numbers."""
    report = verify.compare(tree, planted(tree))
    assert report.ok
    assert report.bit_equal
    assert [leaf.path for leaf in report.leaves] == [
        "layer1/b", "layer1/w", "layer2/square", "layer2/w", "unused",
    ]  # fmt: skip
    assert {leaf.verdict for leaf in report.leaves} == {"bit-equal"}


def test_one_ulp_is_equal_but_not_bit_equal(tree):
    """The smallest difference there is passes, and is counted."""
    w = tree["layer1"]["w"]
    report = verify.compare(tree, planted(tree, layer1__w=np.nextafter(w, 9)))
    assert report.ok
    assert not report.bit_equal
    (leaf,) = [leaf for leaf in report.leaves if leaf.max_abs > 0]
    assert leaf.path == "layer1/w"
    assert leaf.max_ulp == 1
    assert leaf.verdict == "equal"
    assert 0 < leaf.ratio < 1


PLANTED = {
    "scaled by 1.001": (lambda w: w * w.dtype.type(1.001), "1.001 times the reference"),
    "summed over four replicas": (lambda w: w * 4, "it is 4 times the reference"),
    "sign": (lambda w: -w, "it is -1 times the reference"),
    "NaN": (lambda w: np.where(w == w[1, 2], np.nan, w).astype(w.dtype), r"nan at \[1"),
    "infinity": (lambda w: w / w.dtype.type(0.0), "not finite"),
    "one sign in one entry": (
        lambda w: np.where(np.arange(w.size).reshape(w.shape) == 7, -w, w),
        r"times the bound at \[1, 2\]",
    ),
    "wrong dtype": (lambda w: w.astype(np.float16), "expected float.., got float16"),
    "wrong shape": (lambda w: w.T, r"wrong shape: expected \(4, 5\), got \(5, 4\)"),
    "zeros": (np.zeros_like, "it is 0 times the reference"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_planted_errors_are_reported_by_path(tree, name):
    """In float32 and float64; only the leaf that was touched fails."""
    change, message = PLANTED[name]
    report = verify.compare(tree, planted(tree, layer1__w=change(tree["layer1"]["w"])))
    assert [leaf.path for leaf in report.failures] == ["layer1/w"]
    with pytest.raises(VerificationError, match=f"layer1/w: .*{message}"):
        report.raise_if_failed()


def test_swapped_leaves_are_both_reported_and_recognised(tree):
    """Equal shapes hide a swap from everything but the numbers."""
    a, b = tree["layer1"]["w"], tree["layer2"]["w"]
    report = verify.compare(tree, planted(tree, layer1__w=b, layer2__w=a))
    assert {leaf.path for leaf in report.failures} == {"layer1/w", "layer2/w"}
    assert "it is the reference's layer2/w" in report.failures[0].problem


def test_a_transposed_square_is_recognised(tree):
    """Its shape is right, its norm too."""
    report = verify.compare(
        tree, planted(tree, layer2__square=tree["layer2"]["square"].T)
    )
    (leaf,) = report.failures
    assert "it is the reference transposed" in leaf.problem


def test_missing_and_extra_leaves_are_reported(tree):
    """Also where one side has None."""
    missing = planted(tree)
    del missing["layer1"]["b"]
    (leaf,) = verify.compare(tree, missing).failures
    assert (leaf.path, leaf.problem) == ("layer1/b", "missing from the candidate")
    (leaf,) = verify.compare(tree, {**tree, "more": np.ones(2)}).failures
    assert (leaf.path, leaf.problem) == ("more", "not in the reference")
    (leaf,) = verify.compare(tree, planted(tree, frozen=np.ones(2))).failures
    assert leaf.problem == "wrong dtype: expected None, got float64"
    (leaf,) = verify.compare(tree, planted(tree, unused=None)).failures
    assert leaf.path == "unused"
    assert leaf.problem.endswith("got None")


def test_a_zero_gradient_must_be_zero(tree):
    """An unused parameter's gradient has no rounding to hide behind."""
    dust = np.full(2, 1e-30, tree["unused"].dtype)
    (leaf,) = verify.compare(tree, planted(tree, unused=dust)).failures
    assert leaf.path == "unused"
    assert leaf.max_rel == np.inf
    assert leaf.cosine == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_never_passes(value):
    """Not even when both sides agree on it."""
    both = {"w": np.array([1.0, value])}
    (leaf,) = verify.compare(both, both).failures
    assert leaf.path == "w"
    assert leaf.problem.startswith("not finite")
    finite = {"w": np.array([1.0, 2.0])}
    (leaf,) = verify.compare(both, finite).failures
    assert leaf.problem.startswith("the reference is not finite")


def test_leaves_that_are_not_floating_must_be_equal():
    """Counters, flags and PRNG keys."""
    reference = {"n": np.arange(3), "flag": True, "key": jax.random.key(1)}
    assert verify.compare(reference, dict(reference)).bit_equal
    changed = {"n": np.arange(3) + 1, "flag": False, "key": jax.random.key(2)}
    report = verify.compare(reference, changed)
    assert {leaf.path for leaf in report.failures} == {"n", "flag", "key"}


def test_complex_leaves_are_compared_in_both_parts(rng):
    """A conjugate has the same magnitudes and the same real part."""
    z = rng.normal(size=6) + 1j * rng.normal(size=6)
    assert not verify.compare({"z": z}, {"z": z.conj()}).ok
    assert verify.compare({"z": z}, {"z": z * (1 + 2e-16)}).ok


def test_sixteen_bit_leaves_are_judged_in_their_own_unit(rng):
    """Adjacent bfloat16 numbers pass; what is far apart for bfloat16 does not."""
    w = jnp.asarray(rng.normal(size=8), jnp.bfloat16)
    assert verify.compare(w, jnp.nextafter(w, jnp.asarray(9, w.dtype))).ok
    assert not verify.compare(w, w * jnp.asarray(1.5, w.dtype)).ok


def test_terms_and_scale_widen_the_bound():
    """A cancelled sum may be off by its terms' rounding, which it does not show."""
    reference, found = {"w": np.float32([1e-3])}, {"w": np.float32([1e-3 + 1e-6])}
    assert not verify.compare(reference, found).ok
    known = {"terms": 100, "scale": {"w": np.array([50.0])}}
    assert verify.compare(reference, found, **known).ok
    assert verify.compare(reference, found, terms={"w": 100}, scale=50.0).ok


def test_without_terms_and_scale_few_roundings_of_the_largest_entry_are_forgiven():
    """Those of one term in each leaf; a number for all leaves is given to each."""
    reference = {"a": np.float32([3.0, -8.0]), "b": np.float32([0.5])}
    found = {"a": np.float32([3.0, -8.00001]), "b": np.float32([0.500001])}
    errors = {x: np.abs(np.float64(found[x]) - reference[x]).max() for x in "ab"}

    def ratios(*given):
        report = verify.compare(reference, found, *given)
        return {leaf.path: leaf.ratio for leaf in report.leaves}

    own = {"a": bound("float32", 2, 1, 8.0), "b": bound("float32", 1, 1, 0.5)}
    assert ratios() == {x: errors[x] / own[x] for x in "ab"}
    own = {"a": bound("float32", 2, 30, 9.0), "b": bound("float32", 1, 30, 9.0)}
    assert ratios(30, 9.0) == {x: errors[x] / own[x] for x in "ab"}


def test_a_loose_bound_is_reported():
    """Nobody may call an answer right by a judge that cannot see."""
    reference = {"w": np.float32([1.0, 2.0])}
    found = {"w": np.nextafter(reference["w"], np.float32(9))}
    report = verify.compare(reference, found, terms=10**6, scale=1e6)
    assert report.ok
    assert "suspiciously loose" in report.notes[0]
    assert verify.compare(reference, found).notes == ()
    signed_zero = verify.compare({"w": np.float32([0.0])}, {"w": np.float32([-0.0])})
    assert signed_zero.ok
    assert not signed_zero.bit_equal
    assert signed_zero.notes == ()


def test_what_cannot_be_compared_is_refused():
    """An empty tree proves nothing; half a scale is no scale."""
    with pytest.raises(ValueError, match=r"must have leaves\. Got an empty tree"):
        verify.compare({}, {})
    pair = {"a": np.ones(2), "b": np.ones(2)}
    with pytest.raises(ValueError, match=r"scale=.*Got nothing for b"):
        verify.compare(pair, pair, scale={"a": 1.0})
    with pytest.raises(ValueError, match=r"terms=.*Got nothing for a, b"):
        verify.compare(pair, pair, terms={"c": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, r"scale=.* finite and at least 0\. Got -1\.0 for w\."),
        ({"scale": np.inf}, r"scale=.* finite and at least 0\. Got inf for w\."),
        (
            {"scale": {"n": 1, "w": np.array([1, np.nan, 1])}},
            r"at least 0\. Got array\(.*nan",
        ),
        (
            {"scale": {"n": 1, "w": np.array([1, 2, -1e-9])}},
            r"at least 0\. Got array\(.*-1",
        ),
        ({"terms": -1}, r"terms=.* whole number, at least 0\. Got -1 for w\."),
        ({"terms": {"n": 1, "w": 2.5}}, r"whole number, at least 0\. Got 2\.5 for w\."),
        ({"terms": np.nan}, r"whole number, at least 0\. Got nan for w\."),
        ({"terms": np.inf}, r"whole number, at least 0\. Got inf for w\."),
        ({"terms": {"n": 1, "w": np.ones(3)}}, r"whole number, at least 0\. Got array"),
    ],
)
def test_numbers_that_make_no_bound_are_refused(options, message):
    """Any gradient is below an infinite bound, and error/bound is below 1 for -1."""
    reference = {"n": np.arange(2), "w": np.float32([1.0, -2.0, 3.0])}
    with pytest.raises(ValueError, match=message):
        verify.compare(reference, reference, **options)
    # Of none and of as few as there may be, the same gradient is still right.
    assert verify.compare(reference, reference, terms=0.0, scale=0.0).bit_equal


def test_two_leaves_of_one_path_are_no_gradient():
    """Only one of them would be compared."""
    one, other = np.float32([1.0, 2.0]), np.float32([3.0])
    with pytest.raises(ValueError, match=r"for each leaf.* Got a/b twice"):
        verify.compare({"a/b": one, "a": {"b": other}}, {"a/b": one})


# --- entries of which nothing is known ---


def against(limit, expected, got):
    """The row of one float32 leaf under a measured limit."""
    wanted, found = {"w": np.float32(expected)}, {"w": np.float32(got)}
    (row,) = compare_leaves("mine", wanted, found, {"w": Limit(*map(np.array, limit))})
    return row


@pytest.mark.parametrize("unknown", [np.inf, np.nan])
def test_an_entry_that_could_not_be_measured_hides_no_difference(unknown):
    """Such as one whose float64 value is NaN: no difference is above its bound."""
    limit = ([1e-3, unknown, 1e-3], [1.0, np.nan, 1.0])
    right = [1.0, -2.0, 4.0]
    assert against(limit, right, right).bit_equal
    assert against(limit, right, [1.0001, -2.0, 4.0]).verdict == "equal"
    row = against(limit, right, [1.0, 6.0, 4.0])
    assert (row.verdict, row.ratio, row.cosine < 0.5) == ("not judged", 0, True)
    assert row.unjudged == (
        "rounding could not be measured at [1], where the difference is 8.0e+00: any "
        "number would pass"
    )
    # What is wrong elsewhere, or is no number, stays wrong.
    assert against(limit, right, [1.1, 6.0, 4.0]).verdict == "FAILS"
    assert "off by 100 times" in against(limit, right, [1.1, 6.0, 4.0]).problem
    assert against(limit, right, [1.0, np.nan, 4.0]).problem == "not finite: nan at [1]"


def test_the_other_entries_are_judged_as_if_it_were_not_there():
    """They may be blind, or have a bound that says enough."""
    right = [5.0, 0.1, -0.2]
    wide = ([np.inf, 10.0, 8.0], [np.nan, 1.0, 1.0])
    row = against(wide, right, [5.0, 0.15, -0.2])
    assert row.unjudged == (
        "rounding explains differences up to 1.0e+01, and the largest entry is "
        "2.0e-01: zero would pass too"
    )
    narrow = ([np.inf, 0.01, 0.01], [np.nan, 1.0, 1.0])
    assert against(narrow, right, [5.0, 0.105, -0.2]).verdict == "equal"
    assert against(narrow, right, [5.0, 0.12, -0.2]).verdict == "FAILS"


@pytest.mark.parametrize(
    ("width", "size", "verdict"),
    [
        (0.2, 1.0, "not judged"),
        (0.2, 1.7, "equal"),
        (0.09, 0.1, "equal"),
        (0.2, 0.0, "equal"),
    ],
)
def test_a_bound_says_too_little_above_an_eighth_of_the_size(width, size, verdict):
    """Where zero would pass: 0.1 is below 0.2, and above 0.09; P of 0 says nothing."""
    assert against((width, size), [0.1, 0.05], [0.08, 0.05]).verdict == verdict
    assert against((width, size), [0.1, 0.05], [0.1, 0.05]).verdict == "bit-equal"


# --- a leaf in shards ---


def in_shards(expected, got, limit, cuts, again=()):
    """The finding on a leaf that lies in slices of rows; some of them twice."""
    edges = list(zip([0, *cuts], [*cuts, len(got)], strict=True))
    own = [
        Shard((slice(a, b), slice(None)), got[a:b], first)
        for first, pairs in ((True, edges), (False, [edges[i] for i in again]))
        for a, b in pairs
    ]
    judged = _Judged("mine", {"w": expected}, {"w": limit}, described_shard, "")
    return judged.finding("w", {"w": HeldArray("float32", got.shape, tuple(own))})


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sets(st.integers(1, 6)), st.booleans())
def test_a_leaf_in_shards_gets_the_row_of_the_whole(seed, cuts, wrong):
    """Each number of it and the angle; a replica counts once."""
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=(7, 3)).astype(np.float32)
    limit = Limit(rng.uniform(1e-3, 1e-2, size=(7, 3)), np.abs(expected))
    noise = rng.uniform(-1, 1, size=(7, 3)) * limit.bound * (3 if wrong else 0.9)
    got = (expected + noise).astype(np.float32)
    (whole,) = compare_leaves("mine", {"w": expected}, {"w": got}, {"w": limit})
    finding = in_shards(expected, got, limit, sorted(cuts), again=range(len(cuts)))
    numbers = ("max_abs", "max_rel", "max_ulp", "ratio", "verdict")
    assert [getattr(finding.row, x) for x in numbers] == [
        getattr(whole, x) for x in numbers
    ]
    assert finding.products.cosine == pytest.approx(whole.cosine, rel=1e-12)
    # The worst entry is named by its place in the whole.
    if whole.problem:
        where = whole.problem.partition(" times the bound at ")[2].partition("]")[0]
        assert f" times the bound at {where}]: expected" in finding.row.problem


@pytest.mark.parametrize(
    ("spec", "wrong", "words"),
    [
        (P("tp"), [slice(2, 4)], "on tp=1 alone, in [2:4, :], off by "),
        (P(None, "dp"), [(slice(None), slice(5, 10))], "on dp=1 alone, in [:, 5:10], "),
        (P(("dp", "tp")), [3], "on dp=1, tp=0 alone, in [3:4, :], off by "),
        (P("tp"), [0, slice(4, 6)], "on tp=0 and tp=2 alone, in [4:6, :], off by "),
        (P("tp"), [0, 2, 5], "off by "),
        (P(), [2], "off by "),
    ],
)
def test_the_devices_whose_blocks_alone_fail_are_named(rng, spec, wrong, words):
    """By the axes that divide the leaf; where all fail, or have it whole, by none."""
    expected = rng.normal(size=(6, 10)).astype(np.float32)
    got = expected.copy()
    for number, rows in enumerate(wrong):
        got[rows] *= 2 + number
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("dp", "tp"))
    leaf = jax.device_put(got, NamedSharding(mesh, spec))
    limit = Limit(1e-4 * np.abs(expected), np.abs(expected))
    (row,) = compare_leaves("mine", {"w": expected}, {"w": leaf}, {"w": limit})
    assert row.problem.startswith(words)
    if "alone" in words:
        factor = 1 + len(wrong)
        assert row.problem.endswith(f"; it is {factor} times the reference")


def test_the_shard_that_fails_is_named(rng):
    """By its slices; entries by their indices in the whole leaf."""
    expected = rng.normal(size=(7, 3)).astype(np.float32)
    limit = Limit(np.full((7, 3), 1e-2), np.abs(expected))
    got = expected.copy()
    got[4, 2] += 2
    row = in_shards(expected, got, limit, [2, 5]).row
    assert row.problem == (
        f"in [2:5, :], off by 200 times the bound at [4, 2]: expected "
        f"{expected[4, 2]:.6g}, got {got[4, 2]:.6g}"
    )
    unknown = limit._replace(bound=np.where(got == expected, 1e-2, np.inf))
    row = in_shards(expected, got, unknown, [2, 5]).row
    assert row.unjudged.startswith("rounding could not be measured at [4, 2], where")
    elsewhere = in_shards(expected, expected, limit, [2, 5]).row
    assert (elsewhere.verdict, elsewhere.problem) == ("bit-equal", "")


def test_a_process_without_a_shard_of_a_leaf_has_nothing_against_it(rng):
    """Other processes have its numbers; its kind is compared all the same."""
    expected = rng.normal(size=(7, 3)).astype(np.float32)
    judged = _Judged(
        "mine", {"w": expected}, {"w": Limit(1.0, 1.0)}, described_shard, ""
    )
    row = judged.finding("w", {"w": HeldArray("float32", (7, 3), ())}).row
    assert (row.verdict, row.ratio, row.max_rel) == ("bit-equal", 0, 0)
    row = judged.finding("w", {"w": HeldArray("float32", (3, 7), ())}).row
    assert row.problem == "wrong shape: expected (7, 3), got (3, 7)"


# --- a bound that was not measured ---


@pytest.mark.parametrize(
    ("terms", "scale", "ratio", "verdict"),
    [
        (None, None, 0.9, "equal"),
        (None, None, 1.1, "not judged"),
        (None, None, 9.9, "not judged"),
        (None, None, 10.1, "FAILS"),
        (7, None, 2.3, "not judged"),
        (None, 3.0, 2.3, "not judged"),
        (7, 3.0, 0.9, "equal"),
        (7, 3.0, 1.1, "FAILS"),
    ],
)
def test_a_bound_that_was_not_measured_condemns_what_is_far_above_it(
    rng, terms, scale, ratio, verdict
):
    """Up to ten times the bound it does not know, and says who would."""
    reference = {"w": rng.normal(size=(5, 7))}
    allowed = bound("float64", 35, terms or 1, scale or np.abs(reference["w"]).max())
    off = {"w": reference["w"].copy()}
    off["w"][3, 2] += ratio * float(np.max(allowed))
    report = verify.compare(reference, off, terms, scale)
    (leaf,) = report.leaves
    assert leaf.ratio == pytest.approx(ratio, rel=0.01)
    assert leaf.verdict == verdict
    assert report.ok == (verdict == "equal")
    said = "Judge by `verify.gradients`, which measures the bound, or pass `terms` and"
    assert (said in leaf.unjudged) == (verdict == "not judged")


def test_other_faults_need_no_bound():
    """NaN, infinity, another dtype and integers fail as before."""
    reference = {"w": np.float32([1, 2]), "n": np.arange(3), "d": np.float32([1])}
    for value in (np.nan, np.inf):
        wrong = {
            "w": np.float32([1, value]),
            "n": np.array([0, 1, 3]),
            "d": np.float64([1]),
        }
        report = verify.compare(reference, wrong)
        assert {leaf.path for leaf in report.failures} == {"w", "n", "d"}


# --- an excuse ---


def test_an_excuse_covers_numbers_that_differ_and_nothing_else(rng):
    """Not NaN, not another kind, not a missing leaf; and right leaves need none."""
    expected = {x: rng.normal(size=3).astype(np.float32) for x in "abcdef"}
    got = {
        "a": expected["a"] * 3,
        "b": expected["b"],
        "c": np.float32([1, np.nan, 1]),
        "d": expected["d"].astype(np.float64),
        "f": np.float32([1, np.inf, 1]),
        "g": expected["a"],
    }
    limits = {x: Limit(1e-3, 1.0) for x in expected}
    rows = compare_leaves("mine", expected, got, limits, excuse="it draws its own")
    told = {row.path: (row.verdict, row.unjudged) for row in rows}
    assert told == {
        "a": ("not judged", "it draws its own"),
        "b": ("bit-equal", ""),
        "c": ("FAILS", ""),
        "d": ("FAILS", ""),
        "e": ("FAILS", ""),
        "f": ("FAILS", ""),
        "g": ("FAILS", ""),
    }


def test_ulp_distances_count_representable_numbers():
    """Across a power of two, across zero, at the ends of the range."""
    for dtype in (np.float16, np.float32, np.float64):
        one = dtype(1)
        steps = [one]
        for _ in range(5):
            steps.append(np.nextafter(steps[-1], dtype(0)))
        assert ulp_distance(np.array([one]), np.array([steps[-1]])) == 5
    tiny = np.float64([5e-324])
    assert ulp_distance(tiny, -tiny) == 3
    ends = np.finfo(np.float64).max
    assert ulp_distance(np.array([ends]), np.array([-ends])) > 1e19


def test_the_report_prints_and_serialises(tree):
    """The table has a line per leaf; the JSON everything, NaN as text."""
    wrong = planted(tree, layer1__b=tree["layer1"]["b"] * 2)
    del wrong["unused"]
    report = verify.compare(tree, wrong)
    text = str(report)
    assert "candidate" in text
    assert "FAILS" in text
    assert "layer1/b: off by" in text
    record = json.loads(report.to_json())
    assert not record["ok"]
    by_path = {leaf["path"]: leaf for leaf in record["leaves"]}
    assert by_path["unused"]["max_abs"] == "nan"
    assert by_path["layer1/w"]["verdict"] == "bit-equal"
    assert by_path["layer1/b"]["ratio"] > 1e5


def test_ulp_distance_is_the_distance_in_the_list_of_all_numbers():
    """Of float16, of which there are few enough: from the lowest through -0 and +0."""
    bits = np.arange(0x7C00, dtype=np.uint16)  # Up to the largest finite one.
    every = np.concatenate([(bits[::-1] | 0x8000), bits]).view(np.float16)
    assert (np.diff(every.astype(np.float64)) >= 0).all()
    assert set(ulp_distance(every[:-1], every[1:]).tolist()) == {1}
    places = np.arange(len(every))[:: len(every) // 97]
    rows, columns = np.meshgrid(places, places)
    found = ulp_distance(every[rows], every[columns])
    np.testing.assert_array_equal(found, np.abs(rows - columns))


def test_ulp_distance_of_other_kinds(rng):
    """bfloat16 has its own spacing; of complex numbers the worse part counts."""
    one = jnp.ones(2, jnp.bfloat16)
    near = jnp.nextafter(one, jnp.asarray(2, one.dtype))
    assert ulp_distance(np.asarray(one), np.asarray(near)).tolist() == [1, 1]
    z = np.complex64([1 + 1j])
    off = np.complex64([np.nextafter(np.float32(1), np.float32(2)) + 1j])
    assert ulp_distance(z, off) == 1
    farther = off + np.complex64(1j * 2**-20)
    assert ulp_distance(z, farther) == 8
    x = rng.normal(size=9).astype(np.float32)
    np.testing.assert_array_equal(ulp_distance(x, -x), ulp_distance(-x, x))


def test_terms_and_scale_may_be_given_leaf_by_leaf():
    """Each leaf is held against its own; what is not floating needs none."""
    reference = {"a": np.float32([1.0]), "b": np.float32([1.0]), "n": np.arange(2)}
    off = {**reference, "a": np.float32([1 + 1e-3]), "b": np.float32([1 + 1e-3])}
    terms, scale = {"a": 100, "b": 1, "n": 1}, {"a": 1e3, "b": 1.0, "n": 0.0}
    report = verify.compare(reference, off, terms, scale)
    assert [leaf.path for leaf in report.failures] == ["b"]
    swapped = verify.compare(reference, off, {"a": 1, "b": 100, "n": 1}, 1e3)
    assert [leaf.path for leaf in swapped.failures] == []


def test_the_worst_entry_decides(rng):
    """One wrong number among many right ones fails the leaf; the norm would hide it."""
    w = rng.normal(size=10_000)
    found = w.copy()
    found[7777] *= 1 + 1e-6
    (leaf,) = verify.compare({"w": w}, {"w": found}).failures
    assert leaf.cosine > 1 - 1e-12
    assert "at [7777]" in leaf.problem
    assert leaf.max_rel == pytest.approx(1e-6, rel=1e-6)


def test_structures_are_compared_by_path():
    """A list in place of a tuple has the same leaves; a longer one has more."""
    pair = (np.ones(2), {"b": np.ones(3)})
    assert verify.compare(pair, [np.ones(2), {"b": np.ones(3)}]).ok
    (extra,) = verify.compare(pair, (*pair, np.ones(1))).failures
    assert (extra.path, extra.problem) == ("2", "not in the reference")
    nested = verify.compare(pair, (np.ones(2), {"c": np.ones(3)}))
    assert [leaf.path for leaf in nested.failures] == ["1/b", "1/c"]


def test_an_empty_leaf_and_a_scalar():
    """No number is wrong where there is none."""
    tree = {"none": np.zeros((0, 3), np.float32), "s": np.float32(2)}
    report = verify.compare(tree, tree)
    assert report.bit_equal
    assert {leaf.path: leaf.shape for leaf in report.leaves} == {
        "none": (0, 3),
        "s": (),
    }
    assert not verify.compare(tree, {**tree, "s": np.float32(2.1)}).ok


def test_a_candidates_name_is_that_of_its_rows(tree):
    """Also where leaves are missing or more."""
    rows = verify.compare(tree, {"more": np.ones(2)}).leaves
    assert {leaf.candidate for leaf in rows} == {"candidate"}
    assert {leaf.verdict for leaf in rows} == {"FAILS"}


# --- against the definition, in fractions ---


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 40),
    st.sampled_from([1, 7, 400]),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_a_leaf_passes_where_no_entry_is_beyond_its_bound(seed, most, terms, dtype):
    """And each number of its row is the largest of all entries."""
    rng = np.random.default_rng(seed)
    expected = (rng.normal(size=(3, 2)) * 4).astype(dtype)
    moved = expected.view(f"i{dtype().itemsize}") + rng.integers(
        -most, most + 1, (3, 2)
    )
    got = moved.astype(f"i{dtype().itemsize}").view(dtype)
    scale = float(np.abs(expected).max()) * 2
    (row,) = verify.compare({"w": expected}, {"w": got}, terms, scale).leaves
    limit = Fraction(float(bound(dtype, 6, terms, scale)))
    pairs = [(Fraction(float(a)), Fraction(float(b)))
             for a, b in zip(expected.ravel(), got.ravel(), strict=True)]  # fmt: skip
    errors = [abs(a - b) for a, b in pairs]
    assert row.ok == all(error <= limit for error in errors)
    assert row.bit_equal == (expected == got).all()
    # A difference of numbers within a factor of two is exact.
    assert row.max_abs == float(max(errors))
    relative = max(e / abs(a) for e, (a, _) in zip(errors, pairs, strict=True))
    assert row.max_rel == pytest.approx(float(relative), rel=1e-12, abs=0)
    assert row.ratio == pytest.approx(float(max(errors) / limit), rel=1e-12, abs=0)
    ends = zip(expected.ravel(), got.ravel(), strict=True)
    assert row.max_ulp == max(steps_between(a, b, dtype) for a, b in ends)
    both = sum(a * b for a, b in pairs)
    norms = [math.sqrt(sum(x[i] ** 2 for x in pairs)) for i in (0, 1)]
    assert row.cosine == pytest.approx(float(both) / norms[0] / norms[1], abs=1e-12)


def steps_between(first, second, dtype):
    """How many times `nextafter` leads from one number to the other."""
    count = 0
    while first != second:
        first = np.nextafter(first, second, dtype=dtype)
        count += 1
    return count


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.floats(0, 4))
def test_a_verdict_does_not_depend_on_units_order_or_how_leaves_are_cut(
    seed, power, size
):
    """By powers of two; entries permuted; the leaf turned, or as two leaves."""
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=(4, 3))
    given = {"terms": 9, "scale": {"w": 3 + np.abs(expected)}}
    limit = bound(np.float64, 12, 9, given["scale"]["w"])
    got = expected + rng.uniform(-1, 1, size=(4, 3)) * limit * size

    def row(change, **options):
        wanted, found, scale = map(change, (expected, got, given["scale"]["w"]))
        options = {"terms": 9, "scale": {"w": scale}} | options
        (found_row,) = verify.compare({"w": wanted}, {"w": found}, **options).leaves
        return found_row

    plain, unit = row(lambda x: x), 2.0**power
    scaled = row(lambda x: x * unit)
    assert (scaled.max_abs, scaled.max_rel) == (plain.max_abs * unit, plain.max_rel)
    assert scaled.verdict == plain.verdict
    assert scaled.ratio == pytest.approx(plain.ratio, rel=1e-9, abs=0)
    order = rng.permutation(12)
    for change in (lambda x: x.T, lambda x: x.ravel()[order], lambda x: x[None, ::-1]):
        other = row(change)
        assert (other.max_abs, other.max_ulp, other.ratio, other.verdict) == (
            plain.max_abs, plain.max_ulp, plain.ratio, plain.verdict
        )  # fmt: skip
        assert other.cosine == pytest.approx(plain.cosine, abs=1e-14)
    # Of fewer entries the bound is narrower, so that no half passes where they fail.
    halves = [
        verify.compare({"w": expected[s]}, {"w": got[s]}, 9,
                       {"w": given["scale"]["w"][s]})
        for s in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    assert max(half.worst for half in halves) >= plain.ratio
    assert plain.ok or not all(half.ok for half in halves)


# --- another framework's names ---

NAMES = {
    "layer1/b": "first.bias",
    "layer1/w": ("first.weight", (1, 0)),
    "layer2/square": ("square", (1, 0)),
    "layer2/w": ("second.weight", (1, 0)),
    "unused": "unused",
}


@pytest.fixture
def theirs(tree):
    """The same leaves as a framework has them that stores (out, in)."""
    return {
        "first.bias": tree["layer1"]["b"],
        "first.weight": tree["layer1"]["w"].T,
        "second.weight": tree["layer2"]["w"].T,
        "square": tree["layer2"]["square"].T,
        "unused": tree["unused"],
    }


def test_leaves_of_other_names_are_compared_under_the_references(tree, theirs):
    """Every number of every leaf; the report has the reference's paths."""
    report = verify.compare(tree, theirs, names=NAMES)
    assert report.bit_equal
    assert [leaf.path for leaf in report.leaves] == list(NAMES)
    theirs["second.weight"] = theirs["second.weight"] * 2
    (leaf,) = verify.compare(tree, theirs, names=NAMES).failures
    assert leaf.path == "layer2/w"
    assert "it is 2 times the reference" in leaf.problem


def test_axes_are_only_reordered_where_the_map_says_so(tree, theirs):
    """A square leaf hides a forgotten transpose from its shape, not from the judge."""
    forgotten = {**NAMES, "layer2/square": "square", "layer1/w": "first.weight"}
    rows = {x.path: x for x in verify.compare(tree, theirs, names=forgotten).failures}
    assert rows.keys() == {"layer1/w", "layer2/square"}
    assert "wrong shape: expected (4, 5), got (5, 4)" in rows["layer1/w"].problem
    assert "it is the reference transposed" in rows["layer2/square"].problem


def test_four_axes_may_come_in_any_order(rng):
    """A convolution's kernel, which torch stores as (out, in, height, width)."""
    kernel = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    theirs = {"conv.weight": kernel.transpose(3, 2, 0, 1)}
    names = {"k": ("conv.weight", (2, 3, 1, 0))}
    assert verify.compare({"k": kernel}, theirs, names=names).bit_equal


def test_a_gradient_that_another_framework_does_not_have_fails(tree, theirs):
    """torch has None where a parameter took no part."""
    theirs["first.weight"] = None
    (leaf,) = verify.compare(tree, theirs, names=NAMES).failures
    assert leaf.path == "layer1/w"
    assert leaf.problem.endswith("got None")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unused": ...}, r"must name every leaf of the reference\. Got no unused\."),
        ({"layer3/w": "x"}, r"name leaves of the reference only\. Got layer3/w\."),
        (
            # Of a name with a typo two things are true; the one that helps is said.
            {"layer1/b": "first.bais"},
            r"leaves of the candidate only\. Got first\.bais\. Is first\.bias meant\?$",
        ),
        (
            {"layer1/w": ..., "laier1/w": ("first.weight", (1, 0))},
            r"leaves of the reference only\. Got laier1/w\. Is layer1/w meant\?$",
        ),
        ({"unused": "first.bias"}, r"name every leaf of the candidate\. Got no unused"),
        ({"frozen": "gone"}, r"must name leaves of the candidate only\. Got gone\."),
        ({"frozen": "unused"}, r"name a leaf of the candidate once\. Got unused\."),
        (
            {"layer1/w": ("first.weight", (1, 1))},
            r"'layer1/w': \.\.\.\}.* must order the 2 axes .* Got \(1, 1\)\.",
        ),
    ],
)
def test_a_map_that_leaves_anything_open_is_refused(tree, theirs, change, message):
    """What no name leads to would otherwise never be judged."""
    names = {k: x for k, x in {**NAMES, **change}.items() if x is not ...}
    with pytest.raises(ValueError, match=message):
        verify.compare(tree, theirs, names=names)


@pytest.mark.parametrize(
    "name", [3, None, ("first.weight",), ("first.weight", 1), ((1, 0), "first.weight")]
)
def test_an_entry_of_another_form_is_refused(tree, theirs, name):
    rule = r"^`compare\(names={'layer1/w': \.\.\.}\)` must be a path of the .* Got "
    with pytest.raises(TypeError, match=rule + re.escape(repr(name))):
        verify.compare(tree, theirs, names={**NAMES, "layer1/w": name})

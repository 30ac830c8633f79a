"""Every planted error is reported, by the path of its leaf; nothing else is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import VerificationError, verify
from jdist.verify.comparison import ulp_distance


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
    report = verify.compare(tree, wrong, name="doubled")
    text = str(report)
    assert "doubled" in text
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
    rows = verify.compare(tree, {"more": np.ones(2)}, name="mine").leaves
    assert {leaf.candidate for leaf in rows} == {"mine"}
    assert {leaf.verdict for leaf in rows} == {"FAILS"}


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

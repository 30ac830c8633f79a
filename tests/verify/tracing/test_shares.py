"""How often each example counts in a wrong gradient, with shares that were planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.tracing import shares as module
from jdist.verify.tracing.shares import example_gradients, shares

SIZES = {"w": (5, 4), "b": (4,)}
EXAMPLES = 6


@pytest.fixture
def parts(rng):
    """Each example's gradient, by path and entry."""
    return {
        path: rng.normal(size=(EXAMPLES, int(np.prod(shape))))
        for path, shape in SIZES.items()
    }


def gradient(parts, counts, dtype=np.float64):
    """The sum of the examples' gradients, each so many times."""
    counts = np.asarray(counts, float)
    return {p: (counts @ x).reshape(SIZES[p]).astype(dtype) for p, x in parts.items()}


ALONE = [(e,) for e in range(EXAMPLES)]


@pytest.mark.parametrize(
    "counts",
    [
        (1, 1, 0, 1, 1, 1),
        (1, 2, 1, 1, 1, 1),
        (1, 1, -1, 1, 1, 1),
        (0.5, 1, 1, 1, 1.25, 1),
        (2, 2, 2, 2, 2, 2),
        (1, 1, 1, 1, 1, 1.01),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_planted_counts_are_found(parts, counts, dtype):
    """Whole numbers exactly; others to the rounding of the dtype."""
    found = shares(gradient(parts, counts, dtype), list(SIZES), parts, ALONE)
    np.testing.assert_allclose(found, counts, rtol=1e-5)
    whole = [n for n, c in zip(found, counts, strict=True) if c == round(c)]
    assert whole == [c for c in counts if c == round(c)]


def test_groups_count_together(parts):
    """Calls of the backward pass: one is lost."""
    groups = [(0, 3), (1,), (2, 4, 5)]
    counts = (1, 1, 0, 1, 0, 0)
    assert shares(gradient(parts, counts), ["w"], parts, groups) == [1, 1, 0]


def test_other_errors_have_no_shares(parts, rng):
    """A sign in one leaf, noise, a transposed leaf; and what is not finite."""
    right = gradient(parts, np.ones(EXAMPLES))
    wrong = {
        "noise": right["w"] + rng.normal(size=(5, 4)),
        "other entries": right["w"][::-1],
        "NaN": np.where(right["w"] == right["w"][2, 1], np.nan, right["w"]),
    }
    for name, w in wrong.items():
        assert shares({**right, "w": w}, ["w"], parts, ALONE) is None, name


def test_few_entries_tell_nothing(parts):
    """Any difference of four entries is a sum of six gradients."""
    found = gradient(parts, (1, 1, 0, 1, 1, 1))
    assert shares(found, ["b"], parts, ALONE) is None
    assert shares(found, ["b"], parts, [(0, 1, 3, 4, 5), (2,)]) == [1, 0]


def test_bfloat16_counts_are_rounded_to_what_they_can_be(parts):
    """A share that is off by the roundings of a part is a whole number."""
    found = gradient(parts, (1, 1, 0, 1, 1, 1), jnp.bfloat16)
    assert shares(found, list(SIZES), parts, ALONE) == [1, 1, 0, 1, 1, 1]


def test_gradients_of_single_examples():
    """Of the sum, by leaf, in float64 or complex128; None and integers have none."""

    def loss(params, batch):
        return jnp.abs(batch["x"] @ params["w"]) ** 2 * batch["weight"]

    rng = np.random.default_rng(2)
    x = rng.normal(size=(EXAMPLES, 4)).astype(np.complex64)
    w = (rng.normal(size=4) + 1j * rng.normal(size=4)).astype(np.complex64)
    batch = {"x": x, "weight": np.arange(EXAMPLES, dtype=np.float32)}
    params = {"w": w, "count": np.int32(3)}
    found = example_gradients(loss, params, batch)
    assert list(found) == ["w"]
    assert found["w"].dtype == np.complex128
    for e in range(EXAMPLES):
        row = jax.tree.map(lambda x, e=e: x[e : e + 1], batch)
        wanted = jax.grad(lambda w, row=row: loss({"w": w}, row).sum())(w)
        np.testing.assert_allclose(found["w"][e], wanted, rtol=1e-5, atol=1e-6)


def test_of_large_leaves_some_entries_are_fitted(monkeypatch, rng):
    """The same ones of the gradient and of each example's part."""
    monkeypatch.setattr(module, "ENTRIES", 64)
    large = rng.normal(size=(EXAMPLES, 1000))
    picks = module._picks({"w": large[0]})["w"]
    assert len(picks) == 64 == len(np.unique(picks))
    counts = np.array([1, 1, 3, 1, 1, 1.0])
    parts = {"w": large[:, picks]}
    assert shares({"w": counts @ large}, ["w"], parts, ALONE) == counts.tolist()

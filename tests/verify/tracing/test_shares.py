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
    """Of the sum, by leaf, in float64 or complex128; None and integers have none.

    The backward pass of each begins with its factor, which a rule may clip.
    """

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.3, 0.3),))

    def loss(params, batch):
        return clipped(jnp.abs(batch["x"] @ params["w"]) ** 2 * batch["weight"])

    rng = np.random.default_rng(2)
    x = rng.normal(size=(EXAMPLES, 4)).astype(np.complex64)
    w = (rng.normal(size=4) + 1j * rng.normal(size=4)).astype(np.complex64)
    batch = {"x": x, "weight": np.arange(EXAMPLES, dtype=np.float32)}
    params = {"w": w, "count": np.int32(3)}
    factors = np.linspace(0.1, 0.6, EXAMPLES, dtype=np.float32)
    found = example_gradients(loss, params, batch, factors)
    assert list(found) == ["w"]
    assert found["w"].dtype == np.complex128
    for e in range(EXAMPLES):
        row = jax.tree.map(lambda x, e=e: x[e : e + 1], batch)
        f = factors[e]
        wanted = jax.grad(lambda w, row=row, f=f: f * loss({"w": w}, row).sum())(w)
        np.testing.assert_allclose(found["w"][e], wanted, rtol=1e-5, atol=1e-6)


def test_of_large_leaves_some_entries_are_fitted(monkeypatch, rng):
    """The same ones of the gradient and of each example's part, without other leaves
    too: such as where the gradient lacks a leaf or has it in another shape."""
    monkeypatch.setattr(module, "ENTRIES", 128)
    shapes = {"a": (90,), "b": (50,), "c": (20, 5)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    batch = {
        name: jnp.asarray(rng.normal(size=(EXAMPLES, *shape)))
        for name, shape in shapes.items()
    }

    def loss(params, batch):
        return sum(
            jnp.tensordot(jnp.sin(batch[name]), params[name], len(shape))
            for name, shape in shapes.items()
        )

    parts = example_gradients(loss, params, batch, np.ones(EXAMPLES))
    assert {name: x.shape for name, x in parts.items()} == dict.fromkeys(
        shapes, (EXAMPLES, 128 // 3)
    )
    counts = [1, 1, 3, 1, 0, 1]
    whole = {
        name: jnp.tensordot(jnp.asarray(counts, float), jnp.sin(x), 1)
        for name, x in batch.items()
    }
    for wrong in (
        whole, whole | {"a": None}, whole | {"a": whole["b"]}, {"c": whole["c"]}
    ):  # fmt: skip
        assert shares(wrong, ["c"], parts, ALONE) == counts
    assert shares(whole, list(shapes), parts, ALONE) == counts
    picked = module._picked(100, 64)
    assert len(set(picked.tolist())) == 64
    monkeypatch.setattr(module, "ENTRIES", 2)
    one = example_gradients(loss, params, batch, np.ones(EXAMPLES))["c"]
    assert one.shape == (EXAMPLES, 1)


def test_complex_gradients_are_fitted_in_both_parts(rng):
    """A share that is further from 1 than the fit is uncertain is told as it is."""
    normal = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)  # noqa: E731
    each = {"w": normal(3, 400)}
    found = np.array([2, 1.004, 1]) @ each["w"] + 0.01 * normal(400)
    told = shares({"w": found}, ["w"], each, ALONE[:3])
    assert (told[0], told[2]) == (2, 1)
    assert told[1] == pytest.approx(1.004, abs=0.002)
    assert told[1] != 1


@pytest.mark.parametrize(("share", "fits"), [(0.04, True), (0.06, False)])
def test_a_twentieth_may_be_unexplained(rng, share, fits):
    """Of the difference: what no counts of these examples can make."""
    each = rng.normal(size=(3, 30))
    difference = np.array([1.0, -1, 0]) @ each
    other = rng.normal(size=30)
    other -= each.T @ np.linalg.lstsq(each.T, other)[0]
    other *= share / np.sqrt(1 - share**2) / np.linalg.norm(other)
    wrong = each.sum(0) + difference + other * np.linalg.norm(difference)
    found = shares({"w": wrong}, ["w"], {"w": each}, ALONE[:3])
    assert found == ([2, 0, 1] if fits else None)


def test_twice_as_many_entries_as_groups_are_needed(parts):
    few = {"b": parts["b"][:, :3]}
    found = {"b": np.array([1.0, 1, 0, 1, 1, 1]) @ few["b"]}
    assert shares(found, ["b"], few, [(0, 1, 3, 4, 5), (2,)]) is None


def test_the_coarsest_dtype_rounds_the_shares(parts):
    """Of several wrong leaves; a share beyond its roundings is told as it is."""
    for count, told in ((1.01, 1), (1.03, None)):
        exact = gradient(parts, [1, count, 1, 1, 1, 0])
        found = {"w": exact["w"], "b": jnp.asarray(exact["b"], jnp.bfloat16)}
        own = shares(found, ["w", "b"], parts, ALONE)
        assert own[5] == 0
        assert (own[1] == 1) == (told == 1)
        assert own[1] == pytest.approx(told or count, abs=0.01)


def test_shares_are_told_as_finely_as_the_fit_can(rng):
    """Examples of small gradients count once, though others' rounding hides it."""
    each = rng.normal(size=(5, 400)) * np.array(
        [[1.0], [0.004], [0.004], [1.0], [0.004]]
    )
    counts = np.array([2.0, 1.0, 1.0, 1.5, 1.0])
    found = counts @ each
    rounded = {"w": jnp.asarray(found, jnp.bfloat16)}
    groups = [(e,) for e in range(5)]
    fitted, *_ = np.linalg.lstsq(each.T, np.asarray(rounded["w"], float))
    assert np.abs(fitted[[1, 2, 4]] - 1).max() > 4 * 2.0**-8
    told = shares(rounded, ["w"], {"w": each}, groups)
    assert [told[e] for e in (0, 1, 2, 4)] == [2, 1, 1, 1]
    assert 1.45 < told[3] < 1.55

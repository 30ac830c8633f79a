"""What a loss reads, what its cotangents are divided by, and entries that join."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline.run.loss import PipelineLoss, merged, stacked

SHAPES = {"a": (4, 3), "b": (4,), "c": (4, 2)}


def batch_of(rng):
    found = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    # An entry of several leaves, and one without any.
    return found | {"deep": {"left": found["b"] + 1, "right": found["b"] - 1}, "no": {}}


TERMS = {
    "a": lambda batch: batch["a"].sum(-1),
    "b": lambda batch: batch["b"],
    "c": lambda batch: batch["c"][:, 1],
    "deep": lambda batch: batch["deep"]["right"],
}


@pytest.mark.parametrize(
    "read", [s for k in range(5) for s in itertools.combinations(TERMS, k)], ids=str
)
def test_only_entries_that_the_losses_depend_on_are_read(read, rng):
    """Looked at is not read; a part of an entry is. By arrays and by shapes."""

    def fn(outputs, batch):
        losses = outputs**2
        for name, term in TERMS.items():
            value = term(batch)
            losses = losses + (value if name in read else 0 * value.shape[0])
        return losses

    loss = PipelineLoss(fn, ("y",), "mean")
    batch = batch_of(rng)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
    values = {"y": jax.ShapeDtypeStruct((4,), np.float64)}
    for entries in (batch, shapes):
        assert loss.entries_read(values, entries) == read


def test_outputs_come_by_name_where_there_are_several(rng):
    """Only then; an integer output has no cotangent."""

    def fn(outputs, batch):
        assert sorted(outputs) == ["h", "n", "y"]
        count = outputs["n"].astype(batch["b"].dtype)
        return (outputs["y"] - outputs["h"][:, 0]) * count * batch["b"]

    batch = {"b": rng.normal(size=4)}
    values = {
        "y": jnp.arange(4.0),
        "h": jnp.asarray(rng.normal(size=(4, 2))),
        "n": jnp.array([1, 2, 3, 4]),
    }
    passes = PipelineLoss(fn, ("h", "n", "y"), "sum").passes(batch, ("b",))
    weights = np.array([1.0, 0.5, 0.0, 2.0])
    part, cotangents, aux = passes.both(values, batch, weights)
    factor = weights * np.asarray(values["n"]) * batch["b"]
    np.testing.assert_allclose(cotangents["y"], factor, rtol=1e-15)
    np.testing.assert_allclose(cotangents["h"][:, 0], -factor, rtol=1e-15)
    assert not cotangents["h"][:, 1].any()
    assert cotangents["n"] is None
    assert aux is None
    gap = np.asarray(values["y"] - values["h"][:, 0])
    np.testing.assert_allclose(part.value, (gap * factor).sum(), rtol=1e-14)
    assert (float(part.weight), part.gradient) == (3.5, None)
    again, _ = passes.losses(values, batch, weights)
    np.testing.assert_array_equal(again.value, part.value)


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_scale_multiplies_cotangents_and_no_loss(kind, rng):
    """The weights of a mean are shares already: nothing is divided here."""
    plain = PipelineLoss(lambda y, batch: y * batch["b"], ("y",), kind)
    batch, values = {"b": rng.normal(size=3)}, {"y": jnp.arange(3.0)}
    weights = np.array([0.5, 1.0, 1.5])
    passes, scale = plain.passes(batch, ("b",)), np.float32(1000)
    part, cotangents, _ = passes.both(values, batch, weights, scale)
    expected = weights * batch["b"] * 1000
    np.testing.assert_allclose(cotangents["y"], expected, rtol=1e-15)
    other, _, _ = passes.both(values, batch, weights)
    assert (float(part.value), float(part.weight)) == (float(other.value), 3.0)


def test_ties_share_the_cotangent_of_an_extreme(rng):
    """As in `jnp.max`; their number is the weight by which the stages multiply."""
    extreme = PipelineLoss(lambda y, batch: y * batch["b"], ("y",), "max")
    batch, values = {"b": np.array([2.0, 3.0, 6.0, 7.0])}, {"y": jnp.ones(4)}
    values["y"] = values["y"].at[1].set(2.0)
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    part, cotangents, _ = extreme.passes(batch, ("b",)).both(values, batch, weights)
    assert cotangents["y"].tolist() == [0, 1.5, 3, 0]
    assert (float(part.value), float(part.weight)) == (6, 2)


# --- what is missing ---


class Missing(KeyError):
    """An error of a user's own, without arguments."""


def raising(error):
    def fn(outputs, batch):
        raise error

    return fn


@pytest.mark.parametrize(
    ("names", "fn", "text"),
    [
        (
            ("y",),
            lambda y, batch: y + batch["label"],
            r"must read only what is there: a batch of \['b', 'x'\]. Got 'label'",
        ),
        (
            ("h", "y"),
            lambda values, batch: values["z"],
            r"outputs named \['h', 'y'\] and a batch of \['b', 'x'\]. Got 'z'",
        ),
        # A single output has no name that could be missing.
        (("y",), lambda y, batch: batch["y"], r"a batch of \['b', 'x'\]. Got 'y'"),
    ],
)
def test_a_name_that_is_missing_is_told_beside_those_that_are_there(names, fn, text):
    shape = jax.ShapeDtypeStruct((2,), np.float64)
    given = dict.fromkeys(names, shape), {"x": shape, "b": shape}
    with pytest.raises(ValueError, match=rf"loss_fn\(outputs, batch\)` .*{text}"):
        PipelineLoss(fn, names, "mean").entries_read(*given)


@pytest.mark.parametrize(
    ("names", "error"),
    [(("y",), KeyError("b")), (("h", "y"), KeyError("h")), (("y",), Missing())],
    ids=str,
)
def test_a_key_error_of_the_users_own_is_left_alone(names, error):
    """Of a name that is there, in another mapping, or of no name at all."""
    shape = jax.ShapeDtypeStruct((2,), np.float64)
    given = dict.fromkeys(names, shape), {"x": shape, "b": shape}
    with pytest.raises(KeyError, match=f"^{re.escape(str(error))}") as caught:
        PipelineLoss(raising(error), names, "mean").entries_read(*given)
    assert caught.value is error


# --- auxiliary outputs ---


def outputs_of(micro):
    return {"row": np.full((2, 3), micro), "count": np.int64(10 * micro)}


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_entries_join_in_order_whoever_has_them(data):
    """Processes of one worker have the same ones, and some have none."""
    count = data.draw(st.integers(1, 7))
    owner = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    parts = [
        stacked({i: outputs_of(i) for i in range(count) if owner[i] == rank}, np.stack)
        for rank in range(4)
    ]
    twice = data.draw(st.lists(st.sampled_from(parts), max_size=3))
    found = merged(data.draw(st.permutations(parts + twice)))
    whole = stacked({i: outputs_of(i) for i in range(count)}, np.stack)
    assert whole is not None
    numbers, expected = whole
    assert numbers == list(range(count))
    for name, entries in expected.items():
        assert isinstance(found[name], np.ndarray)
        assert np.array_equal(found[name], entries)


@pytest.mark.parametrize(
    ("other", "got"),
    [
        ({"row": np.ones((2, 4)), "count": np.int64(1)}, r"float64\[2,4\]"),
        ({"row": np.ones((2, 3), np.float32), "count": np.int64(1)}, r"float32\[2,3"),
        ({"row": np.ones((2, 3))}, r"\{'row': float64\[2,3\]\}"),
    ],
)
def test_the_micro_batch_whose_outputs_differ_is_named(other, got):
    """By its number, which is not its place among those of a process."""
    usual = {"row": np.ones((2, 3)), "count": np.int64(1)}
    found = {11: usual, 2: usual, 7: other}
    match = rf"as for the first, .*float64\[2,3\].* Got .*{got}.* for micro-batch 7\."
    with pytest.raises(ValueError, match=match):
        stacked(found, np.stack)

"""How a batch is cut, and what becomes of its weights: beside plain counts."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline.run.micro_batch import (
    check_weights,
    in_epoch,
    micro_batch_of,
    normalized,
    size_of_batch,
    split_batch,
    total_beside,
)

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def batch_of(examples):
    """Every number is one of a kind; entries have shapes of their own."""
    x = np.arange(examples * 3.0).reshape(examples, 3)
    ids = np.arange(examples)
    return {"x": x, "deep": {"ids": ids, "none": None, "pair": (-x[:, :2], ids + 0.5)}}


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_parts_are_the_batch_in_order(data):
    """Nearly equal in whole rows of the data axis; the rest is with the last one."""
    count, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    examples = data.draw(st.integers(count * rows, count * rows + 23))
    batch = batch_of(examples)
    weights = np.random.default_rng(examples).uniform(size=examples)
    parts = split_batch(batch, weights, count, "sum", rows)
    sizes = [len(part.weights) for part in parts]
    assert [part.number for part in parts] == list(range(count))
    *whole, last = [size - examples % rows * (n == count - 1) for n, size in
                    enumerate(sizes)]  # fmt: skip
    assert not any(size % rows for size in (*whole, last))
    in_order = sorted((*whole, last), reverse=True)
    assert [*whole, last] == in_order
    assert in_order[0] - in_order[-1] <= rows
    starts = [0, *itertools.accumulate(sizes)]
    assert starts[-1] == examples
    for part, (start, end) in zip(parts, itertools.pairwise(starts), strict=True):
        wanted = jax.tree.map(lambda leaf: leaf[start:end], batch)  # noqa: B023
        assert jax.tree.structure(part.batch) == jax.tree.structure(batch)
        pairs = zip(jax.tree.leaves(part.batch), jax.tree.leaves(wanted), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
        assert np.array_equal(part.weights, weights[start:end])
        assert part.total == float(weights[start:end].sum())


def test_shapes_and_arrays_on_devices_are_cut_alike():
    batch = batch_of(8)
    parts = split_batch(batch, None, 3, "mean", 2)
    shapes = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, batch))
    for other in (shapes, jax.tree.map(jax.numpy.asarray, batch)):
        for part, found in zip(parts, split_batch(other, None, 3, "mean", 2), strict=1):
            assert jax.tree.map(np.shape, found.batch) == jax.tree.map(
                np.shape, part.batch
            )
            assert found.total == part.total
    assert [len(part.weights) for part in parts] == [4, 2, 2]


@pytest.mark.parametrize(
    ("examples", "count", "rows", "match"),
    [
        (3, 4, 1, r"an example for each of the 4 micro-batches. Got 3 ex.*Make the b"),
        (7, 2, 4, r"4 examples for each of the 2 micro-batches, one for.*Got 7 exam"),
        (0, 1, 1, "an example for each of the 1 micro-batches"),
    ],
)
def test_batches_that_are_too_small(examples, count, rows, match):
    with pytest.raises(ValueError, match=match):
        split_batch(batch_of(examples), None, count, "mean", rows)
    least = max(count, count * rows)
    assert len(split_batch(batch_of(least), None, count, "mean", rows)) == count


# --- weights ---

weights_of_batches = st.lists(
    st.floats(1e-30, 1e30) | st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    min_size=1, max_size=12,
).filter(any)  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(own=weights_of_batches, dtype=st.sampled_from([np.float32, np.float64]))
def test_weights_of_a_mean_are_shares_in_double(own, dtype):
    """To rounding the quotients of real numbers; what is positive stays so."""
    weights = np.array(own, dtype)
    found = normalized(weights, "mean", "f")
    exact = [Fraction(float(w)) for w in weights]
    shares = np.array([float(w / sum(exact)) for w in exact])
    assert found.dtype == np.float64
    expected = np.where(weights > 0, np.maximum(shares, TINY), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    assert np.array_equal(found > 0, weights > 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("examples", [5, 6, 7, 11, 1000])
def test_shares_of_equal_weights_are_those_of_jnp_mean(examples, dtype):
    """To the bit, in every split, once they are rounded to the losses' dtype."""
    y = np.zeros(examples, dtype)
    expected = jax.grad(lambda y: y.mean())(jax.numpy.asarray(y))
    for count in (1, 2, 3, 4):
        parts = split_batch({"y": y}, None, count, "mean")
        found = np.concatenate([part.weights for part in parts])
        np.testing.assert_array_equal(found.astype(dtype), expected)
        assert [part.total for part in parts] == [part.weights.sum() for part in parts]


def test_shares_do_not_depend_on_the_split():
    """The total is that of the whole batch, in one order."""
    weights = np.random.default_rng(2).uniform(size=1001).astype(np.float32)
    batch = {"x": np.zeros(1001)}
    found = [
        np.concatenate([p.weights for p in split_batch(batch, weights, n, "mean")])
        for n in (1, 3, 7)
    ]
    assert all(np.array_equal(each, found[0]) for each in found)


def test_a_sum_beyond_double_precision_has_shares():
    """3e308 is none of float64's numbers; another one may be as small as they get."""
    weights = np.array([1e-300, 1e308, 1e308, 1e308])
    assert normalized(weights, "mean", "f").tolist() == [TINY, *[1 / 3] * 3]
    # By a power of two, of which the first total is less than 1.
    assert total_beside(weights, np.full(2, 1.5e308)) == 1.5e308 / 2.0**1023 / 2
    assert total_beside(np.array([5.0, 6.0]), np.array([1.0, 4.0])) == 11 / 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_would_vanish_is_raised_to_the_smallest_normal_number(dtype):
    weights = np.array([2.0**40, 1e-38, 0.0], dtype)
    assert normalized(weights, "mean", "f").tolist() == [1, TINY, 0.0]


@settings(deadline=None, max_examples=30)
@given(own=weights_of_batches, kind=st.sampled_from(["max", "min"]))
def test_of_an_extreme_weights_are_counts(own, kind):
    for dtype in (np.float32, np.float64):
        weights = np.array(own, dtype)
        found = normalized(weights, kind, "f")
        assert found.dtype == dtype
        assert np.array_equal(found, weights > 0)


def test_weights_of_a_sum_are_refused_beyond_single_precision():
    """The largest float32 is not beyond it."""
    given = np.array([1.0, LARGEST, 0.0])
    assert normalized(given, "sum", "f") is given
    beyond = np.array([1.0, 0.0, np.nextafter(LARGEST, np.inf)])
    match = r"f\(weights=...\).*within float32 where losses.*Got .*3.4028.*or use the m"
    with pytest.raises(ValueError, match=match):
        normalized(beyond, "sum", "f")


def test_a_batch_of_an_epoch_has_shares_of_its_own():
    """Beside others it counts by its total, in units of a power of two."""
    first, other = (
        micro_batch_of(n, batch_of(3), weights, "f")
        for n, weights in ((2, [1.0, 2.0, 1.0]), (5, [3.0, 0.0, 9.0]))
    )
    found = in_epoch(other, "mean", first, "f")
    assert (found.number, found.total) == (5, 12 / 8)
    assert found.weights.tolist() == [0.25, 0, 0.75]
    assert found.batch["x"].tolist() == [[0, 1, 2], [0, 1, 2], [6, 7, 8]]
    summed = in_epoch(other, "sum", first, "f")
    assert (summed.weights.tolist(), summed.total) == ([3, 0, 9], 12)
    assert summed.batch["x"].tolist() == found.batch["x"].tolist()
    nothing = micro_batch_of(7, batch_of(2), [0, 0], "f")
    assert in_epoch(nothing, "mean", first, "f") is nothing


# --- excluded examples ---


@pytest.mark.parametrize("kind", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("make", [np.asarray, jax.numpy.asarray])
def test_an_example_that_counts_stands_where_one_is_excluded(kind, make):
    """In every entry; also where a whole micro-batch is excluded."""
    batch = jax.tree.map(make, batch_of(7))
    weights = [0, 0, 0, 2, 5, 0, 1]
    parts = split_batch(batch, weights, 3, kind)
    order = [[3, 3, 3], [3, 4], [3, 6]]
    for part, rows in zip(parts, order, strict=True):
        for found, leaf in zip(
            jax.tree.leaves(part.batch), jax.tree.leaves(batch), strict=True
        ):
            assert type(found) is type(leaf)
            np.testing.assert_array_equal(found, np.asarray(leaf)[rows])
    assert parts[0].total == 0
    # Not in the caller's arrays.
    np.testing.assert_array_equal(batch["deep"]["ids"], np.arange(7))


def test_nothing_is_copied_where_all_examples_count():
    batch = batch_of(7)
    for weights in (None, np.arange(1.0, 8.0)):
        for part in split_batch(batch, weights, 3, "mean"):
            assert np.shares_memory(part.batch["x"], batch["x"])
    one, two = split_batch(batch, [1, 1, 1, 1, 0, 1, 1], 2, "mean")
    assert np.shares_memory(one.batch["x"], batch["x"])
    assert not np.shares_memory(two.batch["x"], batch["x"])


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        (None, np.float32),
        ([1, 2, 0], np.float32),
        (np.array([1, 2, 0], np.int64), np.float32),
        (np.array([True, False, True]), np.float32),
        (np.array([1, 2, 0.5], np.float16), np.float32),
        ([1.0, 2.0, 0.5], np.float64),
    ],
)
def test_weights_are_single_unless_given_in_double(weights, dtype):
    found = check_weights(weights, 3, "f")
    assert found.dtype == dtype
    wanted = [1, 1, 1] if weights is None else list(weights)
    assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([[1.0, 1.0, 1.0]], r"each of the 3 examples. Got shape \(1, 3\)"),
        ([1.0, -0.5, 3.0], r"finite and not negative. Got -0.5 to 3.0"),
        ([1.0, np.inf, 3.0], r"finite and not negative. Got 1.0 to inf"),
        ([0, 0, 0], r"f\(weights=...\).*must not all be zero. Got 3 zeros"),
    ],
)
def test_weights_that_are_refused(weights, match):
    with pytest.raises(ValueError, match=match):
        check_weights(weights, 3, "f")


def test_a_whole_batch_may_count_for_nothing():
    """As one of several micro-batches of an update."""
    part = micro_batch_of(7, batch_of(2), [0, 0], "f")
    assert (part.number, part.total) == (7, 0.0)
    with pytest.raises(ValueError, match=r"not negative. Got -1.0 to 0.0"):
        micro_batch_of(7, batch_of(2), [0, -1], "f")


def test_the_size_of_a_batch_is_what_counts():
    batch = batch_of(5)
    assert size_of_batch(batch, None) == (5, 5.0)
    assert size_of_batch(batch, [0.0, 2.0, 0.0, 0.25, 1.0]) == (3, 3.25)
    # Single precision cannot count so many.
    many = np.broadcast_to(np.float32(1), (2**24 + 4,))
    assert size_of_batch({}, many) == (2**24 + 4, 2.0**24 + 4)

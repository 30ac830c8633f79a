"""How a batch is cut, and what becomes of its weights: beside plain counts."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline.run.micro_batch import (
    check_weights,
    exponent_of,
    micro_batch_of,
    normalized,
    scaled_down,
    size_of_batch,
    split_batch,
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
        assert part.total == part.given == float(weights[start:end].sum())


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

weights_of_parts = st.lists(
    st.lists(
        st.floats(1e-30, 1e30) | st.sampled_from([0.0, 0.25, 1.0, 3.0]),
        min_size=1, max_size=4,
    ),
    min_size=1, max_size=4,
).filter(lambda parts: any(map(any, parts)))  # fmt: skip


def parts_of(lists, dtype=np.float64):
    return [
        micro_batch_of(number, batch_of(len(own)), np.array(own, dtype), "f")
        for number, own in enumerate(lists)
    ]


@settings(deadline=None, max_examples=30)
@given(lists=weights_of_parts)
def test_a_mean_divides_by_one_power_of_two(lists):
    """The largest total comes to lie in (1/2, 1]; what is positive stays so."""
    given = parts_of(lists)
    exponent = exponent_of(given)
    found = normalized(given, "mean", "f")
    largest = max(math.fsum(own) for own in lists)
    assert 2.0 ** (exponent - 1) < largest <= 2.0**exponent * (1 + 1e-15)
    for before, after in zip(given, found, strict=True):
        wanted = np.ldexp(before.weights, -exponent)
        kept = wanted >= TINY
        assert np.array_equal(after.weights[kept], wanted[kept])
        assert np.array_equal(after.weights > 0, before.weights > 0)
        assert after.total == after.weights.sum()
        assert (after.given, after.number) == (before.total, before.number)
        assert after.batch is before.batch


@pytest.mark.parametrize("power", [-1060, -200, -1, 0, 1, 5, 900])
def test_a_total_that_is_a_power_of_two_becomes_1(power):
    """Not 1/2: four examples of 1/4 each, and a smaller part beside them."""
    given = parts_of([[2.0**power] * 4, [2.0**power]])
    assert exponent_of(given) == power + 2
    assert [part.total for part in normalized(given, "mean", "f")] == [1.0, 0.25]


def test_a_sum_beyond_double_precision_has_an_exponent():
    """3e308 is none of float64's numbers; another part may be as small as they get."""
    given = parts_of([[1e-300], [1e308] * 3])
    assert exponent_of(given) == exponent_of(given[::-1]) == 1025
    small, large = normalized(given, "mean", "f")
    assert large.weights.tolist() == [math.ldexp(1e308, -1025)] * 3
    assert 0.5 < large.total <= 1
    assert small.weights.tolist() == [TINY]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_would_vanish_is_raised_to_the_smallest_normal_number(dtype):
    (part,) = parts_of([[1.0, 1e-38, 0.0]], dtype)
    found = scaled_down(part, 40)
    assert found.weights.dtype == dtype
    assert found.weights.tolist() == [2.0**-40, TINY, 0.0]
    assert found.total == 2.0**-40 + TINY


@settings(deadline=None, max_examples=30)
@given(lists=weights_of_parts, kind=st.sampled_from(["max", "min"]))
def test_of_an_extreme_weights_are_counts(lists, kind):
    for dtype in (np.float32, np.float64):
        for part, own in zip(
            normalized(parts_of(lists, dtype), kind, "f"), lists, strict=True
        ):
            chosen = [float(np.asarray(weight, dtype) > 0) for weight in own]
            assert part.weights.dtype == dtype
            assert part.weights.tolist() == chosen
            assert part.total == sum(chosen)
            assert part.given == float(np.array(own, dtype).sum(dtype=np.float64))


def test_weights_of_a_sum_are_refused_beyond_single_precision():
    """The largest float32 is not beyond it; any part may hold the one that is."""
    given = parts_of([[1.0], [LARGEST, 0.0]])
    found = normalized(given, "sum", "f")
    assert [part.weights.tolist() for part in found] == [[1.0], [LARGEST, 0.0]]
    beyond = parts_of([[1.0], [0.0, np.nextafter(LARGEST, np.inf)]])
    match = r"f\(weights=...\).*within float32 where losses.*Got .*3.4028.*or use the m"
    with pytest.raises(ValueError, match=match):
        normalized(beyond, "sum", "f")


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
    assert (part.number, part.total, part.given) == (7, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"not negative. Got -1.0 to 0.0"):
        micro_batch_of(7, batch_of(2), [0, -1], "f")


def test_the_size_of_a_batch_is_what_counts():
    batch = batch_of(5)
    assert size_of_batch(batch, None) == (5, 5.0)
    assert size_of_batch(batch, [0.0, 2.0, 0.0, 0.25, 1.0]) == (3, 3.25)
    # Single precision cannot count so many.
    many = np.broadcast_to(np.float32(1), (2**24 + 4,))
    assert size_of_batch({}, many) == (2**24 + 4, 2.0**24 + 4)

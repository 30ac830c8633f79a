"""Batches that are read one by one: their weights, their end, and what is refused."""

import numpy as np
import pytest

from jdist.pipeline.weight_stashing.batch_stream import BatchStream
from tests.pipeline.epochs import paired

CALL = "train"


def batch(rows, start=0.0):
    return {"x": np.arange(rows, dtype=np.float32) + start}


def stream(batches, kind="mean", groups=(1,), kept=None, compared=True, total=None):
    kept = kept or (lambda micro: True)
    return BatchStream(batches, total, kind, groups, kept, compared, CALL)


def read(found):
    found.read(found.length - 1)
    return found


def test_it_reads_what_is_asked_for_and_forgets():
    seen = []

    def batches():
        for i in range(4):
            seen.append(i)
            yield batch(2 + i, start=10.0 * i), np.full(2 + i, 0.5 + i)

    found = stream(batches(), kept=lambda micro: micro != 2, total=4)
    assert (seen, found.length) == ([], 4)
    found.read(1)
    assert seen == [0, 1]
    found.read(0)
    assert seen == [0, 1]
    assert found[1].batch["x"].tolist() == [10.0, 11.0, 12.0]
    found.forget(1)
    found.forget(1)
    read(found)
    for gone in (1, 2):
        with pytest.raises(KeyError, match=str(gone)):
            found[gone]
    ratio = np.array(found.totals) / [2 * 0.5, 3 * 1.5, 4 * 2.5, 5 * 3.5]
    assert set(ratio.tolist()) == {0.5}  # The first total, 1, is a power of two.


def test_checksums_tell_contents_and_order():
    parts = [batch(3, i) for i in range(3)]
    same, again = (read(stream(list(parts))).checksums for _ in range(2))
    assert same == again
    assert sorted(same) == ["entry 'x'", "weights"]
    swapped = read(stream([parts[1], parts[0], parts[2]])).checksums
    assert swapped["entry 'x'"] != same["entry 'x'"]
    assert swapped["weights"] == same["weights"]
    assert read(stream(parts, compared=False)).checksums == {}


def test_weights_of_a_sum_are_as_they_were_given():
    given = [np.array([3.0, 0.25]), np.array([1e9])]
    found = stream(paired([batch(2), batch(1)], given), kind="sum")
    read(found)
    assert [found[i].weights.tolist() for i in (0, 1)] == [[3.0, 0.25], [1e9]]


@pytest.mark.parametrize(
    ("weights", "groups", "message"),
    [
        ([1, 0, 0, 2], (2,), None),
        ([1, 0, 0, 2, 3], (2,), None),
        ([0, 1, 1], (1,), "all be zero .* of an update. Got zeros in batch 0"),
        ([1, 1, 0, 0, 1], (2,), "Got zeros in the batches 2 to 3"),
        ([1, 1, 1, 0], (3,), "Got zeros in batch 3"),
        ([1, 0, 0, 1, 1, 1], (3, 2), None),
        ([1, 1, 0, 0, 1, 1], (3, 2), "Got zeros in the batches 2 to 3"),
    ],
)
def test_an_update_needs_an_example_that_counts(weights, groups, message):
    given = [np.full(2, w, np.float32) for w in weights]
    found = stream(paired([batch(2)] * len(given), given), groups=groups)
    if message is None:
        totals = np.array(read(found).totals)
        assert np.array_equal(totals / totals.max(), np.array(weights) / max(weights))
        return
    with pytest.raises(ValueError, match=message):
        read(found)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_the_first_total_above_0_normalizes_the_others(size):
    """A batch that counts for nothing has no size."""
    given = [np.full(2, size * w) for w in (0.0, 3.0, 6.0, 0.75)]
    totals = read(stream(paired([batch(2)] * 4, given), groups=(2,))).totals
    assert 0.5 <= totals[1] < 1
    np.testing.assert_allclose(
        totals, [0, totals[1], 2 * totals[1], 0.25 * totals[1]], rtol=1e-15
    )


def test_batches_without_weights_stand_between_others():
    """Each of their examples counts 1, whatever came before."""
    rows = [2, 2, 2, 2, 3, 2]
    given = [[5.0, 1.0], None, [3.0, 4.0], None, None, None]
    found = read(stream([(batch(n, n), w) for n, w in zip(rows, given, strict=True)]))
    for i, (n, w) in enumerate(zip(rows, given, strict=True)):
        wanted = np.ones(n) if w is None else np.array(w)
        shares = wanted / wanted.sum()
        np.testing.assert_allclose(found[i].weights, shares, rtol=1e-7)
        assert found[i].total * 8 == wanted.sum()
        assert (found[i].number, found[i].batch["x"][0]) == (i, n)


def test_weights_of_a_sum_beyond_single_precision_are_refused():
    found = stream(paired([batch(1)] * 2, [[1.0], [1e39]]), kind="sum")
    found.read(0)
    with pytest.raises(
        ValueError, match=r"train\(weights=...\).*within float32.*1e\+39"
    ):
        found.read(1)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (3, TypeError, r"train\(batches\)` must be batches, one after .*Got an int"),
        (batch(1), TypeError, "Got a dict. Wrap a single batch in a list"),
        ([], ValueError, "must have one batch at least"),
        (iter([batch(1)]), ValueError, r"total=...\)` must be given where .* a list"),
        ([(batch(1), 1, 2)], ValueError, "pairs of .* weights. Got a tuple of 3"),
        ([[1.0]], TypeError, "must be a dict of named arrays"),
        ([(batch(2), [1.0])], ValueError, "one number for each of the 2 examples"),
    ],
)
def test_what_is_refused(batches, error, message):
    with pytest.raises(error, match=message):
        read(stream(batches))


def test_what_an_iterator_raises_says_where():
    def batches():
        yield batch(2)
        yield batch(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        read(stream(batches(), total=3))
    assert caught.value.__notes__ == ["It was raised when batch 2 was read."]


def test_batches_that_end_early():
    found = stream(iter([batch(2)] * 3), total=4)
    with pytest.raises(ValueError, match="must be the 4 batches of the epoch"):
        read(found)

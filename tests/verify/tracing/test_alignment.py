"""Rows of a candidate are assigned to examples by their values, against brute force."""

import numpy as np
import pytest

from jdist.verify.tracing.alignment import NONE, _classes, align
from jdist.verify.tracing.layout import Layout
from jdist.verify.tracing.recording import TapRecord
from jdist.verify.tracing.reference import Passage, Rows

BOUND = 1e-3


def passage(values, label="tap", bound=BOUND):
    """One passage of the reference, of whose cotangents nothing is known."""
    layout = Layout(values.shape, 0, 1)
    rows = Rows(values, np.full(values.shape, bound))
    return Passage("tap", label, layout, rows, None)


def record(value, cotangent=None, axes=0):
    """What a candidate's tap has seen."""
    return TapRecord("tap", axes, np.asarray(value), cotangent)


def aligned(values, *records):
    """Records beside one passage."""
    return align([0], [passage(values)], records)


def test_rows_are_found_in_any_order_and_call(rng):
    """A permutation over two calls, with one copy as padding."""
    values = rng.normal(size=(7, 3))
    order = rng.permutation(7)
    first, second = order[:3], np.append(order[3:], order[0])
    found = aligned(values, record(values[first]), record(values[second]))
    assert found.forward.found.tolist() == [*first, *second]
    assert found.forward.calls == (3, 5)
    calls = [rows.tolist() for rows in found.forward.rows_by_call()]
    assert calls == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert found.backward.found.tolist() == []


def test_only_what_is_within_the_bound_is_an_example(rng):
    """Just inside, just outside, NaN; each entry by its own bound."""
    values = rng.normal(size=(4, 5))
    inside, outside = values[:1] + 0.9 * BOUND, values[:1].copy()
    outside[0, 2] += 1.1 * BOUND
    below = values[:1] - 1.1 * BOUND
    broken = np.where(np.arange(5) == 3, np.nan, values[1:2])
    found = aligned(values, *map(record, (inside, outside, below, broken)))
    assert found.forward.found.tolist() == [0, NONE, NONE, NONE]
    assert NONE not in found.label


def test_infinities_are_matched_by_their_signs():
    """A masked logit is -inf in both; +inf, or a large number, is something else."""
    values = np.array([[1.0, -np.inf], [1.0, 2.0], [np.inf, 2.0]])
    given = np.array([[1.0, -np.inf], [1.0, np.inf], [1.0, -1e300], [np.inf, 2.0]])
    found = aligned(values, record(given))
    assert found.forward.found.tolist() == [0, NONE, NONE, 2]


def test_numbers_whose_squares_overflow_are_matched(rng):
    """As of a loss near its end in float64; the bounds are as large as they."""
    values = -1e250 * rng.uniform(1, 2, size=(4, 3))
    found = align(
        [0], [passage(values, bound=1e240)], [record(values[::-1]), record(values / 2)]
    )
    assert found.label.tolist() == [0, 1, 2, 3]
    assert found.forward.found.tolist() == [3, 2, 1, 0, *[NONE] * 4]
    small = rng.normal(size=(4, 3))
    assert aligned(small, record(values)).forward.found.tolist() == [NONE] * 4


def test_equal_examples_are_one_class(rng):
    """Within both bounds, and through a chain of neighbours."""
    values = rng.normal(size=(5, 3))
    values[3] = values[1] + 1.5 * BOUND
    values[4] = values[3] + 1.5 * BOUND
    found = aligned(values, record(values))
    assert found.label.tolist() == [0, 1, 2, 1, 1]
    assert found.classes_at(0).tolist() == [0, 1, 2, 1, 1]
    assert found.members(1) == [(0, 1), (0, 3), (0, 4)]
    assert found.forward.found.tolist() == [0, 1, 2, 1, 1]


def test_passages_of_one_tap_are_told_apart(rng):
    """A layer that is called twice: a row is of the call whose value it has."""
    first, second = rng.normal(size=(2, 4, 3))
    passages = [passage(first, "tap[0]"), passage(second, "tap[1]")]
    found = align([2, 6], passages, [record(second[::-1]), record(first)])
    assert found.forward.found.tolist() == [7, 6, 5, 4, 0, 1, 2, 3]
    assert found.places == (2, 6)
    assert found.members(5) == [(6, 1)]
    assert found.classes_at(6).tolist() == [4, 5, 6, 7]


def test_cotangents_stay_beside_their_values(rng):
    """Backward records alone have cotangents, in the order of their rows."""
    values, cotangents = rng.normal(size=(2, 4, 3))
    found = aligned(values, record(values[:2]), record(values[2:], cotangents[2:]))
    assert found.forward.found.tolist() == [0, 1]
    assert found.forward.cotangents is None
    assert found.backward.found.tolist() == [2, 3]
    np.testing.assert_array_equal(found.backward.cotangents, cotangents[2:])


def test_rows_of_vmap_follow_each_other(rng):
    """One leading axis more, which the record counts."""
    values = rng.normal(size=(6, 3))
    stacked = values[[5, 1, 0, 2, 4, 3]].reshape(2, 3, 3)
    found = aligned(values, record(stacked, axes=1))
    assert found.forward.found.tolist() == [5, 1, 0, 2, 4, 3]
    assert found.forward.calls == (6,)


@pytest.mark.parametrize("mask", [-np.inf, -30, -1e9, float(np.finfo("f4").min)])
@pytest.mark.parametrize("causal", [True, False])
def test_masked_scores_do_not_hide_the_others(rng, mask, causal):
    """In all rows the same entries, or in each row others: padding of many lengths."""
    values = rng.normal(size=(7, 11))
    kept = np.arange(11) < (5 if causal else rng.integers(2, 11, size=(7, 1)))
    values = np.where(kept, values, mask)
    order = rng.permutation(7)
    # Less than the bound, and more than that in one entry that is not masked.
    inside = values[order] + np.where(kept, rng.uniform(-0.9, 0.9) * BOUND, 0)
    outside = values[order].copy()
    outside[:, 1] += 2 * BOUND
    found = aligned(values, record(inside), record(outside))
    assert found.label.tolist() == list(range(7))
    assert found.forward.found.tolist() == [*order, *[NONE] * 7]


def test_complex_rows_are_told_apart_by_both_parts(rng):
    values = rng.normal(size=(5, 4)) + 1j * rng.normal(size=(5, 4))
    found = aligned(values, record(values[::-1]), record(values.conj()))
    assert found.forward.found.tolist() == [4, 3, 2, 1, 0, *[NONE] * 5]


def test_a_row_of_nan_is_no_row_of_a_candidate(rng):
    """As of an example that is excluded, whose loss may be 0 / 0."""
    values = rng.normal(size=(4, 3))
    values[2] = np.nan
    found = aligned(values, record(values[::-1]))
    assert found.forward.found.tolist() == [3, NONE, 1, 0]
    assert found.label.tolist() == [0, 1, 2, 3]


def test_classes_are_those_of_all_pairs(rng):
    """The quick search by distances leaves out no pair that is equal."""
    centres = rng.normal(size=(6, 3)) * np.array([1e-2, 1.0, 1e3])
    members = rng.integers(6, size=40)
    bounds = np.full((40, 3), BOUND) * np.array([1e-2, 1.0, 1e3])
    values = centres[members] + bounds * rng.uniform(-0.9, 0.9, size=(40, 3))
    first = {m: np.flatnonzero(members == m)[0] for m in set(members.tolist())}
    assert _classes(values, bounds).tolist() == [first[m] for m in members]


def test_a_class_has_the_name_of_its_first_row():
    """Also where only a later row is equal to both."""
    values = np.array([[0.0], [3.0], [1.5], [9.0]]) * BOUND
    assert _classes(values, np.full((4, 1), BOUND)).tolist() == [0, 0, 0, 3]


def test_rows_within_a_wide_bound_differ_by_a_narrow_one():
    """Their distance is small beside the bounds; the entries decide."""
    values = np.array([[0.0, 0.0], [0.0, 0.1]])
    assert _classes(values, np.full((2, 2), [1.0, BOUND])).tolist() == [0, 1]

"""Covering arrays have each combination that is allowed, and are the same each time."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import verify
from jdist.verify.fuzzing import coverage as module
from jdist.verify.fuzzing.coverage import isolating_rows, uncovered
from jdist.verify.fuzzing.layout_grid import LARGEST, layout_grid


def parts(layout, strength):
    """The combinations of values in a layout."""
    return {
        tuple((a, layout[a]) for a in own) for own in combinations(layout, strength)
    }


def all_layouts(axes, valid):
    every = (dict(zip(axes, own, strict=True)) for own in product(*axes.values()))
    return [layout for layout in every if valid(layout)]


@st.composite
def grids(draw):
    """Axes, a rule that allows some of the layouts, and a strength."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axes = {f"a{number}": tuple(range(size)) for number, size in enumerate(sizes)}
    total = int(np.prod(sizes))
    # The first layout is always allowed.
    kept = {0} | draw(st.sets(st.integers(0, total - 1)))
    order = {tuple(own): n for n, own in enumerate(product(*axes.values()))}
    strength = draw(st.integers(1, len(sizes)))
    return axes, lambda c: order[tuple(c.values())] in kept, strength


@settings(max_examples=150, deadline=None)
@given(grids(), st.integers(0, 3), st.sampled_from([2, 4096]))
def test_each_allowed_combination_occurs(grid, seed, sample):
    """Also where only a sample of the rows is compared; and never in vain."""
    axes, valid, strength = grid
    previous, module.SAMPLE = module.SAMPLE, sample
    try:
        options = {"valid": valid, "strength": strength, "seed": seed}
        found = verify.covering_array(axes, **options)
        again = verify.covering_array(axes, **options)
    finally:
        module.SAMPLE = previous
    assert found == again
    assert found[0] == all_layouts(axes, valid)[0]
    assert all(valid(layout) for layout in found)
    wanted = set().union(*(parts(c, strength) for c in all_layouts(axes, valid)))
    covered = set()
    for layout in found:
        assert parts(layout, strength) - covered
        covered |= parts(layout, strength)
    assert covered == wanted


@settings(max_examples=150, deadline=None)
@given(grids(), st.data())
def test_what_is_not_covered_is_told(grid, data):
    """What rows that may not be chosen leave out is just what is uncovered."""
    axes, valid, strength = grid
    own = layout_grid("fuzz", axes, valid, strength)
    some = st.lists(st.booleans(), min_size=len(own.rows), max_size=len(own.rows))
    usable = np.array(data.draw(some))
    rows = isolating_rows(own.rows, strength, usable, [])
    assert usable[rows].all()
    assert len(rows) == len(set(rows))
    layouts = [own.layout(row) for row in range(len(own.rows))]
    allowed = set().union(*(parts(c, strength) for c in layouts))
    possible = set().union(
        *(parts(c, strength) for c, use in zip(layouts, usable, strict=True) if use)
    )
    told = [tuple(each.items()) for each in uncovered(own, strength, rows)]
    assert len(told) == len(set(told))
    assert set(told) == allowed - possible
    assert isolating_rows(own.rows, strength, usable, rows) == []


def test_pairs_need_few_of_many_layouts():
    """Of 8192 layouts of 13 switches; the simplest is first."""
    axes = {f"a{n}": (False, True) for n in range(13)}
    found = verify.covering_array(axes)
    assert len(found) <= 10
    assert not any(found[0].values())
    assert 10 < len(verify.covering_array(axes, strength=3)) <= 30


@pytest.mark.parametrize(
    ("axes", "options", "error", "words"),
    [
        ([("a", (1, 2))], {}, TypeError, "axes=...\\)` must be a mapping"),
        ({}, {}, ValueError, "axes=...\\)` must have at least one axis, and"),
        ({3: (1, 2)}, {}, TypeError, "must be named by a string. Got 3"),
        (
            {"a": ()},
            {},
            ValueError,
            "axes={'a': ...}\\)` must .* at least one. Got \\(",
        ),
        ({"a": 4}, {}, TypeError, "must be a sequence of different values .* Got 4"),
        ({"a": "xy"}, {}, TypeError, "must be a sequence of .* at least one. Got 'xy'"),
        ({"a": ([], [1])}, {}, TypeError, "values that can be hashed, at least one"),
        ({"a": (1, 2, True)}, {}, ValueError, "must be a sequence of different values"),
        ({"a": (1, 2)}, {"strength": 0}, ValueError, "must be from 1 to 1, .* Got 0"),
        ({"a": (1, 2)}, {"strength": 2}, ValueError, "the number of axes. Got 2"),
        ({"a": (1, 2)}, {"strength": 1.0}, TypeError, "an integer. Got 1.0"),
        (
            {"a": (1, 2), "b": (1,)},
            {"valid": 3},
            TypeError,
            "must be a function of a layout",
        ),
        (
            {"a": (1, 2), "b": (1, 2, 3)},
            {"valid": lambda c: c["a"] > 2},
            ValueError,
            "valid=...\\)` must allow at least one layout. Got none of 6",
        ),
        (
            {f"a{n}": (0, 1) for n in range(19)},
            {},
            ValueError,
            f"at most {LARGEST} combinations. Got 19 axes with {2 * LARGEST}",
        ),
        (
            {"a": (1, 2)},
            {"strength": 1, "seed": -1},
            ValueError,
            "seed=...\\)` must be",
        ),
    ],
)
def test_what_is_no_grid_is_refused(axes, options, error, words):
    with pytest.raises(error, match=words):
        verify.covering_array(axes, **options)

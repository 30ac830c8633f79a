"""Shrinking ends where no axis can go back alone, and asks about few layouts."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.verify.fuzzing.shrinking import shrink

AXES = {"dp": (1, 2, 4), "tp": (1, 2), "cp": (1, 2), "micro": (1, 2, 3), "mask": (0, 1)}
LAYOUTS = [dict(zip(AXES, own, strict=True)) for own in product(*AXES.values())]


def anything(layout):
    return True


def shrunk(layout, fails, valid=anything):
    """The result, and what was asked on the way, each layout once."""
    asked = []

    def ask(each):
        assert valid(each)
        assert each != layout
        if each not in asked:
            asked.append(dict(each))
        return fails(each)

    return shrink(layout, AXES, valid, ask), asked


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_interaction_is_found_exactly(size):
    """From each layout that fails, with a few questions; all layouts are 72."""
    for axes in list(product(AXES, repeat=size)):
        if len(set(axes)) < size:
            continue

        def fails(layout, axes=axes):
            return all(layout[axis] != AXES[axis][0] for axis in axes)

        least = {a: v[1] if a in axes else v[0] for a, v in AXES.items()}
        for layout in filter(fails, LAYOUTS):
            found, asked = shrunk(layout, fails)
            assert found == least
            assert len(asked) <= 11


@settings(max_examples=200, deadline=None)
@given(st.sets(st.sampled_from(range(len(LAYOUTS))), min_size=1), st.data())
def test_no_axis_alone_goes_further(failing, data):
    """Whatever fails, and whatever is allowed."""
    allowed = failing | data.draw(st.sets(st.sampled_from(range(len(LAYOUTS)))))

    def fails(layout):
        return LAYOUTS.index(layout) in failing

    def valid(layout):
        return LAYOUTS.index(layout) in allowed

    begin = LAYOUTS[data.draw(st.sampled_from(sorted(failing)))]
    found, _ = shrunk(begin, fails, valid)
    assert fails(found)
    for axis, values in AXES.items():
        for value in values[: values.index(found[axis])]:
            simpler = {**found, axis: value}
            assert not (valid(simpler) and fails(simpler))


def test_two_axes_go_together_where_one_alone_is_not_allowed():
    def valid(layout):
        return layout["dp"] == layout["micro"] or layout["micro"] == 3

    begin = {"dp": 2, "tp": 2, "cp": 1, "micro": 2, "mask": 1}
    found, _ = shrunk(begin, lambda layout: layout["mask"] == 1, valid)
    assert found == {"dp": 1, "tp": 1, "cp": 1, "micro": 1, "mask": 1}


def test_the_axes_go_in_their_order():
    _, asked = shrunk(LAYOUTS[-1], anything)
    assert [layout["dp"] for layout in asked][:1] == [1]
    assert asked[-1] == LAYOUTS[0]
    assert len(asked) == len(AXES)

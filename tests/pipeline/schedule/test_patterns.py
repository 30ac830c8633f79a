"""The two forms of an order, beside lists that are written one action at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline.schedule.actions import Columns
from jdist.pipeline.schedule.patterns import alternating, phases


def text(program):
    return [str(action) for action in Columns.joined([program]).actions(0)]


@settings(deadline=None)
@given(count=st.integers(1, 12), warm_up=st.integers(0, 15))
def test_alternating(count, warm_up):
    """Forward passes ahead, then one of each in turn, then what is left."""
    forward = (np.full(count, 3), np.arange(count))
    backward = (np.full(count, 5), np.arange(count)[::-1])
    todo, expected = list(range(count)), []
    for number in range(count):
        # Before backward pass `number`, warm-up + 1 more forward passes are done.
        while todo and todo[0] <= warm_up + number:
            expected.append(f"3F{todo.pop(0)}")
        expected.append(f"5B{count - 1 - number}")
    assert text(alternating(forward, backward, warm_up)) == expected


@settings(deadline=None)
@given(
    patterns=st.lists(
        st.tuples(
            st.sampled_from(["F0", "F1", "F0 F1", "B0", "I0 W", "I1 F0 W", "B1 F1"]),
            st.integers(-1, 4),
        ),
        min_size=1,
    ),
    most=st.integers(1, 6),
)
def test_phases(patterns, most):
    """Each letter takes the next micro-batch of its stage, W the oldest pending one."""
    count, pending, expected = {}, [], []
    for pattern, repeats in patterns:
        for token in pattern.split() * max(repeats, 0):
            if token == "W":
                stage, micro = pending.pop(0)
                kind = "W"
            else:
                stage, half = (4, 9)[int(token[1])], token[0] == "I"
                kind = "F" if token[0] == "F" else "B"
                micro = count[kind, stage] = count.get((kind, stage), -1) + 1
                if half:
                    pending.append((stage, micro))
            expected.append((kind, stage, micro))
    assert text(phases(patterns, [4, 9], most)) == [
        f"{stage}{kind}{micro}" for kind, stage, micro in expected if micro < most
    ]


@pytest.mark.parametrize("repeats", [0, -3])
def test_phases_without_repetitions(repeats):
    assert text(phases([("F0", repeats), ("F0 B0", 1)], [7], 5)) == ["7F0", "7B0"]

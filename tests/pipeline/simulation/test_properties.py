"""Properties of every simulation: bounds, monotony, units, symmetry of time."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import pipeline
from jdist.pipeline import Costs, simulate

FAMILIES = (
    pipeline.gpipe,
    pipeline.one_f_one_b,
    pipeline.zero_bubble,
    pipeline.zbv,
    lambda n, m: pipeline.looped_bfs(n, m, 2),
    lambda n, m: pipeline.pipedream(n, m, replicas=(1 + m % 2,) * n),
)
SECONDS = ("forward", "backward", "backward_inputs", "backward_params")
LINKS = ("message_bytes", "latency")


@st.composite
def cases(draw):
    """A schedule and costs per stage, in eighths of a second: sums are exact."""
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(FAMILIES))(n, m)
    eighths = st.integers(0, 40).map(lambda k: k / 8)
    costs = {
        name: [draw(eighths) for _ in range(schedule.stages - (name in LINKS))]
        for name in (*SECONDS, *LINKS)
    }
    costs["bandwidth"] = draw(st.sampled_from([0.5, 1.0, 2.0]))
    return schedule, costs


@settings(deadline=None, max_examples=60)
@given(case=cases(), name=st.sampled_from((*SECONDS, *LINKS)), data=st.data())
def test_what_costs_more_is_never_faster(case, name, data):
    """No action begins earlier if one cost of one stage grows."""
    schedule, costs = case
    if not costs[name]:
        return
    at = data.draw(st.integers(0, len(costs[name]) - 1))
    more = [cost + (1.5 if j == at else 0.0) for j, cost in enumerate(costs[name])]
    before = simulate(schedule, Costs(**costs))
    after = simulate(schedule, Costs(**costs | {name: more}))
    assert (after.start >= before.start).all()


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_bounds(case):
    """No worker works at two actions; none is faster than its work, nor a batch than
    the way there and back; and the slowest schedule is one action after another."""
    schedule, costs = case
    found = simulate(schedule, Costs(**costs))
    for first, last in itertools.pairwise(schedule.columns.first):
        start, end = found.start[first:last], found.end[first:last]
        assert (start[1:] >= end[:-1]).all()
    assert found.makespan >= max(found.busy)
    there = sum(costs["forward"])
    whole = [b if not s else i for b, i, s in zip(
        costs["backward"], costs["backward_inputs"], schedule.split[:, 0], strict=True
    )]  # fmt: skip
    assert found.makespan >= there + sum(whole)
    messages = [x / costs["bandwidth"] for x in costs["message_bytes"]]
    sent = 2 * schedule.micro_batches * (sum(messages) + sum(costs["latency"]))
    assert found.makespan <= sum(found.busy) + sent


@settings(deadline=None, max_examples=40)
@given(case=cases(), power=st.integers(-3, 3))
def test_seconds_are_a_unit(case, power):
    """All times in another unit: all of a timeline in that unit, bit for bit."""
    schedule, costs = case
    before = simulate(schedule, Costs(**costs))
    scaled = {name: np.array(cost) * 2.0**power for name, cost in costs.items()}
    # Bytes and bandwidth both scale: seconds on the link would not.
    scaled["bandwidth"] = costs["bandwidth"]
    after = simulate(schedule, Costs(**scaled))
    assert np.array_equal(after.start, before.start * 2.0**power)
    assert after.bubble == before.bubble


@pytest.mark.parametrize("m", [1, 2, 5])
def test_time_runs_backwards_too(m):
    """GPipe from its end: backward passes are forward passes of the mirrored model."""
    forward, backward = [1.0, 2.5, 0.5], [2.0, 0.25, 4.0]
    there = simulate(pipeline.gpipe(3, m), Costs(forward=forward, backward=backward))
    back = simulate(pipeline.gpipe(3, m), Costs(forward=backward, backward=forward))
    assert there.makespan == back.makespan


# --- pictures ---


def test_bars_are_the_actions():
    """One bar and one label each, where and when the action is."""
    from matplotlib.figure import Figure

    found = simulate(pipeline.interleaved(2, 4, 2), Costs(forward=[1, 2, 3, 4]))
    axes = Figure().subplots()
    found.draw(axes)
    drawn = {
        (round(box.x0, 9), round(box.x1, 9), round(box.y0 + 0.45))
        for bars in axes.collections
        for path in bars.get_paths()
        for box in [path.get_extents()]
    }
    records = list(found.records())
    assert drawn == {(r.start, r.end, r.worker) for r in records}
    labels = {(t.get_position(), t.get_text()) for t in axes.texts}
    middles = {(((r.start + r.end) / 2, r.worker), str(r.micro_batch)) for r in records}
    assert labels == middles
    named = [b.get_label() for b in axes.collections if b.get_label()[0] != "_"]
    assert sorted(named) == ["backward", "forward"]
    assert axes.get_title() == found.title
    assert f"bubble {found.bubble:.1%}" in found.title


def test_pixels_are_the_actions():
    """Beyond so many actions an image, whose pixels show what is under their middle."""
    from matplotlib.figure import Figure

    from jdist.pipeline.simulation import timeline

    found = simulate(pipeline.one_f_one_b(8, 1300))
    assert len(found.columns) > timeline.BARS
    axes = Figure().subplots()
    found.draw(axes)
    (image,) = axes.images
    shown = np.asarray(image.get_array())
    assert shown.shape == (8, timeline.WIDTH)
    moments = (np.arange(timeline.WIDTH) + 0.5) / timeline.WIDTH * found.makespan
    expected = np.zeros_like(shown)
    for r in found.records():
        under = (moments >= r.start) & (moments < r.end)
        expected[r.worker, under] = "FBW".index(r.kind) + 1
    assert np.array_equal(shown, expected)

"""The timeline of a run: every action, on one clock, and what was kept meanwhile."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import Costs, Record, Timeline, simulate
from jdist.pipeline.run.action_timer import ROUND_TRIPS, clock_offset
from tests.pipeline import worker_cases
from tests.pipeline.models import losses, problem, stages

FAMILIES = {
    "gpipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    "zero bubble": pipeline.zero_bubble,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_action_in_its_order(family):
    """And the step returns what it returns without being timed."""
    schedule = FAMILIES[family](3, 3)
    pipe = pipeline.Pipeline(stages(), losses, schedule)
    params, batch, weights = problem(7)
    expected = pipe.value_and_grad(params, batch, weights)
    found, timeline = pipeline.timed(
        pipe, lambda: pipe.value_and_grad(params, batch, weights)
    )
    assert timeline.columns == schedule.columns
    assert timeline.peak_activations == schedule.peak_activations
    assert pipe.action_timer is None
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def test_of_several_steps_the_last_one_counts():
    schedule = pipeline.one_f_one_b(3, 2)
    pipe = pipeline.Pipeline(stages(), losses, schedule)
    params, batch, _ = problem(4)

    def twice():
        pipe.value_and_grad(params, batch)
        return pipe.value_and_grad(params, batch)

    assert len(pipeline.timed(pipe, twice)[1].columns) == len(schedule.columns)


def test_no_step_at_all():
    pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 2))
    with pytest.raises(ValueError, match="must not be empty"):
        pipeline.timed(pipe, lambda: None)
    assert pipe.action_timer is None


def test_of_all_workers(cluster):
    """Each gets the same timeline; no action begins before what it waits for ended."""
    tasks = [cluster.start(rank, worker_cases.timed) for rank in range(3)]
    found = [task.result() for task in tasks]
    assert found[0] == found[1] == found[2]
    records = [Record(*record) for record in found[0]]
    timeline = Timeline.from_records(records)
    schedule = pipeline.one_f_one_b(3, 3)
    assert timeline.columns == schedule.columns
    ends = {(r.kind, r.stage, r.micro_batch): r.end for r in records}
    for r in records:
        ahead = ("F", r.stage - 1) if r.kind == "F" else ("B", r.stage + 1)
        if (*ahead, r.micro_batch) in ends:
            # The clock is wrong by half a round trip at most.
            assert r.start > ends[*ahead, r.micro_batch] - worker_cases.ROUND_TRIP


# --- clocks ---


def test_the_soonest_answer_counts():
    """Round trips of many lengths, in which the answer always comes first."""
    lengths = iter([9.0, 4.0, 0.5, *[7.0] * ROUND_TRIPS])
    time = itertools.accumulate(
        (step for length in lengths for step in (1.0, length)), initial=0.0
    )
    shown = [next(time) for _ in range(2 * ROUND_TRIPS)]
    clock = iter(shown)
    last = [0.0]

    def now():
        last[0] = next(clock)
        return last[0]

    # The answer leaves as soon as the question was put: half of 0.5 is the error.
    offset = clock_offset(lambda: last[0] + 1000.0, now)
    assert offset == pytest.approx(1000.0, abs=0.5)


# --- what is kept ---


def dense(w, x):
    """Keeps its input and its output."""
    return jnp.tanh(x @ w)


def measured_bytes(schedule, rows):
    """Per worker, of three stages of different widths."""
    widths = (6, 10, 4, 8)
    names = ("x", "a", "b", "c")
    pipe = pipeline.Pipeline(
        [
            pipeline.Stage(dense, names[j : j + 1], names[j + 1 : j + 2])
            for j in (0, 1, 2)
        ],
        lambda y, batch: (y**2).sum(-1),
        schedule,
    )
    params = [
        jnp.ones((a, b), jnp.float32) * 0.1 for a, b in itertools.pairwise(widths)
    ]
    batch = {"x": np.ones((rows, widths[0]), np.float32)}
    run = pipeline.timed(pipe, lambda: pipe.value_and_grad(params, batch))[1]
    each = rows // schedule.micro_batches * 4
    expected = [each * (a + b) for a, b in itertools.pairwise(widths)]
    return run.activation_bytes, expected


@pytest.mark.parametrize("micro_batches", [3, 6])
def test_activations_follow_the_bound_and_weights_are_not_among_them(micro_batches):
    """1F1B: worker j keeps n - j micro-batches, to the byte; GPipe all of them."""
    schedule = pipeline.one_f_one_b(3, micro_batches)
    found, each = measured_bytes(schedule, 12)
    assert found == tuple(n * size for n, size in zip((3, 2, 1), each, strict=True))
    simulated = simulate(schedule, Costs(activation_bytes=each))
    assert simulated.activation_bytes == found
    found, each = measured_bytes(pipeline.gpipe(3, micro_batches), 12)
    assert found == tuple(micro_batches * size for size in each)


# --- what a run tells about another ---


def test_latencies_are_found_where_somebody_waited():
    schedule = pipeline.one_f_one_b(3, 6)
    costs = Costs(forward=[1, 2, 1], backward=[2, 3, 2], latency=[0.5, 0.25])
    run = simulate(schedule, costs)
    np.testing.assert_allclose(run.latencies, [0.5, 0.25])
    assert simulate(schedule, Costs.measured(run)).makespan == run.makespan


def test_nobody_waits_for_a_neighbour_on_the_same_worker():
    run = simulate(pipeline.interleaved(1, 2, chunks=3))
    assert run.latencies.tolist() == [0, 0]

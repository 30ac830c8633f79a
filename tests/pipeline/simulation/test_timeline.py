"""Timelines from records, their pictures and traces, and costs taken from them."""

import builtins
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import Unavailable, pipeline
from jdist.pipeline import Costs, Record, Timeline, UpdatePolicy, simulate
from jdist.pipeline.simulation.timeline import StageBytes
from tests.pipeline.epochs import forward_only

PNG = b"\x89PNG\r\n\x1a\n"


def test_from_its_own_records(rng):
    """In any order and with another origin: the same timeline."""
    schedule = pipeline.pipedream(3, 8)
    before = simulate(schedule, Costs(forward=rng.uniform(1, 2, (3, 8))))
    records = [r._replace(start=r.start + 7, end=r.end + 7) for r in before.records()]
    rng.shuffle(records)
    after = Timeline.from_records(
        [Record(*r) for r in records], update_policy=UpdatePolicy()
    )
    assert after.columns == before.columns
    np.testing.assert_allclose(after.start, before.start, atol=1e-12)
    assert after.makespan == pytest.approx(before.makespan)
    assert after.bubble == pytest.approx(before.bubble)
    assert after.peak_activations == before.peak_activations == (3, 2, 1)
    assert after.weight_versions == before.weight_versions == (3, 2, 1)
    assert after.peak_bytes is None
    assert repr(after).startswith("<Timeline measured: 3 workers, 48 actions, ")


def test_a_worker_that_did_nothing_counts():
    records = [Record(2, "F", 0, 0, 1.0, 3.0), Record(0, "F", 1, 0, 3.0, 5.0)]
    found = Timeline.from_records(records)
    assert found.workers == 3
    assert found.busy == (2, 0, 2)
    assert found.bubble == pytest.approx(1 - 4 / 12)


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([], "must not be empty"),
        ([Record(0, "F", 0, 0, 2.0, 1.0)], "must not end before they start"),
        ([Record(0, "F", 0, 0, 0.0, float("nan"))], "must not end before"),
        (
            [Record(0, "F", 0, 0, 0.0, 2.0), Record(0, "B", 0, 0, 1.0, 3.0)],
            "of one worker must not overlap",
        ),
        (
            [Record(1, "F", 1, 0, 1.0, 2.0), Record(-1, "F", 0, 0, 0.0, 1.0)],
            r"workers of at least 0. Got Record\(worker=-1,",
        ),
        ([Record(0, "G", 0, 0, 0.0, 1.0)], "kind 'G', which is none of F, B, W"),
        ([Record(0, "F", 0.5, 0, 0.0, 1.0)], "0.5 is not an integer"),
    ],
)
def test_records_that_cannot_be(records, match):
    with pytest.raises(ValueError, match=match):
        Timeline.from_records(records)


def test_actions_that_touch_do_not_overlap():
    """One ends when the next begins; what another worker does meanwhile is its own."""
    found = Timeline.from_records(
        [
            Record(0, "B", 0, 0, 5.0, 6.0),
            Record(1, "F", 1, 0, 3.0, 9.0),
            Record(0, "F", 0, 0, 2.0, 5.0),
            Record(0, "W", 0, 0, 6.0, 6.0),
        ]
    )
    assert [str(a) for a in found.columns.actions(0)] == ["0F0", "0B0", "0W0"]
    assert found.start.tolist() == [0, 3, 4, 1]
    assert found.end.tolist() == [3, 4, 4, 7]
    assert found.busy == (4, 6)


def waits_by_hand(run):
    """By pair of stages, what each action waited beyond the end of its input."""
    own = {(r.kind, r.stage, r.micro_batch): r for r in run.records()}
    free, last = {}, {}
    for record in run.records():
        free[record[1:4]] = last.get(record.worker, -np.inf)
        last[record.worker] = record.end
    pairs = range(max(r.stage for r in run.records()))
    found = {pair: [] for pair in pairs}
    for (kind, stage, micro), after in own.items():
        source = {"F": stage - 1, "B": stage + 1}.get(kind)
        before = own.get((kind, source, micro))
        if before and before.worker != after.worker and free[after[1:4]] < before.end:
            found[min(stage, source)].append(after.start - before.end)
    return [max(0.0, np.median(each)) if each else 0.0 for each in found.values()]


RUNS = {
    "1F1B": pipeline.one_f_one_b,
    "V": pipeline.zbv,
    "looped": lambda n, m: pipeline.looped_bfs(n, m, 2),
    "replicas": lambda n, m: pipeline.pipedream(n, m, replicas=[1 + m % 2] * n),
    "forward only": forward_only,
}


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_latencies_are_medians_of_what_was_waited_for(data):
    """Costs and latencies of each stage and micro-batch, in eighths of a second."""
    name = data.draw(st.sampled_from(sorted(RUNS)))
    schedule = RUNS[name](data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    sizes = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (schedule.stages, schedule.micro_batches)
    tables = {
        key: sizes.integers(1, 40, shape) / 8
        for key in ("forward", "backward", "backward_inputs", "backward_params")
    }
    latency = sizes.integers(0, 40, (shape[0] - 1, shape[1])) / 8
    run = simulate(schedule, Costs(**tables, latency=latency))
    assert run.latencies.tolist() == waits_by_hand(run)


def test_a_clock_that_is_behind_shows_no_latency_below_0():
    records = [Record(0, "F", 0, 0, 0.0, 2.0), Record(1, "F", 1, 0, 1.75, 3.0)]
    assert Timeline.from_records(records).latencies.tolist() == [0.0]


def test_an_action_without_its_partner_waited_for_nothing():
    """A part of a run: micro-batch 1 never came to the second stage."""
    records = [
        Record(0, "F", 0, 0, 0.0, 1.0),
        Record(0, "F", 0, 1, 1.0, 2.0),
        Record(1, "F", 1, 0, 1.5, 3.0),
    ]
    assert Timeline.from_records(records).latencies.tolist() == [0.5]


@pytest.mark.parametrize("lacking", ["activation_bytes", "weight_bytes"])
def test_bytes_are_known_together_or_not_at_all(lacking):
    costs = Costs(activation_bytes=[3.0, 5.0], weight_bytes=[100.0, 200.0])
    found = simulate(pipeline.gpipe(2, 4), costs)
    assert found.peak_bytes == (112.0, 220.0)
    assert replace(found, **{lacking: None}).peak_bytes is None


def test_of_no_time_at_all():
    found = simulate(pipeline.gpipe(2, 2), Costs(forward=0, backward=0))
    assert (found.makespan, found.bubble) == (0, 0)


def test_the_trace_has_every_action(tmp_path):
    found = simulate(pipeline.zero_bubble(2, 3))
    path = found.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {0: "worker 0", 1: "worker 1"}
    got = {
        (e["tid"], e["name"], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    }
    assert got == {
        (r.worker, f"{r.stage}{r.kind}{r.micro_batch}", r.kind, r.start, r.end)
        for r in found.records()
    }


@pytest.mark.parametrize(
    "schedule",
    [
        pipeline.interleaved(2, 4, 2),
        pipeline.zero_bubble(4, 60),
        pipeline.one_f_one_b(64, 256),
    ],
    ids=["labels", "bars", "pixels"],
)
def test_the_picture_is_one(schedule, tmp_path):
    """Each of the three ways to draw; another format by the file's name."""
    found = simulate(schedule)
    path = found.plot(tmp_path / "gantt.png")
    assert path.read_bytes().startswith(PNG)
    assert found.plot(tmp_path / "gantt.svg").read_text().startswith("<?xml")


def test_the_picture_shows_what_happened(tmp_path):
    """Every pixel of a row: the colour of the action under it, or white."""
    from matplotlib.image import imread

    from jdist.pipeline.simulation import timeline

    found = simulate(pipeline.one_f_one_b(128, 128))
    assert len(found.columns) > timeline.BARS
    pixels = imread(found.plot(tmp_path / "gantt.png"))[..., :3]
    for color in timeline.COLORS[:2]:
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        same = np.abs(pixels - wanted).max(-1) < 0.01
        assert same.mean() > 0.1


def test_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unavailable, match="needs matplotlib: pip install"):
        simulate(pipeline.gpipe(1, 1)).plot(tmp_path / "gantt.png")
    assert not list(tmp_path.iterdir())


def test_costs_from_a_run_predict_another(rng):
    """Taken from 1F1B they give GPipe's makespan; split ones those of ZB-H1."""
    shape = (3, 9)
    real = {"forward": [1, 2, 3], "backward": [4, 3, 2], "latency": [0.5, 0.25]}
    run = simulate(pipeline.one_f_one_b(*shape), Costs(**real))
    costs = Costs.measured(run, latency=[0.5, 0.25])
    for schedule in (pipeline.gpipe(*shape), pipeline.one_f_one_b(3, 20)):
        expected = simulate(schedule, Costs(**real)).makespan
        assert simulate(schedule, costs).makespan == expected
    halves = {**real, "backward_inputs": [3, 2, 1], "backward_params": [1, 1, 2]}
    run = simulate(pipeline.zero_bubble(*shape), Costs(**halves))
    found = Costs.measured(run)
    assert found.backward_inputs.tolist() == [3, 2, 1]
    assert found.backward_params.tolist() == [1, 1, 2]


def test_costs_are_medians_without_the_first_micro_batch():
    table = np.array([[100.0, 1.0, 2.0, 9.0]])
    run = simulate(pipeline.gpipe(1, 4), Costs(forward=table))
    assert Costs.measured(run).forward.tolist() == [2.0]
    run = simulate(pipeline.gpipe(1, 1), Costs(forward=7.0))
    assert Costs.measured(run).forward.tolist() == [7.0]


def test_costs_of_a_run_without_a_stage_are_refused():
    run = Timeline.from_records([Record(0, "F", 1, 0, 0.0, 1.0)])
    with pytest.raises(ValueError, match=r"F actions at each of its 2 stages"):
        Costs.measured(run)


def test_a_kind_that_a_stage_lacks_keeps_its_default():
    """The first stage of a split drain has no W: halves are halves of its whole."""
    schedule = pipeline.split_drain(pipeline.one_f_one_b(3, 6))
    assert schedule.split.any(1).tolist() == [False, True, True]
    run = simulate(schedule, Costs(backward=[3, 4, 5], backward_inputs=[9, 8, 7]))
    found = Costs.measured(run, forward=[6.0, 7.0, 8.0])
    assert found.backward.tolist() == [3, 4, 5]
    for half in (found.backward_inputs, found.backward_params):
        assert half.tolist() == [1.5, 2, 2.5]
    assert found.forward == [6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("schedule", "pending"),
    [
        (pipeline.gpipe(3, 4), [6, 10, 14]),
        (pipeline.split_drain(pipeline.gpipe(3, 4)), [6, 20, 30]),
    ],
)
def test_bytes_of_a_run_count_where_something_waited(schedule, pending):
    """Elsewhere a weight gradient is taken to wait with twice the activations."""
    kept = StageBytes(np.array([3.0, 5.0, 7.0]), np.array([10.0, 20.0, 30.0]))
    run = replace(simulate(schedule), stage_bytes=kept)
    found = Costs.measured(run)
    assert found.activation_bytes.tolist() == [3, 5, 7]
    assert found.pending_bytes.tolist() == pending

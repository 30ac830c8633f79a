"""Timelines from records, their pictures and traces, and costs taken from them."""

import builtins
import json

import numpy as np
import pytest

from jdist import Unavailable, pipeline
from jdist.pipeline import Costs, Record, Timeline, UpdatePolicy, simulate

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
    ],
)
def test_records_that_cannot_be(records, match):
    with pytest.raises(ValueError, match=match):
        Timeline.from_records(records)


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

    from jdist.pipeline.simulation import pictures

    found = simulate(pipeline.one_f_one_b(128, 128))
    assert len(found.columns) > pictures.BARS
    pixels = imread(found.plot(tmp_path / "gantt.png"))[..., :3]
    for color in pictures.COLORS[:2]:
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

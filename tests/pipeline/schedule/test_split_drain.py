"""The drain of any schedule: which backward passes are split, and what stays."""

import re

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import Schedule, split_drain
from jdist.pipeline.schedule.actions import Action
from tests.pipeline.epochs import forward_only

FAMILIES = {
    "gpipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    "looped": lambda n, m: pipeline.looped_bfs(n, m, 2),
    "interleaved": lambda n, m: pipeline.interleaved(n, n * m, 3),
    "zero bubble": pipeline.zero_bubble,
    "DualPipeV": lambda n, m: pipeline.dualpipe_v(n, 2 * n + m),
}


def by_hand(schedule, worker):
    """A worker's program, action by action."""
    program = schedule.actions(worker)
    last = max(i for i, action in enumerate(program) if action.kind == "F")
    for i, (kind, stage, micro) in enumerate(program):
        yield Action(kind, stage, micro)
        if kind == "B" and i > last and stage and not schedule.split[stage, micro]:
            yield Action("W", stage, micro)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_split_and_what_stays(family):
    for n in range(1, 6):
        for m in range(1, 8):
            whole = FAMILIES[family](n, m)
            split = split_drain(whole).validate()
            for worker in range(n):
                assert split.actions(worker) == [*by_hand(whole, worker)], (n, m)
            assert split.peak_in_flight == whole.peak_in_flight
            for worker, (before, after) in enumerate(
                zip(whole.peak_activations, split.peak_activations, strict=True)
            ):
                # From a B to its W the cotangents of one micro-batch wait.
                more = len(split.actions(worker)) > len(whole.actions(worker))
                assert before <= after <= before + more
            assert split.placement == whole.placement
            assert split.name == f"{whole.name}, split drain"


def test_twice_is_once():
    once = split_drain(pipeline.one_f_one_b(3, 4))
    assert split_drain(once) == once


def test_a_worker_without_actions_and_workers_in_turn():
    programs = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"], [], ["1F1", "1B1"]]
    made = Schedule.of(programs, placement=((0,), (1, 3)))
    split = split_drain(made).validate()
    assert [len(split.actions(worker)) for worker in range(4)] == [4, 3, 0, 3]
    assert np.array_equal(split.split, [[False, False], [True, True]])


@pytest.mark.parametrize(
    "schedule",
    [forward_only(2, 3), pipeline.pipedream(2, 3)],
    ids=lambda s: s.name,
)
def test_schedules_without_a_drain_are_refused(schedule):
    name = re.escape(repr(schedule))
    match = f"must have backward passes and one update after all of them. Got {name}"
    with pytest.raises(ValueError, match=match):
        split_drain(schedule)

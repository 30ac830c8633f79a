"""A schedule's rules, each broken once; its views; and when its actions happen."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from jdist.pipeline import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream,
    zbv,
    zero_bubble,
)
from jdist.pipeline.schedule.actions import Action, Columns, ScheduleError
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from tests.pipeline.epochs import forward_only

GOOD = [["0F0", "0F1", "0B0", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1B1", "1W1"]]


def test_what_the_broken_ones_are_made_of_is_right():
    """Rules hold before they are broken."""
    assert Schedule.of(GOOD).validate().clocks == 6


def refused(made, rule, worker, action, match):
    """`made` is a schedule, or lists to make one of."""
    with pytest.raises(ScheduleError, match=match) as caught:
        (made if isinstance(made, Schedule) else Schedule.of(made)).validate()
    found = (caught.value.rule, caught.value.worker, str(caught.value.action))
    assert found == (rule, worker, action)


def test_complete_a_missing_backward_pass():
    programs = [["0F0", "0F1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]
    refused(programs, "complete", 0, "0B1", "is missing")


def test_complete_an_action_twice():
    programs = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1", "1F1"]]
    refused(programs, "complete", 1, "1F1", "more than once")


def test_complete_a_weight_gradient_twice():
    programs = [["0F0", "0B0", "0W0", "0W0"]]
    refused(programs, "complete", 0, "0W0", "more than once")


def test_complete_on_the_wrong_worker():
    schedule = Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]])
    schedule = replace(schedule, placement=((0,), (0,)))
    refused(schedule, "complete", 1, "1F0", "another worker")


def test_complete_beyond_the_last_micro_batch():
    schedule = replace(Schedule.of([["0F0", "0F1", "0B0", "0B1"]]), micro_batches=1)
    refused(schedule, "complete", 0, "0F1", "1 stages, 1 batches")


@pytest.mark.parametrize("action", ["-1F0", "0F-1", "1F0", "0B1"])
def test_complete_what_no_table_holds(action):
    """Just below the first stage or micro-batch, and just beyond the last."""
    stage, kind, micro = action[:-2], action[-2], action[-1]
    if "F-" in action:
        stage, kind, micro = "0", "F", "-1"
    last = Action(kind, int(stage), int(micro))
    columns = Columns.of([[Action("F", 0, 0), Action("B", 0, 0), last]])
    schedule = Schedule("mine", 1, ((0,),), columns)
    refused(schedule, "complete", 0, action, "is not one of 1 stages, 1 batches")


def test_complete_a_weight_gradient_in_a_forward_only_one():
    columns = Columns.of([[Action("F", 0, 0), Action("W", 0, 0)]])
    schedule = Schedule("mine", 1, ((0,),), columns)
    assert schedule.forward_only
    refused(schedule, "complete", 0, "0W0", "forward-only")


def test_complete_a_neighbour_that_is_nowhere():
    """Seen too when only clocks are asked for, since there are none."""
    columns = Columns.of([[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0)]])
    with pytest.raises(ScheduleError, match=r"never produces.*waits for") as caught:
        _ = Schedule("mine", 1, ((0,), (1,)), columns).clocks
    assert (caught.value.rule, str(caught.value.action)) == ("complete", "0B0")


def test_complete_a_forward_pass_whose_input_is_nowhere():
    """At the stage after the first, which needs none."""
    columns = Columns.of([[], [Action("F", 1, 0)]])
    with pytest.raises(ScheduleError, match="never produces") as caught:
        _ = Schedule("mine", 1, ((0,), (1,)), columns).clocks
    assert (caught.value.worker, str(caught.value.action)) == (1, "1F0")


def test_numbers_beyond_reason():
    """Refused before tables of so many rows and columns are made, and at once."""
    with pytest.raises(ScheduleError, match=r"complete.*0F2.*missing of 1 stages"):
        Schedule.of([["0F0", "0F1", "0B0", "0B1", "0F999999999"]])
    with pytest.raises(ScheduleError, match="4294967296 is beyond what 32 bits hold"):
        Schedule.of([[Action("F", 2**32, 0)]])
    schedule = replace(Schedule.of([["0F0", "0B0"]]), micro_batches=10**12)
    with pytest.raises(
        ScheduleError, match=r"complete.*0F1.*1000000000000 micro-batch"
    ):
        schedule.validate()


def test_dependencies():
    refused([["0F0", "0W0", "0B0"]], "dependencies", 0, "0W0", "its own B")
    programs = [["0F0", "0F1", "0B0", "0W1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    refused(programs, "dependencies", 0, "0W1", "its own B")


def test_dependencies_in_a_circle():
    """Worker 0 wants a backward pass that worker 1 cannot have begun."""
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(ScheduleError, match="in a circle") as caught:
        Schedule.of(programs)
    found = (caught.value.rule, caught.value.worker, str(caught.value.action))
    assert found == ("dependencies", 0, "0B0")


def test_the_last_stage_waits_for_its_own_forward_pass():
    """It has no stage after it; without clocks its worker waits for itself."""
    with pytest.raises(ScheduleError, match="in a circle") as caught:
        Schedule.of([["0F0", "0B0"], ["1B0", "1F0"]])
    assert (caught.value.worker, str(caught.value.action)) == (0, "0B0")


def test_activations_until_the_weight_gradient():
    """With W deferred, B frees nothing and leaves cotangents beside activations."""
    order = [["0F0", "0B0", "0F1", "0B1", "0W0", "0W1"]]
    assert Schedule.of(order).peak_activations == (4,)
    assert Schedule.of(order).peak_in_flight == (1,)
    order = [["0F0", "0B0", "0W0", "0F1", "0B1"]]
    assert Schedule.of(order).peak_activations == (2,)


def test_an_idle_worker_between_others():
    """It holds nothing, and an error behind it names the right worker."""
    programs = [["0F0", "0B0"], [], [], ["1F0", "1B0"], []]
    schedule = Schedule.of(programs).validate()
    assert schedule.placement == ((0,), (3,))
    assert schedule.peak_activations == schedule.peak_in_flight == (1, 0, 0, 1, 0)
    assert [schedule.columns.worker(i) for i in range(4)] == [0, 0, 3, 3]
    assert schedule.columns.worker_of_each().tolist() == [0, 0, 3, 3]
    assert str(schedule).splitlines()[2] == "worker 2 |  .   .   .   ."


def test_bad_text_is_refused():
    for text in ("0X1", "F1", "0F", "0f1", "0F1 ", "-1F0"):
        with pytest.raises(ValueError, match="a stage, one of F, B, W"):
            Action.parse(text)


@pytest.mark.parametrize(
    ("programs", "error", "match"),
    [
        ([[("F", 0, 0)]], TypeError, r"`Action`, or its text .*Got \('F', 0, 0\)"),
        ([["0F0", 5]], TypeError, r"Schedule.of\(programs=...\).*Got 5"),
        ([[Action("X", 0, 0)]], ScheduleError, r"complete.*0X0.*kind 'X'.*of F, B, W"),
        ([[Action("F", 0.7, 0)]], ScheduleError, r"complete.*0.7 is not an integer"),
        ([[Action("F", 0, True)]], ScheduleError, r"True is not an integer"),
        ([[Action("F", 0, None)]], ScheduleError, r"None is not an integer"),
    ],
)
def test_what_is_no_action_is_refused(programs, error, match):
    """A fraction of a stage would be the stage below it."""
    with pytest.raises(error, match=match):
        Schedule.of(programs)


def test_nothing_to_do_is_refused():
    with pytest.raises(ValueError, match="at least one action"):
        Schedule.of([[], []])


def test_a_stage_on_two_workers_needs_a_placement():
    programs = [["0F0", "0B0"], ["0F1", "0B1"]]
    with pytest.raises(ValueError, match=r"stage 0 has not exactly one worker.*\(0, 1"):
        Schedule.of(programs)
    schedule = Schedule.of(programs, placement=((0, 1),)).validate()
    assert [schedule.worker(0, i) for i in range(4)] == [0, 1, 0, 1]


def test_every_stage_needs_a_worker():
    with pytest.raises(
        ValueError, match=r"a worker for each stage. Got \(\(0,\), \(\)\)"
    ):
        Schedule.of([["0F0", "1F0"]], placement=((0,), ()))


def test_a_worker_has_one_turn_at_a_stage():
    """With two it would wait for its own gradient."""
    programs = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], []]
    with pytest.raises(ValueError, match=r"of a stage once. Got \(\(0, 0\),"):
        Schedule.of(programs, placement=((0, 0),))


def test_schedules_and_their_errors_travel():
    """By pickle, as to the processes that run them."""
    schedule = pipedream(3, 5, replicas=(2, 1, 1))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    error = ScheduleError("complete", "is missing", 3, Action("B", 2, 7))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error) == "rule 'complete' (worker 3, action 2B7): is missing"
    assert (again.worker, again.action) == (3, Action("B", 2, 7))
    assert str(ScheduleError("complete", "nothing")) == "rule 'complete': nothing"


def test_updates_are_checked():
    with pytest.raises(
        ValueError, match=r"UpdatePolicy\(every=...\).*at least 1. Got 0"
    ):
        UpdatePolicy(every=0)
    with pytest.raises(
        ValueError, match="one of 'stashing', 'vertical_sync', '2bw', 'flush'"
    ):
        UpdatePolicy("newest")


def test_columns_and_lists_say_the_same():
    """Both ways round, with a worker that has nothing to do."""
    lists = [[Action.parse(a) for a in program] for program in [*GOOD, []]]
    columns = Columns.of(lists)
    assert [columns.actions(w) for w in range(columns.workers)] == lists
    assert [columns.worker(i) for i in range(len(columns))] == [0] * 5 + [1] * 5
    assert columns == Columns.of(lists)
    assert columns != Columns.of([lists[1], lists[0], []])
    assert columns != "columns"
    with pytest.raises(ValueError, match="read-only"):
        columns.kind[0] = 1


def test_schedules_are_equal_by_content():
    assert one_f_one_b(2, 3) == one_f_one_b(2, 3)
    assert one_f_one_b(2, 3) != one_f_one_b(2, 4)
    assert one_f_one_b(2, 3) != pipedream(2, 3)
    assert one_f_one_b(2, 3) != 3
    assert repr(zero_bubble(2, 3)) == (
        "<Schedule ZB-H1: 2 stages, 2 workers, 3 micro-batches, 18 actions>"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"placement": ((0,), (1, 1))},
        {"update_policy": UpdatePolicy()},
        {"micro_batches": 3},
        {"columns": Columns.of([[Action.parse(a) for a in p] for p in GOOD[::-1]])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_schedules_that_differ_in_one_thing(change):
    """And what says nothing about the execution makes no difference."""
    schedule = Schedule.of(GOOD)
    assert schedule.clock.tolist() == [0, 1, 3, 4, 5, 1, 2, 3, 4, 5]
    assert schedule != replace(schedule, **change)
    assert schedule == replace(schedule, name="other")


def test_columns_are_small_and_the_callers_arrays_stay_his():
    given = [np.array([0, 1]), np.array([0, 0]), np.array([0, 0]), np.array([0, 2])]
    columns = Columns(*given)
    found = [columns.kind, columns.stage, columns.micro_batch, columns.first]
    assert [str(array.dtype) for array in found] == ["uint8", "int32", "int32", "int64"]
    assert not any(array.flags.writeable for array in found)
    assert all(array.flags.writeable for array in given)
    assert not Schedule.of([["0F0", "0B0"]]).clock.flags.writeable


def test_clocks_stand_below_each_other():
    """Ranks and actions of two digits among those of one."""
    assert str(forward_only(2, 11)).splitlines() == [
        "worker 0 | 0F0  0F1  0F2  0F3  0F4  0F5  0F6  0F7  0F8  0F9  0F10  .",
        "worker 1 |  .   1F0  1F1  1F2  1F3  1F4  1F5  1F6  1F7  1F8  1F9  1F10",
    ]
    lines = str(forward_only(11, 1)).splitlines()
    assert lines[0].startswith("worker  0 | 0F0   .    .  ")
    assert lines[10].endswith("  .    .   10F0")
    assert len({line.index("|") for line in lines}) == 1
    # The tenth worker is number 9, of one digit.
    assert str(forward_only(10, 1)).startswith("worker 0 | 0F0")


FAMILIES = [
    one_f_one_b(3, 5),
    gpipe(3, 4, replicas=(1, 3, 2)),
    interleaved(2, 4, 3),
    looped_bfs(3, 2, 2),
    zero_bubble(4, 6),
    zbv(3, 5),
]


@pytest.mark.parametrize("schedule", FAMILIES, ids=lambda schedule: schedule.name)
def test_forward_passes_of_the_first_micro_batches(schedule):
    """Each once, on its worker, in the order of the schedule; evaluation runs them."""
    for count in range(1, schedule.micro_batches + 1):
        found = schedule.forward_passes(count).validate()
        assert (found.forward_only, found.micro_batches) == (True, count)
        assert found.placement == schedule.placement
        assert found.name == f"{schedule.name}, forward"
        assert len(found.columns) == schedule.stages * count
        for worker in range(schedule.workers):
            program = schedule.actions(worker)
            places = [program.index(action) for action in found.actions(worker)]
            assert places == sorted(places)


def test_an_own_schedule_stays_one_without_its_updates():
    """Nothing is known of other numbers of micro-batches, updates or not."""
    own = Schedule.of([["0F0", "0B0"]], update_policy=UpdatePolicy())
    assert own.synchronous().update_policy is None
    with pytest.raises(ValueError, match="must be the 1 that its actions were given"):
        own.synchronous().resized(2)


def test_which_backward_passes_are_split():
    schedule = Schedule.of(GOOD)
    assert schedule.split.tolist() == [[True, False], [False, True]]
    assert not forward_only(2, 3).split.any()

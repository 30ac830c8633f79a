"""The rules that a schedule keeps, each checked on all actions at once."""

from typing import TYPE_CHECKING

import numpy as np

from jdist.pipeline.schedule.actions import (
    KINDS,
    Action,
    B,
    Columns,
    F,
    ScheduleError,
    W,
)
from jdist.pipeline.schedule.memory import held

if TYPE_CHECKING:
    from jdist.pipeline.schedule.schedule import Schedule


def validate(schedule: "Schedule") -> None:
    """Checks every rule, in the order of `Schedule.validate`.

    Raises:
      ScheduleError: With the first rule broken.
    """
    check_complete(schedule)
    _one_action(schedule)
    _dependencies(schedule)
    _live_activations(schedule)
    _clock_count(schedule)


def check_complete(schedule: "Schedule") -> None:
    """Checks "complete", the one rule that needs no clock.

    Raises:
      ScheduleError: It is broken.
    """
    check_size(schedule.columns, schedule.stages, schedule.micro_batches)
    _placed(schedule)
    _each_once(schedule)


def check_size(columns: Columns, stages: int, micro_batches: int) -> None:
    """Checks that there are forward passes enough for so many stages and batches.

    It costs no memory beyond that of the actions, unlike all that makes a table of
    stages and micro-batches, whose numbers may be typing errors.

    Raises:
      ScheduleError: There are not ("complete").
    """
    own = columns.kind == F
    if stages * micro_batches <= np.count_nonzero(own):
        return
    cell = (
        columns.stage[own].astype(np.int64) * micro_batches + columns.micro_batch[own]
    )
    present = np.unique(cell[cell >= 0])
    wrong = np.flatnonzero(present != np.arange(len(present)))
    missing = int(wrong[0]) if wrong.size else len(present)
    action = Action("F", *divmod(missing, micro_batches))
    highest = [
        columns.action(int(n.argmax())) for n in (columns.stage, columns.micro_batch)
    ]
    what = f"is missing of {stages} stages and {micro_batches} micro-batches"
    what += f"; the highest numbers are those of {highest[0]} and {highest[1]}"
    raise ScheduleError("complete", what, None, action)


def _placed(schedule: "Schedule") -> None:
    columns = schedule.columns
    wrong = (
        (columns.stage < 0)
        | (columns.stage >= schedule.stages)
        | (columns.micro_batch < 0)
        | (columns.micro_batch >= schedule.micro_batches)
    )
    what = f"is not one of {schedule.stages} stages, {schedule.micro_batches} batches"
    _refuse_first(schedule, "complete", wrong, what)
    owner = schedule.owner[columns.stage, columns.micro_batch]
    wrong = owner != columns.worker_of_each()
    _refuse_first(schedule, "complete", wrong, "stands on another worker than its own")


def _each_once(schedule: "Schedule") -> None:
    columns = schedule.columns
    shape = (schedule.stages, schedule.micro_batches)
    cell = columns.stage.astype(np.int64) * shape[1] + columns.micro_batch
    for kind, name in enumerate(KINDS):
        where = np.flatnonzero(columns.kind == kind)
        count = np.bincount(cell[where], minlength=shape[0] * shape[1])
        allowed = not (schedule.forward_only and kind != F)
        repeated = np.zeros(len(columns), bool)
        repeated[where] = (count[cell[where]] > 1) | (not allowed)
        what = "stands there more than once" if allowed else "in a forward-only one"
        _refuse_first(schedule, "complete", repeated, what)
        missing = np.flatnonzero(count == 0)
        if missing.size and kind != W and allowed:
            stage, micro_batch = divmod(int(missing[0]), shape[1])
            worker = schedule.worker(stage, micro_batch)
            action = Action(name, stage, micro_batch)
            raise ScheduleError("complete", "is missing", worker, action)


def _one_action(schedule: "Schedule") -> None:
    clock, first = schedule.clock, schedule.columns.first
    wrong = np.zeros(len(clock), bool)
    wrong[1:] = clock[1:] <= clock[:-1]
    wrong[first[:-1][first[:-1] < len(clock)]] = False
    wrong |= clock < 0
    what = "has not a clock of its own after the worker's action before it"
    _refuse_first(schedule, "one action", wrong, what)


def _dependencies(schedule: "Schedule") -> None:
    columns = schedule.columns
    shape = (schedule.stages, schedule.micro_batches)
    never = np.full(shape, -1, np.int32)
    when = [never.copy() for _ in KINDS]
    for kind, table in enumerate(when):
        own = columns.kind == kind
        table[columns.stage[own], columns.micro_batch[own]] = schedule.clock[own]
    before = np.vstack([never[:1], when[F][:-1]])
    after = np.vstack([when[B][1:], never[:1]])
    for kind, needed, name in (
        (F, before, "F of the stage before"),
        (B, after, "B of the stage after"),
        (B, when[F], "its own F"),
        (W, when[B], "its own B"),
    ):
        due = needed[columns.stage, columns.micro_batch]
        wrong = (columns.kind == kind) & (schedule.clock <= due)
        _refuse_first(schedule, "dependencies", wrong, f"does not come after {name}")


def _live_activations(schedule: "Schedule") -> None:
    if schedule.activation_bound is None:
        return
    bound = np.asarray(schedule.activation_bound)
    wrong = held(schedule.columns) > np.repeat(bound, np.diff(schedule.columns.first))
    what = f"exceeds the bounds {schedule.activation_bound}"
    _refuse_first(schedule, "live activations", wrong, what)


def _clock_count(schedule: "Schedule") -> None:
    if schedule.clock_bound is None:
        return
    wrong = schedule.clock >= schedule.clock_bound
    what = f"comes after the last of {schedule.clock_bound} clocks"
    _refuse_first(schedule, "clock count", wrong, what)


def _refuse_first(
    schedule: "Schedule", rule: str, wrong: np.ndarray, what: str
) -> None:
    found = np.flatnonzero(wrong)
    if found.size:
        columns, index = schedule.columns, int(found[0])
        raise ScheduleError(rule, what, columns.worker(index), columns.action(index))

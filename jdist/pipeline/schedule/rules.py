"""The rules of a schedule, each checked on all actions at once."""

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


def check_size(columns: Columns, stages: int, micro_batches: int) -> None:
    """Checks that there are enough forward passes for the stages and micro-batches.

    Raises:
      ScheduleError: There are too few ("complete").
    """
    # First of all checks, in the memory of the actions: the others make tables of
    # stages x micro-batches, which a typing error in a number would make huge. F alone,
    # since it occurs exactly once in every valid schedule.
    own = columns.kind == F
    if stages * micro_batches <= np.count_nonzero(own):
        return
    cell = (
        columns.stage[own].astype(np.int64) * micro_batches + columns.micro_batch[own]
    )
    # The first gap in the sorted cells is the first missing forward pass.
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


def check_placed(columns: Columns, owner: np.ndarray) -> None:
    """Checks that every action exists and stands on the worker of its stage.

    Args:
      columns: The actions.
      owner: The worker of each stage and micro-batch, `(stages, micro_batches)`.

    Raises:
      ScheduleError: One does not ("complete").
    """
    stages, micro_batches = owner.shape
    wrong = (
        (columns.stage < 0)
        | (columns.stage >= stages)
        | (columns.micro_batch < 0)
        | (columns.micro_batch >= micro_batches)
    )
    what = f"is not one of {stages} stages, {micro_batches} batches"
    _refuse_first(columns, "complete", wrong, what)
    # After the check above, so that the indices are within the table.
    wrong = owner[columns.stage, columns.micro_batch] != columns.worker_of_each()
    _refuse_first(columns, "complete", wrong, "stands on another worker than its own")


def check_each_once(columns: Columns, owner: np.ndarray, forward_only: bool) -> None:
    """Checks that F and B occur once and W at most once, or F alone.

    Args:
      columns: The actions.
      owner: As in `check_placed`.
      forward_only: Whether B and W are not allowed.

    Raises:
      ScheduleError: They do not ("complete").
    """
    stages, micro_batches = owner.shape
    cell = columns.stage.astype(np.int64) * micro_batches + columns.micro_batch
    for kind, name in enumerate(KINDS):
        where = np.flatnonzero(columns.kind == kind)
        # One pass over the actions for all cells, however many there are.
        count = np.bincount(cell[where], minlength=stages * micro_batches)
        allowed = not (forward_only and kind != F)
        repeated = np.zeros(len(columns), bool)
        repeated[where] = (count[cell[where]] > 1) | (not allowed)
        what = "stands there more than once" if allowed else "in a forward-only one"
        _refuse_first(columns, "complete", repeated, what)
        missing = np.flatnonzero(count == 0)
        if missing.size and kind != W and allowed:
            stage, micro_batch = divmod(int(missing[0]), micro_batches)
            worker = int(owner[stage, micro_batch])
            action = Action(name, stage, micro_batch)
            raise ScheduleError("complete", "is missing", worker, action)


def check_one_action(columns: Columns, clock: np.ndarray) -> None:
    """Checks that the clocks of each worker's actions increase from 0 on.

    Raises:
      ScheduleError: They do not ("one action").
    """
    wrong = np.zeros(len(clock), bool)
    wrong[1:] = clock[1:] <= clock[:-1]
    # The first action of a worker has none before it; a worker may have no actions.
    wrong[columns.first[:-1][columns.first[:-1] < len(clock)]] = False
    wrong |= clock < 0
    what = "has not a clock of its own after the worker's action before it"
    _refuse_first(columns, "one action", wrong, what)


def check_dependencies(
    columns: Columns, clock: np.ndarray, stages: int, micro_batches: int
) -> None:
    """Checks that every action has a later clock than all actions that it waits for.

    Raises:
      ScheduleError: One has not ("dependencies").
    """
    # A clock of -1 lies before every other: nothing waits for what does not exist.
    never = np.full((stages, micro_batches), -1, np.int32)
    when = [never.copy() for _ in KINDS]
    for kind, table in enumerate(when):
        own = columns.kind == kind
        table[columns.stage[own], columns.micro_batch[own]] = clock[own]
    before = np.vstack([never[:1], when[F][:-1]])
    after = np.vstack([when[B][1:], never[:1]])
    for kind, needed, name in (
        (F, before, "F of the stage before"),
        (B, after, "B of the stage after"),
        (B, when[F], "its own F"),
        (W, when[B], "its own B"),
    ):
        due = needed[columns.stage, columns.micro_batch]
        wrong = (columns.kind == kind) & (clock <= due)
        _refuse_first(columns, "dependencies", wrong, f"does not come after {name}")


def _refuse_first(columns: Columns, rule: str, wrong: np.ndarray, what: str) -> None:
    found = np.flatnonzero(wrong)
    if found.size:
        index = int(found[0])
        raise ScheduleError(rule, what, columns.worker(index), columns.action(index))

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


def check_own_order(columns: Columns, stages: int, micro_batches: int) -> None:
    """Checks that each W comes after its own B; the clock exists only if others do.

    Raises:
      ScheduleError: One does not ("dependencies").
    """
    before = columns.index_of(B, stages, micro_batches)
    index = np.arange(len(columns))
    # A stage's actions are on one worker, so positions can be compared.
    late = before[columns.stage, columns.micro_batch] > index
    what = "does not come after its own B"
    _refuse_first(columns, "dependencies", (columns.kind == W) & late, what)


def _refuse_first(columns: Columns, rule: str, wrong: np.ndarray, what: str) -> None:
    found = np.flatnonzero(wrong)
    if found.size:
        index = int(found[0])
        raise ScheduleError(rule, what, columns.worker(index), columns.action(index))

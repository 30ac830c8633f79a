"""Schedules as CSV: a row per worker, a column per clock, a cell per action.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

The cells are those of `torch.distributed.pipelining`, so that its schedules can be read
and these can be read there: `2F7` forward, `2B7` whole backward, `2I7` the part of a
split backward that gives the cotangent of the inputs, `2W7` its weight gradients.
"""

import csv
import io
import os
import re
from pathlib import Path

from jdist._errors import requirement
from jdist.pipeline.schedule import Placement, Schedule, Updates
from jdist.pipeline.schedule_actions import Action, B, ScheduleError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def to_csv(schedule: Schedule, path: str | os.PathLike[str] | None = None) -> str:
    """The schedule as text, written to a file too if one is given.

    Example:
      >>> from jdist.pipeline.schedules import zero_bubble
      >>> print(to_csv(zero_bubble(2, 2)), end="")
      0F0,0F1,,0I0,0W0,0I1,0W1
      ,1F0,1I0,1F1,1I1,1W0,1W1
    """
    columns, halves = schedule.columns, schedule.split
    rows = [[""] * schedule.clocks for _ in range(schedule.workers)]
    workers = columns.worker_of_each()
    for index, (worker, clock) in enumerate(zip(workers, schedule.clock, strict=True)):
        action = columns.action(index)
        half = columns.kind[index] == B and halves[action.stage, action.micro_batch]
        letter = "I" if half else action.kind
        rows[worker][clock] = f"{action.stage}{letter}{action.micro_batch}"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    if path is not None:
        Path(path).write_text(out.getvalue())
    return out.getvalue()


def from_csv(
    source: str | os.PathLike[str],
    *,
    name: str = "custom",
    placement: Placement | None = None,
    updates: Updates | None = None,
) -> Schedule:
    """Reads a schedule, and validates it.

    Args:
      source: A path; or the text itself, if it has a comma or a line break.
      name: For pictures and messages.
      placement: The workers of each stage, where a stage has several.
      updates: For an asynchronous schedule.

    Raises:
      ScheduleError: It breaks a rule; or a backward pass is written as `I` without a
        `W`, or as `B` with one ("complete").
      ValueError: A cell is not an action; names its row and column.

    Example:
      >>> from_csv("0F0,,0B0\\n,1F0,1B0").name
      Traceback (most recent call last):
      jdist...ScheduleError: rule 'dependencies' (worker 0, action 0B0): does not come
        after B of the stage after
    """
    text = os.fspath(source)
    if "," not in text and "\n" not in text:
        text = Path(text).read_text()
    programs: list[list[Action]] = []
    clock: list[list[int]] = []
    halves: dict[tuple[int, int], bool] = {}
    for row, cells in enumerate(csv.reader(io.StringIO(text))):
        filled = [(at, cell.strip()) for at, cell in enumerate(cells) if cell.strip()]
        found = [_parse(cell, row, at) for at, cell in filled]
        programs.append([action for action, _ in found])
        clock.append([at for at, _ in filled])
        halves |= {a[1:]: half for a, half in found if a.kind == "B"}
    schedule = Schedule.of(
        programs, name=name, placement=placement, clock=clock, updates=updates
    )
    _check_halves(schedule, halves)
    return schedule.validate()


def _parse(cell: str, row: int, column: int) -> tuple[Action, bool]:
    found = _CELL.fullmatch(cell)
    if not found:
        rule = "must be empty or a stage, one of F, B, I, W, and a micro-batch"
        where = f"from_csv(row {row}, column {column})"
        remedy = "Messages and overlapped pairs are no actions: leave them out."
        raise ValueError(requirement(where, rule, cell, remedy))
    letter = "B" if found[2] == "I" else found[2]
    return Action.parse(f"{found[1]}{letter}{found[3]}"), found[2] == "I"


def _check_halves(schedule: Schedule, halves: dict[tuple[int, int], bool]) -> None:
    for (stage, micro_batch), half in halves.items():
        if half != schedule.split[stage, micro_batch]:
            what = "is written as I without a W" if half else "is a whole B beside a W"
            worker = schedule.worker(stage, micro_batch)
            action = Action("B", stage, micro_batch)
            raise ScheduleError("complete", what, worker, action)

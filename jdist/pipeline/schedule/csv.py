"""Schedules as CSV: a row per worker, a column per clock, a cell per action.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

The cells are those of `torch.distributed.pipelining`, so that its schedules can be read
and these can be read there: `2F7` forward, `2B7` whole backward, `2I7` the part of a
split backward that gives the cotangent of the inputs, `2W7` its weight gradients.
torch's dumps have cells besides: `(2F7;3B5)OVERLAP_F_B` is two actions, and messages
(`2SEND_F7`) and collectives (`2UNSHARD`, `2REDUCE_GRAD`) are none.
"""

import contextlib
import csv
import io
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import KINDS, Action, B, ScheduleError
from jdist.pipeline.schedule.schedule import Placement, Schedule, Updates

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_ACTION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
_Cell = tuple[Action, bool]
"""An action, and whether it is written as `I`."""


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
    """Reads a schedule, written here or by torch, and validates it.

    The columns are the clocks if every action can be done at its column's clock.
    Otherwise only the order within each row counts, as it does in torch, whose files
    often have the order alone; the clocks are then the earliest. Messages and
    collectives are left out: an executor knows itself what to send, and when a stage's
    gradients are complete. Overlapped actions become consecutive ones.

    Args:
      source: A path; or the text itself, if it has a comma or a line break. Of torch,
        what `_dump_csv` writes in either format.
      name: For pictures and messages.
      placement: The workers of each stage, where a stage has several.
      updates: For an asynchronous schedule.

    Raises:
      ScheduleError: It breaks a rule; or a backward pass is written as `I` without a
        `W`, or as `B` with one ("complete").
      ValueError: A cell is none of torch's; names its row and column.

    Example:
      >>> print(from_csv("0F0,0B0,0REDUCE_GRAD\\n1F0,1B0,1REDUCE_GRAD"))
      worker 0 | 0F0  .   .  0B0
      worker 1 |  .  1F0 1B0  .
    """
    text = os.fspath(source)
    if "," not in text and "\n" not in text:
        text = Path(text).read_text(encoding="utf-8-sig")  # spreadsheets write a mark
    programs: list[list[Action]] = []
    columns: list[list[int]] = []
    halves: dict[tuple[int, int], bool] = {}
    timed = True  # every cell is one action, so that a column can be a clock
    for row, cells in enumerate(_rows(text)):
        filled = [(at, cell.strip()) for at, cell in enumerate(cells) if cell.strip()]
        read = [(at, _parse(cell, row, at)) for at, cell in filled]
        timed = timed and all(len(found) == 1 for _, found in read)
        programs.append([action for _, found in read for action, _ in found])
        columns.append([at for at, found in read for _ in found])
        halves |= {a[1:]: half for _, f in read for a, half in f if a.kind == "B"}
    programs = [_counted_from_0(program) for program in programs]
    ordered = Schedule.of(programs, name=name, placement=placement, updates=updates)
    _check_halves(ordered, halves)
    if timed:
        clock = np.array([at for row in columns for at in row])
        with contextlib.suppress(ScheduleError):
            return replace(ordered, given_clock=clock).validate()
    return ordered.validate()


def _rows(text: str) -> list[list[str]]:
    """The cells of each row, without blank lines at the end."""
    reader = csv.reader(io.StringIO(text))
    try:
        rows = list(reader)
    except csv.Error as error:
        where = f"from_csv(line {reader.line_num})"
        raise ValueError(requirement(where, "must be CSV", str(error))) from error
    while rows and not rows[-1]:
        rows.pop()
    if [] in rows:
        rule = "must not be blank: it would move all workers below by one"
        remedy = "The row of an idle worker has a comma."
        where = f"from_csv(row {rows.index([])})"
        raise ValueError(requirement(where, rule, "no cell", remedy))
    return rows


def _parse(cell: str, row: int, column: int) -> list[_Cell]:
    """The actions of a cell: none for a message, several if they are overlapped."""
    if _NO_ACTION.fullmatch(cell):
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    parts = overlapped[1].split(";") if overlapped else [cell]
    found: list[_Cell] = []
    for part in parts:
        action = _ACTION.fullmatch(part.strip())
        if not action:
            rule = "must be empty or hold what torch writes, such as 2B7 or 2SEND_F7"
            where = f"from_csv(row {row}, column {column})"
            remedy = "An action is a stage, one of F, B, I, W, and a micro-batch."
            raise ValueError(requirement(where, rule, cell, remedy))
        stage, letter, micro_batch = action.groups()
        kind = "B" if letter == "I" else letter
        found.append((Action.parse(f"{stage}{kind}{micro_batch}"), letter == "I"))
    return found


def _counted_from_0(program: list[Action]) -> list[Action]:
    """The program, without a slip of torch 2.13 that its own reader refuses.

    It writes the last stage of 1F1B as F1 B0 F2 B1 ..., whose forward passes are those
    of micro-batches 0, 1, ...
    """
    if not program:
        return program
    pairs = [(k, kind) for k in range(len(program) // 2) for kind in KINDS[:2]]
    right = [Action(kind, program[0].stage, k) for k, kind in pairs]
    slip = [a._replace(micro_batch=a.micro_batch + (a.kind == "F")) for a in right]
    return right if program == slip else program


def _check_halves(schedule: Schedule, halves: dict[tuple[int, int], bool]) -> None:
    for (stage, micro_batch), half in halves.items():
        if half != schedule.split[stage, micro_batch]:
            what = "is written as I without a W" if half else "is a whole B beside a W"
            worker = schedule.worker(stage, micro_batch)
            action = Action("B", stage, micro_batch)
            raise ScheduleError("complete", what, worker, action)

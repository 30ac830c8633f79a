"""The CSV form of a schedule: a row per worker, a column per clock, a cell per action.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

The cells are those of `torch.distributed.pipelining`: `2F7` is a forward pass, `2B7` a
whole backward pass, `2I7` the part of a split backward pass that computes the cotangent
of the inputs, and `2W7` its weight gradients. Dumps of torch have further cells:
`(2F7;3B5)OVERLAP_F_B` stands for two actions, and messages (`2SEND_F7`) and collectives
(`2UNSHARD`, `2REDUCE_GRAD`) for none. `Schedule.to_csv` and `Schedule.from_csv` are the
public functions.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from jdist._errors import value_error
from jdist.pipeline.schedule.actions import KINDS, Action

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_ACTION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
_CALL = "Schedule.from_csv"


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """The text of the cells of all rows."""
    out = io.StringIO()
    # The csv module's default is \r\n.
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def read_csv(text: str) -> tuple[list[list[Action]], dict[tuple[int, int], bool]]:
    """The actions of a text written here or by torch.

    Returns:
      The actions of each row, in which `I` has become B; and for each B, by stage and
      micro-batch, whether it is written as `I`.

    Raises:
      ValueError: A cell is not one of torch's, or a row is blank; names row and column.
    """
    programs: list[list[Action]] = []
    halves: dict[tuple[int, int], bool] = {}
    for row, cells in enumerate(_rows(text)):
        read = [
            each
            for column, cell in enumerate(cells)
            if cell.strip()
            for each in _actions(cell.strip(), row, column)
        ]
        programs.append(_counted_from_0([action for action, _ in read]))
        halves |= {a[1:]: half for a, half in read if a.kind == "B"}
    return programs, halves


def _rows(text: str) -> list[list[str]]:
    """The cells of each row, without blank lines at the end."""
    # The csv module knows quotes and line ends of all platforms.
    reader = csv.reader(io.StringIO(text))
    try:
        rows = list(reader)
    except csv.Error as error:
        where = f"{_CALL}(line {reader.line_num})"
        raise value_error(where, "must be CSV", str(error)) from error
    # Because editors and spreadsheets leave blank lines at the end of a file.
    while rows and not rows[-1]:
        rows.pop()
    if [] in rows:
        rule = "must not be blank: it would move all workers below by one"
        remedy = "The row of an idle worker has a comma."
        raise value_error(f"{_CALL}(row {rows.index([])})", rule, "no cell", remedy)
    return rows


def _actions(cell: str, row: int, column: int) -> list[tuple[Action, bool]]:
    """The actions of a cell, each with whether it is written as `I`."""
    # Messages and collectives follow from the actions.
    if _NO_ACTION.fullmatch(cell):
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    parts = overlapped[1].split(";") if overlapped else [cell]
    found = []
    for part in parts:
        action = _ACTION.fullmatch(part.strip())
        if not action:
            rule = "must be empty or hold what torch writes, such as 2B7 or 2SEND_F7"
            where = f"{_CALL}(row {row}, column {column})"
            remedy = "An action is a stage, one of F, B, I, W, and a micro-batch."
            raise value_error(where, rule, cell, remedy)
        stage, letter, micro_batch = action.groups()
        # I and B are one kind here; whether a W follows says which it is.
        kind = "B" if letter == "I" else letter
        found.append((Action.parse(f"{stage}{kind}{micro_batch}"), letter == "I"))
    return found


def _counted_from_0(program: list[Action]) -> list[Action]:
    """The actions, with an error of torch 2.13 corrected.

    Torch writes the last stage of 1F1B as F1 B0 F2 B1 ..., where the forward passes are
    those of micro-batches 0, 1, ...; its own reader refuses that.
    """
    if not program:
        return program
    pairs = [(k, kind) for k in range(len(program) // 2) for kind in KINDS[:2]]
    right = [Action(kind, program[0].stage, k) for k, kind in pairs]
    wrong = [a._replace(micro_batch=a.micro_batch + (a.kind == "F")) for a in right]
    return right if program == wrong else program

"""Actions of a schedule, one by one and as columns.

An action is a forward pass, a backward pass or a weight gradient of one stage for one
micro-batch. A schedule of a thousand stages has millions of them, so they are stored as
NumPy columns and become `Action` objects only on request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jdist._errors import JdistError, check_type, quoted, value_error

ActionKind = Literal["F", "B", "W"]
KINDS: tuple[ActionKind, ActionKind, ActionKind] = ("F", "B", "W")
F, B, W = range(len(KINDS))
"""Indices of the kinds, as in `Columns.kind`."""

_SPELLING = re.compile(r"(\d+)([FBW])(\d+)")


class ScheduleError(JdistError, ValueError):
    """A schedule that breaks one of the rules.

    Attributes:
      rule: Name of the rule; see `Schedule.validate`.
      what: Description of the violation.
      worker: Rank of the worker whose actions break it, or None if no single one does.
      action: The first action that breaks it, or None.
    """

    def __init__(
        self,
        rule: str,
        what: str,
        worker: int | None = None,
        action: "Action | None" = None,
    ) -> None:
        # Pickle calls the class with `args`: all fields must be among them.
        super().__init__(rule, what, worker, action)
        self.rule = rule
        self.what = what
        self.worker = worker
        self.action = action

    def __str__(self) -> str:
        place = [f"worker {self.worker}"] if self.worker is not None else []
        place += [f"action {self.action}"] if self.action is not None else []
        where = f" ({', '.join(place)})" if place else ""
        return f"rule {self.rule!r}{where}: {self.what}"


class Action(NamedTuple):
    """One unit of a worker's work.

    Attributes:
      kind: "F", forward; "B", backward, without weight gradients where a W follows;
        "W", weight gradients.
      stage: The stage.
      micro_batch: The micro-batch.

    Example:
      >>> str(Action("B", stage=2, micro_batch=7)), Action.parse("2B7").stage
      ('2B7', 2)
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads the text that `str` writes.

        Raises:
          TypeError: It is not a text.
          ValueError: It is not a stage, one of F, B, W, and a micro-batch.
          ScheduleError: A number has more than 10 digits.
        """
        rule = "must be a stage, one of F, B, W, and a micro-batch, such as 2B7"
        check_type("Action.parse(text=...)", text, str, rule)
        found = _SPELLING.fullmatch(text)
        if not found:
            raise value_error("Action.parse(text=...)", rule, text)
        # Python's int() refuses more than 4300 digits with a message of its own.
        if max(len(found[1]), len(found[3])) > 10:
            what = f"{text[:40]}... is beyond what 32 bits hold"
            raise ScheduleError("complete", what)
        # Not found[2] itself, which a type checker knows as any string.
        kind = KINDS["FBW".index(found[2])]
        return cls(kind, int(found[1]), int(found[3]))


class WorkerActions(NamedTuple):
    """The actions of one worker as columns, in order; see `Columns`."""

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """The actions of all workers, in order, one worker after the other.

    Attributes:
      kind: Index into `KINDS` per action, uint8.
      stage: int32.
      micro_batch: int32.
      first: Index of each worker's first action, and at the end the number of actions;
        int64, `(workers + 1,)`.
    """

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    first: np.ndarray

    def __post_init__(self) -> None:
        """Sets dtypes and makes the arrays read-only."""
        # Half the memory of int64; a thousand stages and four thousand micro-batches
        # have eight million actions.
        wanted = {"kind": np.uint8, "stage": np.int32, "micro_batch": np.int32}
        for name, dtype in {**wanted, "first": np.int64}.items():
            # A view, so that the caller's array stays writeable.
            array = np.asarray(getattr(self, name), dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, programs: Sequence[Sequence[Action]]) -> "Columns":
        """Columns from a list of actions per worker.

        Raises:
          ScheduleError: The kind of an action is not F, B or W; or its stage or its
            micro-batch is not an integer of 32 bits ("complete").
        """
        flat = [action for program in programs for action in program]
        for action in flat:
            if action.kind not in KINDS:
                what = f"has the kind {action.kind!r}, which is none of F, B, W"
                raise ScheduleError("complete", what, None, action)
        _check_int32([n for action in flat for n in action[1:]])
        return cls(
            np.array([KINDS.index(action.kind) for action in flat], np.uint8),
            np.array([action.stage for action in flat], np.int32),
            np.array([action.micro_batch for action in flat], np.int32),
            np.cumsum([0, *map(len, programs)]),
        )

    @classmethod
    def joined(cls, programs: Sequence[WorkerActions]) -> "Columns":
        """Columns of all workers from those of each."""
        first = np.cumsum([0, *(len(program.kind) for program in programs)])
        kind, stage, micro_batch = map(np.concatenate, zip(*programs, strict=True))
        return cls(kind, stage, micro_batch, first)

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        names = ("first", "kind", "stage", "micro_batch")
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.first) - 1

    def action(self, index: int) -> Action:
        """The action at an index of the columns."""
        kind = KINDS[self.kind[index]]
        return Action(kind, int(self.stage[index]), int(self.micro_batch[index]))

    def worker(self, index: int) -> int:
        """The worker of the action at an index."""
        # From the right: workers without actions begin at the same index.
        return int(np.searchsorted(self.first, index, side="right")) - 1

    def worker_of_each(self) -> np.ndarray:
        """The worker of every action, int32."""
        workers = np.arange(self.workers, dtype=np.int32)
        return np.repeat(workers, np.diff(self.first))

    def actions(self, worker: int) -> list[Action]:
        """The actions of one worker in order."""
        own = slice(*self.first[worker : worker + 2])
        # Python numbers of whole columns: one by one they take four times as long.
        kind, stage, micro_batch = (
            column[own].tolist() for column in (self.kind, self.stage, self.micro_batch)
        )
        return list(map(Action, map(KINDS.__getitem__, kind), stage, micro_batch))

    def index_of(self, kind: int, stages: int, micro_batches: int) -> np.ndarray:
        """The index of each stage and micro-batch's action of `kind`; -1: none.

        Returns:
          int32, `(stages, micro_batches)`.
        """
        found = np.full((stages, micro_batches), -1, np.int32)
        where = np.flatnonzero(self.kind == kind)
        # int32, half of NumPy's default: there is a cell for each stage and micro-
        # batch.
        found[self.stage[where], self.micro_batch[where]] = where
        return found


def _check_int32(numbers: Sequence[int]) -> None:
    """Refuses stages and micro-batches that no int32 holds."""
    # NumPy would cut off what follows the point.
    for number in numbers:
        if not _is_integer(number):
            raise ScheduleError("complete", f"{number!r} is not an integer")
    # NumPy's own OverflowError would not name the rule.
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    beyond = [number for number in numbers if not least <= number <= most]
    if beyond:
        raise ScheduleError("complete", f"{beyond[0]} is beyond what 32 bits hold")


def check_counts(call: str, least: int = 1, **counts: int) -> None:
    """Refuses arguments that are not integers of at least `least`.

    Raises:
      ValueError: Names the argument and its value.
    """
    for name, value in counts.items():
        if not _is_integer(value) or value < least:
            rule = f"must be an integer of at least {least}"
            raise value_error(f"{call}({name}=...)", rule, quoted(value))


def _is_integer(value: object) -> bool:
    # True is an int in Python, and would mean 1.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

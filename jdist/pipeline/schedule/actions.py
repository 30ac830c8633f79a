"""What a worker does: actions one by one, and millions of them as columns.

An action is a forward pass, a backward pass or a weight gradient of one stage for one
micro-batch. A schedule for a thousand stages has millions; they are kept as four NumPy
columns and become `Action`s only where somebody looks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jdist._errors import JdistError, requirement

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, Kind, Kind] = ("F", "B", "W")
F, B, W = range(len(KINDS))
"""Numbers of the kinds in `Columns.kind`."""

_SPELLING = re.compile(r"(\d+)([FBW])(\d+)")


class ScheduleError(JdistError, ValueError):
    """A schedule breaks one of the rules.

    Attributes:
      rule: Its name; see `Schedule.validate`.
      what: What is wrong.
      worker: Rank of the worker whose program breaks it, or None if no single one does.
      action: The first action that breaks it, or None.
    """

    def __init__(
        self,
        rule: str,
        what: str,
        worker: int | None = None,
        action: "Action | None" = None,
    ) -> None:
        super().__init__(rule, what, worker, action)  # all of it survives pickling
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
    """One piece of work.

    Example:
      >>> str(Action("B", stage=2, micro_batch=7)), Action.parse("2B7").stage
      ('2B7', 2)
    """

    kind: Kind
    """F: forward. B: backward, without weight gradients where a W follows. W: those."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads what `str` writes.

        Raises:
          ValueError: It is not a stage, one of F, B, W, and a micro-batch.
          ScheduleError: A number has more than 10 digits.
        """
        found = _SPELLING.fullmatch(text)
        if not found:
            rule = "must be a stage, one of F, B, W, and a micro-batch, such as 2B7"
            raise ValueError(requirement("Action.parse(text=...)", rule, text))
        if max(len(found[1]), len(found[3])) > 10:  # Python itself reads 4300 at most
            what = f"{text[:40]}... is beyond what 32 bits hold"
            raise ScheduleError("complete", what)
        kind = KINDS["FBW".index(found[2])]
        return cls(kind, int(found[1]), int(found[3]))


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """The actions of all workers, one worker's after the other's, in order.

    Attributes:
      kind: Index into `KINDS` per action, uint8.
      stage: int32.
      micro_batch: int32.
      first: Where each worker's actions begin, and at the end the number of actions;
        int64, `(workers + 1,)`.
    """

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    first: np.ndarray

    def __post_init__(self) -> None:
        """Fixes dtypes, and makes the arrays read-only."""
        wanted = {"kind": np.uint8, "stage": np.int32, "micro_batch": np.int32}
        for name, dtype in {**wanted, "first": np.int64}.items():
            array = np.asarray(getattr(self, name), dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, programs: Sequence[Sequence[Action]]) -> "Columns":
        """From lists of actions, one per worker."""
        flat = [action for program in programs for action in program]
        check_numbers("complete", [n for action in flat for n in action[1:]])
        return cls(
            np.array([KINDS.index(action.kind) for action in flat], np.uint8),
            np.array([action.stage for action in flat], np.int32),
            np.array([action.micro_batch for action in flat], np.int32),
            np.cumsum([0, *map(len, programs)]),
        )

    @classmethod
    def joined(cls, programs: "Sequence[Program]") -> "Columns":
        """From columns per worker."""
        return cls(
            np.concatenate([program.kind for program in programs]),
            np.concatenate([program.stage for program in programs]),
            np.concatenate([program.micro_batch for program in programs]),
            np.cumsum([0, *(len(program.kind) for program in programs)]),
        )

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
        """How many there are."""
        return len(self.first) - 1

    def action(self, index: int) -> Action:
        """The action at one place of the columns."""
        kind = KINDS[self.kind[index]]
        return Action(kind, int(self.stage[index]), int(self.micro_batch[index]))

    def worker(self, index: int) -> int:
        """The worker whose action stands there."""
        return int(np.searchsorted(self.first, index, side="right")) - 1

    def worker_of_each(self) -> np.ndarray:
        """The worker of every action, int32."""
        workers = np.arange(self.workers, dtype=np.int32)
        return np.repeat(workers, np.diff(self.first))

    def actions(self, worker: int) -> list[Action]:
        """What one worker does, in order."""
        span = range(int(self.first[worker]), int(self.first[worker + 1]))
        return [self.action(index) for index in span]

    def index_of(self, kind: int, stages: int, micro_batches: int) -> np.ndarray:
        """Where each stage and micro-batch's action of `kind` stands; -1: nowhere.

        Returns:
          int32, `(stages, micro_batches)`.
        """
        found = np.full((stages, micro_batches), -1, np.int32)
        where = np.flatnonzero(self.kind == kind)
        found[self.stage[where], self.micro_batch[where]] = where
        return found


def check_numbers(rule: str, numbers: Sequence[int]) -> None:
    """Refuses stages, micro-batches and clocks that no int32 holds.

    Raises:
      ScheduleError: With `rule`, which such a number breaks whatever the others are.
    """
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    beyond = [number for number in numbers if not least <= number <= most]
    if beyond:
        raise ScheduleError(rule, f"{beyond[0]} is beyond what 32 bits hold")


class Program(NamedTuple):
    """What one worker does, as columns."""

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray

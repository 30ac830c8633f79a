"""Schedules: the order and the clock of every worker's actions, as data.

    s = one_f_one_b(2, 3)
    print(s)

    worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
    worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .

An executor follows the order of a worker's actions. The clock is the time at which an
action would happen if every action took the same time, which is what papers draw.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from jdist._errors import check_sequence, check_type, quoted, type_error, value_error
from jdist.pipeline.schedule import memory, rules
from jdist.pipeline.schedule.actions import (
    Action,
    B,
    Columns,
    ScheduleError,
    W,
    check_counts,
)
from jdist.pipeline.schedule.clock import play, waits_for
from jdist.pipeline.schedule.csv import csv_text, read_csv
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedule.versions import check_versions, versions_of_stages

Placement = tuple[tuple[int, ...], ...]
"""The workers of each stage: one, or several that take micro-batches in turn."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The actions of all workers.

    Attributes:
      name: Name of the family.
      micro_batches: Their number m.
      placement: The workers of each stage.
      columns: All actions.
      update_policy: When stages update, and with which weights they compute; None: one
        update after all micro-batches (a synchronous schedule).
      family: The same schedule for another number of micro-batches; None: it is known
        for one number only. See `resized`.

    Example:
      >>> from jdist.pipeline import one_f_one_b
      >>> schedule = one_f_one_b(2, 3)
      >>> print(schedule)
      worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
      worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .
      >>> schedule.actions(1)[1]
      Action(kind='B', stage=1, micro_batch=0)
      >>> schedule.validate().clocks
      8
    """

    name: str
    micro_batches: int
    placement: Placement
    columns: Columns
    update_policy: UpdatePolicy | None = None
    family: "Callable[[int], Schedule] | None" = None

    def __post_init__(self) -> None:
        """Checks the arguments, but no rule of a schedule; see `validate`."""
        check_counts("Schedule", micro_batches=self.micro_batches)
        _check_placement("Schedule", self.placement)
        rule = "must be Columns; `Schedule.of` makes them from actions"
        check_type("Schedule(columns=...)", self.columns, Columns, rule)
        _check_policy("Schedule", self.update_policy)
        family: object = self.family
        if family is not None and not callable(family):
            rule = "must be a function from a number of micro-batches to a schedule"
            raise type_error("Schedule(family=...)", rule, quoted(family))

    @classmethod
    def of(
        cls,
        programs: Sequence[Sequence[Action | str]],
        *,
        name: str = "custom",
        placement: Placement | None = None,
        update_policy: UpdatePolicy | None = None,
    ) -> "Schedule":
        """A user's own schedule, from a list of actions per worker.

        Args:
          programs: Actions, or their text such as "0F3". Without any B the schedule is
            forward only.
          name: Name for pictures and messages.
          placement: The workers of each stage; None: those that run it, which must be
            one each.
          update_policy: See the class.

        Raises:
          ScheduleError: It is not "complete", or workers wait for each other in a
            circle ("dependencies").
          TypeError: Something is neither an action nor a text, or an argument is of
            another type.
          ValueError: There is no action, an action's text does not parse, a stage has
            several workers and no placement was given, or the placement names a worker
            of a stage twice.

        Example:
          >>> two = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
          >>> print(Schedule.of(two).validate())
          worker 0 | 0F0 0F1  .  0B0  .  0B1
          worker 1 |  .  1F0 1B0 1F1 1B1  .
        """
        call, rule = "Schedule.of(programs=...)", "must be a list of actions per worker"
        check_sequence(call, programs, Sequence, rule)
        for program in programs:
            check_sequence(call, program, object, rule)
        _check_policy("Schedule.of", update_policy)
        if placement is not None:
            _check_placement("Schedule.of", placement)
            # A worker that takes two turns would wait for its own gradient.
            if any(len(set(workers)) < len(workers) for workers in placement):
                call, rule = "placement=...", "must name each worker of a stage once"
                raise value_error(f"Schedule.of({call})", rule, placement)
        # Text and actions may be mixed.
        columns = Columns.of([[_action(a) for a in program] for program in programs])
        if not len(columns):
            rule = "must have at least one action"
            raise value_error("Schedule.of(programs=...)", rule, programs)
        # Numbers without gaps are checked next.
        micro_batches = int(columns.micro_batch.max()) + 1
        # A placement may name stages that no action mentions, which "complete" refuses.
        stages = len(placement or ()) or int(columns.stage.max()) + 1
        # Before anything of the size of stages x micro-batches is made.
        rules.check_size(columns, stages, micro_batches)
        if placement is None:
            placement = _placement_of(columns)
        made = cls(
            name,
            micro_batches,
            placement,
            columns,
            update_policy=update_policy,
        )
        made._check_complete()
        made.clock  # noqa: B018 - a circle is refused here, not at the first use
        return made

    @classmethod
    def from_csv(
        cls,
        source: str | os.PathLike[str],
        *,
        name: str = "custom",
        placement: Placement | None = None,
        update_policy: UpdatePolicy | None = None,
    ) -> "Schedule":
        """Reads a schedule, written by `to_csv` or by torch, and validates it.

        Only the order within each row counts, as in torch. Messages and collectives are
        left out, because an executor derives them. Overlapped actions become
        consecutive ones.

        Args:
          source: A path; or the text itself, if it has a comma or a line break. From
            torch, either format of `_dump_csv`.
          name: Name for pictures and messages.
          placement: The workers of each stage, where a stage has several.
          update_policy: For an asynchronous schedule.

        Raises:
          ScheduleError: It breaks a rule; or a backward pass is written as `I` without
            a `W`, or as `B` with one ("complete").
          TypeError: The source is neither a path nor a text.
          ValueError: A cell is not one of torch's; names its row and column.

        Example:
          >>> print(Schedule.from_csv("0F0,0B0,0REDUCE_GRAD\\n1F0,1B0,1REDUCE_GRAD"))
          worker 0 | 0F0  .   .  0B0
          worker 1 |  .  1F0 1B0  .
        """
        rule = "must be a path or a string"
        check_type("Schedule.from_csv(source)", source, (str, os.PathLike), rule)
        # A text of several cells or rows has one of these, and is no path.
        text = os.fspath(source)
        if "," not in text and "\n" not in text:
            # Spreadsheets write a byte order mark, which utf-8-sig skips.
            text = Path(text).read_text(encoding="utf-8-sig")
        programs, halves = read_csv(text)
        ordered = cls.of(
            programs,
            name=name,
            placement=placement,
            update_policy=update_policy,
        )
        # Torch writes both letters; a mismatch is an error of the file, not a choice.
        for (stage, micro_batch), half in halves.items():
            if half != ordered.split[stage, micro_batch]:
                written = "written as I without" if half else "a whole B beside"
                worker = ordered.worker(stage, micro_batch)
                action = Action("B", stage, micro_batch)
                raise ScheduleError("complete", f"is {written} a W", worker, action)
        return ordered.validate()

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The schedule as CSV text, a row per worker and a column per clock.

        Args:
          path: A file that the text is written to, too.

        Example:
          >>> from jdist.pipeline import zero_bubble
          >>> print(zero_bubble(2, 2).to_csv(), end="")
          0F0,0F1,,0I0,0W0,0I1,0W1
          ,1F0,1I0,1F1,1I1,1W0,1W1
        """

        def cell(action: Action) -> str:
            half = action.kind == "B" and self.split[action.stage, action.micro_batch]
            return f"{action.stage}{'I' if half else action.kind}{action.micro_batch}"

        text = csv_text(self._grid("", cell))
        if path is not None:
            Path(path).write_text(text)
        return text

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.columns.workers

    @cached_property
    def clock(self) -> np.ndarray:
        """The earliest clock of each action, from 0, int32.

        Raises:
          ScheduleError: There is none: workers wait in a circle ("dependencies"), or
            what an action waits for is missing ("complete").
        """
        waits = waits_for(self.columns, self.stages, self.micro_batches)
        clock = play(self.columns, waits, np.ones(len(self.columns))).astype(np.int32)
        clock.flags.writeable = False
        return clock

    @property
    def clocks(self) -> int:
        """Number of clocks that it takes."""
        return int(self.clock.max(initial=-1)) + 1

    def worker(self, stage: int, micro_batch: int) -> int:
        """The worker that runs a stage for a micro-batch."""
        # Round-robin by number, so that forward and backward pass meet the same worker.
        workers = self.placement[stage]
        return workers[micro_batch % len(workers)]

    def actions(self, worker: int) -> list[Action]:
        """The actions of a worker, in order.

        Raises:
          ValueError: There is no worker of this number.
        """
        check_counts("Schedule.actions", least=0, worker=worker)
        if worker >= self.workers:
            rule = f"must be one of {self.workers} workers"
            raise value_error("Schedule.actions(worker)", rule, worker)
        return self.columns.actions(worker)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there are no backward passes."""
        return not (self.columns.kind == B).any()

    @cached_property
    def owner(self) -> np.ndarray:
        """Worker of each stage and micro-batch, int32, `(stages, micro_batches)`."""
        turns = np.arange(self.micro_batches)
        # Micro-batch i belongs to the (i mod r)-th worker.
        rows = [np.array(w, np.int32)[turns % len(w)] for w in self.placement]
        return np.stack(rows)

    @cached_property
    def split(self) -> np.ndarray:
        """Whether the backward pass is split in two, bool, `(stages, micro_batches)`.

        Where it is, B computes the cotangent of the stage's inputs and a later W the
        gradients of its parameters; elsewhere B computes both.
        """
        return self.columns.index_of(W, self.stages, self.micro_batches) >= 0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per worker, the most held between two actions.

        In activations of one stage for one micro-batch: 1 from F to B, and 2 from B to
        W, which needs activations and as many cotangents. For stages of other
        proportions, and for bytes, see `Costs`.
        """
        # Cached, since it goes over all actions.
        return memory.peak_activations(self.columns)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per worker, the most (stage, micro-batch) pairs with F done and B not.

        The literature calls them micro-batches in flight; pending weight gradients (B
        done, W not) are not among them.
        """
        return memory.peak_in_flight(self.columns)

    def validate(self) -> "Schedule":
        """Checks every rule and returns the schedule itself.

        - "complete": each stage has each micro-batch once in F and, unless forward
          only, once in B, at most once in W, on the worker of its placement.
        - "dependencies": an action comes after all it waits for: F of the stage before;
          B of the stage after and F of its own; W its own B.
        - "versions": under an update policy a micro-batch enters a stage after the
          updates that made the weights that it uses; with a flush, a stage has finished
          all earlier micro-batches at each update.

        Raises:
          ScheduleError: With the first rule broken, its worker and its action.
          ValueError: The update policy does not fit the schedule; see `versions_used`.
        """
        # Without completeness the clock may not exist.
        self._check_complete()
        self.clock  # noqa: B018 - a circle is refused
        rules.check_own_order(self.columns, self.stages, self.micro_batches)
        if self.update_policy is not None:
            check_versions(self.columns, self.update_policy)
        return self

    def _check_complete(self) -> None:
        rules.check_size(self.columns, self.stages, self.micro_batches)
        rules.check_placed(self.columns, self.owner)
        rules.check_each_once(self.columns, self.owner, self.forward_only)

    def versions_used(self) -> np.ndarray:
        """The version that each micro-batch uses at each stage, forward and backward.

        Where a stage has several workers, each counts its own updates.

        Returns:
          int32, `(stages, micro_batches)`; all 0 for a synchronous schedule.

        Raises:
          ValueError: A worker's backward passes have another order than its forward
            passes, or a stage has several workers under "vertical_sync" or "2bw".

        Example:
          >>> from jdist.pipeline import pipedream
          >>> pipedream(3, 6).versions_used()
          array([[0, 0, 0, 1, 2, 3],
                 [0, 0, 1, 2, 3, 4],
                 [0, 1, 2, 3, 4, 5]], dtype=int32)
        """
        found = np.zeros((self.stages, self.micro_batches), np.int32)
        if self.update_policy is not None:
            for passes, used in versions_of_stages(self.columns, self.update_policy):
                found[passes.stage, passes.micro_batch] = used
        return found

    def resized(self, micro_batches: int) -> "Schedule":
        """The schedule of the same family for another number of micro-batches.

        Raises:
          ValueError: The number is below 1 or not possible in the family; or the
            schedule was made from a user's own actions and the number is not theirs; or
            its update policy was replaced.

        Example:
          >>> from jdist.pipeline import pipedream
          >>> pipedream(2, 3).resized(5) == pipedream(2, 5)
          True
        """
        check_counts("Schedule.resized", micro_batches=micro_batches)
        if micro_batches == self.micro_batches:
            return self
        if self.family is None:
            rule = f"must be the {self.micro_batches} that its actions were given for"
            remedy = "Make the schedule by a function such as `pipedream(n, m)`."
            call = "Schedule.resized(micro_batches)"
            raise value_error(call, rule, micro_batches, remedy)
        made = self.family(micro_batches)
        if made.update_policy != self.update_policy:
            rule = f"must keep {self.update_policy}, and its family makes schedules "
            rule += f"with {made.update_policy}"
            remedy = "Give the policy to the function that makes the schedule."
            call = "Schedule.resized(micro_batches)"
            raise value_error(call, rule, micro_batches, remedy)
        return made

    def synchronous(self) -> "Schedule":
        """The same actions with one update after all micro-batches."""
        family = self.family and partial(derived, Schedule.synchronous, self.family)
        return replace(self, update_policy=None, family=family)

    def forward_passes(self, micro_batches: int) -> "Schedule":
        """The forward passes of the first micro-batches alone, in the same order."""
        programs = [
            [
                action
                for action in self.actions(worker)
                if action.kind == "F" and action.micro_batch < micro_batches
            ]
            for worker in range(self.workers)
        ]
        name = f"{self.name}, forward"
        return Schedule.of(programs, name=name, placement=self.placement)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        # Not the name, which says nothing about the execution.
        names = ("placement", "update_policy", "micro_batches", "columns")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    def _grid(self, empty: str, cell: Callable[[Action], str]) -> list[list[str]]:
        """The text of each action, in a row per worker and a column per clock."""
        grid = [[empty] * self.clocks for _ in range(self.workers)]
        for worker, row in enumerate(grid):
            clocks = self.clock[slice(*self.columns.first[worker : worker + 2])]
            for clock, action in zip(clocks, self.actions(worker), strict=True):
                row[clock] = cell(action)
        return grid

    def __str__(self) -> str:
        grid = self._grid(".", str)
        # One width for all columns, so that clocks stand below each other.
        width = max(len(cell) for row in grid for cell in row)
        # Ranks are padded, too.
        rank = len(str(self.workers - 1))
        return "\n".join(
            f"worker {worker:>{rank}} | "
            + " ".join(f"{cell:^{width}}" for cell in row).rstrip()
            for worker, row in enumerate(grid)
        )

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.stages} stages, {self.workers} workers, "
            f"{self.micro_batches} micro-batches, {len(self.columns)} actions>"
        )


def derived(
    change: Callable[[Schedule], Schedule],
    family: Callable[[int], Schedule],
    micro_batches: int,
) -> Schedule:
    """A schedule of a family, changed; with `partial` a family that can be pickled."""
    return change(family(micro_batches))


def _action(given: object) -> Action:
    if isinstance(given, Action):
        return given
    if isinstance(given, str):
        return Action.parse(given)
    rule = "must have an `Action`, or its text such as '0F3', for each action"
    raise type_error("Schedule.of(programs=...)", rule, given)


def _check_placement(call: str, placement: Placement) -> None:
    """Refuses what names no workers of stages."""
    argument = f"{call}(placement=...)"
    rule = "must be a tuple of the numbers of the workers of each stage"
    check_sequence(argument, placement, Sequence, rule)
    for workers in placement:
        check_sequence(argument, workers, int | np.integer, rule)
    if not placement or not all(placement):
        raise value_error(argument, "must have a worker for each stage", placement)


def _check_policy(call: str, policy: UpdatePolicy | None) -> None:
    rule = "must be an UpdatePolicy, or None for one update after all micro-batches"
    check_type(f"{call}(update_policy=...)", policy, UpdatePolicy | None, rule)


def _placement_of(columns: Columns) -> Placement:
    stages = int(columns.stage.max()) + 1
    workers = columns.worker_of_each()
    found = []
    for stage in range(stages):
        # Several workers could take turns in any order, which only the user knows.
        own = tuple(int(w) for w in np.unique(workers[columns.stage == stage]))
        if len(own) != 1:
            rule = f"must be given: stage {stage} has not exactly one worker"
            raise value_error("Schedule.of(placement=...)", rule, own)
        found.append(own)
    return tuple(found)

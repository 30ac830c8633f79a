"""A schedule: who does what, in which order and at which clock. Data, and nothing else.

    s = one_f_one_b(2, 3)
    print(s)

    worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
    worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .

An executor works through a worker's actions in order; a clock only says how the
schedule would run if every action took the same time, which is what papers draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule import memory, rules
from jdist.pipeline.schedule.actions import Action, B, Columns, W, check_numbers
from jdist.pipeline.schedule.clock import play, waits_for
from jdist.pipeline.schedule.program import check_counts

Placement = tuple[tuple[int, ...], ...]
"""The workers of each stage: one, or several among which micro-batches go round."""

Uses = Literal["latest", "entry", "previous"]


@dataclass(frozen=True, slots=True)
class Updates:
    """When the stages of an asynchronous schedule update, and what a forward pass uses.

    Attributes:
      every: A worker updates its stage after so many of its backward passes.
      uses: Which weights a micro-batch meets. "latest": at each stage the newest there
        (weight stashing). "entry": at every stage the version that was the newest at
        stage 0 when it entered (vertical sync). "previous": those before the newest
        complete update that all stages share, w(t-1) for batch t (2BW).

    Raises:
      ValueError: `every` is not a positive integer, or `uses` none of the three.
    """

    every: int = 1
    uses: Uses = "latest"

    def __post_init__(self) -> None:
        """Checks both."""
        check_counts("Updates", every=self.every)
        if self.uses not in ("latest", "entry", "previous"):
            rule = "must be 'latest', 'entry' or 'previous'"
            raise ValueError(requirement("Updates(uses=...)", rule, self.uses))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of all workers, and what is promised about them.

    Attributes:
      name: Of the family.
      micro_batches: Their number m.
      placement: The workers of each stage.
      columns: All actions.
      given_clock: The clock of each action; None: its earliest.
      forward_only: There are no backward passes.
      updates: When stages update; None: once, after all micro-batches (a flush).
      activation_bound: Per worker, the most that it may hold between two actions, in
        activations of one stage for one micro-batch: 1 from F to B, and 2 from B to W,
        the activations and their cotangents. None: no promise.
      clock_bound: How many clocks it takes at most. None: no promise.

    Example:
      >>> from jdist.pipeline.schedules import one_f_one_b
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
    given_clock: np.ndarray | None = None
    forward_only: bool = False
    updates: Updates | None = None
    activation_bound: tuple[int, ...] | None = None
    clock_bound: int | None = None

    @classmethod
    def of(
        cls,
        programs: Sequence[Sequence[Action | str]],
        *,
        name: str = "custom",
        placement: Placement | None = None,
        clock: Sequence[Sequence[int]] | None = None,
        updates: Updates | None = None,
    ) -> "Schedule":
        """A schedule of one's own, from a list of actions per worker.

        Args:
          programs: Actions, or their text such as "0F3". Without any B the schedule is
            taken to be forward only.
          name: For pictures and messages.
          placement: The workers of each stage; None: those that run it, which must be
            one each.
          clock: The clock of each action; None: as soon as possible.
          updates: See the class.

        Raises:
          ScheduleError: It is not "complete", or workers wait for each other in a
            circle ("dependencies").
          ValueError: Nothing is done, an action's text does not parse, a stage has
            several workers and no placement was given, or clocks and actions are not
            equally many.

        Example:
          >>> two = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
          >>> print(Schedule.of(two).validate())
          worker 0 | 0F0 0F1  .  0B0  .  0B1
          worker 1 |  .  1F0 1B0 1F1 1B1  .
        """
        read = [
            [Action.parse(a) if isinstance(a, str) else a for a in program]
            for program in programs
        ]
        columns = Columns.of(read)
        if not len(columns):
            rule = "must have at least one action"
            raise ValueError(requirement("Schedule.of(programs=...)", rule, programs))
        micro_batches = int(columns.micro_batch.max()) + 1
        stages = len(placement or ()) or int(columns.stage.max()) + 1
        rules.check_size(columns, stages, micro_batches)
        if placement is None:
            placement = _placement_of(columns)
        elif not all(placement):
            rule = "must have a worker for each stage"
            raise ValueError(requirement("Schedule.of(placement=...)", rule, placement))
        flat = None if clock is None else _flat_clock(clock, read)
        made = cls(
            name,
            micro_batches,
            placement,
            columns,
            flat,
            forward_only=not (columns.kind == B).any(),
            updates=updates,
        )
        rules.check_complete(made)
        made.clock  # noqa: B018 - a circle is refused here, not at the first use
        return made

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """Their number."""
        return self.columns.workers

    @cached_property
    def clock(self) -> np.ndarray:
        """The clock of each action, from 0, int32.

        Raises:
          ScheduleError: There is none: workers wait in a circle ("dependencies"), or
            what an action waits for is missing ("complete").
        """
        clock = self.given_clock
        if clock is None:
            waits = waits_for(self.columns, self.stages, self.micro_batches)
            clock = play(self.columns, waits, np.ones(len(self.columns)))
        fixed = np.asarray(clock).astype(np.int32)
        fixed.flags.writeable = False
        return fixed

    @property
    def clocks(self) -> int:
        """How many clocks it takes."""
        return int(self.clock.max(initial=-1)) + 1

    def worker(self, stage: int, micro_batch: int) -> int:
        """Who runs this stage for this micro-batch."""
        workers = self.placement[stage]
        return workers[micro_batch % len(workers)]

    def actions(self, worker: int) -> list[Action]:
        """What a worker does, in order."""
        return self.columns.actions(worker)

    @cached_property
    def owner(self) -> np.ndarray:
        """Each stage and micro-batch's worker, int32, `(stages, micro_batches)`."""
        turns = np.arange(self.micro_batches)
        rows = [np.array(w, np.int32)[turns % len(w)] for w in self.placement]
        return np.stack(rows)

    @cached_property
    def split(self) -> np.ndarray:
        """Whether the backward pass is split in two, bool, `(stages, micro_batches)`.

        Where it is, B computes the cotangent of the stage's inputs and a later W the
        gradients of its parameters; elsewhere B computes both.
        """
        return self.columns.index_of(W, self.stages, self.micro_batches) >= 0

    def validate(self) -> "Schedule":
        """Checks every rule and returns the schedule itself.

        - "complete": each stage has each micro-batch once in F and, unless forward
          only, once in B, at most once in W, on the worker of its placement.
        - "one action": a worker has at most one action at a clock, in program order.
        - "dependencies": an action comes at a later clock than all it waits for: F of
          the stage before; B of the stage after and F of its own; W its own B.
        - "live activations": no worker exceeds `activation_bound`.
        - "clock count": no clock lies at or beyond `clock_bound`.

        Raises:
          ScheduleError: With the first rule broken, its worker and its action.
        """
        rules.validate(self)
        return self

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per worker, the most held between two actions.

        In activations of one stage for one micro-batch: 1 from F to B, and 2 from B to
        W, which needs activations and as many cotangents. For stages of other
        proportions, and for bytes, see `Costs`.
        """
        return memory.peak_activations(self.columns)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per worker, of how many (stage, micro-batch) at most F is done and B not.

        What the literature calls micro-batches in flight; pending weight gradients
        (B done, W not) are not among them.
        """
        return memory.peak_in_flight(self.columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        same = (self.placement, self.updates, self.micro_batches, self.columns)
        theirs = (other.placement, other.updates, other.micro_batches, other.columns)
        return same == theirs and np.array_equal(self.clock, other.clock)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    def __str__(self) -> str:
        grid = [["."] * self.clocks for _ in range(self.workers)]
        for worker, row in enumerate(grid):
            span = slice(*self.columns.first[worker : worker + 2])
            for clock, action in zip(
                self.clock[span], self.actions(worker), strict=True
            ):
                row[clock] = str(action)
        width = max(len(cell) for row in grid for cell in row)
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


def _flat_clock(
    clock: Sequence[Sequence[int]], programs: Sequence[Sequence[Action]]
) -> np.ndarray:
    lengths = [len(row) for row in clock]
    if lengths != [len(program) for program in programs]:
        rule = "must have one number for each action of each worker"
        raise ValueError(requirement("Schedule.of(clock=...)", rule, clock))
    flat = [number for row in clock for number in row]
    check_numbers("one action", flat)
    return np.array(flat, np.int64)


def _placement_of(columns: Columns) -> Placement:
    stages = int(columns.stage.max()) + 1
    workers = columns.worker_of_each()
    found = []
    for stage in range(stages):
        own = tuple(int(w) for w in np.unique(workers[columns.stage == stage]))
        if len(own) != 1:
            rule = f"must be given: stage {stage} has not exactly one worker"
            raise ValueError(requirement("Schedule.of(placement=...)", rule, own))
        found.append(own)
    return tuple(found)

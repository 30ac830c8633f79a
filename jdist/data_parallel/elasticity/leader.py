"""The leader of an elastic run: a state machine of events in and effects out.

It has no access to processes, arrays or clocks. A step's batch is a number of *units*
(slots, or examples), which are assigned in contiguous parts to the live replicas. A
step is committed once the parts computed by any replicas contain each unit of the batch
once:

    replica                          leader
    report: state of step 7     -->
                                <--  Directive: compute units 0..5 of step 7
    report: units 0..5          -->  (with 6..10, 11..15 from others: commit)
                                <--  Directive: apply step 7, compute .. of step 8

If a replica dies or misses the deadline, its units are assigned to others; results of
other replicas are kept. A newcomer is sent the state of rank 0 while the others
continue, and then applies the gradients committed meanwhile, which the leader keeps
until then.

Rank 0 is the replica in the leader's process, without which there is no run. It begins
with a state, writes the checkpoints, and is never further behind than gradients are
kept: so there always is a state to hand out.

Effects depend on the sequence of events only: one seed replays a simulated run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A contiguous range of a step's units."""

    start: int
    """The first unit of the part."""

    stop: int
    """The unit after the last one."""


class ReplicaReport(NamedTuple):
    """A replica's message to the leader; the answer is a `Directive`."""

    held: int | None
    """The number of steps in the state that it holds; None if it holds none."""

    step: int | None
    """The step that `parts` are of."""

    parts: tuple[Part, ...]
    """Units that it has computed."""


class Directive(NamedTuple):
    """Instructions for a replica, carried out in the order of the fields."""

    fetch: bool = False
    """Take the state of rank 0, which is sent along."""

    apply: tuple[int, ...] = ()
    """Steps whose gradients are to be applied to the state."""

    heir: bool = False
    """Whether this replica writes a checkpoint if the leader is lost."""

    end: bool = False
    """The run is over."""

    step: int | None = None
    """The step that `parts` are of."""

    parts: tuple[Part, ...] = ()
    """Units to compute."""


class Order(NamedTuple):
    """Effect: send a directive to a replica."""

    replica: int
    instruction: Directive


class Commit(NamedTuple):
    """Effect: sum the results of these parts, which make up the whole step.

    Precedes each order to apply that step. Results of steps before `oldest` are no
    longer needed.
    """

    step: int
    parts: tuple[Part, ...]
    oldest: int


class Abandon(NamedTuple):
    """Effect: end the run, because a step has waited too long for replicas."""

    ready: int
    """Replicas that could compute."""


Effect = Order | Commit | Abandon
Effects = Iterator[Effect]


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Parameters of an elastic run.

    Attributes:
      steps: Number of steps.
      units: Maps a step to its number of units.
      timeout: Seconds in which a replica must compute its parts; those of a slower one
        are assigned to others.
      min_replicas: Smallest number of replicas with which a step begins.
      join_timeout: Seconds that a step waits for them.
      log: Largest number of committed gradients that are kept.
    """

    steps: int
    units: Callable[[int], int]
    timeout: float
    min_replicas: int = 1
    join_timeout: float = math.inf
    log: int = 64


@dataclass(slots=True, eq=False)
class _Seat:
    """The leader's view of one replica.

    Attributes:
      held: Steps in its state when it last reported, or at least in that which it is
        being sent; None without a state.
      waiting: Whether its report awaits an answer.
      units: Units assigned to it.
      due: Time of its deadline.
      expelled: Whether it missed a deadline and has not reported since.
      ended: Whether it received the directive that ends the run.
    """

    held: int | None = None
    waiting: bool = False
    units: set[int] = field(default_factory=set)
    due: float = 0.0
    expelled: bool = False
    ended: bool = False


class Leader:
    """The state machine; see the module.

    Replicas are numbers, which are never reused for another process.

    Args:
      terms: Parameters of the run.
      own: The replica in whose process the leader runs, rank 0. Its first report has
        the state from which the run begins.

    Attributes:
      step: Number of committed steps; None before there is a state.
    """

    def __init__(self, terms: RunTerms, own: int) -> None:
        self.step: int | None = None
        self._terms = terms
        self._own = own
        self._seats: dict[int, _Seat] = {}
        self._oldest = 0  # The first step whose gradient is kept.
        self._done: set[Part] = set()
        self._open: set[int] = set()  # Units that no replica computes.
        self._begun = False
        self._begin_by = math.inf  # While a step waits for replicas.

    # --- events ---

    def report(self, replica: int, report: ReplicaReport, now: float) -> list[Effect]:
        """Handles a report of a replica."""
        if self.step is None and replica == self._own and report.held is not None:
            self.step = self._oldest = report.held
        seat = self._seats.setdefault(replica, _Seat())
        if report.step == self.step and self._begun:
            self._take(seat, report.parts)
        # Units that were assigned to it and are missing in its report.
        self._open |= seat.units
        # A new seat: a report also ends an expulsion.
        self._seats[replica] = _Seat(report.held, waiting=True)
        return list(self._advance(now))

    def gone(self, replica: int, now: float) -> list[Effect]:
        """Handles the loss or departure of a replica."""
        seat = self._seats.pop(replica, None)
        if seat is None:
            return []
        self._open |= seat.units
        return list(self._advance(now))

    def tick(self, now: float) -> list[Effect]:
        """Expels replicas beyond their deadline; ends a run that waited too long."""
        if self._begin_by <= now:
            self._begin_by = math.inf
            return [Abandon(len(self._ready()))]
        for seat in self._seats.values():
            if seat.units and seat.due <= now:
                self._open |= seat.units
                seat.units, seat.expelled = set(), True
        return list(self._advance(now))

    def next_deadline(self) -> float | None:
        """The time of the next deadline; None if there is none."""
        dues = [seat.due for seat in self._seats.values() if seat.units]
        found = min([self._begin_by, *dues])
        return None if found == math.inf else found

    @property
    def is_over(self) -> bool:
        """Whether all live replicas have received the directive that ends the run."""
        if self.step != self._terms.steps:
            return False
        return all(seat.ended or seat.expelled for seat in self._seats.values())

    # --- transitions ---

    def _take(self, seat: _Seat, parts: Iterable[Part]) -> None:
        """Records results, unless another replica was assigned them meanwhile."""
        for part in parts:
            # In a fixed order a result is a node of the tree, which may be less than
            # what was assigned; the rest is still to be computed.
            for owner in (seat.units, self._open):
                if owner.issuperset(range(*part)):
                    owner.difference_update(range(*part))
                    self._done.add(part)
                    break

    def _advance(self, now: float) -> Effects:
        if self.step is not None:
            if self._begun and self._is_whole():
                yield self._commit()
            if not self._begun:
                yield from self._begin()
            yield from self._assign_open(now)
            # After the assignment: an order to compute applies committed steps as well.
            yield from self._catch_up()
        if self.step is None or self._begun or self.step >= self._terms.steps:
            self._begin_by = math.inf
        else:
            # A step that is waiting already keeps its time.
            self._begin_by = min(self._begin_by, now + self._terms.join_timeout)

    def _is_whole(self) -> bool:
        assert self.step is not None
        units = self._terms.units(self.step)
        return sum(part.stop - part.start for part in self._done) == units

    def _commit(self) -> Commit:
        assert self.step is not None
        parts = tuple(sorted(self._done))
        self._done.clear()
        self._open.clear()
        self._begun = False
        for seat in self._seats.values():
            seat.units = set()  # Only units that were computed twice are left in them.
        self.step += 1
        self._forget()
        return Commit(self.step - 1, parts, self._oldest)

    def _forget(self) -> None:
        """Drops gradients that no replica needs, and those beyond the limit."""
        assert self.step is not None
        held = [s.held for s in self._seats.values() if s.held is not None]
        needed = min(held, default=self.step)
        # A replica further behind has to fetch a state instead.
        floor = self.step - self._terms.log
        self._oldest = max(self._oldest, min(needed, self.step - 1), floor)

    def _ready(self) -> list[int]:
        """Replicas that can compute the current step, at most one gradient behind."""
        assert self.step is not None
        return [
            replica
            for replica, seat in sorted(self._seats.items())
            if seat.waiting
            and seat.held is not None
            and seat.held >= max(self.step - 1, self._oldest)
        ]

    def _begin(self) -> Effects:
        assert self.step is not None
        ready, own = self._ready(), self._held_by_own()
        if own is None:
            return
        if self.step >= self._terms.steps:
            # With the last step rank 0 reports that its checkpoint is complete, before
            # which no replica leaves.
            for replica in ready if own == self.step else ():
                self._seats[replica].ended = True
                yield self._order(replica, end=True)
            return
        # With a commit the gradient of step - log is dropped, which rank 0 must not
        # need any more.
        if own > self.step - self._terms.log and len(ready) >= self._terms.min_replicas:
            self._begun = True
            self._open = set(range(self._terms.units(self.step)))

    def _held_by_own(self) -> int | None:
        """The steps in the state of rank 0; None before its first report."""
        seat = self._seats.get(self._own)
        return None if seat is None else seat.held

    def _assign_open(self, now: float) -> Effects:
        """Divides unassigned units over the replicas that are ready."""
        if not self._begun or not self._open:
            return
        ready = self._ready()
        if not ready:
            return
        # Not rank 0: the heir writes a checkpoint if rank 0 is lost.
        heir = next((each for each in ready if each != self._own), None)
        shares = _divided(sorted(self._open), len(ready))
        self._open = set()
        for replica, parts in zip(ready, shares, strict=True):
            if not parts:
                continue
            seat = self._seats[replica]
            seat.units = {unit for part in parts for unit in range(*part)}
            seat.due = now + self._terms.timeout
            yield self._order(
                replica, heir=replica == heir, step=self.step, parts=parts
            )

    def _catch_up(self) -> Effects:
        """Lets replicas apply committed steps, or take a state if they cannot."""
        assert self.step is not None
        # Sorted, so that effects depend on the sequence of events only.
        for replica, seat in sorted(self._seats.items()):
            if not seat.waiting or seat.held == self.step:
                continue
            if seat.held is not None and seat.held >= self._oldest:
                yield self._order(replica)
            else:
                # The gradients since that state are kept for it.
                seat.waiting, seat.held = False, self._held_by_own()
                yield Order(replica, Directive(fetch=True))

    def _order(self, replica: int, **fields: Any) -> Order:
        """The order to catch up with the present, and further fields of it."""
        assert self.step is not None
        seat = self._seats[replica]
        assert seat.held is not None
        seat.waiting = False
        return Order(
            replica, Directive(apply=tuple(range(seat.held, self.step)), **fields)
        )


def _divided(units: Sequence[int], count: int) -> list[tuple[Part, ...]]:
    """Divides units, in order, into shares whose sizes differ by one at most."""
    # In order, so that a share is few ranges, and few nodes of the summation tree.
    share, extra = divmod(len(units), count)
    ends = [share * number + min(number, extra) for number in range(count + 1)]
    return [_ranges(units[start:stop]) for start, stop in pairwise(ends)]


def _ranges(units: Sequence[int]) -> tuple[Part, ...]:
    """The ranges that ascending units make up."""
    if not units:
        return ()
    gaps = [i for i in range(1, len(units)) if units[i] != units[i - 1] + 1]
    places = pairwise([0, *gaps, len(units)])
    return tuple(Part(units[start], units[stop - 1] + 1) for start, stop in places)

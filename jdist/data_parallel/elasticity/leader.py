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
other replicas are kept. A newcomer fetches a state from a live replica while the others
continue, and then applies the gradients committed meanwhile, which the leader keeps
until then.

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

    generation: int = 0
    """The last one that the replica was told of; see `Directive`."""

    held: int | None = None
    """The number of steps in the state that it holds; None if it holds none."""

    step: int | None = None
    """The step that `parts` are of."""

    parts: tuple[Part, ...] = ()
    """Units that it has computed."""

    saved: int | None = None
    """A step whose checkpoint it has written since its last report."""

    unreachable: int | None = None
    """A replica from which it could not fetch a state."""


class Directive(NamedTuple):
    """Instructions for a replica, carried out in the order of the fields."""

    generation: int
    """How often the run has begun from a checkpoint or from the first parameters.
    States of an earlier generation count no more."""

    restore: bool = False
    """Begin with the last checkpoint, or with the first parameters."""

    fetch: int | None = None
    """Take the state of this replica."""

    apply: tuple[int, ...] = ()
    """Steps whose gradients are to be applied to the state."""

    save: bool = False
    """Write the state as a checkpoint."""

    wait: bool = False
    """Report once all checkpoints are complete that this replica writes."""

    heir: bool = False
    """Whether this replica writes a checkpoint if the leader is lost."""

    end: bool = False
    """The run is over."""

    late: bool = False
    """With `end`: no replica is left that could hand out the last state, and what this
    one holds, if anything, is an earlier one."""

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
      timeout: Seconds in which a replica must compute its parts; a slower one is
        expelled if another has the state.
      min_replicas: Smallest number of replicas with which a step begins.
      join_timeout: Seconds that a step waits for them.
      save_every: Steps between checkpoints; None for none.
      log: Largest number of committed gradients that are kept.
    """

    steps: int
    units: Callable[[int], int]
    timeout: float
    min_replicas: int = 1
    join_timeout: float = math.inf
    save_every: int | None = None
    log: int = 64


@dataclass(slots=True, eq=False)
class _Seat:
    """The leader's view of one replica.

    Attributes:
      held: Steps in its state when it last reported; None without a state.
      waiting: Whether its report awaits an answer.
      units: Units assigned to it.
      due: Time of its deadline.
      source: Replica from which it fetches a state.
      base: Steps in that replica's state when the fetch was ordered.
      avoid: Replicas from which a fetch failed.
      restoring: Whether it reads a checkpoint.
      expelled: Whether it missed a deadline and has not reported since.
      ended: Whether it received the directive that ends the run.
    """

    held: int | None = None
    waiting: bool = False
    units: set[int] = field(default_factory=set)
    due: float = 0.0
    base: int | None = None
    avoid: frozenset[int] = frozenset()
    source: int | None = None
    restoring: bool = False
    expelled: bool = False
    ended: bool = False


class Leader:
    """The state machine; see the module.

    Replicas are numbers, which are never reused for another process.

    Args:
      terms: Parameters of the run.
      own: The replica in whose process the leader runs.

    Attributes:
      step: Number of committed steps; None before there is a state.
      generation: See `Directive`.
    """

    def __init__(self, terms: RunTerms, own: int) -> None:
        self.step: int | None = None
        self.generation = 0
        self._terms = terms
        self._own = own
        self._seats: dict[int, _Seat] = {}
        self._oldest = 0  # The first step whose gradient is kept.
        self._done: set[Part] = set()
        self._open: set[int] = set()  # Units that no replica computes.
        self._begun = False
        self._has_begun = False  # Whether any step ever did.
        self._begin_by = math.inf  # While a step waits for replicas.
        self._save_due = False
        self._saver: int | None = None
        self._over = False

    # --- events ---

    def report(self, replica: int, report: ReplicaReport, now: float) -> list[Effect]:
        """Handles a report of a replica."""
        seat = self._seats.setdefault(replica, _Seat())
        # Results and states from before a restart do not count.
        current = report.generation == self.generation
        if seat.restoring and current and report.held is not None:
            # From a checkpoint, or from the first parameters.
            self.step = self._oldest = report.held
        if report.saved is not None and self._saver == replica:
            self._saver = None
        if report.unreachable is not None:
            self._suspect(report.unreachable)
        if current and report.step == self.step and self._begun:
            self._take(seat, report.parts)
        # Units that were assigned to it and are missing in its report.
        self._open |= seat.units
        reachable = current and report.held is not None and self._reaches(report.held)
        failed = () if report.unreachable is None else (report.unreachable,)
        # A new seat: a report also ends an expulsion, a fetch and a restore.
        self._seats[replica] = _Seat(
            held=report.held if reachable else None,
            waiting=True,
            avoid=seat.avoid.union(failed) if failed else frozenset(),
        )
        return list(self._advance(now))

    def gone(self, replica: int, now: float) -> list[Effect]:
        """Handles the loss or departure of a replica."""
        seat = self._seats.pop(replica, None)
        if seat is None:
            return []
        self._open |= seat.units
        # Its checkpoint may be incomplete: another replica writes one.
        if self._saver == replica:
            self._saver, self._save_due = None, True
        return list(self._advance(now))

    def tick(self, now: float) -> list[Effect]:
        """Expels replicas beyond their deadline; ends a run that waited too long."""
        if self._begin_by <= now:
            self._begin_by = math.inf
            return [Abandon(len(self._ready()))]
        # Sorted, here and below, so that effects depend on the sequence of events only.
        for replica, seat in sorted(self._seats.items()):
            # The only holder of the state keeps its units: no other could compute them.
            if seat.units and seat.due <= now and self._holders(without=replica):
                self._suspect(replica)
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

    def _suspect(self, replica: int) -> None:
        seat = self._seats.get(replica)
        if seat is None or seat.waiting:
            return  # It has reported meanwhile.
        self._open |= seat.units
        seat.units, seat.expelled = set(), True
        if self._saver == replica:
            self._saver, self._save_due = None, True

    def _reaches(self, held: int) -> bool:
        """Whether the gradients kept lead from that state to the current one."""
        return self.step is not None and self._oldest <= held <= self.step

    def _holders(self, without: int | None = None) -> list[int]:
        """Replicas with a state that leads to the present, the best source first."""
        held = {
            replica: seat.held
            for replica, seat in self._seats.items()
            if replica != without
            and not (seat.expelled or seat.restoring)
            and seat.held is not None
            and self._reaches(seat.held)
        }
        fetching = [seat.source for seat in self._seats.values()]

        # Fetches are spread over the holders. Then rank 0 is the last, which serves all
        # others already; and the state with most steps is the best, since the fewest
        # gradients have to be applied to it.
        def order(replica: int) -> tuple[int, ...]:
            own = replica == self._own
            return fetching.count(replica), own, -held[replica], -replica

        return sorted(held, key=order)

    def _advance(self, now: float) -> Effects:
        if self.step is not None:
            if self._begun and self._is_whole():
                yield self._commit()
            if not self._begun:
                yield from self._begin()
            yield from self._assign_open(now)
            # After the assignment: an order to compute applies committed steps as well.
            yield from self._catch_up()
        yield from self._provide_states()
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
        every = self._terms.save_every
        if every and (self.step % every == 0 or self.step == self._terms.steps):
            self._save_due = True
        self._forget()
        return Commit(self.step - 1, parts, self._oldest)

    def _forget(self) -> None:
        """Drops gradients that no replica needs, and those beyond the limit."""
        assert self.step is not None
        # `base` too: a state that is being fetched will need the gradients since.
        held = [each for s in self._seats.values() for each in (s.held, s.base)]
        needed = min((each for each in held if each is not None), default=self.step)
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
        ready = self._ready()
        if self.step >= self._terms.steps:
            yield from self._end(ready)
            return
        # The first step waits for rank 0, so that one replica has every loss.
        if len(ready) < self._terms.min_replicas or not (
            self._has_begun or self._own in ready
        ):
            return
        self._begun = self._has_begun = True
        self._open = set(range(self._terms.units(self.step)))

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
        busy = [replica for replica, own in zip(ready, shares, strict=True) if own]
        # Not rank 0 if possible: it sums the gradients.
        writer = heir if heir in busy else busy[0]
        self._open = set()
        for replica, parts in zip(ready, shares, strict=True):
            if not parts:
                continue
            seat = self._seats[replica]
            seat.units = {unit for part in parts for unit in range(*part)}
            seat.due = now + self._terms.timeout
            yield self._order(
                replica,
                may_save=replica == writer,
                heir=replica == heir,
                step=self.step,
                parts=parts,
            )

    def _catch_up(self) -> Effects:
        assert self.step is not None
        for replica, seat in sorted(self._seats.items()):
            if seat.waiting and seat.held is not None and seat.held < self.step:
                if self._reaches(seat.held):
                    yield self._order(replica)
                else:
                    seat.held = None  # It has to fetch a state again.

    def _end(self, ready: Sequence[int]) -> Effects:
        # No replica leaves before the last checkpoint is complete: if its writer is
        # lost, another one has to write it.
        if self._save_due or self._saver is not None:
            writers = ready if self._saver is None else [self._saver]
            for replica in [each for each in writers if each in ready][:1]:
                yield self._order(replica, may_save=True, wait=True)
            return
        for replica in ready:
            self._over = self._seats[replica].ended = True
            yield self._order(replica, end=True)

    def _order(self, replica: int, may_save: bool = False, **fields: Any) -> Order:
        """The order to catch up with the present, and further fields of it."""
        assert self.step is not None
        seat = self._seats[replica]
        assert seat.held is not None
        seat.waiting = False
        # One replica writes at a time. One that is still writing after the last step
        # waits for both checkpoints, which it writes in turn.
        free = self._saver is None or ("wait" in fields and self._saver == replica)
        save = may_save and self._save_due and free
        if save:
            self._saver, self._save_due = replica, False
        apply = tuple(range(seat.held, self.step))
        directive = Directive(self.generation, apply=apply, save=save, **fields)
        return Order(replica, directive)

    def _provide_states(self) -> Effects:
        """Lets replicas without a state fetch one, or restore the last checkpoint."""
        for replica, seat in sorted(self._seats.items()):
            if not seat.waiting or seat.held is not None:
                continue
            holders = self._holders(without=replica)
            if holders:
                # A holder that was out of reach is tried again if there is no other.
                source = min(holders, key=lambda each: each in seat.avoid)
                seat.waiting, seat.source = False, source
                seat.base = self._seats[source].held
                yield Order(replica, Directive(self.generation, fetch=source))
            elif self._over:
                seat.waiting, seat.ended = False, True
                yield Order(replica, Directive(self.generation, end=True, late=True))
            elif not any(each.restoring for each in self._seats.values()):
                # One replica restores and the others fetch from it, so that all have
                # the same state. States of expelled replicas are given up.
                self._restart()
                seat.waiting, seat.restoring = False, True
                yield Order(replica, Directive(self.generation, restore=True))

    def _restart(self) -> None:
        self.generation += 1
        self.step = None
        self._done.clear()
        self._open.clear()
        self._begun = self._save_due = False
        self._saver = None
        for seat in self._seats.values():
            seat.held, seat.units = None, set()


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

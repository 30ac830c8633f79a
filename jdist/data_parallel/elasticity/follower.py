"""A replica of an elastic run: it does what the leader says, and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, Protocol, TypeVar

from jdist.data_parallel.elasticity.leader import Directive, Part, ReplicaReport

__all__ = ["Follower", "Snapshot", "Unreachable", "Work"]

State = TypeVar("State")
Sum = TypeVar("Sum")


class Unreachable(Exception):
    """A replica did not hand out its state."""


class Snapshot(NamedTuple, Generic[State]):
    """A state, and which one it is."""

    generation: int
    """See `Directive`."""

    held: int | None
    """Steps that it has taken; None if there is no state."""

    state: State | None
    """The state."""


class Work(Protocol[State, Sum]):
    """What a replica does besides following the protocol."""

    def restore(self) -> tuple[int, State]:
        """The last checkpoint, or the first parameters; and the steps in it."""

    def fetch(self, replica: int) -> Snapshot[State]:
        """The state of another replica.

        Raises:
          Unreachable: It does not hand it out.
        """

    def apply(self, state: State, step: int, total: Sum) -> State:
        """The state after a step, from the sum of its parts."""

    def compute(self, state: State, step: int, part: Part) -> list[tuple[Part, Sum]]:
        """Sums of the units of a part, each with the units that it is of."""

    def save(self, step: int, state: State) -> Future[None]:
        """Begins to write a checkpoint; done when it is complete."""


class Follower(Generic[State, Sum]):
    """A replica; see the module.

    Args:
      work: What it computes with.

    Attributes:
      snapshot: Its state. Replaced as a whole: another thread may hand it out.
      heir: Whether it writes a checkpoint if the leader is lost.
      over: Whether the run is.
    """

    def __init__(self, work: Work[State, Sum]) -> None:
        self.snapshot: Snapshot[State] = Snapshot(0, None, None)
        self.heir = False
        self.over = False
        self._work = work
        self._saving: tuple[int, Future[None]] | None = None

    def first_report(self) -> ReplicaReport:
        """What a newcomer says."""
        return ReplicaReport()

    def follow(
        self, directive: Directive, totals: Mapping[int, Sum]
    ) -> tuple[ReplicaReport, Sequence[Sum]]:
        """Does what the leader says.

        Args:
          directive: What that is.
          totals: The sums of the steps that are to be applied.

        Returns:
          The next report, and the sums of its parts.
        """
        unreachable = None
        if directive.late or directive.generation != self.snapshot.generation:
            # An earlier state, or one of before a restart, must not pass for a result.
            self.snapshot = Snapshot(directive.generation, None, None)
        if directive.restore:
            self.snapshot = Snapshot(directive.generation, *self._work.restore())
        elif directive.fetch is not None:
            unreachable = self._fetch(directive.generation, directive.fetch)
        self._apply(directive.apply, totals)
        generation, held, state = self.snapshot
        found: list[tuple[Part, Sum]] = []
        if state is not None and held is not None:
            if directive.save:
                self._finish_saving()
                self._saving = (held, self._work.save(held, state))
            if directive.step is not None:
                for part in directive.parts:
                    found += self._work.compute(state, directive.step, part)
        self.heir = directive.heir
        if directive.end:
            self._finish_saving()
            self.over = True
        report = ReplicaReport(
            generation,
            held,
            directive.step,
            tuple(part for part, _ in found),
            self._saved(),
            unreachable,
        )
        return report, [total for _, total in found]

    def _fetch(self, generation: int, source: int) -> int | None:
        """Takes a state; the source if that did not work."""
        try:
            snapshot = self._work.fetch(source)
        except Unreachable:
            return source
        if snapshot.generation != generation or snapshot.held is None:
            return source
        self.snapshot = snapshot
        return None

    def _apply(self, steps: Sequence[int], totals: Mapping[int, Sum]) -> None:
        for step in steps:
            state = self.snapshot.state
            assert self.snapshot.held == step
            assert state is not None
            after = self._work.apply(state, step, totals[step])
            self.snapshot = Snapshot(self.snapshot.generation, step + 1, after)

    def _saved(self) -> int | None:
        """The step of a checkpoint that is complete since the last report."""
        if self._saving is None or not self._saving[1].done():
            return None
        return self._finish_saving()

    def _finish_saving(self) -> int | None:
        if self._saving is None:
            return None
        (step, written), self._saving = self._saving, None
        written.result()
        return step

"""A replica of an elastic run: it follows the leader's directives and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, Protocol, TypeVar

from jdist.data_parallel.elasticity.leader import Directive, Part, ReplicaReport

State = TypeVar("State")
Sum = TypeVar("Sum")


class Unreachable(Exception):
    """A replica did not send its state."""


class Snapshot(NamedTuple, Generic[State]):
    """A state, with its generation and its step."""

    generation: int
    """See `Directive`."""

    held: int | None
    """Number of steps that its state has taken; None without a state."""

    state: State | None
    """The state."""


class Work(Protocol[State, Sum]):
    """The computation of a replica, without the protocol."""

    def restore(self) -> tuple[int, State]:
        """Returns the last checkpoint, or the first state, and its number of steps."""

    def fetch(self, replica: int) -> Snapshot[State]:
        """Fetches the state of another replica.

        Raises:
          Unreachable: It does not hand it out.
        """

    def apply(self, state: State, step: int, total: Sum) -> State:
        """Computes the state after a step from the sum of its parts."""

    def compute(self, state: State, step: int, part: Part) -> list[tuple[Part, Sum]]:
        """Computes the sums of a part, each with its range of units."""

    def save(self, step: int, state: State) -> Future[None]:
        """Begins to write a checkpoint; the future is done when it is complete."""


class Follower(Generic[State, Sum]):
    """A replica; see the module.

    Args:
      work: Its computation.

    Attributes:
      snapshot: Its state.
      heir: Whether it writes a checkpoint if the leader is lost.
      over: Whether the run is over.
    """

    def __init__(self, work: Work[State, Sum]) -> None:
        # Always replaced as a whole, since another thread may be sending it.
        self.snapshot: Snapshot[State] = Snapshot(0, None, None)
        self.heir = False
        self.over = False
        self._work = work
        self._saving: tuple[int, Future[None]] | None = None

    def first_report(self) -> ReplicaReport:
        """The report of a newcomer."""
        return ReplicaReport()

    def follow(
        self, directive: Directive, totals: Mapping[int, Sum]
    ) -> tuple[ReplicaReport, Sequence[Sum]]:
        """Carries out a directive.

        Args:
          directive: The leader's answer to the last report.
          totals: The sums of the steps to apply.

        Returns:
          The next report, and the sums of its parts.
        """
        unreachable = None
        if directive.late or directive.generation != self.snapshot.generation:
            # A state from before a restart, or an earlier one, must not be a result.
            self.snapshot = Snapshot(directive.generation, None, None)
        if directive.restore:
            self.snapshot = Snapshot(directive.generation, *self._work.restore())
        elif directive.fetch is not None:
            unreachable = self._fetch(directive.generation, directive.fetch)
        self._apply(directive.apply, totals)
        generation, held, state = self.snapshot
        found: list[tuple[Part, Sum]] = []
        if state is not None and held is not None:
            # Before the computation: the checkpoint is written while that runs.
            if directive.save:
                # One checkpoint at a time: `_saving` has room for one.
                self._finish_saving()
                self._saving = (held, self._work.save(held, state))
            if directive.step is not None:
                for part in directive.parts:
                    found += self._work.compute(state, directive.step, part)
        self.heir = directive.heir
        if directive.end:
            # A failed write raises here, while `close` would only wait.
            self._finish_saving()
            self.over = True
        report = ReplicaReport(
            generation,
            held,
            directive.step,
            tuple(part for part, _ in found),
            self._finish_saving() if directive.wait else self._saved(),
            unreachable,
        )
        return report, [total for _, total in found]

    def _fetch(self, generation: int, source: int) -> int | None:
        """Fetches a state; returns the source if that failed, else None."""
        try:
            snapshot = self._work.fetch(source)
        except Unreachable:
            return source
        # A state from before a restart is of no use.
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
        """The step of a checkpoint completed since the last report, or None."""
        # Does not wait: a report delayed by the disk could miss its deadline.
        if self._saving is None or not self._saving[1].done():
            return None
        return self._finish_saving()

    def _finish_saving(self) -> int | None:
        if self._saving is None:
            return None
        (step, written), self._saving = self._saving, None
        written.result()
        return step

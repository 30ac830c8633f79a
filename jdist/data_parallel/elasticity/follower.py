"""A replica of an elastic run: it follows the leader's directives and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from jdist.data_parallel.elasticity.leader import Directive, Part, ReplicaReport
from jdist.data_parallel.elasticity.replica_work import ReplicaWork, Snapshot
from jdist.reduction import Partial


class Follower:
    """A replica; see the module.

    Args:
      work: Its computation.
      fetch: The state of another replica; None if that did not send it.

    Attributes:
      snapshot: Its state.
      heir: Whether it writes a checkpoint if the leader is lost.
      over: Whether the run is over.
    """

    def __init__(
        self, work: ReplicaWork, fetch: Callable[[int], Snapshot | None]
    ) -> None:
        # Always replaced as a whole, since another thread may be sending it.
        self.snapshot = Snapshot(0, None, None)
        self.heir = False
        self.over = False
        self._work, self._fetch = work, fetch
        self._saving: tuple[int, Future[None]] | None = None

    def follow(
        self, directive: Directive, totals: Mapping[int, Partial]
    ) -> tuple[ReplicaReport, Sequence[Partial]]:
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
            fetched = self._fetch(directive.fetch)
            # A state from before a restart is of no use.
            if fetched is None or fetched.generation != directive.generation:
                unreachable = directive.fetch
            else:
                self.snapshot = fetched
        self._apply(directive.apply, totals)
        generation, held, state = self.snapshot
        found: list[tuple[Part, Partial]] = []
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

    def _apply(self, steps: Sequence[int], totals: Mapping[int, Partial]) -> None:
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

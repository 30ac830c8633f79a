"""A replica of an elastic run: it follows the leader's directives and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from jdist.data_parallel.elasticity.leader import Directive, Part, ReplicaReport
from jdist.data_parallel.elasticity.replica_work import ReplicaWork, Snapshot
from jdist.reduction import Partial


class Follower:
    """A replica; see the module.

    Args:
      work: Its computation.
      steps: Number of steps of the run.
      save_every: Steps between the checkpoints that it writes, beside that of the last
        step; None: it writes none.

    Attributes:
      snapshot: Its state.
      heir: Whether it writes a checkpoint if the leader is lost.
      over: Whether the run is over.
    """

    def __init__(self, work: ReplicaWork, steps: int, save_every: int | None) -> None:
        # Always replaced as a whole, since another thread may be sending it.
        self.snapshot = Snapshot(None, None)
        self.heir = False
        self.over = False
        self._work, self._steps, self._save_every = work, steps, save_every
        self._save_due = False
        self._saving: Future[None] | None = None

    def follow(
        self,
        directive: Directive,
        totals: Mapping[int, Partial],
        fetched: Snapshot | None = None,
    ) -> tuple[ReplicaReport, Sequence[Partial]]:
        """Carries out a directive.

        Args:
          directive: The leader's answer to the last report.
          totals: The sums of the steps to apply.
          fetched: The state of rank 0, if it is to be taken.

        Returns:
          The next report, and the sums of its parts.
        """
        if fetched is not None:
            self.snapshot = fetched
        for step in directive.apply:
            self._apply(step, totals[step])
        held, state = self.snapshot
        found: list[tuple[Part, Partial]] = []
        if state is not None and directive.step is not None:
            for part in directive.parts:
                found += self._work.compute(state, directive.step, part)
        self.heir, self.over = directive.heir, directive.end
        parts = tuple(part for part, _ in found)
        report = ReplicaReport(held, directive.step, parts)
        return report, [total for _, total in found]

    def _apply(self, step: int, total: Partial) -> None:
        held, state = self.snapshot
        assert held == step
        assert state is not None
        self.snapshot = Snapshot(step + 1, self._work.apply(state, step, total))
        if self._save_every is not None:
            self._save(self._save_every)

    def _save(self, every: int) -> None:
        """Begins to write a checkpoint if one is due, and completes that of the end."""
        held, state = self.snapshot
        assert held is not None
        assert state is not None
        is_last = held == self._steps
        self._save_due |= is_last or held % every == 0
        # One at a time. The steps go on while it is written, so a later one may be
        # saved in place of that for which there was no time.
        if self._saving is not None and (is_last or self._saving.done()):
            self._saving.result()
            self._saving = None
        if self._save_due and self._saving is None:
            self._save_due = False
            self._saving = self._work.save(held, state)
        if is_last and self._saving is not None:
            # A failed write raises here, while `close` would only wait.
            self._saving.result()

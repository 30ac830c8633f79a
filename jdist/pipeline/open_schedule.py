"""The schedule of an epoch whose length shows only at its end.

A worker does the same in all epochs until one of them has no micro-batch for its next
forward pass: only the drain depends on the length. So its actions are read from the
schedule of some longer epoch, one at a time, and from that of the true length once it
is known. The same is true of the versions of the weights that micro-batches meet.
"""

from collections.abc import Callable

import numpy as np

from jdist.pipeline.batch_stream import BatchStream
from jdist.pipeline.schedule import Schedule
from jdist.pipeline.schedule_actions import Action
from jdist.pipeline.schedule_versions import live_versions, versions_used


class OpenSchedule:
    """What workers do, and with which weights, as long as batches come.

    Args:
      of: The schedule of an epoch, by its number of micro-batches.
      stream: The micro-batches.

    Attributes:
      kept: How many versions of a stage's weights its worker keeps at most, however
        long the epoch is; `(stages, workers)`.
    """

    def __init__(self, of: Callable[[int], Schedule], stream: BatchStream) -> None:
        self._of = of
        self._stream = stream
        self._slack = steady_length(of(1))
        self._make(self._slack)
        made = self._made
        self.kept = live_versions(made.columns, made.updates)

    def version(self, stage: int, micro: int) -> int:
        """The version that a micro-batch meets at a stage."""
        self._close()
        if self._stream.length is None:
            while micro + self._slack > self._made.micro_batches:
                self._make(2 * self._made.micro_batches)
        return int(self._versions[stage, micro])

    def action(self, worker: int, number: int) -> Action | None:
        """A worker's action by its number, if there is a micro-batch for it.

        None after the last one of an epoch that has ended.
        """
        self._close()
        if self._stream.length is None:
            while number >= self._sure[worker]:
                self._make(2 * self._made.micro_batches)
        actions = self._actions[worker]
        return actions[number] if number < len(actions) else None

    def _close(self) -> None:
        """Once the stream has ended: the schedule is that of its length."""
        length = self._stream.length
        if length is not None and self._made.micro_batches != length:
            self._make(length)

    def _make(self, length: int) -> None:
        self._made = self._of(length)
        self._versions: np.ndarray = versions_used(self._made)
        workers = range(self._made.workers)
        self._actions = [self._made.actions(worker) for worker in workers]
        # Up to its last forward pass a worker does the same in a longer epoch.
        self._sure = [
            max((i + 1 for i, a in enumerate(actions) if a.kind == "F"), default=0)
            for actions in self._actions
        ]


class OpenActions:
    """What one worker does as long as batches come; see `Actions`.

    Args:
      schedule: Of all workers.
      stream: The micro-batches, of which one is read when its forward pass is next.
      worker: Which.
    """

    def __init__(
        self, schedule: OpenSchedule, stream: BatchStream, worker: int
    ) -> None:
        self._schedule = schedule
        self._stream = stream
        self._worker = worker
        self._done = 0

    def next(self) -> Action | None:
        """See `Actions`; reads the batch of a forward pass."""
        action = self._schedule.action(self._worker, self._done)
        if action is None or action.kind != "F":
            return action
        if self._stream.reaches(action.micro_batch):
            return action
        return self._schedule.action(self._worker, self._done)

    def advance(self) -> None:
        """See `Actions`."""
        self._done += 1


def steady_length(schedule: Schedule) -> int:
    """Micro-batches after which an epoch goes on as it did before.

    All stages are then filled, and as many versions as ever are kept.

    Args:
      schedule: Of an epoch of any length.

    Example:
      >>> from jdist.pipeline.schedules import pipedream
      >>> steady_length(pipedream(3, 1, update_every=2))
      24
    """
    assert schedule.updates is not None
    return 4 * schedule.workers * schedule.updates.every

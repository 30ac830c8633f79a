"""The schedule of an epoch whose length shows only at its end.

A worker does the same in all epochs until one of them has no micro-batch for its next
forward pass: only the drain depends on the length. So its actions are read from the
schedule of some longer epoch, one at a time, and from that of the true length once it
is known. The same is true of the versions of the weights that micro-batches meet.
"""

from collections.abc import Callable

from jdist.pipeline.pipedream.batch_stream import BatchStream
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.versions import live_versions, versions_used


class OpenSchedule:
    """What workers do, and with which weights, as long as batches come.

    Args:
      of: The schedule of an epoch, by its number of micro-batches.
      stream: The micro-batches.

    Attributes:
      kept: How many versions of a stage's weights its worker keeps at most, however
        long the epoch is; `(stages, workers)`.
      updates: When weights are updated, however long the epoch is.
    """

    def __init__(self, of: Callable[[int], Schedule], stream: BatchStream) -> None:
        self._of = of
        self._stream = stream
        self._drains: dict[int, list[Action]] = {}
        self._make(steady_length(of(1)))
        assert self._longer.updates is not None
        self.updates = self._longer.updates
        self.kept = live_versions(self._longer.columns, self.updates)

    def version(self, stage: int, micro: int) -> int:
        """The version that a micro-batch meets at a stage, if it exists."""
        while micro >= self._longer.micro_batches:
            self._make(2 * self._longer.micro_batches)
        return int(self._versions[stage, micro])

    def has_ended(self, worker: int) -> bool:
        """Whether a worker has looked in vain for another micro-batch.

        What others know does not count: what it keeps and when it updates must not
        depend on where they are.
        """
        return worker in self._drains

    def may_have(self, worker: int, micro: int) -> bool:
        """Whether a micro-batch may exist, as far as a worker has looked."""
        length = self._stream.length
        return not self.has_ended(worker) or length is None or micro < length

    def look(self, worker: int, number: int) -> Action | None:
        """A worker's action by its number; reads the batch of a forward pass.

        None after the last one of an epoch that has ended.
        """
        if not self.has_ended(worker):
            while number >= self._sure[worker]:
                self._make(2 * self._longer.micro_batches)
            action = self._actions[worker][number]
            if action.kind != "F" or self._stream.reaches(action.micro_batch):
                return action
            assert self._stream.length is not None
            self._drains[worker] = self._of(self._stream.length).actions(worker)
        actions = self._drains[worker]
        return actions[number] if number < len(actions) else None

    def _make(self, length: int) -> None:
        self._longer = self._of(length)
        self._versions = versions_used(self._longer)
        workers = range(self._longer.workers)
        self._actions = [self._longer.actions(worker) for worker in workers]
        # Up to its last forward pass a worker does the same in a longer epoch.
        self._sure = [
            max((i + 1 for i, a in enumerate(actions) if a.kind == "F"), default=0)
            for actions in self._actions
        ]


class OpenActions:
    """What one worker does as long as batches come; see `Actions`.

    Args:
      schedule: Of all workers.
      worker: Which.
    """

    def __init__(self, schedule: OpenSchedule, worker: int) -> None:
        self._schedule = schedule
        self._worker = worker
        self._done = 0

    def next(self) -> Action | None:
        """See `Actions`; reads the batch of a forward pass."""
        return self._schedule.look(self._worker, self._done)

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

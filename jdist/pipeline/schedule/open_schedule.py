"""Schedules of epochs whose length is known only at their end.

Until a worker finds no micro-batch for its next forward pass, its actions are the same
in all longer epochs; the length affects the drain alone. So the actions are read one by
one from the schedule of a longer epoch, and from that of the true length once it is
known. The same holds for the versions of the weights that micro-batches use.
"""

import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from jdist.pipeline.schedule.actions import Action, F
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.versions import live_versions


class MicroBatchStream(Protocol):
    """A stream of numbered micro-batches."""

    @property
    def length(self) -> int | None:
        """Number of micro-batches; None until the end was reached."""

    def reaches(self, micro: int) -> bool:
        """Whether the stream has a micro-batch of that number; reads up to it."""


class OpenSchedule:
    """The actions and weight versions of all workers, for a stream of micro-batches.

    Args:
      schedule: An asynchronous schedule that `Schedule.resized` can extend.
      stream: The micro-batches.

    Attributes:
      kept: The most versions of a stage's weights that its worker keeps at a time, for
        an epoch of any length; `(stages, workers)`.
    """

    def __init__(self, schedule: Schedule, stream: MicroBatchStream) -> None:
        self._stream = stream
        self._ended: set[int] = set()
        self._drained: Schedule | None = None
        # Long enough that `kept` has its final values.
        self._read(schedule.resized(steady_length(schedule)))
        self.kept = live_versions(self._longer.columns, self._longer.update_policy)

    def version(self, stage: int, micro: int) -> int:
        """The version that a micro-batch uses at a stage, if the micro-batch exists."""
        while micro >= self._longer.micro_batches:
            self._double()
        return int(self._versions[stage, micro])

    def has_ended(self, worker: int) -> bool:
        """Whether a worker has found no micro-batch for its next forward pass.

        Other workers may have found it earlier.
        """
        # Not `self._stream.length`, which another worker of the process may have found:
        # a worker's versions and updates must not depend on where the others run.
        return worker in self._ended

    def may_have(self, worker: int, micro: int) -> bool:
        """Whether a micro-batch may exist, as far as a worker has read."""
        length = self._stream.length
        return not self.has_ended(worker) or length is None or micro < length

    def actions(self, worker: int) -> Iterator[Action]:
        """A worker's actions in order; reads the batch of each forward pass."""
        done = 0
        while True:
            while done == self._certain[worker]:
                self._double()
            span = slice(done, self._certain[worker])
            for action in self._longer.columns.actions(worker, span):
                if action.kind == "F" and not self._stream.reaches(action.micro_batch):
                    self._ended.add(worker)
                    yield from self._drain().columns.actions(worker, slice(done, None))
                    return
                yield action
                done += 1

    def _drain(self) -> Schedule:
        """The schedule of the true length, the same up to the end of the batches."""
        if self._drained is None:
            assert self._stream.length is not None
            self._drained = self._longer.resized(self._stream.length)
        return self._drained

    def _double(self) -> None:
        # Doubling: the work for an epoch of m micro-batches stays proportional to m.
        self._read(self._longer.resized(2 * self._longer.micro_batches))

    def _read(self, longer: Schedule) -> None:
        self._longer = longer
        self._versions = longer.versions_used()
        # Up to its last forward pass a worker does the same in every longer epoch.
        forward = longer.columns.kind == F
        self._certain = [
            int(np.flatnonzero(forward[start:end]).max(initial=-1)) + 1
            for start, end in itertools.pairwise(longer.columns.first.tolist())
        ]


def steady_length(schedule: Schedule) -> int:
    """The number of micro-batches after which an epoch is in its steady state.

    All stages are then filled, and no longer epoch keeps more versions.

    Args:
      schedule: An asynchronous one, of an epoch of any length.

    Example:
      >>> from jdist.pipeline import pipedream
      >>> steady_length(pipedream(3, 1, update_every=2))
      24
    """
    assert schedule.update_policy is not None
    # A worker runs fewer forward passes ahead than there are workers, and a version
    # lasts for `every` of them; the rest is margin.
    return 4 * schedule.workers * schedule.update_policy.every

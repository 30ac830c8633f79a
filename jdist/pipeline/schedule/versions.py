"""Which weights a micro-batch meets at a stage, and how many versions are kept there.

An asynchronous schedule never waits for all micro-batches before it updates. Version v
of a stage's weights is what v updates have made of the initial ones. A backward pass
uses the version that its forward pass used, so a version is kept as long as a
micro-batch may still need it. All of this follows from the order of a worker's actions.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import B, Columns, F

if TYPE_CHECKING:
    from jdist.pipeline.schedule.schedule import Schedule, Updates


class _Turn(NamedTuple):
    """What one worker does of one stage, at its forward and backward passes only."""

    worker: int
    stage: int
    micro_batch: np.ndarray
    """Those it gets, in the order of their forward passes."""
    forward: np.ndarray
    """Whether each of its passes is a forward pass."""


def versions_used(schedule: "Schedule") -> np.ndarray:
    """The version that each micro-batch meets at each stage, in forward and backward.

    With several workers for a stage each counts its own updates.

    Returns:
      int32, `(stages, micro_batches)`; all 0 for a schedule with a flush.

    Raises:
      ValueError: A worker's backward passes come in another order than its forward
        passes, or a stage has several workers where `uses` is not "latest".

    Example:
      >>> from jdist.pipeline.schedules import pipedream
      >>> versions_used(pipedream(3, 6))
      array([[0, 0, 0, 1, 2, 3],
             [0, 0, 1, 2, 3, 4],
             [0, 1, 2, 3, 4, 5]], dtype=int32)
    """
    found = np.zeros((schedule.stages, schedule.micro_batches), np.int32)
    if schedule.updates is not None:
        for turn, used in _used(schedule.columns, schedule.updates):
            found[turn.stage, turn.micro_batch] = used
    return found


def live_versions(columns: Columns, updates: "Updates | None") -> np.ndarray:
    """How many versions of a stage's weights its worker keeps at most.

    Between a worker's actions these are the newest version, those of micro-batches
    in flight, and, where a micro-batch brings its version along, those of micro-batches
    that are still to come.

    Returns:
      int32, `(stages, workers)`: 0 where the worker has nothing to do with the stage.

    Raises:
      ValueError: As in `versions_used`.
    """
    found = np.zeros((int(columns.stage.max(initial=0)) + 1, columns.workers), np.int32)
    if updates is None:
        found[columns.stage, columns.worker_of_each()] = 1
        return found
    for turn, used in _used(columns, updates):
        kept = _kept(turn, used, updates)
        found[turn.stage, turn.worker] = kept.max()
    return found


def _used(columns: Columns, updates: "Updates") -> Iterator[tuple[_Turn, np.ndarray]]:
    micro_batches = int(columns.micro_batch.max(initial=0)) + 1
    entry = np.zeros(micro_batches, np.int64)
    for turn in sorted(_turns(columns), key=lambda turn: turn.stage):
        done = np.cumsum(~turn.forward) // updates.every
        if updates.uses != "latest" and len(turn.micro_batch) != micro_batches:
            rule = "must be 'latest' where a stage has several workers"
            raise ValueError(requirement("Updates(uses=...)", rule, updates.uses))
        if updates.uses == "latest":
            used = done[turn.forward]
        elif updates.uses == "previous":
            used = np.maximum(turn.micro_batch // updates.every - 1, 0)
        else:
            if turn.stage == 0:
                entry[turn.micro_batch] = done[turn.forward]
            used = entry[turn.micro_batch]
        yield turn, used


def _kept(turn: _Turn, used: np.ndarray, updates: "Updates") -> np.ndarray:
    """Versions kept after each pass."""
    finished = np.cumsum(~turn.forward)
    newest = finished // updates.every
    if updates.uses == "latest":
        last = np.cumsum(turn.forward) - 1
    else:
        last = np.searchsorted(used, newest, side="right") - 1
    # Versions do not decrease along the micro-batches: count where they change.
    change = np.concatenate([[0], np.cumsum(np.diff(used) > 0)])
    first = np.minimum(finished, len(used) - 1)
    needed = np.where(last >= finished, change[last] - change[first] + 1, 0)
    also_newest = (last < finished) | (used[last] < newest)
    return needed + also_newest


def _turns(columns: Columns) -> Iterator[_Turn]:
    for worker in range(columns.workers):
        span = slice(*columns.first[worker : worker + 2])
        kind, stage = columns.kind[span], columns.stage[span]
        for own in np.unique(stage):
            passes = (stage == own) & (kind <= B)
            forward = kind[passes] == F
            micro_batch = columns.micro_batch[span][passes]
            if not np.array_equal(micro_batch[forward], micro_batch[~forward]):
                rule = f"must finish micro-batches in order (worker {worker})"
                got = "another order of backward passes than of forward passes"
                raise ValueError(requirement("Schedule(updates=...)", rule, got))
            yield _Turn(worker, int(own), micro_batch[forward], forward)

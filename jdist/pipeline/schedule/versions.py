"""Versions of weights: the one that a micro-batch uses, and the number kept.

Version v of a stage's weights is the result of v updates of the initial ones. A
backward pass uses the version of its forward pass, so that a version is kept as long as
a micro-batch may still need it. All of this follows from the order of a worker's
actions and the update policy.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jdist._errors import value_error
from jdist.pipeline.schedule.actions import Action, B, Columns, F, ScheduleError
from jdist.pipeline.schedule.update_policy import UpdatePolicy


class _StagePasses(NamedTuple):
    """The forward and backward passes of one stage on one worker.

    Attributes:
      worker: The worker.
      stage: The stage.
      micro_batch: Its micro-batches, in the order of their forward passes.
      forward: For each pass, whether it is a forward pass.
    """

    worker: int
    stage: int
    micro_batch: np.ndarray
    forward: np.ndarray


def live_versions(columns: Columns, policy: UpdatePolicy | None) -> np.ndarray:
    """The most versions of a stage's weights that its worker keeps at a time.

    Between a worker's actions these are the newest version, those of micro-batches in
    flight, and, where a micro-batch enters with its version, those of micro-batches
    that are still to come.

    Returns:
      int32, `(stages, workers)`: 0 where the worker does not run the stage.

    Raises:
      ValueError: As in `Schedule.versions_used`.
    """
    found = np.zeros((int(columns.stage.max(initial=0)) + 1, columns.workers), np.int32)
    if policy is None:
        # A synchronous schedule has one version until its only update.
        found[columns.stage, columns.worker_of_each()] = 1
        return found
    for passes, used in versions_of_stages(columns, policy):
        found[passes.stage, passes.worker] = _kept(passes, used, policy).max()
    return found


def check_versions(columns: Columns, policy: UpdatePolicy) -> None:
    """Checks that the weights that a micro-batch uses exist when it enters a stage.

    With a flush, that a stage has finished all earlier micro-batches at each update.

    Raises:
      ScheduleError: They do not, or it has not ("versions").
      ValueError: As in `Schedule.versions_used`.
    """
    for passes, used in versions_of_stages(columns, policy):
        needed = used
        if policy.rule == "flush":
            # Forward pass k waits for the update after the k // every whole blocks
            # before it, so that none is in flight at an update.
            needed = np.arange(len(used)) // policy.every
        updates = np.cumsum(~passes.forward) // policy.every
        early = np.flatnonzero(updates[passes.forward] < needed)
        if early.size:
            what = f"comes before the {needed[early[0]]} updates that it must follow "
            what += f"under {policy}"
            if policy.rule == "flush":
                what += ": the schedule must drain before each"
            action = Action("F", passes.stage, int(passes.micro_batch[early[0]]))
            raise ScheduleError("versions", what, passes.worker, action)


def versions_of_stages(
    columns: Columns, policy: UpdatePolicy
) -> Iterator[tuple[_StagePasses, np.ndarray]]:
    """The passes of each stage and worker, with the version each micro-batch uses."""
    # By the columns, since a timeline of a run has no schedule.
    micro_batches = int(columns.micro_batch.max(initial=0)) + 1
    entry = np.zeros(micro_batches, np.int64)
    # By stage, because vertical sync takes all versions from stage 0.
    for passes in sorted(_passes(columns), key=lambda passes: passes.stage):
        updates = np.cumsum(~passes.forward) // policy.every
        # A forward pass uses the newest version of its stage.
        by_own_count = policy.rule in ("stashing", "flush")
        if not by_own_count and len(passes.micro_batch) != micro_batches:
            rule = "must be 'stashing' or 'flush' where a stage has several workers"
            raise value_error("UpdatePolicy(rule=...)", rule, policy.rule)
        if by_own_count:
            used = updates[passes.forward]
        elif policy.rule == "2bw":
            # Batch t is computed with w(t-1), and batch 0 with w(0).
            used = np.maximum(passes.micro_batch // policy.every - 1, 0)
        else:
            if passes.stage == 0:
                entry[passes.micro_batch] = updates[passes.forward]
            used = entry[passes.micro_batch]
        yield passes, used


def _kept(passes: _StagePasses, used: np.ndarray, policy: UpdatePolicy) -> np.ndarray:
    """The number of versions kept after each pass."""
    finished = np.cumsum(~passes.forward)
    newest = finished // policy.every
    # Micro-batches still to come may use a version that exists already: the last of
    # those that use at most the newest one. If they take the newest when they enter,
    # that one is kept in any case.
    last = np.searchsorted(used, newest, side="right") - 1
    # Versions never decrease along the micro-batches, so that the number of distinct
    # ones between two micro-batches is the number of increases.
    change = np.concatenate([[0], np.cumsum(np.diff(used) > 0)])
    first = np.minimum(finished, len(used) - 1)
    needed = np.where(last >= finished, change[last] - change[first] + 1, 0)
    # The newest version is kept for the next forward pass, unless counted above.
    also_newest = (last < finished) | (used[last] < newest)
    return needed + also_newest


def _passes(columns: Columns) -> Iterator[_StagePasses]:
    for worker in range(columns.workers):
        span = slice(*columns.first[worker : worker + 2])
        kind, stage = columns.kind[span], columns.stage[span]
        for own in np.unique(stage):
            passes = (stage == own) & (kind <= B)
            forward = kind[passes] == F
            micro_batch = columns.micro_batch[span][passes]
            # `_kept` counts a prefix as finished, which needs one order for both.
            if not np.array_equal(micro_batch[forward], micro_batch[~forward]):
                rule = f"must finish micro-batches in order (worker {worker})"
                got = "another order of backward passes than of forward passes"
                raise value_error("Schedule(update_policy=...)", rule, got)
            yield _StagePasses(worker, int(own), micro_batch[forward], forward)

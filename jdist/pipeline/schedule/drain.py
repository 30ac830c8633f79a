"""A shorter drain: cotangents are sent before weight gradients are computed."""

import dataclasses
from functools import partial

import numpy as np

from jdist._errors import check_type, quoted, value_error
from jdist.pipeline.schedule.actions import B, Columns, F, W
from jdist.pipeline.schedule.schedule import Schedule, derived


def split_drain(schedule: Schedule) -> Schedule:
    """The same schedule, with the backward passes of its drain split in two.

    After a worker's last forward pass only the last cotangents are left to pass from
    stage to stage, and the weight gradients of each stage delay the stage before it.
    Here a stage sends the cotangent first (B) and computes its weight gradients right
    afterwards (W). With W no longer than F, the bubble of (n-1)(F + B) becomes
    (n-1)(F + B - W). Backward passes before the drain stay whole, since two halves cost
    slightly more, and so do those of the first stage, which no worker waits for. The
    order is unchanged. Between its B and its W a worker holds the cotangents of one
    more micro-batch than before.

    Args:
      schedule: A synchronous one, such as 1F1B, GPipe or a looped one. Backward passes
        that are split already stay as they are.

    Raises:
      TypeError: It is no schedule.
      ValueError: It has no backward passes, or stages update in between.

    Source:
      The split is that of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, 2.

    Example:
      >>> from jdist.pipeline import one_f_one_b
      >>> print(split_drain(one_f_one_b(2, 3)))
      worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
      worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1W2
    """
    check_type("split_drain(schedule)", schedule, Schedule, "must be a Schedule")
    if schedule.forward_only or schedule.update_policy is not None:
        rule = "must have backward passes and one update after all of them"
        raise value_error("split_drain(schedule)", rule, quoted(schedule))
    columns = schedule.columns
    worker = columns.worker_of_each()
    forward = np.flatnonzero(columns.kind == F)
    last = np.full(columns.workers, -1)
    # NumPy keeps the last assignment to an index: each worker's last forward pass.
    last[worker[forward]] = forward
    # -1 for a worker without forward passes: all its actions are drain.
    drain = np.arange(len(columns)) > last[worker]
    whole = ~schedule.split[columns.stage, columns.micro_batch]
    at = np.flatnonzero(drain & whole & (columns.kind == B) & (columns.stage > 0))
    # `np.insert` counts positions in the array before any insertion.
    split = Columns(
        np.insert(columns.kind, at + 1, W),
        np.insert(columns.stage, at + 1, columns.stage[at]),
        np.insert(columns.micro_batch, at + 1, columns.micro_batch[at]),
        # A worker's actions begin later by the insertions before it.
        columns.first + np.searchsorted(at, columns.first),
    )
    return dataclasses.replace(
        schedule,
        name=f"{schedule.name}, split drain",
        columns=split,
        family=schedule.family and partial(derived, split_drain, schedule.family),
    )

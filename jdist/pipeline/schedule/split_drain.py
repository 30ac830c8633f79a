"""A shorter drain: what the stage before waits for is sent before weight gradients."""

import dataclasses

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import B, Columns, F, W
from jdist.pipeline.schedule.schedule import Schedule


def split_drain(schedule: Schedule) -> Schedule:
    """The same schedule, with the backward passes of its drain split in two.

    After a worker's last forward pass nothing is left but to bring the last cotangents
    from stage to stage, and each stage lets the one before it wait for its weight
    gradients. Here it sends the cotangent first (B) and computes them right afterwards
    (W). With W no longer than F, the bubble of (n-1)(F + B) is one of (n-1)(F + B - W).
    Backward passes before the drain stay whole, since two halves cost a little more,
    and so do those of the first stage, which no worker waits for. The order is that of
    the schedule given. Between its B and its W a worker holds the cotangents of one
    more micro-batch than before.

    Args:
      schedule: With a flush, as 1F1B, GPipe or the looped ones have. What is split in
        it already stays as it is.

    Raises:
      ValueError: It has no backward passes, or stages update in between.

    Source:
      The split is that of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, 2.

    Example:
      >>> from jdist.pipeline.schedules import one_f_one_b
      >>> print(split_drain(one_f_one_b(2, 3)))
      worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
      worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1W2
    """
    if schedule.forward_only or schedule.updates is not None:
        rule = "must have backward passes and one update after all of them"
        call = "split_drain(schedule)"
        raise ValueError(requirement(call, rule, repr(schedule)))
    columns = schedule.columns
    worker = columns.worker_of_each()
    forward = np.flatnonzero(columns.kind == F)
    last = np.full(columns.workers, -1)
    last[worker[forward]] = forward  # of one worker's, the later one stays
    drain = np.arange(len(columns)) > last[worker]
    whole = ~schedule.split[columns.stage, columns.micro_batch]
    at = np.flatnonzero(drain & whole & (columns.kind == B) & (columns.stage > 0))
    more = np.bincount(worker[at], minlength=columns.workers) > 0
    bound = schedule.activation_bound
    split = Columns(
        np.insert(columns.kind, at + 1, W),
        np.insert(columns.stage, at + 1, columns.stage[at]),
        np.insert(columns.micro_batch, at + 1, columns.micro_batch[at]),
        columns.first + np.searchsorted(at, columns.first),
    )
    return dataclasses.replace(
        schedule,
        name=f"{schedule.name}, split drain",
        columns=split,
        given_clock=None,
        activation_bound=None
        if bound is None
        else tuple(b + int(one) for b, one in zip(bound, more, strict=True)),
        clock_bound=None,
    )

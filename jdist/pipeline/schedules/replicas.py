"""Stages on several workers, which take micro-batches in turn."""

from collections.abc import Sequence

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import WorkerActions, check_counts
from jdist.pipeline.schedule.patterns import alternating
from jdist.pipeline.schedule.schedule import Placement

__all__ = ["ahead_of", "in_turn", "placed", "replica_counts"]


def replica_counts(
    call: str, n: int, replicas: Sequence[int] | None, m: int | None = None
) -> tuple[int, ...]:
    """The workers of each stage.

    Args:
      call: Names the schedule in errors.
      n: Stages.
      replicas: As given; None: one worker each.
      m: Micro-batches, if each worker has to have one.

    Raises:
      ValueError: There are not n numbers, one is below 1 or above `m`.
    """
    counts = (1,) * n if replicas is None else tuple(replicas)
    if len(counts) != n:
        rule = f"must have a number for each of {n} stages"
        raise ValueError(requirement(f"{call}(replicas=...)", rule, counts))
    for count in counts:
        check_counts(call, replicas=count)
    if m is not None and max(counts) > m:
        rule = f"must be at most the {m} micro-batches, for each worker needs one"
        raise ValueError(requirement(f"{call}(replicas=...)", rule, counts))
    return counts


def placed(counts: Sequence[int]) -> Placement:
    """Ranks given out stage by stage."""
    ends = np.cumsum(counts)
    return tuple(
        tuple(range(int(end) - count, int(end)))
        for end, count in zip(ends, counts, strict=True)
    )


def ahead_of(counts: Sequence[int]) -> list[int]:
    """How many forward passes a worker of each stage runs ahead in 1F1B.

    That is floor((w_j - 1) / r_j), with r_j the workers of the stage and w_j those of
    this and all later stages.
    """
    later = np.cumsum(counts[::-1])[::-1]
    return [int(w - 1) // count for w, count in zip(later, counts, strict=True)]


def in_turn(
    counts: Sequence[int], m: int, ahead: Sequence[int]
) -> tuple[list[WorkerActions], tuple[int, ...]]:
    """Each worker's program, and how many micro-batches' activations it holds at most.

    Args:
      counts: Workers of each stage: micro-batch i goes to the (i mod r)-th of them.
      m: Micro-batches.
      ahead: Forward passes that a stage's workers run ahead.
    """
    programs, bound = [], []
    for stage, count in enumerate(counts):
        for turn in range(count):
            every = np.arange(turn, m, count)
            own = (np.full(len(every), stage), every)
            programs.append(alternating(own, own, warm_up=ahead[stage]))
            bound.append(min(len(every), ahead[stage] + 1))
    return programs, tuple(bound)

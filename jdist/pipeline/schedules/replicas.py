"""1F1B and related schedules over stages of one or several workers.

A stage on several workers distributes micro-batches to them round-robin.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jdist._errors import check_type, value_error
from jdist.pipeline.schedule.actions import Columns, WorkerActions, check_counts
from jdist.pipeline.schedule.patterns import alternating
from jdist.pipeline.schedule.schedule import Placement, Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy


def replica_counts(
    call: str, n: int, replicas: Sequence[int] | None, m: int | None = None
) -> tuple[int, ...]:
    """The number of workers of each stage.

    Args:
      call: The schedule's function, for errors.
      n: Stages.
      replicas: The user's argument; None: one worker each.
      m: Micro-batches, if every worker must have one.

    Raises:
      TypeError: It is no sequence.
      ValueError: There are not n numbers, or one is below 1 or above `m`.
    """
    if replicas is None:
        replicas = (1,) * n
    rule = f"must have a number for each of {n} stages"
    check_type(f"{call}(replicas=...)", replicas, (Sequence, np.ndarray), rule)
    counts = tuple(replicas)
    if len(counts) != n:
        raise value_error(f"{call}(replicas=...)", rule, counts)
    for count in counts:
        check_counts(call, replicas=count)
    # A gradient is a sum over replicas, each of which contributes at least one term.
    if m is not None and max(counts) > m:
        rule = f"must be at most the {m} micro-batches, for each worker needs one"
        raise value_error(f"{call}(replicas=...)", rule, counts)
    return counts


def warm_ups(counts: Sequence[int]) -> list[int]:
    """The number of forward passes that a worker of each stage runs ahead in 1F1B.

    It is floor((w_j - 1) / r_j), with r_j the workers of the stage and w_j those of
    this and all later stages.
    """
    # The sum of all later counts: reversed, because `cumsum` adds from the front.
    later = np.cumsum(counts[::-1])[::-1]
    return [int(w - 1) // count for w, count in zip(later, counts, strict=True)]


def alternating_schedule(
    name: str,
    m: int,
    counts: Sequence[int],
    ahead: Sequence[int],
    family: Callable[[int], Schedule],
    update_policy: UpdatePolicy | None = None,
) -> Schedule:
    """A schedule whose workers run some forward passes ahead and then alternate.

    Args:
      name: Name of the family.
      m: Micro-batches.
      counts: Workers of each stage: micro-batch i goes to the (i mod r)-th of them.
      ahead: Forward passes that the workers of each stage run ahead.
      family: See `Schedule`.
      update_policy: See `Schedule`. With "flush" the micro-batches of an update
        alternate by themselves: their last backward passes come before the next ones'
        forward passes.
    """
    block = m
    if update_policy is not None and update_policy.rule == "flush":
        block = update_policy.every
    programs = []
    for stage, count in enumerate(counts):
        for turn in range(count):
            parts = []
            for begin in range(0, m, block):
                # The last block may be shorter.
                every = np.arange(begin + turn, min(begin + block, m), count)
                own = (np.full(len(every), stage), every)
                parts.append(alternating(own, own, warm_up=ahead[stage]))
            joined = map(np.concatenate, zip(*parts, strict=True))
            programs.append(WorkerActions(*joined))
    return Schedule(
        name,
        m,
        _placement(counts),
        Columns.joined(programs),
        update_policy=update_policy,
        family=family,
    )


def _placement(counts: Sequence[int]) -> Placement:
    """Ranks assigned stage by stage."""
    ends = np.cumsum(counts)
    return tuple(
        tuple(range(int(end) - count, int(end)))
        for end, count in zip(ends, counts, strict=True)
    )

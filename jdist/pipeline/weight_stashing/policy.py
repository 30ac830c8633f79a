"""Schedules of an epoch under PipeDream's weight update policies."""

from collections.abc import Sequence
from typing import get_args

from jdist._errors import check_choice, requirement
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdateRule
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.schedules.pipedream_2bw import pipedream_2bw
from jdist.pipeline.schedules.pipedream_flush import pipedream_flush


def schedule_of_epoch(
    policy: UpdateRule,
    n: int,
    m: int,
    replicas: Sequence[int] | None,
    update_every: int | None,
) -> Schedule:
    """Makes the schedule of an epoch under a policy.

    Args:
      policy: See `PipeDream`.
      n: Number of stages.
      m: Number of micro-batches of the epoch.
      replicas: Number of workers of each stage; None: one each.
      update_every: Micro-batches of a worker per update; None: 1, or n for "2bw".

    Raises:
      ValueError: The policy is unknown, or cannot have replicas; or what the schedules
        raise.

    Example:
      >>> schedule_of_epoch("2bw", 3, 12, None, None).update_policy
      UpdatePolicy(rule='2bw', every=3)
    """
    check_choice("PipeDream(policy=...)", policy, get_args(UpdateRule))
    if policy == "stashing":
        every = 1 if update_every is None else update_every
        return pipedream(n, m, replicas=replicas, update_every=every)
    if replicas is not None and any(count != 1 for count in replicas):
        rule = f"must be 1 for each stage with the policy {policy!r}"
        remedy = "Versions of replicas count their own updates: use 'stashing'."
        call = "PipeDream(replicas=...)"
        raise ValueError(requirement(call, rule, tuple(replicas), remedy))
    if policy == "2bw":
        return pipedream_2bw(n, m, update_every=update_every)
    every = 1 if update_every is None else update_every
    if policy == "flush":
        return pipedream_flush(n, m, update_every=every)
    return pipedream(n, m, update_every=every, policy="vertical_sync")


def schedule_of_step(schedule: Schedule) -> Schedule:
    """The schedule of a synchronous step, from that of an epoch.

    Example:
      >>> schedule_of_step(pipedream_flush(3, 4, update_every=1)) == one_f_one_b(3, 4)
      True
    """
    policy, shape = schedule.update_policy, (schedule.stages, schedule.micro_batches)
    assert policy is not None
    # A flush schedule drains only for its updates: without them each drain would be a
    # needless bubble.
    if policy.rule == "flush" and schedule == pipedream_flush(
        *shape, update_every=policy.every
    ):
        return one_f_one_b(*shape)
    return schedule.synchronous()

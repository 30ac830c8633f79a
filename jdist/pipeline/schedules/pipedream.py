"""PipeDream: 1F1B without a flush, with asynchronous updates and replicated stages."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedules.replicas import (
    alternating_schedule,
    replica_counts,
    warm_ups,
)


def pipedream(
    n: int,
    m: int,
    *,
    replicas: Sequence[int] | None = None,
    update_every: int = 1,
    policy: Literal["stashing", "vertical_sync"] = "stashing",
) -> Schedule:
    """Asynchronous 1F1B for n stages and an epoch of m micro-batches.

    A stage updates after each backward pass, and the pipeline drains only after the
    m-th micro-batch: the bubble of an epoch is that of one flush. A backward pass uses
    the weights that its forward pass used, so a worker keeps several versions, which
    `simulate(...).weight_versions` counts.

    A stage on several workers gives micro-batch i to the (i mod r)-th of them, forward
    and backward. A worker of stage j runs floor((w_j - 1) / r_j) forward passes ahead,
    with r_j the workers of the stage and w_j those of this and all later stages;
    without replicas n - j - 1.

    Args:
      n: Stages.
      m: Micro-batches until the pipeline drains.
      replicas: Workers of each stage; None: one each. Ranks are given out in order.
      update_every: Backward passes of a worker per update (macro-batches).
      policy: See `UpdatePolicy`.

    Raises:
      ValueError: A number is below 1, `replicas` does not have n numbers, or `policy`
        is unknown.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.2 and 3.3.

    Example:
      >>> print(pipedream(2, 4, replicas=(2, 1)))
      worker 0 | 0F0 0F2  .  0B0  .   .   .  0B2  .   .
      worker 1 | 0F1 0F3  .   .   .  0B1  .   .   .  0B3
      worker 2 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3  .
    """
    check_counts("pipedream", n=n, m=m, update_every=update_every)
    # 2BW and flush need other orders, or an interval that fits the stages.
    if policy not in ("stashing", "vertical_sync"):
        rule = "must be 'stashing' or 'vertical_sync'"
        remedy = "Other policies have a schedule of their own, such as `pipedream_2bw`."
        raise ValueError(requirement("pipedream(policy=...)", rule, policy, remedy))
    counts = replica_counts("pipedream", n, replicas)
    family = partial(
        pipedream, n, replicas=counts, update_every=update_every, policy=policy
    )
    updates = UpdatePolicy(policy, update_every)
    ahead = warm_ups(counts)
    return alternating_schedule("PipeDream", m, counts, ahead, family, updates)

"""PipeDream: 1F1B over an epoch, under four policies of when stages update."""

from collections.abc import Sequence
from functools import partial
from typing import get_args

from jdist._errors import check_choice, value_error
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy, UpdateRule
from jdist.pipeline.schedules.replicas import (
    alternating_schedule,
    replica_counts,
    warm_ups,
)

_NAMES = {
    "stashing": "PipeDream",
    "vertical_sync": "PipeDream",
    "2bw": "PipeDream-2BW",
    "flush": "PipeDream-Flush",
}


def pipedream(
    n: int,
    m: int,
    *,
    policy: UpdateRule = "stashing",
    replicas: Sequence[int] | None = None,
    update_every: int | None = None,
) -> Schedule:
    """Asynchronous 1F1B for n stages and an epoch of m micro-batches.

    Each micro-batch has a gradient and an update of its own (or `update_every` of them
    share one), and the pipeline drains only after the m-th: the bubble of an epoch is
    that of one flush. A micro-batch therefore uses weights without the updates of those
    just before it. Its backward pass uses the weights of its forward pass, so a worker
    keeps several versions, which `simulate(...).weight_versions` counts. With stages
    numbered from 1, w_j(t) the weights of stage j after t updates, and w_j(t) = w_j(0)
    for t < 0, an update is

        stashing       w(t+1) = w(t) - lr grad f(w_1(t-n+1), w_2(t-n+2), .., w_n(t))
        vertical_sync  w(t+1) = w(t) - lr grad f(w_1(t-n+1), .., w_n(t-n+1))
        2bw            w(t+1) = w(t) - lr grad f(w(t-1))
        flush          w(t+1) = w(t) - lr grad f(w(t))

    and likewise for any optimizer. "flush" has a flush before each update, so that all
    stages have one version, as in GPipe.

    A stage on several workers gives micro-batch i to the (i mod r)-th of them, forward
    and backward. A worker of stage j runs floor((w_j - 1) / r_j) forward passes ahead,
    with r_j the workers of the stage and w_j those of this and all later stages;
    without replicas n - j - 1.

    Args:
      n: Stages.
      m: Micro-batches until the pipeline drains. `Pipeline.train_epoch` takes epochs of
        any length; calls that make no update between the passes have m micro-batches.
      policy: See `UpdatePolicy`.
      replicas: Workers of each stage, which update together; None: one each. Ranks are
        given out in order. With "stashing" only.
      update_every: Backward passes of a worker per update (macro-batches): the gradient
        is the mean (or sum) over all their examples. None: 1, or n under "2bw", which
        needs n at least, and "flush".

    Raises:
      ValueError: A number is below 1, or `update_every` below n under "2bw"; `policy`
        is unknown, or cannot have replicas; `replicas` does not have n numbers.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.2 and 3.3; Memory-Efficient
      Pipeline-Parallel DNN Training, ICML 2021.

    Example:
      >>> print(pipedream(2, 4, replicas=(2, 1)))
      worker 0 | 0F0 0F2  .  0B0  .   .   .  0B2  .   .
      worker 1 | 0F1 0F3  .   .   .  0B1  .   .   .  0B3
      worker 2 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3  .
      >>> print(pipedream(2, 4, policy="flush"))
      worker 0 | 0F0 0F1  .  0B0  .  0B1 0F2 0F3  .  0B2  .  0B3
      worker 1 |  .  1F0 1B0 1F1 1B1  .   .  1F2 1B2 1F3 1B3  .
    """
    check_choice("pipedream(policy=...)", policy, get_args(UpdateRule))
    least = n if policy in ("2bw", "flush") else 1
    every = least if update_every is None else update_every
    check_counts("pipedream", n=n, m=m, update_every=every)
    counts = replica_counts("pipedream", n, replicas)
    if policy != "stashing" and max(counts) > 1:
        rule = f"must be 1 for each stage with the policy {policy!r}"
        remedy = "Versions of replicas count their own updates: use 'stashing'."
        raise value_error("pipedream(replicas=...)", rule, counts, remedy)
    # With fewer a micro-batch would begin before the version of weights that it uses
    # exists.
    if policy == "2bw" and every < n:
        rule = f"must be at least the {n} stages with the policy '2bw'"
        raise value_error("pipedream(update_every=...)", rule, every)
    updates = UpdatePolicy(policy, every)
    family = partial(pipedream, n, policy=policy, replicas=counts, update_every=every)
    ahead = warm_ups(counts)
    return alternating_schedule(_NAMES[policy], m, counts, ahead, family, updates)

"""GPipe: all forward passes, then all backward passes."""

from collections.abc import Sequence
from functools import partial

from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.replicas import alternating_schedule, replica_counts


def gpipe(n: int, m: int, *, replicas: Sequence[int] | None = None) -> Schedule:
    """GPipe's schedule for n stages, one per worker, and m micro-batches.

    Activations of all m micro-batches are alive on every worker at the end of the
    forward passes.

    Args:
      n: Stages.
      m: Micro-batches.
      replicas: Workers of each stage, which take micro-batches in turn; None: one each.
        Ranks are given out in order.

    Raises:
      ValueError: A number is below 1; `replicas` does not have n numbers, or has one
        above m.

    Source:
      Huang et al., GPipe, NeurIPS 2019.

    Example:
      >>> print(gpipe(2, 3))
      worker 0 | 0F0 0F1 0F2  .   .  0B0 0B1 0B2
      worker 1 |  .  1F0 1F1 1F2 1B0 1B1 1B2  .
    """
    check_counts("gpipe", n=n, m=m)
    counts = replica_counts("gpipe", n, replicas, m)
    family = partial(gpipe, n, replicas=replicas)
    # All forward passes are "ahead" of the first backward pass.
    return alternating_schedule("GPipe", m, counts, [m] * n, family)

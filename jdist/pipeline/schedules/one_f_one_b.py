"""1F1B with a flush: backward passes as early as possible."""

from collections.abc import Sequence
from functools import partial

from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.replicas import (
    alternating_schedule,
    replica_counts,
    warm_ups,
)


def one_f_one_b(n: int, m: int, *, replicas: Sequence[int] | None = None) -> Schedule:
    """1F1B for n stages, one per worker, and m micro-batches.

    Stage j runs n - j - 1 forward passes ahead and then one forward and one backward
    pass in turn. It takes as long as GPipe, but stage j never holds activations of more
    than n - j micro-batches.

    Args:
      n: Stages.
      m: Micro-batches.
      replicas: Workers of each stage, which take micro-batches in turn; None: one each.
        Ranks are given out in order.

    Raises:
      ValueError: A number is below 1; `replicas` does not have n numbers, or has one
        above m.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.2; with a flush: Fan et al., DAPPLE,
      PPoPP 2021, and Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training,
      ICML 2021.

    Example:
      >>> print(one_f_one_b(2, 3))
      worker 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
      worker 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .
    """
    check_counts("one_f_one_b", n=n, m=m)
    counts = replica_counts("one_f_one_b", n, replicas, m)
    family = partial(one_f_one_b, n, replicas=replicas)
    # Fewer passes ahead would let later stages idle; more would hold more activations.
    return alternating_schedule("1F1B", m, counts, warm_ups(counts), family)

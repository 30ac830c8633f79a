"""1F1B with a flush: a backward pass as soon as there is one."""

import numpy as np

from jdist.pipeline.schedule import Schedule
from jdist.pipeline.schedule_actions import Columns
from jdist.pipeline.schedule_program import alternating, check_counts


def one_f_one_b(n: int, m: int) -> Schedule:
    """1F1B for n stages, one per worker, and m micro-batches.

    Stage j does n - j - 1 forward passes ahead and then one forward and one backward
    pass in turn. It takes as long as GPipe, but stage j never holds the activations of
    more than n - j micro-batches, however many there are.

    Raises:
      ValueError: A number is below 1.

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
    every = np.arange(m)
    programs = []
    for stage in range(n):
        own = (np.full(m, stage), every)
        programs.append(alternating(own, own, warm_up=n - stage - 1))
    return Schedule(
        "1F1B",
        m,
        tuple((stage,) for stage in range(n)),
        Columns.joined(programs),
        activation_bound=tuple(min(m, n - stage) for stage in range(n)),
        clock_bound=2 * (m + n - 1),
    )

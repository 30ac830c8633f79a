"""GPipe: all forward passes, then all backward passes."""

import numpy as np

from jdist.pipeline.schedule import Schedule
from jdist.pipeline.schedule_actions import Columns
from jdist.pipeline.schedule_program import alternating, check_counts


def gpipe(n: int, m: int) -> Schedule:
    """GPipe's schedule for n stages, one per worker, and m micro-batches.

    All m micro-batches' activations are alive at the end of the forward passes, on
    every worker.

    Raises:
      ValueError: A number is below 1.

    Source:
      Huang et al., GPipe, NeurIPS 2019.

    Example:
      >>> print(gpipe(2, 3))
      worker 0 | 0F0 0F1 0F2  .   .  0B0 0B1 0B2
      worker 1 |  .  1F0 1F1 1F2 1B0 1B1 1B2  .
    """
    check_counts("gpipe", n=n, m=m)
    every = np.arange(m)
    programs = []
    for stage in range(n):
        own = (np.full(m, stage), every)
        programs.append(alternating(own, own, warm_up=m))
    return Schedule(
        "GPipe",
        m,
        tuple((stage,) for stage in range(n)),
        Columns.joined(programs),
        activation_bound=(m,) * n,
        clock_bound=2 * (m + n - 1),
    )

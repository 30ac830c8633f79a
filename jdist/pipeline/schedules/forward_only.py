"""Forward only: the schedule of evaluation."""

from functools import partial

import numpy as np

from jdist.pipeline.schedule.actions import Columns, F, WorkerActions, check_counts
from jdist.pipeline.schedule.schedule import Schedule


def forward_only(n: int, m: int) -> Schedule:
    """Forward passes of m micro-batches through n stages, one per worker.

    Raises:
      ValueError: A number is below 1.

    Example:
      >>> print(forward_only(2, 3))
      worker 0 | 0F0 0F1 0F2  .
      worker 1 |  .  1F0 1F1 1F2
    """
    check_counts("forward_only", n=n, m=m)
    kind, every = np.full(m, F), np.arange(m)
    programs = [WorkerActions(kind, np.full(m, stage), every) for stage in range(n)]
    return Schedule(
        "forward only",
        m,
        tuple((stage,) for stage in range(n)),
        Columns.joined(programs),
        forward_only=True,
        # The last micro-batch enters at clock m - 1 and passes n stages.
        clock_bound=m + n - 1,
        family=partial(forward_only, n),
    )

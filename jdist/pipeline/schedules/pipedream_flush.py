"""PipeDream-Flush: 1F1B over a whole epoch, with a flush before each update."""

from functools import partial

import numpy as np

from jdist.pipeline.schedule.actions import Columns, WorkerActions, check_counts
from jdist.pipeline.schedule.patterns import alternating
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy


def pipedream_flush(n: int, m: int, *, update_every: int | None = None) -> Schedule:
    """1F1B with a flush after every `update_every` micro-batches of an epoch.

    The update of a stage waits for the backward passes of all earlier micro-batches,
    so that all stages have one version: w(t+1) = w(t) - lr grad f(w(t)), as in GPipe.

    Args:
      n: Stages, one per worker.
      m: Micro-batches of the epoch.
      update_every: Micro-batches per update; None: n.

    Raises:
      ValueError: A number is below 1.

    Source:
      Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021.

    Example:
      >>> print(pipedream_flush(2, 4))
      worker 0 | 0F0 0F1  .  0B0  .  0B1 0F2 0F3  .  0B2  .  0B3
      worker 1 |  .  1F0 1B0 1F1 1B1  .   .  1F2 1B2 1F3 1B3  .
    """
    every = n if update_every is None else update_every
    check_counts("pipedream_flush", n=n, m=m, update_every=every)
    # The last block may be shorter.
    blocks = [np.arange(i, min(i + every, m)) for i in range(0, m, every)]
    programs = []
    for stage in range(n):
        parts = []
        for block in blocks:
            own = (np.full(len(block), stage), block)
            # 1F1B over one block. It drains the pipeline, since all its backward passes
            # precede the next block.
            parts.append(alternating(own, own, warm_up=n - stage - 1))
        programs.append(WorkerActions(*map(np.concatenate, zip(*parts, strict=True))))
    return Schedule(
        "PipeDream-Flush",
        m,
        tuple((stage,) for stage in range(n)),
        Columns.joined(programs),
        update_policy=UpdatePolicy("flush", every),
        activation_bound=tuple(min(every, m, n - stage) for stage in range(n)),
        clock_bound=2 * (m + len(blocks) * (n - 1)),
        family=partial(pipedream_flush, n, update_every=every),
    )

"""Looped breadth-first: all micro-batches through one stage of a worker at a time."""

from functools import partial

import numpy as np

from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.patterns import Passes, alternating, schedule_of
from jdist.pipeline.schedule.schedule import Schedule


def looped_bfs(n: int, m: int, chunks: int) -> Schedule:
    """Breadth-first over n workers with `chunks` stages each: j, n + j, 2n + j, ...

    All micro-batches go through a worker's first stage, then all through its second,
    and back in the same manner. The bubble is that of the interleaved schedule, and all
    activations are alive at once. In exchange a worker uses the parameters of each
    stage once in each direction, and completes its gradients in one go, as sharded data
    parallelism requires.

    Raises:
      ValueError: A number is below 1.

    Source:
      Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.

    Example:
      >>> print(looped_bfs(2, 2, chunks=2))
      worker 0 | 0F0 0F1 2F0 2F1  .   .  2B0 2B1 0B0 0B1
      worker 1 |  .  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1  .
    """
    check_counts("looped_bfs", n=n, m=m, chunks=chunks)
    programs = []
    for rank in range(n):
        stages = np.arange(chunks) * n + rank
        forward = _breadth_first(stages, m)
        backward = _breadth_first(stages[::-1], m)
        programs.append(alternating(forward, backward, warm_up=m * chunks))
    family = partial(looped_bfs, n, chunks=chunks)
    return schedule_of("looped BFS", m, [*range(n)] * chunks, programs, family)


def _breadth_first(stages: np.ndarray, m: int) -> Passes:
    # All micro-batches of a stage before any of the next.
    return np.repeat(stages, m), np.tile(np.arange(m), len(stages))

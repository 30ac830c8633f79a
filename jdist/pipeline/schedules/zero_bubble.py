"""Zero bubble, variant H1: weight gradients fill the idle times of 1F1B."""

from functools import partial

from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.patterns import phases, schedule_of
from jdist.pipeline.schedule.schedule import Schedule


def zero_bubble(n: int, m: int) -> Schedule:
    """ZB-H1 for n stages, one per worker, and m micro-batches.

    The backward pass is split: the previous stage waits only for the cotangents of the
    inputs (B), and the gradients of the parameters (W) can come later. Worker j always
    defers j of them, so that earlier stages get their cotangents sooner. No worker has
    more than n unfinished micro-batches, as many as stage 0 in 1F1B. A deferred one
    holds cotangents besides its activation: worker j has n - j - 1 activations and
    j + 1 pending weight gradients, (n - j - 1) M_B + (j + 1) M_W.

    Raises:
      ValueError: A number is below 1.

    Source:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.

    Example:
      >>> print(zero_bubble(2, 3))
      worker 0 | 0F0 0F1  .  0B0 0W0 0F2 0B1 0W1 0B2 0W2
      worker 1 |  .  1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """
    check_counts("zero_bubble", n=n, m=m)
    # With fewer micro-batches than workers there is no steady phase.
    steady = max(m - n, 0)
    programs = []
    for j in range(n):
        patterns = [
            ("F", n - j),
            ("I F", j),
            ("I W F", steady),
            ("I W", n - j),
            ("W", j),
        ]
        programs.append(phases(patterns, [j], m))
    return schedule_of("ZB-H1", m, range(n), programs, partial(zero_bubble, n))

"""ZBV: zero bubble with two stages per worker, laid out as a V."""

from functools import partial

from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.patterns import phases
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.v_shaped import v_schedule


def zbv(n: int, m: int) -> Schedule:
    """ZBV for n workers with stages j and 2n - 1 - j each, and m micro-batches.

    The last stage is on worker 0, so that a micro-batch ends where it began and its
    backward pass starts early. If F, B and W take equally long, no worker is idle from
    its first action to its last, with 2n of these half-size stages in flight, as much
    memory as 1F1B's n whole ones. Towards the end worker j defers more and more weight
    gradients, and with their cotangents it holds n + 1 + 3j activations if that is more
    than 2n + 1.

    Raises:
      ValueError: A number is below 1.

    Source:
      Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (V-ZB);
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.

    Example:
      >>> print(zbv(2, 2))
      worker 0 | 0F0 0F1  .  3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0  .  0B1 0W1
      worker 1 |  .  1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1  .
    """
    check_counts("zbv", n=n, m=m)
    # The patterns fill the pipeline with 2n - 1 micro-batches; `phases` drops the
    # surplus.
    made_for = max(m, 2 * n - 1)
    programs = []
    for j in range(n):
        patterns = [
            ("F0", 2 * (n - j) - 1),
            ("F1 F0", j),
            ("F1 I1 W", n - j),
            ("F0 I0 W F1 I1 W", made_for - 2 * n + 1 + j),
            ("I0 W F1 I1 W", n - 1 - j),
            ("I0 I1", j),
            ("I0 W", n - j),
            ("W", 2 * j),
        ]
        programs.append(phases(patterns, [j, 2 * n - 1 - j], m))
    return v_schedule("ZBV", m, programs, partial(zbv, n))

"""PipeDream: 1F1B without a flush, stages updating as they go, replicas in turn."""

from collections.abc import Sequence

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule import Placement, Schedule, Updates, Uses
from jdist.pipeline.schedule_actions import Columns
from jdist.pipeline.schedule_program import alternating, check_counts


def pipedream(
    n: int,
    m: int,
    *,
    replicas: Sequence[int] | None = None,
    update_every: int = 1,
    uses: Uses = "latest",
) -> Schedule:
    """Asynchronous 1F1B for n stages and an epoch of m micro-batches.

    A stage updates after each backward pass, and the pipeline never drains before the
    m-th micro-batch: an epoch's bubble is that of one flush. A backward pass uses the
    weights that its forward pass used, so a worker keeps several versions:
    `simulate(...).weight_versions` counts them.

    A stage on several workers gives micro-batch i to the (i mod r)-th of them, forward
    and backward. A worker of stage j runs floor((w_j - 1) / r_j) forward passes ahead,
    with r_j the workers of the stage and w_j those of this and all later stages;
    without replicas n - j - 1.

    Args:
      n: Stages.
      m: Micro-batches until the pipeline drains.
      replicas: Workers of each stage; None: one each. Ranks are given out in order.
      update_every: Backward passes of a worker per update (macro-batches).
      uses: "latest", or "entry" for vertical sync; see `Updates`.

    Raises:
      ValueError: A number is below 1, `replicas` has not n of them, or `uses` is
        neither.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.2 and 3.3.

    Example:
      >>> print(pipedream(2, 4, replicas=(2, 1)))
      worker 0 | 0F0 0F2  .  0B0  .   .   .  0B2  .   .
      worker 1 | 0F1 0F3  .   .   .  0B1  .   .   .  0B3
      worker 2 |  .  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3  .
    """
    check_counts("pipedream", n=n, m=m, update_every=update_every)
    counts = _checked(n, replicas)
    placement = _ranks(counts)
    later = np.cumsum(counts[::-1])[::-1]
    programs, bound = [], []
    for stage, count in enumerate(counts):
        ahead = int(later[stage] - 1) // count
        for turn in range(count):
            every = np.arange(turn, m, count)
            own = (np.full(len(every), stage), every)
            programs.append(alternating(own, own, warm_up=ahead))
            bound.append(min(len(every), ahead + 1))
    return Schedule(
        "PipeDream",
        m,
        placement,
        Columns.joined(programs),
        updates=Updates(update_every, uses),
        activation_bound=tuple(bound),
        clock_bound=2 * (m + n - 1) if max(counts) == 1 else None,
    )


def _checked(n: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
    counts = (1,) * n if replicas is None else tuple(replicas)
    if len(counts) != n:
        rule = f"must have a number for each of {n} stages"
        raise ValueError(requirement("pipedream(replicas=...)", rule, counts))
    for count in counts:
        check_counts("pipedream", replicas=count)
    return counts


def _ranks(counts: Sequence[int]) -> Placement:
    ends = np.cumsum(counts)
    return tuple(
        tuple(range(int(end) - count, int(end)))
        for end, count in zip(ends, counts, strict=True)
    )

"""PipeDream-2BW: 1F1B without a flush and with two versions of the weights."""

from dataclasses import replace
from functools import partial

from jdist._errors import requirement
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b


def pipedream_2bw(n: int, m: int, *, update_every: int | None = None) -> Schedule:
    """Asynchronous 1F1B with gradients accumulated over `update_every` micro-batches.

    All micro-batches of a batch use the weights before the newest ones on all stages,
    w(t+1) = w(t) - lr grad f(w(t-1)), so that two versions are enough.

    Args:
      n: Stages, one per worker.
      m: Micro-batches until the pipeline drains.
      update_every: Micro-batches per update, at least n; None: n.

    Raises:
      ValueError: A number is below 1, or `update_every` is below n.

    Source:
      Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021.

    Example:
      >>> pipedream_2bw(2, 8).update_policy
      UpdatePolicy(rule='2bw', every=2)
    """
    every = n if update_every is None else update_every
    check_counts("pipedream_2bw", n=n, m=m, update_every=every)
    # With fewer a micro-batch would begin before the version of weights that it uses
    # exists.
    if every < n:
        rule = f"must be at least the {n} stages"
        raise ValueError(requirement("pipedream_2bw(update_every=...)", rule, every))
    return replace(
        one_f_one_b(n, m),
        name="PipeDream-2BW",
        update_policy=UpdatePolicy("2bw", every),
        family=partial(pipedream_2bw, n, update_every=every),
    )

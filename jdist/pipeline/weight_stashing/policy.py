"""The schedule of a synchronous step under an asynchronous schedule."""

from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream


def schedule_of_step(schedule: Schedule) -> Schedule:
    """The schedule of a synchronous step, from that of an epoch.

    Example:
      >>> schedule_of_step(pipedream(3, 4, policy="flush")) == one_f_one_b(3, 4)
      True
    """
    policy, shape = schedule.update_policy, (schedule.stages, schedule.micro_batches)
    assert policy is not None
    # A flush schedule drains only for its updates: without them each drain would be a
    # needless bubble.
    if policy.rule == "flush" and schedule == pipedream(
        *shape, policy="flush", update_every=policy.every
    ):
        return one_f_one_b(*shape)
    return schedule.synchronous()

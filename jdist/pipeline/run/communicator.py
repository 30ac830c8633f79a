"""The choice of a communicator by the places that a pipeline is given."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist.pipeline.run.stage_channels import (
    Communicator,
    LocalCommunicator,
    Places,
    places_on,
)
from jdist.pipeline.run.worker_channels import WorkerCommunicator
from jdist.pipeline.schedule.schedule import Schedule
from jdist.rpc.extension import current_agent


def communicator_for(
    schedule: Schedule,
    workers_or_devices: Sequence[str] | Sequence[jax.Device] | Mesh | None,
    about: str = "",
) -> Communicator:
    """The communicator for the places that a pipeline is given.

    Args:
      schedule: The schedule.
      workers_or_devices: See `Pipeline`.
      about: What else must be the same on all workers, for the error's text.

    Raises:
      ValueError: There is not one place for each worker; a name is no worker of the
        group, or not one of them is this worker; a mesh does not fit the schedule.
    """
    call = "Pipeline(workers_or_devices=...)"
    if workers_or_devices is None:
        devices: list[jax.Device | None] = [None] * schedule.workers
        return LocalCommunicator(Places(schedule, devices, range(schedule.workers)))
    if isinstance(workers_or_devices, Mesh):
        return LocalCommunicator(places_on(schedule, workers_or_devices))
    given = list(workers_or_devices)
    if len(given) != schedule.workers:
        rule = f"must be one for each of the {schedule.workers} workers"
        raise ValueError(requirement(call, rule, given))
    if not all(isinstance(place, str) for place in given):
        return LocalCommunicator(Places(schedule, given, range(schedule.workers)))
    agent = current_agent()
    known = [info.name for info in agent.group.workers()]
    if agent.info.name not in given or not {*given} <= {*known}:
        rule = f"must be workers of the group, {agent.info.name!r} among them"
        raise ValueError(requirement(call, rule, given, f"The group has {known}."))
    return WorkerCommunicator(agent, schedule, given, about)

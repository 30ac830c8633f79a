"""Executors: all workers in this process, or one of them in each.

The program of a step is one (`Step`); an executor says which workers are here, and how
values get to the others.
"""

import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist.pipeline.run.action_timer import clock_offset
from jdist.pipeline.run.places import Places, places_on
from jdist.pipeline.run.stage_channels import InProcessChannels, StageChannels, ending
from jdist.pipeline.run.worker_channels import CLOCK, WorkerChannels, mailbox_of
from jdist.pipeline.schedule.schedule import Schedule
from jdist.rpc.extension import Agent, current_agent


class Executor(Protocol):
    """Where the workers of a pipeline are."""

    @property
    def places(self) -> Places:
        """Who runs what."""

    @property
    def sees_all(self) -> bool:
        """Whether all workers are in this process."""

    @property
    def last(self) -> StageChannels | None:
        """The last call that was begun."""

    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """Begins a call that all processes of the pipeline make; see `Opened`.

        Args:
          kind: The public method. What it is given is looked at inside.

        Raises:
          ValueError: Before the first call: the pipelines are not alike.
          WorkerLost, RpcTimeout: Not all processes came to the first call.
        """

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """What every process of the pipeline gave, once all have: a call of its own.

        Raises:
          WorkerLost: A worker will not come.
          RpcTimeout: Nor did it within the default timeout; the message names it.
          ValueError: It is in another call.
        """

    def clock_offset(self) -> float:
        """What to add to this process's `time.perf_counter` for the first worker's.

        Raises:
          WorkerLost: That worker is gone.
          RpcTimeout: It does not answer.
        """


class InProcess:
    """All workers in this process, each with a device."""

    sees_all = True

    def __init__(self, places: Places) -> None:
        self.places = places
        self.last: StageChannels | None = None
        self._calls = itertools.count()

    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """See `Executor`."""
        self.last = InProcessChannels(self.places.devices, next(self._calls))
        return ending(self.last)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """See `Executor`."""
        return [value]

    def clock_offset(self) -> float:
        """See `Executor`: it is the same."""
        return 0.0


class Workers:
    """One worker of rpc per process, or per thread of a local cluster.

    Args:
      agent: This one.
      schedule: The schedule.
      names: Of all, by rank in the schedule.
      about: What else must be the same on all workers.
    """

    sees_all = False

    def __init__(
        self, agent: Agent, schedule: Schedule, names: Sequence[str], about: str
    ) -> None:
        own = names.index(agent.info.name)
        devices: list[jax.Device | None] = [None] * len(names)
        devices[own] = agent.options.device
        self.places = Places(schedule, devices, (own,))
        self._agent = agent
        self._names = names
        self._leader = min(schedule.placement[0])
        self._about = about
        self._pipeline = mailbox_of(agent).new_pipeline(names)
        self.last: StageChannels | None = None
        self._calls = itertools.count()
        self._met = False

    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """See `Executor`."""
        if not self._met:
            self._meet()
            self._met = True
        address = (self._pipeline, next(self._calls))
        own = self.places.own[0]
        self.last = WorkerChannels(
            self._agent, self._names, own, self._leader, address, kind
        )
        return ending(self.last)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """See `Executor`."""
        with self.opened(purpose) as channels:
            return channels.agree(value)

    def clock_offset(self) -> float:
        """See `Executor`."""
        first = self._names[0]
        if first == self._agent.info.name:
            return 0.0
        ask = functools.partial(self._agent.call, first, CLOCK, None)
        return clock_offset(ask, time.perf_counter)

    def _meet(self) -> None:
        """Waits for all workers; their calls are counted from here on."""
        schedule = self.places.schedule
        mine = f"{schedule!r} as {self._pipeline}, {self._about}"
        digest = hashlib.sha256(repr(_plain(schedule)).encode()).hexdigest()[:8]
        found = self._agent.group.all_gather(
            f"{mine}, actions {digest}", self._names, -1, "Pipeline"
        )
        if len({*found.values()}) > 1:
            rule = "must be the same on all workers, made in the same order"
            shown = "; ".join(f"{name}: {found[name]}" for name in self._names)
            raise ValueError(requirement("Pipeline(schedule)", rule, shown))


def _plain(schedule: Schedule) -> list[Any]:
    columns = schedule.columns
    arrays = columns.first, columns.kind, columns.stage, columns.micro_batch
    return [schedule.placement, *(array.tolist() for array in arrays)]


def executor_for(
    schedule: Schedule,
    workers_or_devices: Sequence[str] | Sequence[jax.Device] | Mesh | None,
    about: str = "",
) -> Executor:
    """The executor that the places ask for.

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
        return InProcess(Places(schedule, devices, range(schedule.workers)))
    if isinstance(workers_or_devices, Mesh):
        return InProcess(places_on(schedule, workers_or_devices))
    given = list(workers_or_devices)
    if len(given) != schedule.workers:
        rule = f"must be one for each of the {schedule.workers} workers"
        raise ValueError(requirement(call, rule, given))
    if not all(isinstance(place, str) for place in given):
        return InProcess(Places(schedule, given, range(schedule.workers)))
    agent = current_agent()
    known = [info.name for info in agent.group.workers()]
    if agent.info.name not in given or not {*given} <= {*known}:
        rule = f"must be workers of the group, {agent.info.name!r} among them"
        raise ValueError(requirement(call, rule, given, f"The group has {known}."))
    return Workers(agent, schedule, given, about)

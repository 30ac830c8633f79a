"""Executors: all workers in this process, or one of them in each.

The program of a step is one (`Step`); an executor says which workers are here, and how
values get to the others.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist.pipeline.places import Places, places_on
from jdist.pipeline.post import InProcessPost, Post
from jdist.pipeline.schedule import Schedule
from jdist.pipeline.stopwatch import clock_offset
from jdist.pipeline.worker_post import CLOCK, WorkerPost, mailbox_of
from jdist.rpc import current
from jdist.rpc.agent import Agent


class Executor(Protocol):
    """Where the workers of a pipeline are."""

    @property
    def places(self) -> Places:
        """Who runs what."""

    @property
    def sees_all(self) -> bool:
        """Whether all workers are in this process."""

    def open(self, step: int) -> Post:
        """The way of values in one step."""

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """What every process of the pipeline gave, once all of them have.

        Raises:
          WorkerLost: A worker will not come.
          RpcTimeout: Nor did it within the default timeout; the message names it.
        """

    def clock_offset(self) -> float:
        """What to add to this process's `time.perf_counter` for the first worker's.

        Raises:
          WorkerLost: That worker is gone.
          RpcTimeout: It does not answer.
        """


@dataclass(frozen=True, slots=True)
class InProcess:
    """All workers in this process, each with a device."""

    places: Places
    sees_all: bool = True

    def open(self, step: int) -> Post:
        """See `Executor`."""
        return InProcessPost(self.places.devices)

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
    """

    sees_all = False

    def __init__(self, agent: Agent, schedule: Schedule, names: Sequence[str]) -> None:
        own = names.index(agent.info.name)
        devices: list[jax.Device | None] = [None] * len(names)
        devices[own] = agent.options.device
        self.places = Places(schedule, devices, (own,))
        self._agent = agent
        self._names = names
        self._pipeline = mailbox_of(agent).new_pipeline(names)

    def open(self, step: int) -> Post:
        """See `Executor`. Before the first step the workers wait for each other.

        Raises:
          ValueError: They have different schedules.
        """
        if step == 0:
            self._meet()
        address = (self._pipeline, step)
        own = self.places.own[0]
        return WorkerPost(self._agent, self._names, own, address)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """See `Executor`."""
        found = self._agent.group.all_gather(value, self._names, -1, purpose)
        return [found[name] for name in self._names]

    def clock_offset(self) -> float:
        """See `Executor`; all come first, so that the one asked is not computing."""
        self.gather(None, "comparing clocks")
        first = self._names[0]
        if first == self._agent.info.name:
            return 0.0
        ask = functools.partial(self._agent.call, first, CLOCK, None)
        return clock_offset(ask, time.perf_counter)

    def _meet(self) -> None:
        schedule = self.places.schedule
        mine = f"{schedule!r} as {self._pipeline}"
        found = self.gather(mine, "Pipeline")
        if len(set(found)) > 1:
            rule = "must be the same on all workers, made in the same order"
            pairs = zip(self._names, found, strict=True)
            shown = "; ".join(f"{name}: {text}" for name, text in pairs)
            raise ValueError(requirement("Pipeline(schedule)", rule, shown))


def executor_for(
    schedule: Schedule,
    workers_or_devices: Sequence[str] | Sequence[jax.Device] | Mesh | None,
) -> Executor:
    """The executor that the places ask for.

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
    agent = current.agent()
    known = [info.name for info in agent.group.workers()]
    if agent.info.name not in given or not {*given} <= {*known}:
        rule = f"must be workers of the group, {agent.info.name!r} among them"
        raise ValueError(requirement(call, rule, given, f"The group has {known}."))
    return Workers(agent, schedule, given)

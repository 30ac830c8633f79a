"""Where the stages of a pipeline are, and how values get from one to another.

`Places` says which worker runs a stage, and on which device. A `Communicator` opens the
calls that all processes of a pipeline make together; the `StageChannels` of a call
bring its values to the stages that take them. Within a process a value is there when it
is sent; between processes it is a message (`worker_channels`).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.pipeline.run.micro_batch import MicroBatch
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.mesh_processes import processes_of, told_by_processes
from jdist.pipeline.stages.place import (
    Place,
    common_parts,
    devices_of,
    moved,
    places_along,
    stage_axis_of,
)


@dataclass(frozen=True, eq=False)
class Places:
    """The worker of each stage and micro-batch, and its place.

    Attributes:
      schedule: The schedule, whose workers have ranks.
      devices: Of each worker the device or the mesh; None for JAX's default device.
      own: Ranks of the workers that are in this process.
    """

    schedule: Schedule
    devices: Sequence[Place]
    own: Sequence[int]

    @property
    def loss(self) -> int:
        """In the place of a stage: the loss, which is where the last stage is."""
        return len(self.schedule.placement)

    @cached_property
    def actions(self) -> dict[int, list[Action]]:
        """The actions of the workers of this process, in order."""
        return {worker: self.schedule.actions(worker) for worker in self.own}

    @cached_property
    def stages(self) -> dict[int, int]:
        """The stages that run in this process, each with its first worker here."""
        rows = enumerate(self.schedule.placement)
        here = {j: {*workers}.intersection(self.own) for j, workers in rows}
        return {j: min(workers) for j, workers in here.items() if workers}

    def replicas(self, worker: int, stage: int) -> list[int]:
        """The other workers of a stage, by rank."""
        workers = self.schedule.placement[stage]
        return sorted(other for other in workers if other != worker)

    def worker(self, stage: int, micro_batch: int) -> int:
        """The rank of the worker of a stage, or of the loss, for a micro-batch."""
        workers = self.schedule.placement[min(stage, self.loss - 1)]
        # Round robin, as in PipeDream (1F1B-RR): a micro-batch meets one worker
        # forwards and backwards, and no table has to say which.
        return workers[micro_batch % len(workers)]

    def check(self, name: str, entry: PyTree, worker: int, taker: int) -> None:
        """Refuses an entry of the batch that was put elsewhere than where it is taken.

        Raises:
          ValueError: So it was. Arrays that are not committed to a device, such as
            NumPy's, are moved.
        """
        devices = devices_of(self.devices[worker])
        # Without a place of its own a stage computes wherever its inputs are.
        if not devices:
            return
        for leaf in jax.tree.leaves(entry):
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            if leaf.devices() != devices:
                who = "the loss" if taker == self.loss else f"stage {taker}"
                where = ", ".join(sorted(map(str, devices)))
                rule = f"must have {name!r} on {where}, where {who} takes it"
                got = f"{name!r} on {', '.join(sorted(map(str, leaf.devices())))}"
                remedy = "Put it there with jax.device_put, or pass a NumPy array."
                call = "Pipeline.value_and_grad(batch)"
                raise ValueError(requirement(call, rule, got, remedy))


def places_on(
    schedule: Schedule, mesh: Mesh, stage_axis: str | None, data_axis: str | None
) -> Places:
    """The workers of a schedule along an axis of a mesh, in order.

    Raises:
      ValueError: What `stage_axis_of` and `places_along` raise; or the mesh has no
        device of this process.
    """
    axis = stage_axis_of(mesh, stage_axis, schedule.workers)
    places, here = places_along(mesh, axis, data_axis), jax.process_index()
    own = [
        rank
        for rank, place in enumerate(places)
        if any(device.process_index == here for device in devices_of(place))
    ]
    if not own:
        rule = "must have a device of each process that calls it"
        got = f"{list(mesh.devices.flat)} in process {here}"
        raise ValueError(requirement("Pipeline(mesh)", rule, got))
    return Places(schedule, places, own)


class MessageTag(NamedTuple):
    """The tag of a value under way, which no other value of its call has.

    Attributes:
      kind: "F" for a value, "B" for a cotangent ("f" and "b" for their shapes, before
        the first step), "G" for a replica's gradient, "S" for
        shapes, "T" for a gradient of what stages share, "N" for the norm of a stage's
        gradient, "E" for the number of micro-batches at which a worker's batches ended,
        "C" for a stage on its way to where it is saved;
        "V" for the vote of a worker that has done its part, "D" for the decision that
        all have.
      micro_batch: Number of the micro-batch; -1 for what belongs to none.
        For "G" of the bucket; in an epoch, for "G", "T" and "N", of the update.
      name: Of the value, or of what is shared; for "G" "state" or nothing.
      stage: For which stage; the number of stages for the loss.
      sender: Rank of the worker that sent it.
    """

    kind: str
    micro_batch: int
    name: str
    stage: int
    sender: int


class Transfer(NamedTuple):
    """A value, or its cotangent, that went from one stage to another.

    Attributes:
      step: Number of the call of the pipeline.
      micro_batch: Number of the micro-batch.
      name: Of the value.
      source: The stage that sent it; -1 for the batch.
      destination: The stage that took it; the number of stages for the loss.
      cotangent: Whether it is the cotangent of the value, on its way back.
      nbytes: Its size.
    """

    step: int
    micro_batch: int
    name: str
    source: int
    destination: int
    cotangent: bool
    nbytes: int


class ValueChannels(Protocol):
    """Bring values to the workers that take them.

    Attributes:
      number: Of the call that they belong to, counted alike by all workers.
    """

    number: int

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """Sends a value to a worker; does not wait until it is there."""

    def has(self, tag: MessageTag, worker: int) -> bool:
        """Whether it has arrived at that worker, which is one of this process."""

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """The value, which is not kept."""

    def wait(self, waiting: Mapping[MessageTag, str]) -> None:
        """Returns once something has arrived that was not there before.

        Args:
          waiting: What is missing, and the action that waits for it.

        Raises:
          Exception: Nothing will arrive any more, or not in time.
        """


class StageChannels(ValueChannels, Protocol):
    """One call that all workers make: its values, and whether it succeeds.

    Attributes:
      parts: The smallest number of rows that the meshes of all workers can split.
      failed: Whether it has ended with an error.
    """

    parts: int
    failed: bool

    def identify(
        self,
        step: int | None = None,
        settings: Mapping[str, PyTree] | None = None,
        batches: Iterable[Mapping[str, PyTree]] = (),
        parts: Sequence[MicroBatch] = (),
        key: jax.Array | None = None,
    ) -> None:
        """Says what the call is given, once that is checked and before values are sent.

        Args:
          step: Of the training state.
          settings: Numbers and texts that concern all workers, by name.
          batches: See `sized`, as for the other arguments.
          parts: The micro-batches.
          key: The PRNG key.

        Raises:
          Exception: Another worker has refused the call, or was given something else.
        """

    def begin(self) -> None:
        """Comes after all that a process may refuse, and before any program.

        Where processes compute together, each waits here for the others: one that did
        not come into a collective would leave them in it.

        Raises:
          Exception: Another process has refused the call.
        """

    def agree(self, value: PyTree, computed: PyTree = None) -> list[PyTree]:
        """Ends the call on all workers, or on none.

        Args:
          value: What this process has to tell all others.
          computed: Arrays that must be there first: what fails in them fails the call.

        Returns:
          What every process told, once all have done their part.

        Raises:
          Exception: One of them has not; then this raises on all of them.
        """

    def end(self, error: BaseException | None) -> None:
        """The call is over here; if it failed before `agree`, the others are told."""


Opened = Callable[[str], contextlib.AbstractContextManager[StageChannels]]
"""Begins a call of that kind. What is raised inside is raised on all workers, until
they have agreed."""


def receive(
    channels: ValueChannels, tag: MessageTag, worker: int, purpose: str
) -> PyTree:
    """Waits for a value and takes it.

    Raises: what `ValueChannels.wait` raises.
    """
    while not channels.has(tag, worker):
        channels.wait({tag: purpose})
    return channels.take(tag, worker)


class Communicator(Protocol):
    """The processes of a pipeline, which make its calls together."""

    @property
    def places(self) -> Places:
        """The worker of each stage and micro-batch."""

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

    def gather(self, value: PyTree, purpose: str) -> list[PyTree]:
        """The values of all processes of the pipeline: a call of its own.

        Raises:
          WorkerLost: A worker will not come.
          RpcTimeout: Nor did it within the default timeout; the message names it.
          ValueError: It is in another call.
        """

    def clock_offset(self) -> float:
        """The first worker's `time.perf_counter` minus this process's.

        Raises:
          WorkerLost: That worker is gone.
          RpcTimeout: It does not answer.
        """


class InProcessChannels:
    """All workers are in this process: a value is there as soon as it is sent.

    Args:
      devices: The place of each worker.
      number: See `StageChannels`.
      mesh: Of one program, if several processes have its devices.
    """

    def __init__(
        self,
        devices: Sequence[Place] = (),
        number: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        self.number = number
        self._mesh = mesh
        self.parts = common_parts(devices)
        self.failed = False
        self._devices = devices
        self._arrived: dict[tuple[MessageTag, int], Any] = {}

    def identify(
        self,
        step: int | None = None,
        settings: Mapping[str, PyTree] | None = None,
        batches: Iterable[Mapping[str, PyTree]] = (),
        parts: Sequence[MicroBatch] = (),
        key: jax.Array | None = None,
    ) -> None:
        """See `StageChannels`: there is no other process to compare with."""

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """See `StageChannels`."""
        self._arrived[tag, worker] = moved(value, self._devices[worker])

    def has(self, tag: MessageTag, worker: int) -> bool:
        """See `StageChannels`."""
        return (tag, worker) in self._arrived

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """See `StageChannels`."""
        return self._arrived.pop((tag, worker))

    def wait(self, waiting: Mapping[MessageTag, str]) -> None:
        """No other process is there to send anything.

        Raises:
          ValueError: Always.
        """
        # All actions are in this process: where none can go on, none ever will.
        rule = "must let every action have its inputs"
        got = f"workers that wait for each other at {', '.join(waiting.values())}"
        raise ValueError(requirement("Pipeline(schedule)", rule, got))

    def begin(self) -> None:
        """See `StageChannels`: one program has its own comparison."""

    def agree(self, value: PyTree, computed: PyTree = None) -> list[PyTree]:
        """See `StageChannels`; does not wait for arrays, which one process need not."""
        return [value] if self._mesh is None else told_by_processes(self._mesh, value)

    def end(self, error: BaseException | None) -> None:
        """See `StageChannels`."""
        self.failed = error is not None
        # What nothing took, after an error, would keep its memory.
        self._arrived.clear()


@contextlib.contextmanager
def ending(channels: StageChannels) -> Iterator[StageChannels]:
    """Ends a call with the error that the block raises, or without."""
    try:
        yield channels
    # Interrupts too: other workers must not wait for this one.
    except BaseException as error:
        channels.end(error)
        raise
    channels.end(None)


def alone(kind: str) -> contextlib.AbstractContextManager[StageChannels]:
    """An `Opened` for a process that shares its calls with no other."""
    return ending(InProcessChannels())


class LocalCommunicator:
    """All workers of the pipeline in this process, or in those that run one program.

    Args:
      places: The device of each worker.
      mesh: Of one program.
    """

    sees_all = True

    def __init__(self, places: Places, mesh: Mesh | None = None) -> None:
        self.places = places
        several = mesh is not None and len({*processes_of(mesh)}) > 1
        self._mesh = mesh if several else None
        self.last: StageChannels | None = None
        self._calls = itertools.count()

    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """See `Communicator`."""
        made_of = self.places.devices, next(self._calls), self._mesh
        self.last = InProcessChannels(*made_of)
        return ending(self.last)

    def gather(self, value: PyTree, purpose: str) -> list[PyTree]:
        """See `Communicator`."""
        return [value] if self._mesh is None else told_by_processes(self._mesh, value)

    def clock_offset(self) -> float:
        """See `Communicator`: it is the same."""
        return 0.0

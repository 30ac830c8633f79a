"""Placement of stages, and channels for the values between them.

`Places` maps stages to workers and devices. A `Communicator` opens the calls that all
processes of a pipeline make together; the `StageChannels` of a call transfer values
between stages. Within a process a value arrives when it is sent; between processes it
is a message (`worker_channels`).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from jdist._errors import value_error
from jdist._tree import PyTree
from jdist.pipeline.run.identity import CallArguments
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.mesh_processes import processes_of, told_by_processes
from jdist.pipeline.stages.place import (
    Place,
    common_parts,
    devices_of,
    moved,
)


@dataclass(frozen=True, eq=False)
class Places:
    """The worker of each stage and micro-batch, and the worker's device.

    Attributes:
      schedule: The schedule, whose workers have ranks.
      devices: Device or mesh of each worker; None for JAX's default device.
      own: Ranks of the workers in this process.
    """

    schedule: Schedule
    devices: Sequence[Place]
    own: Sequence[int]

    @cached_property
    def loss(self) -> int:
        """The stage number that stands for the loss, which runs with the last stage."""
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
        return self.schedule.worker(min(stage, self.loss - 1), micro_batch)

    def check(self, name: str, entry: PyTree, worker: int, taker: int) -> None:
        """Refuses an entry of the batch that is committed to another device.

        Raises:
          ValueError: The entry is committed to other devices than its consumer's.
            Arrays that are not committed to a device, such as NumPy's, are moved.
        """
        devices = devices_of(self.devices[worker])
        # A stage without a device computes wherever its inputs are.
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
                raise value_error("Pipeline.value_and_grad(batch)", rule, got, remedy)


class MessageTag(NamedTuple):
    """The tag of a message, unique within its call.

    Attributes:
      kind: "F" for a value, "B" for a cotangent ("f" and "b" for their shapes, before
        the first step), "G" for a replica's gradient, "T" for the gradient of a tied
        parameter, "C" for a stage sent to the process that saves it; "V" for the vote
        of a worker, "D" for the decision.
      micro_batch: Number of the micro-batch; -1 for a message of no micro-batch. For
        "G" in an epoch number of the update. For "V" and "D" 0 at the beginning of the
        call, 1 at its end.
      name: Name of the value or of the tied parameter; for "G" "state" or empty.
      stage: The stage that the message is about, for "F" its consumer; the number of
        stages for the loss.
      sender: Rank of the worker that sent it.
    """

    kind: str
    micro_batch: int
    name: str
    stage: int
    sender: int


class ValueChannels(Protocol):
    """Point-to-point channels for the values of one call."""

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """Sends a value to a worker; does not wait for its arrival."""

    def has(self, tag: MessageTag, worker: int) -> bool:
        """Whether a value has arrived at a worker of this process."""

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """Removes and returns a value that has arrived."""

    def wait(self, waiting: Mapping[MessageTag, object]) -> None:
        """Blocks until one of the missing values has arrived.

        Args:
          waiting: The missing values, and the action that waits for each, or a text.

        Raises:
          Exception: None of them will arrive, or not in time.
        """


class StageChannels(ValueChannels, Protocol):
    """The channels of one call that all workers make, with its commit.

    Attributes:
      parts: The smallest number of rows that the meshes of all workers can split.
    """

    parts: int

    def identify(self, given: CallArguments) -> None:
        """Sets the identity of the call, after its checks and before any value is sent.

        Raises:
          Exception: Another worker has refused the call, or has another identity.
        """

    def begin(self) -> None:
        """Marks the point after all checks of a process and before any program.

        Where processes compute together, this is a barrier: a process that did not
        join a collective would leave the others in it.

        Raises:
          Exception: Another process has refused the call.
        """

    def agree(self, value: PyTree, computed: PyTree = None) -> list[PyTree]:
        """Commits the call on all workers, or on none; an all-gather.

        Args:
          value: The contribution of this process.
          computed: Arrays that must be computed first; an error in them fails the call.

        Returns:
          The values of all processes.

        Raises:
          Exception: A process has failed; then this raises on all of them.
        """

    def computed(self, value: PyTree) -> None:
        """Waits for arrays.

        Raises:
          Exception: Another process has failed meanwhile.
        """

    def end(self, error: BaseException | None) -> None:
        """Ends the call here; if it failed before `agree`, notifies the others."""


def receive(
    channels: ValueChannels, tag: MessageTag, worker: int, purpose: str
) -> PyTree:
    """Waits for a value, removes it and returns it.

    Raises: what `ValueChannels.wait` raises.
    """
    while not channels.has(tag, worker):
        channels.wait({tag: purpose})
    return channels.take(tag, worker)


class InProcessChannels:
    """Channels between workers of this process, in a dict.

    Args:
      devices: Device or mesh of each worker.
      mesh: Mesh of a single SPMD program, if several processes have its devices.
    """

    def __init__(self, devices: Sequence[Place], mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self.parts = common_parts(devices)
        self._devices = devices
        self._arrived: dict[tuple[MessageTag, int], Any] = {}

    def identify(self, given: CallArguments) -> None:
        """See `StageChannels`: there is no other process to compare with."""

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """See `StageChannels`."""
        # Moved by the sender, so that the transfer overlaps with actions before the
        # value's consumer.
        self._arrived[tag, worker] = moved(value, self._devices[worker])

    def has(self, tag: MessageTag, worker: int) -> bool:
        """See `StageChannels`."""
        return (tag, worker) in self._arrived

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """See `StageChannels`."""
        return self._arrived.pop((tag, worker))

    def wait(self, waiting: Mapping[MessageTag, object]) -> None:
        """Refuses a schedule that deadlocks.

        Raises:
          ValueError: Always.
        """
        # No other process sends values: if no action can start now, none ever can.
        rule = "must let every action have its inputs"
        actions = ", ".join(map(str, waiting.values()))
        got = f"workers that wait for each other at {actions}"
        raise value_error("Pipeline(schedule)", rule, got)

    def begin(self) -> None:
        """See `StageChannels`: one program has its own comparison."""

    def agree(self, value: PyTree, computed: PyTree = None) -> list[PyTree]:
        """See `StageChannels`; does not wait for arrays."""
        # An error in an array of a single process reaches the caller anyway, and a
        # wait would end the overlap of steps by asynchronous dispatch.
        return [value] if self._mesh is None else told_by_processes(self._mesh, value)

    def computed(self, value: PyTree) -> None:
        """See `StageChannels`."""
        jax.block_until_ready(value)

    def end(self, error: BaseException | None) -> None:
        """See `StageChannels`."""
        # After an error values without a consumer are left, whose memory must be freed.
        self._arrived.clear()


class Communicator(ABC):
    """The processes of a pipeline, which make its calls together.

    Args:
      places: The worker of each stage and micro-batch, and its device.

    Attributes:
      places: As above.
      sees_all: Whether all workers are in this process.
      failure: Stands for the failure of the last call; None if it has not failed.
    """

    sees_all: bool

    def __init__(self, places: Places) -> None:
        self.places = places
        self.failure: object | None = None

    @contextlib.contextmanager
    def ending(self, channels: StageChannels) -> Iterator[StageChannels]:
        """Ends a call with the error of the block, if it raises one."""
        try:
            yield channels
        # Also on Ctrl-C, or the other workers would wait for this one.
        except BaseException as error:
            # Not the error, whose traceback would keep arrays in memory.
            self.failure = object()
            channels.end(error)
            raise
        self.failure = None
        channels.end(None)

    @abstractmethod
    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """Begins a call that all processes of the pipeline make.

        What is raised inside is raised on all workers, until they have agreed.

        Args:
          kind: The public method. Its arguments are checked inside the block, so that a
            refusal is a failure of this call on all processes.

        Raises:
          ValueError: Before the first call: the pipelines are not alike.
          WorkerLost, RpcTimeout: Not all processes came to the first call.
        """

    def gather(self, value: PyTree, purpose: str) -> list[PyTree]:
        """Gathers a value from all processes of the pipeline, in a call of its own.

        Raises:
          WorkerLost: A worker is gone.
          RpcTimeout: A worker did not come within the default timeout; the message
            names it.
          ValueError: A worker is in another call.
        """
        with self.opened(purpose) as channels:
            return channels.agree(value)

    def clock_offset(self) -> float:
        """The first worker's `time.perf_counter` minus this process's.

        Raises:
          WorkerLost: That worker is gone.
          RpcTimeout: It does not answer.
        """
        return 0.0


class LocalCommunicator(Communicator):
    """The communicator of a single process, or of processes that run one SPMD program.

    Args:
      places: The device of each worker.
      mesh: Mesh of a single SPMD program.
    """

    sees_all = True

    def __init__(self, places: Places, mesh: Mesh | None = None) -> None:
        super().__init__(places)
        several = mesh is not None and len({*processes_of(mesh)}) > 1
        self._mesh = mesh if several else None

    def opened(self, kind: str) -> contextlib.AbstractContextManager[StageChannels]:
        """See `Communicator`."""
        return self.ending(InProcessChannels(self.places.devices, self._mesh))

"""Where the stages of a pipeline run: devices, meshes, workers, or one program."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from jdist._errors import check_flags, check_sequence, check_type, value_error
from jdist.pipeline.run.stage_channels import Communicator, LocalCommunicator, Places
from jdist.pipeline.run.worker_channels import Members, WorkerCommunicator
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.place import (
    STAGE_AXIS,
    Place,
    StageMesh,
    automatic_axes,
    devices_of,
    place_on,
    places_along,
    places_of,
    processes_at,
)
from jdist.rpc import RpcError
from jdist.rpc.extension import current_agent

_PLACES = "Pipeline(places)"


@dataclass(frozen=True)
class Meshes:
    """A mesh, or a device, for each worker of a pipeline's schedule.

    A list of meshes and devices is the same with the default data axis.

    On a mesh of its own a stage is divided by the shardings of its parameters and the
    data axis. Under `jax.distributed` a mesh may have devices of one or several other
    processes, all of which are workers of rpc and make the same calls.

    Attributes:
      meshes: One for each worker of the schedule.
      data_axis: The axis of the meshes over which rows of micro-batches, and of values
        between stages, are split. A mesh without it has them whole on every device.
        None: "data".

    Raises:
      TypeError: One is neither a mesh nor a device.
      ValueError: No mesh has the data axis; two meshes share some of their devices, but
        not all; a mesh has manual axes.

    Example:
      >>> import jax, numpy as np
      >>> from jdist import pipeline
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
      >>> places = pipeline.Meshes([mesh, mesh], data_axis="rows")
      >>> stages = [
      ...     pipeline.Stage(lambda w, x: x * w, ("x",), ("h",)),
      ...     pipeline.Stage(lambda w, h: h * w, ("h",), ("y",)),
      ... ]
      >>> pipe = pipeline.Pipeline(
      ...     stages, lambda y, batch: y**2, pipeline.gpipe(2, 3), places
      ... )
      >>> params = pipe.place([np.float32(2), np.float32(3)])
      >>> loss, _ = pipe.value_and_grad(params, {"x": np.ones(6, np.float32)})
      >>> float(loss)
      36.0
    """

    meshes: Sequence[Mesh | jax.Device]
    data_axis: str | None = None

    def __post_init__(self) -> None:
        """Checks the meshes and the axis."""
        rule = "must be a sequence of meshes and devices"
        check_sequence("Meshes(meshes)", self.meshes, object, rule)
        object.__setattr__(self, "meshes", tuple(self.meshes))
        self.places()

    def places(self) -> list[Place]:
        """The places of the workers."""
        return places_of(self.meshes, self.data_axis)


@dataclass(frozen=True)
class Workers:
    """Workers of rpc, each of which makes the same pipeline and calls it.

    Attributes:
      names: Names of the workers, one for each worker of the schedule.
      mesh: This worker's own mesh for its stages, of devices of its process; None for
        the device of the worker. Meshes of other workers may have other axes.
      data_axis: The axis of the workers' meshes over which rows are split, as for
        `Meshes`.

    Raises:
      TypeError: `names` is no sequence of names, or `mesh` no mesh.
      ValueError: The mesh has manual axes, or devices of other processes.

    Example:
      >>> import numpy as np
      >>> from jdist import pipeline, rpc
      >>> stages = [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))]
      >>> places, batch = pipeline.Workers(["worker0"]), {"x": np.ones(4, np.float32)}
      >>> with rpc.local_cluster(places.names), rpc.use_worker("worker0"):
      ...     pipe = pipeline.Pipeline(
      ...         stages, lambda y, batch: y**2, pipeline.gpipe(1, 2), places
      ...     )
      ...     loss, _ = pipe.value_and_grad([np.float32(3)], batch)
      >>> float(loss)
      9.0
    """

    names: Sequence[str]
    mesh: Mesh | None = None
    data_axis: str | None = None

    def __post_init__(self) -> None:
        """Checks the names and the mesh."""
        rule = "must be a sequence of names of workers"
        check_sequence("Workers(names)", self.names, str, rule)
        object.__setattr__(self, "names", tuple(self.names))
        self.place(None)

    def place(self, device: jax.Device | None) -> Place:
        """The place of this worker, whose own device is given."""
        return device if self.mesh is None else place_on(self.mesh, self.data_axis)


@dataclass(frozen=True)
class OneProgram:
    """One mesh on which equal stages run as a single SPMD program.

    The devices are those of one process, or of several that make the same calls. Over
    the further axes of the mesh a stage is divided as on a mesh of its own.

    Attributes:
      mesh: The mesh of all stages.
      stage_axis: The axis along which the workers are; its size is the schedule's
        number of workers. None: "stage", or the only axis.
      data_axis: The axis over which rows are split, as for `Meshes`.
      overlap: Whether messages are in flight while the next actions run. They then cost
        no time, unless a link is slower than an action, and each arrives a clock later:
        for schedules with twice as many micro-batches in flight as stages, or GPipe.

    Raises:
      TypeError: `mesh` is no mesh, or `overlap` is not True or False.
      ValueError: The mesh lacks one of the axes, or has manual axes.

    Example:
      >>> import jax, numpy as np
      >>> from jdist import pipeline
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))
      >>> pipe = pipeline.Pipeline(
      ...     [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))],
      ...     lambda y, batch: y**2,
      ...     pipeline.gpipe(1, 2),
      ...     pipeline.OneProgram(mesh),
      ... )
      >>> batch = {"x": np.ones(4, np.float32)}
      >>> loss, _ = pipe.value_and_grad([np.float32(3)], batch)
      >>> float(loss)
      9.0
    """

    mesh: Mesh
    stage_axis: str | None = None
    data_axis: str | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        """Checks the mesh and its axes."""
        call = "OneProgram(mesh)"
        check_type(call, self.mesh, Mesh, "must be a jax.sharding.Mesh")
        check_flags("OneProgram", overlap=self.overlap)
        automatic_axes(call, self.mesh)
        names = self.mesh.axis_names
        if self.axis not in names:
            rule = f"must have an axis {self.axis!r}, along which the stages are"
            remedy = "Make the mesh so, or name its axis of stages by `stage_axis=`."
            raise value_error(call, rule, f"{list(names)}", remedy)
        others = [name for name in names if name != self.axis]
        if self.data_axis is not None and self.data_axis not in others:
            rule = "must be an axis of the mesh beside that of the stages"
            got = f"{self.data_axis!r}, where these are {others}"
            raise value_error("OneProgram(data_axis=...)", rule, got)

    @property
    def axis(self) -> str:
        """The axis along which the workers are."""
        names = self.mesh.axis_names
        only = names[0] if len(names) == 1 else STAGE_AXIS
        return only if self.stage_axis is None else self.stage_axis


GivenPlaces: TypeAlias = (
    "Sequence[jax.Device | Mesh] | Meshes | Workers | OneProgram | None"
)
"""The places that a user gives a pipeline; None: JAX's default device."""


def communicator_for(
    schedule: Schedule, given: GivenPlaces, about: str = ""
) -> Communicator:
    """Makes the communicator of a pipeline from the places that the user gave.

    Args:
      schedule: The schedule.
      given: The places.
      about: Further text that must be the same on all workers, for the error's text.

    Raises:
      TypeError: It is none of these.
      ValueError: There is not one place for each worker; a name is no worker of the
        group, or not one of them is this worker; a mesh does not fit the schedule.
    """
    if given is None:
        devices: list[Place] = [None] * schedule.workers
        return LocalCommunicator(Places(schedule, devices, range(schedule.workers)))
    if isinstance(given, OneProgram):
        return _in_one_program(schedule, given)
    if isinstance(given, Workers):
        return _of_workers(schedule, given, about)
    if not isinstance(given, Meshes):
        rule = "must be a sequence of devices and meshes, or Meshes, Workers or "
        rule += "OneProgram"
        check_sequence(_PLACES, given, object, rule)
        given = Meshes(given)
    _check_count(schedule, given.meshes)
    places = given.places()
    if _are_elsewhere(places):
        return _over_processes(schedule, places, about, given.data_axis)
    return LocalCommunicator(Places(schedule, places, range(schedule.workers)))


def _check_count(schedule: Schedule, given: Sequence[object]) -> None:
    if len(given) != schedule.workers:
        rule = f"must be one for each of the {schedule.workers} workers"
        raise value_error(_PLACES, rule, list(given))


def _in_one_program(schedule: Schedule, given: OneProgram) -> LocalCommunicator:
    """The communicator of workers along an axis of one mesh."""
    mesh, axis, here = given.mesh, given.axis, jax.process_index()
    shape = dict(mesh.shape)
    if shape[axis] != schedule.workers:
        rule = f"must have an axis {axis!r} as long as the schedule has workers, "
        rule += f"{schedule.workers}"
        raise value_error(_PLACES, rule, f"{shape}")
    places = places_along(mesh, axis, given.data_axis)
    own = [rank for rank, place in enumerate(places) if here in processes_at(place)]
    if not own:
        rule = "must have a device of each process that calls it"
        got = f"{list(mesh.devices.flat)} in process {here}"
        raise value_error("OneProgram(mesh)", rule, got)
    return LocalCommunicator(Places(schedule, places, own), mesh)


def _of_workers(schedule: Schedule, given: Workers, about: str) -> WorkerCommunicator:
    """The communicator of workers by their names, each with a place of its own."""
    agent, names = current_agent(), given.names
    _check_count(schedule, names)
    known = [info.name for info in agent.group.workers()]
    if agent.info.name not in names or not {*names} <= {*known}:
        rule = f"must be workers of the group, {agent.info.name!r} among them"
        got, remedy = list(names), f"The group has {known}."
        raise value_error("Workers(names)", rule, got, remedy)
    own = names.index(agent.info.name)
    known_here: list[Place] = [None] * len(names)
    known_here[own] = given.place(agent.options.device)
    found = Places(schedule, known_here, (own,))
    leader = min(schedule.placement[0])
    members = Members(names, range(len(names)), own, leader)
    return WorkerCommunicator(agent, found, members, about, given.data_axis)


def _are_elsewhere(places: Sequence[Place]) -> bool:
    """Whether some devices of the places belong to other processes of this run."""
    if jax.process_count() == 1:
        return False
    devices = set().union(*map(devices_of, places))
    known = set().union(*(jax.devices(d.platform) for d in devices))
    # Devices of a compiler for absent hardware belong to no process.
    return devices <= known and not devices <= {*jax.local_devices()}


def _over_processes(
    schedule: Schedule, places: Sequence[Place], about: str, data_axis: str | None
) -> WorkerCommunicator:
    """The communicator of processes of `jax.distributed`, by the places of the workers.

    Raises:
      ValueError: A process has devices of two workers, or of none; a place is a single
        device; a mesh has several processes and the schedule is asynchronous; the
        processes are no workers of rpc, by their own numbers.
    """
    here = jax.process_index()
    each = [processes_at(place) for place in places]
    flat = [process for some in each for process in some]
    if not all(isinstance(place, StageMesh) for place in places):
        rule = "must be meshes, where they are in several processes"
        remedy = 'Make one of a device: Mesh(np.array([device]), ("data",)).'
        raise value_error(_PLACES, rule, list(places), remedy)
    absent = sorted({*range(jax.process_count())} - {*flat})
    if absent:
        rule = "must have a device of each process: one without would do nothing"
        remedy = "Give their devices to a mesh, or start fewer processes."
        raise value_error(_PLACES, rule, f"no device of the processes {absent}", remedy)
    twice = sorted(process for process, n in Counter(flat).items() if n > 1)
    if twice:
        rule = "must have the devices of a process at one worker of the schedule, "
        rule += "where meshes are in several processes"
        got = f"devices of the processes {twice} at several workers"
        remedy = "Give a worker several stages by `interleaved`; or let one program "
        remedy += "run equal stages: its mesh may be laid out in any way."
        raise value_error(_PLACES, rule, got, remedy)
    joint = len(flat) > len(places)
    if joint and schedule.update_policy is not None:
        rule = "must be meshes of one process each with an asynchronous schedule"
        got = f"meshes of the processes {each}"
        raise value_error(_PLACES, rule, got, "`train_step` takes any.")
    try:
        agent = current_agent()
        names = {info.id: info.name for info in agent.group.workers()}
        known = agent.info.id == here and {*flat} <= names.keys()
        got = f"rank {agent.info.id} in process {here}"
    except RpcError as error:
        known, got = False, f"no worker in process {here}: {error}"
    if not known:
        rule = "must be in processes that are workers of rpc, each with its number in "
        rule += "`jax.distributed` as its rank"
        remedy = "Call rpc.init_rpc in each, which jdist.launch gives these numbers."
        raise value_error(_PLACES, rule, got, remedy)
    # Members are in the order of the workers' processes: several have one rank.
    ranks = [rank for rank, some in enumerate(each) for _ in some]
    own, leader = flat.index(here), ranks.index(min(schedule.placement[0]))
    members = Members([names[process] for process in flat], ranks, own, leader)
    found = Places(schedule, places, (ranks[own],))
    about += f", on {[sorted(map(str, devices_of(place))) for place in places]}"
    return WorkerCommunicator(agent, found, members, about, data_axis)

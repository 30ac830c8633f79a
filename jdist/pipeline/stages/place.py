"""Places of a pipeline's workers, devices or meshes, and moves of arrays to them.

A stage is compiled for a mesh as for a device. XLA divides the work by the shardings of
its arguments and inserts the collectives, and the result is that of one device:
shardings decide time and memory of a step, not its values.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jdist._compat import automatic, launched, placed, shares_threads
from jdist._errors import check_type, type_error, value_error
from jdist._tree import PyTree, is_key, is_shape, unworded, words

_PLACES = "Pipeline(places)"
DATA_AXIS = "data"
"""The data axis of meshes that have one of this name, unless another is given."""
STAGE_AXIS = "stage"
"""The axis of stages of a mesh with several axes, unless another is given."""


@dataclass(frozen=True, slots=True)
class StageMesh:
    """A mesh on which a worker computes.

    Attributes:
      mesh: The mesh.
      data_axis: The axis over which rows of values are split; None: they are not split.
    """

    mesh: Mesh
    data_axis: str | None

    @property
    def parts(self) -> int:
        """Number of parts into which rows are split."""
        return 1 if self.data_axis is None else int(self.mesh.shape[self.data_axis])

    def sharding(self, shape: Sequence[int]) -> NamedSharding:
        """The sharding of a value: split by rows if they divide, else replicated."""
        # Rows are not padded, which would change the results of a stage that mixes
        # examples or draws for each.
        divides = bool(shape) and shape[0] > 0 and shape[0] % self.parts == 0
        spec = PartitionSpec(self.data_axis) if divides else PartitionSpec()
        return NamedSharding(self.mesh, spec)


Place: TypeAlias = "jax.Device | StageMesh | None"
"""The placement of a worker; None: wherever its inputs are."""


def places_of(given: Sequence[jax.Device | Mesh], data_axis: str | None) -> list[Place]:
    """Check the devices and meshes of a pipeline, and convert them into places.

    Args:
      given: One for each worker.
      data_axis: See `Meshes`.

    Raises:
      TypeError: One is neither a device nor a mesh.
      ValueError: Two have some devices in common, but not all; a mesh has manual
        axes; no mesh has the data axis.
    """
    places: list[Place] = []
    for worker, one in enumerate(given):
        if isinstance(one, Mesh):
            own = automatic_axes(_PLACES, one, f" for worker {worker}")
            places.append(_with_data_axis(own, data_axis))
        elif isinstance(one, str | Sharding) or not hasattr(one, "device_kind"):
            rule = "must be devices and meshes"
            remedy = "Names of workers are given as `pipeline.Workers(names)`."
            raise type_error(_PLACES, rule, f"{one!r} for worker {worker}", remedy)
        else:
            places.append(one)
    _check_data_axis(places, data_axis)
    _check_overlap(places)
    return places


def place_on(mesh: Mesh, data_axis: str | None) -> StageMesh:
    """The place of a worker on a mesh of its own.

    Raises:
      TypeError: It is not a mesh.
      ValueError: It has manual axes, or devices of other processes.
    """
    call = "Workers(mesh=...)"
    check_type(call, mesh, Mesh, "must be a jax.sharding.Mesh")
    mesh = automatic_axes(call, mesh)
    here = jax.process_index()
    others = {device.process_index for device in mesh.devices.flat} - {here}
    if others:
        rule = "must have devices of this process alone"
        got = f"devices of the processes {sorted(others)} in process {here}"
        raise value_error(call, rule, got, "Make it of jax.local_devices().")
    return _with_data_axis(mesh, data_axis)


def places_along(mesh: Mesh, axis: str, data_axis: str | None) -> list[Place]:
    """The places of the workers of one program: slices of a mesh along one axis.

    Args:
      mesh: The mesh of all stages.
      axis: The axis of stages.
      data_axis: The axis over which rows are split; None: "data", if it is one.
    """
    at = mesh.axis_names.index(axis)
    names = tuple(name for name in mesh.axis_names if name != axis)
    rows = np.moveaxis(mesh.devices, at, 0)
    if not names:
        return list(rows)
    return [_with_data_axis(Mesh(row, names), data_axis) for row in rows]


def _with_data_axis(mesh: Mesh, data_axis: str | None) -> StageMesh:
    axis = DATA_AXIS if data_axis is None else data_axis
    return StageMesh(mesh, axis if axis in mesh.axis_names else None)


def automatic_axes(call: str, mesh: Mesh, whose: str = "") -> Mesh:
    """The mesh as pipelines compute on it: XLA divides the work over its axes.

    Explicit axes would ask the stage's author for the collectives.

    Raises:
      ValueError: It has manual axes.
    """
    if AxisType.Manual in mesh.axis_types:
        rule = "must be meshes with automatic or explicit axes"
        kinds = ", ".join(kind.name for kind in mesh.axis_types)
        remedy = "Make it by jax.sharding.Mesh(devices, names)."
        raise value_error(call, rule, f"axes of type {kinds}{whose}", remedy)
    return automatic(mesh) if AxisType.Explicit in mesh.axis_types else mesh


def _check_data_axis(places: Sequence[Place], data_axis: str | None) -> None:
    meshes = [place for place in places if isinstance(place, StageMesh)]
    if data_axis is None or any(place.data_axis for place in meshes):
        return
    names = sorted({name for place in meshes for name in place.mesh.axis_names})
    rule = "must be an axis of one of the meshes"
    got = f"{data_axis!r}, where the axes are {names}"
    raise value_error("Meshes(data_axis=...)", rule, got)


def _check_overlap(places: Sequence[Place]) -> None:
    """Refuse two places that share some devices, but not all."""
    # A shared device would do the work of two workers while the rest of its mesh does
    # that of one, which no schedule assumes.
    sets = [(worker, devices_of(place)) for worker, place in enumerate(places)]
    for (one, first), (other, second) in itertools.combinations(sets, 2):
        if first & second and first != second:
            rule = "must have all devices in common or none, so that a device does the "
            rule += "work of its schedule"
            shared = ", ".join(sorted(map(str, first & second)))
            got = f"{shared} and others for the workers {one} and {other}"
            remedy = "Give both the same mesh, or meshes of other devices; a mesh may "
            remedy += "leave devices out."
            raise value_error(_PLACES, rule, got, remedy)


def devices_of(place: Place) -> set[jax.Device]:
    """The devices of a place; none for a place that follows its inputs."""
    if isinstance(place, StageMesh):
        return {*place.mesh.devices.flat}
    return set() if place is None else {place}


def processes_at(place: Place) -> list[int]:
    """The processes that have devices of a place, in the order of the devices."""
    devices: Any = () if place is None else (place,)
    if isinstance(place, StageMesh):
        devices = place.mesh.devices.flat
    return list(dict.fromkeys(int(device.process_index) for device in devices))


def device_here(place: Place) -> Place:
    """The first device of this process in a mesh; other places unchanged."""
    if not isinstance(place, StageMesh):
        return place
    here = jax.process_index()
    own = (d for d in place.mesh.devices.flat if d.process_index == here)
    return next(own, place.mesh.devices.flat[0])


def pacing(
    places: Iterable[Place], wait: Callable[[PyTree], PyTree]
) -> Callable[..., PyTree]:
    """The function through which the programs of these places are called.

    Args:
      places: Devices or meshes.
      wait: How to wait for arrays of an earlier program.

    Returns:
      `operator.call`, unless a mesh has several CPU devices of this process, where the
      host must not run ahead too far (`jdist._compat.paced`).
    """
    for place in places:
        if isinstance(place, StageMesh) and shares_threads(place.mesh):
            return functools.partial(launched, place.mesh, wait)
    return operator.call


def undivided(place: Place) -> Place:
    """The same place, with values replicated instead of split by rows."""
    return replace(place, data_axis=None) if isinstance(place, StageMesh) else place


def beside(place: Place) -> Place:
    """The place where numbers of all stages, such as norms, are combined."""
    # On a mesh over several processes one device of each suffices: every process has
    # the numbers, so that no collective is needed. A topology has devices of made-up
    # processes, although this process is alone.
    several = jax.process_count() > 1 and len(processes_at(place)) > 1
    return device_here(place) if several else undivided(place)


def place_of(array: object) -> Place:
    """The place of an array or a shape; on a mesh without a data axis."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return StageMesh(sharding.mesh, None)
    return None if sharding is None else next(iter(sharding.device_set))


def common_parts(places: Sequence[Place]) -> int:
    """The smallest number of rows that every mesh splits evenly."""
    return math.lcm(*(p.parts for p in places if isinstance(p, StageMesh)))


# --- what moves ---


def moved(value: PyTree, place: Place) -> PyTree:
    """Move the arrays of a value to a place.

    Args:
      value: A tree of arrays, or of shapes, which are given the place's sharding.
      place: The place; None leaves arrays where they are, and puts those of NumPy on
        the default device.
    """
    # `device_put` takes 30 us even where it has nothing to do.
    # A loop, because a generator costs as much as the checks.
    for leaf in jax.tree.leaves(value):
        if _is_elsewhere(leaf, place):
            break
    else:
        return value

    def there(leaf: Any) -> Any:
        if not _is_elsewhere(leaf, place):
            return leaf
        if place is None:
            return _on_default_device(leaf)
        return _put(leaf, _target(leaf, place))

    return jax.tree.map(there, value)


def laid(leaf: Any, target: Sharding) -> Any:
    """An array or a shape with a given sharding; unchanged if it has it already."""
    is_there = (
        isinstance(leaf, jax.Array)
        and leaf.committed
        and leaf.sharding.is_equivalent_to(target, leaf.ndim)
    )
    return leaf if is_there else _put(leaf, target)


def spec_of(leaf: object) -> PartitionSpec:
    """The layout of an array or a shape over its mesh; empty without a mesh.

    Specifications of one layout have one form here, so that they can be compared: it
    names no axis of size 1, which a compiled program may drop, and has no None at the
    end.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    entries: list[Any] = []
    for entry in sharding.spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = [n for n in names if n is not None and sharding.mesh.shape[n] > 1]
        entries.append(tuple(kept) if len(kept) > 1 else next(iter(kept), None))
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def received(value: PyTree, place: Place) -> PyTree:
    """Move a message's value to this worker's mesh, if it has one."""
    # Messages arrive on the worker's device: without a mesh they are in place.
    return moved(value, place) if isinstance(place, StageMesh) else value


def _is_elsewhere(leaf: object, place: Place) -> bool:
    if isinstance(leaf, jax.Array):
        if place is None:
            return False
        # An uncommitted array would be committed after the first step, and the second
        # step be compiled anew.
        return not leaf.committed or _differ(leaf, place)
    if is_shape(leaf):
        return place is not None
    # NumPy's arrays are transferred once, here, rather than by each compiled call.
    return isinstance(leaf, np.ndarray)


def _on_default_device(array: np.ndarray) -> jax.Array:
    """`jax.device_put`, in a fifth of its time for the types of most batches."""
    dtype = array.dtype
    # `device_put` knows, and mostly refuses, what is not as simple.
    simple = dtype.kind in "biufc" and dtype.itemsize <= 8 and dtype.isnative
    if not simple or type(array) is not np.ndarray:
        return jax.device_put(array)
    narrow = jax.dtypes.canonicalize_dtype(dtype)
    return placed(np.asarray(array, narrow, order="C"), None)


def _differ(leaf: jax.Array, place: jax.Device | StageMesh) -> bool:
    if isinstance(place, StageMesh):
        return not leaf.sharding.is_equivalent_to(_target(leaf, place), leaf.ndim)
    return leaf.device != place


def _target(leaf: Any, place: jax.Device | StageMesh) -> Sharding:
    if isinstance(place, StageMesh):
        return place.sharding(leaf.shape)
    return SingleDeviceSharding(place)


def _put(leaf: Any, target: Sharding) -> Any:
    if is_shape(leaf):
        return leaf.update(sharding=target)
    if target.is_fully_addressable:
        return jax.device_put(whole_here(leaf), target)
    devices: set[Any] = target.device_set
    processes = sorted({device.process_index for device in devices})
    # All processes of a mesh over several put the same values there.
    if jax.process_count() > 1 and jax.process_index() in processes:
        return over_processes(leaf, target)
    # Refused, since `device_put` would wait for processes that need not make this call.
    rule = "must be devices of this process where a call runs"
    got = f"devices of the processes {processes} in process {jax.process_index()}"
    remedy = "A pipeline for absent hardware has `lower` alone."
    raise value_error(_PLACES, rule, got, remedy)


def over_processes(leaf: Any, target: Sharding) -> jax.Array:
    """Put an array that each process has in full on devices of several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # Over the same devices `device_put` is a program that all processes run.
        return jax.device_put(leaf, target)
    if is_key(leaf):
        return unworded(over_processes(words(leaf), target), leaf)
    # `device_put` would make the processes compare their arrays, value by value.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, target, lambda part: whole[part])


# --- what stays ---


def resident(value: PyTree, place: Place, call: str, stage: int) -> PyTree:
    """Put parameters or states of a stage on its place.

    On a mesh an array keeps the specification of its sharding, also that of another
    mesh. An array without one is replicated.

    Args:
      value: A tree of arrays, numbers and shapes.
      place: The place of the stage.
      call: The argument, for errors.
      stage: The stage's number, likewise.

    Raises:
      ValueError: An array is sharded over an axis that the mesh does not have, or that
        does not divide it there.
    """
    if not isinstance(place, StageMesh):
        return moved(value, place)

    def there(leaf: Any) -> Any:
        if not (is_shape(leaf) or isinstance(leaf, jax.Array | np.ndarray)):
            return leaf
        now = getattr(leaf, "sharding", None)
        spec = now.spec if isinstance(now, NamedSharding) else PartitionSpec()
        on_it = isinstance(now, NamedSharding) and now.mesh == place.mesh
        if on_it and isinstance(leaf, jax.Array) and leaf.committed:
            return leaf
        _check_spec(spec, leaf.shape, place.mesh, call, stage)
        return _put(leaf, NamedSharding(place.mesh, spec))

    return jax.tree.map(there, value)


def sharded(
    value: PyTree, specs: PyTree, place: Place, call: str, stage: int
) -> PyTree:
    """Shard parameters or states of a stage over its mesh.

    Args:
      value: A tree of arrays, numbers and shapes.
      specs: A PartitionSpec for each of them or for each subtree; None: replicated.
      place: The place of the stage.
      call: The method, for errors.
      stage: The stage's number, likewise.

    Raises:
      ValueError: The place is not a mesh; the trees differ; a specification names an
        axis that the mesh does not have, or that does not divide the array.
    """
    if not isinstance(place, StageMesh):
        rule = f"must be None for stage {stage}, whose place is no mesh"
        raise value_error(f"{call}(specs)", rule, specs)
    try:
        each = jax.tree.broadcast(specs, value, is_leaf=_is_spec)
    except ValueError as error:
        rule = "must be a tree like the parameters, or a part of it from the top, for "
        rule += f"stage {stage}"
        raise value_error(f"{call}(specs)", rule, str(error)) from error

    for spec in jax.tree.leaves(each, is_leaf=_is_spec):
        rule = "must have a PartitionSpec or None for each parameter"
        check_type(f"{call}(specs)", spec, PartitionSpec | None, rule)

    def there(spec: PartitionSpec | None, leaf: Any) -> Any:
        spec = PartitionSpec() if spec is None else spec
        _check_spec(spec, np.shape(leaf), place.mesh, f"{call}(specs)", stage)
        return _put(leaf, NamedSharding(place.mesh, spec))

    return jax.tree.map(there, each, value, is_leaf=_is_spec)


def _is_spec(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, PartitionSpec)


def _check_spec(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, call: str, stage: int
) -> None:
    try:
        layout = NamedSharding(mesh, spec)
        layout.check_compatible_aval(tuple(shape))
        layout.shard_shape(tuple(shape))
    except ValueError as error:
        rule = f"must fit the mesh of stage {stage}, with axes {list(mesh.axis_names)}"
        got = f"{spec} for shape {tuple(shape)}: {error}"
        remedy = "Place the array by Pipeline.place(params, specs), over axes that the "
        remedy += "mesh has and that divide it."
        raise value_error(call, rule, got, remedy) from error


def on_mesh(tree: PyTree) -> bool:
    """Whether an array or a shape of the tree is on a mesh."""
    places = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return any(isinstance(place, NamedSharding) for place in places)


def laid_like(value: PyTree, like: PyTree) -> PyTree:
    """Shard each array of a tree as that of `like`, if the latter is committed."""

    def there(leaf: Any, other: Any) -> Any:
        bound = is_shape(other) or (isinstance(other, jax.Array) and other.committed)
        place = other.sharding if bound else None
        return leaf if place is None else laid(leaf, place)

    return jax.tree.map(there, value, like)


def on_host(array: Any) -> np.ndarray:
    """The values of an array, also of one that is sharded over several processes.

    All processes that have a part of such an array call this together.
    """
    return np.asarray(whole_here(array))


def whole_here(leaf: Any) -> Any:
    """Gather an array that is sharded over several processes on a device of this one.

    All processes that have a part of such an array call this together. Anything else is
    returned unchanged.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if not leaf.is_fully_replicated:
        assert isinstance(leaf.sharding, NamedSharding)
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.device_put(leaf, whole)
    return leaf.addressable_data(0)


def bytes_on_device(array: jax.Array) -> int:
    """The bytes of an array on each of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize

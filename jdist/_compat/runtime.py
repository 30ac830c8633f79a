"""The process: its devices and precision, arrays put on a device, other processes."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from jdist._compat import internals
from jdist._errors import Unavailable, requirement

Given = ParamSpec("Given")
Result = TypeVar("Result")


def double_precision() -> AbstractContextManager[None]:
    """Within it JAX computes with 64-bit types, whatever the global setting."""
    return jax.enable_x64(True)


def axes_of_one_device_untyped() -> AbstractContextManager[None]:
    """Within it explicit axes of one device, which divide nothing, are in no type."""
    # To become JAX's default, and then to go: a release without it does so always.
    untyped: Any = getattr(jax, "remove_size_one_mesh_axis_from_type", None)
    return nullcontext() if untyped is None else untyped(True)


@contextmanager
def outside_mesh() -> Iterator[None]:
    """Unsets the mesh of `jax.set_mesh` for a block.

    Under it JAX computes on no other devices, and puts what it makes on all of them.
    """
    unset: AbstractContextManager[Any] = nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        # Inside a transformation the mesh is that of its trace, and stays.
        with suppress(ValueError):
            unset = jax.set_mesh(None)
    with unset:
        yield


def called_outside_mesh(fn: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that runs in `outside_mesh`; 0.3 us where no mesh is set.

    Its frame refers to the arguments until the function returns.
    """

    @functools.wraps(fn)
    def called(*arguments: Given.args, **options: Given.kwargs) -> Result:
        if jax.sharding.get_abstract_mesh().empty:
            return fn(*arguments, **options)
        with outside_mesh():
            return fn(*arguments, **options)

    return called


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes, over the same devices."""
    return Mesh(mesh.devices, mesh.axis_names)


def with_automatic_axes(tree: Any) -> Any:
    """The tree with its arrays on a mesh with automatic axes; nothing is copied.

    Along explicit axes an array cannot be cut where its parts are divided.
    """

    def one(leaf: Any) -> Any:
        known = isinstance(leaf, jax.Array) and not is_traced(leaf)
        place = leaf.sharding if known else None
        if not isinstance(place, NamedSharding) or not isinstance(place.mesh, Mesh):
            return leaf
        if AxisType.Explicit not in place.mesh.axis_types:
            return leaf
        return jax.device_put(leaf, NamedSharding(automatic(place.mesh), place.spec))

    return jax.tree.map(one, tree)


def set_cpu_device_count(count: int) -> None:
    """Gives this process `count` CPU devices; before the first JAX computation only.

    Raises:
      RuntimeError: A JAX computation has already started the backend. (JAX's own.)
    """
    jax.config.update("jax_num_cpu_devices", count)


def require_backend() -> None:
    """Starts JAX's backend.

    Raises:
      Unavailable: There is no device of the platform that JAX was told to use. JAX
        says so by a RuntimeError, or for GPUs by an AssertionError without a word.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted = jax.config.jax_platforms or "any"  # type: ignore[attr-defined]
        rule = "must name a platform of which there is a device here"
        remedy = (
            "JAX_PLATFORMS=cpu runs everywhere. JAX's plugins for other platforms: "
            "https://docs.jax.dev/en/latest/installation.html."
        )
        got = f"{wanted} ({error})" if str(error) else wanted
        raise Unavailable(requirement("JAX_PLATFORMS", rule, got, remedy)) from error


def distributed_client() -> Any:
    """The client of `jax.distributed`'s coordinator, which keeps keys and values.

    Used of it: `key_value_set`, `key_value_dir_get`, `key_value_delete`.
    """
    return internals.distributed_state.client


def abandon_distributed() -> None:
    """Makes this process forget `jax.distributed`: its exit waits for no other."""
    state = internals.distributed_state
    # At exit JAX waits for all processes to get there, which they never will if they
    # are inside a collective with this one. The destructors of its objects would wait
    # too, hence one reference that nothing ever takes back.
    for name in ("client", "service", "preemption_sync_manager"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, name)))
        setattr(state, name, None)


def is_computed(array: jax.Array) -> bool:
    """Whether an array's numbers are there; `jax.Array` documents only the wait."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return bool(array.is_ready())  # type: ignore[attr-defined]


def is_traced(value: object) -> bool:
    """Whether `value` is known only by shape and dtype, inside a JAX transformation."""
    return isinstance(value, jax.core.Tracer)


def placed(
    array: np.ndarray, device: jax.Device | None, weak: bool = False
) -> jax.Array:
    """`jax.device_put`, in a fifth of its time, and for any dtype and weak type.

    At 3 x 3 on CPU `device_put` takes 28 us, most of it in Python. Without the checks
    made there, 64-bit types stay what they are also where they are switched off, and a
    weak type can be given, for which JAX documents no way. As there, memory at a
    multiple of 64 bytes is taken over on CPU.

    Args:
      array: In C order and of the machine's byte order; not to be written to any more.
      device: The result is committed to it; None for the default, not committed.
      weak: Whether the type yields to others in promotion, as a Python number's does.

    Raises:
      jax.errors.JaxRuntimeError: JAX has no such dtype.
    """
    committed = device is not None
    if device is None:
        device = default_device()
    abstract = _abstract(array.shape, array.dtype, weak)
    sharding = _only_on(device)
    return internals.batched_device_put(
        abstract, sharding, [array], [device], committed, enable_x64=True
    )


def beside(array: jax.Array | np.ndarray, value: jax.Array) -> jax.Array:
    """The cotangent of a value where the value is, committed if that is."""
    place, committed = value.sharding, value.committed
    if isinstance(array, np.ndarray):
        return placed_at(array, place, committed)
    # Identity first: a comparison takes longer, and most arrays share one.
    same = array.sharding is place or array.sharding == place
    if committed:
        done = same and array.committed
        return array if done else jax.device_put(array, place)
    # A value that is not committed may be anywhere, and its cotangent is left where it
    # is. On the same device it is not committed either: what follows from it would be,
    # and every program that takes it would be compiled again.
    # Elsewhere it may stay, and over several devices there is no uncommitted array.
    if not (same and array.committed) or len(place.device_set) > 1:
        return array
    return internals.batched_device_put(
        array.aval, place, [array], list(place.device_set), False, enable_x64=True
    )


def placed_at(
    array: np.ndarray, place: jax.sharding.Sharding, committed: bool
) -> jax.Array:
    """The array as `beside` places it: there, and committed if so said."""
    devices = list(place.device_set)
    if len(devices) > 1:
        return jax.device_put(array, place)
    abstract = _abstract(array.shape, array.dtype, False)
    return internals.batched_device_put(
        abstract, place, [array], devices, committed, enable_x64=True
    )


def placed_as(array: jax.Array, before: jax.Array) -> jax.Array:
    """An array in the place of another one, committed to its devices if that was."""
    return jax.device_put(array, before.sharding) if before.committed else array


@functools.lru_cache(1024)
def _abstract(
    shape: tuple[int, ...], dtype: np.dtype, weak: bool
) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype, weak_type=weak)


@functools.cache
def _only_on(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def default_device() -> jax.Device:
    """The device on which JAX puts what is not said to belong elsewhere."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]

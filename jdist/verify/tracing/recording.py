"""Recordings of the values and cotangents that pass the taps of this process.

A recording covers all threads of one process. Workers in other processes record for
themselves; their `records` are plain data that can be sent by any means, and `replay`
adds them to the active recordings of the process that receives them.
"""

import base64
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._errors import listed, requirement
from jdist.verify.processes.peers import Peers

under_way = jax.make_user_context(False)
"""Whether a recording is under way: for all threads, and part of JAX's cache keys.

Programs that were compiled without taps are therefore traced again in a recording, and
those with taps serve no call after it.
"""


class MeshAxis(NamedTuple):
    """An axis along which the devices of a tap have values of their own.

    Attributes:
      name: Name of the mesh axis.
      size: Number of devices along it.
      dim: The dimension of the value that is divided over it; None if none is.
      declared: Whether the tap names the axis.
    """

    name: str
    size: int
    dim: int | None
    declared: bool


class TapRecord(NamedTuple):
    """One passage of a tap.

    Attributes:
      name: Name of the tap.
      axes: Number of leading axes that `vmap` gave the arrays.
      value: The value.
      cotangent: The value's cotangent, of its shape, in the backward pass; None in the
        forward pass.
      mesh: The axes of the mesh, inside `shard_map`.
      place: The coordinate of the device along each of them.
      number: The tap's place in the order in which programs were traced. XLA runs taps
        that do not depend on each other in any order; passages of one number, as in a
        loop, arrive in turn.
    """

    name: str
    axes: int
    value: np.ndarray
    cotangent: np.ndarray | None
    mesh: tuple[MeshAxis, ...] = ()
    place: tuple[int, ...] = ()
    number: int = 0


def in_program_order(records: Iterable[TapRecord]) -> list[TapRecord]:
    """The records as a program that runs one operation after the other passes them."""
    return sorted(records, key=lambda record: record.number)


def labels(names: Sequence[str]) -> list[str]:
    """The names of passages in order, with a number, `block[3]`, if one has several."""
    count, before = Counter(names), {name: itertools.count() for name in names}
    return [f"{x}[{next(before[x])}]" if count[x] > 1 else x for x in names]


class TapRecording:
    """A context manager that records all taps of this process.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import verify
      >>> loss = jax.jit(lambda w, x: (verify.tap(w * x, "product") ** 2).sum())
      >>> with verify.TapRecording() as recording:
      ...     gradient = jax.grad(loss)(2.0, jnp.array([1.0, 3.0]))
      ...     _ = gradient.block_until_ready()
      >>> [(r.name, r.value.tolist(), r.cotangent) for r in recording.records][0]
      ('product', [2.0, 6.0], None)
      >>> recording.records[1].cotangent.tolist()
      [4.0, 12.0]
    """

    def __init__(self) -> None:
        self._records: list[TapRecord] = []

    @property
    def records(self) -> tuple[TapRecord, ...]:
        """The records so far, in the order of arrival.

        Each is a tuple `(name, axes, value, cotangent, mesh, place, number)`: the tap's
        name, how many leading axes of the arrays are those of `vmap`, the value, its
        cotangent in the backward pass, else None, where in a mesh it is, and where in
        its program.
        """
        with _lock:
            return tuple(self._records)

    def __enter__(self) -> "TapRecording":
        with _lock:
            _active.append(self)
            under_way.set_global(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            _active.remove(self)
            # Recordings may overlap: the last one to end resets the flag.
            under_way.set_global(bool(_active))


# Taps deliver on XLA's threads and on those of pipelines.
_lock = threading.Lock()
_active: list[TapRecording] = []


# Without slots: JAX refers weakly to what programs call.
@dataclass(frozen=True)
class Delivery:
    """Adds passages to all recordings.

    Attributes:
      mesh: The axes of the mesh of which the last array has the coordinates.
      number: The tap's place in the order in which programs were traced.
    """

    mesh: tuple[MeshAxis, ...] = ()
    number: int = field(default_factory=itertools.count(1).__next__)

    def __call__(self, name: str, axes: int, arrays: Sequence[np.ndarray]) -> None:
        """Adds a passage: a value, or a cotangent and its value; then coordinates."""
        if not self.mesh:
            *cotangent, value = arrays
            own = cotangent[0] if cotangent else None
            _add([TapRecord(name, axes, value, own, number=self.number)])
            return
        *shown, places = arrays
        # An axis of `vmap` can be an axis of the mesh: its rows have other places.
        outer = (
            places.shape[:-1]
            if np.ptp(places.reshape(-1, len(self.mesh)), 0).any()
            else ()
        )
        records = []
        for i in np.ndindex(outer):
            *cotangent, value = (x[i] for x in shown)
            place = tuple(places[i].reshape(-1, len(self.mesh))[0].tolist())
            own = cotangent[0] if cotangent else None
            inner = axes - len(outer)
            records.append(
                TapRecord(name, inner, value, own, self.mesh, place, self.number)
            )
        _add(records)


def replay(records: Iterable[Sequence[object]]) -> None:
    """Adds records of another process to the active recordings of this one.

    Args:
      records: `TapRecording.records`, as they are or as plain tuples.

    Raises:
      ValueError: One of them does not have the fields of a `TapRecord`.
    """
    made = []
    rule = "must be records, each a tuple"
    for each in listed("replay(records=...)", records, Sequence, rule):
        # Four fields are enough for one device, which has no place in a mesh.
        if len(each) not in (4, 6, len(TapRecord._fields)):
            rule = f"must be records: {', '.join(TapRecord._fields)}"
            got = f"a sequence of {len(each)}"
            raise ValueError(requirement("replay(records=...)", rule, got))
        made.append(_restored(TapRecord(*each)))
    _add(made)


def _restored(record: TapRecord) -> TapRecord:
    """A record with tuples that may have come as lists."""
    mesh = tuple(MeshAxis(*axis) for axis in record.mesh)
    return record._replace(mesh=mesh, place=tuple(record.place))


def of_all_processes(records: Sequence[TapRecord], peers: Peers) -> list[TapRecord]:
    """The records of all processes, the same on each of them; by tap, then by rank."""
    if peers.size == 1:
        return list(records)
    names = {record.name for record in records}
    # A message for each tap: those of a large model are too much for one.
    return [
        _unpacked(number, *each)
        for name in sorted(set().union(*peers.exchange(sorted(names))))
        for number, each in enumerate(
            itertools.chain(*peers.exchange([
                _packed(r) for r in in_program_order(records) if r.name == name
            ]))
        )
    ]  # fmt: skip


def _packed(record: TapRecord) -> list[Any]:
    """A record as JSON can hold it."""
    arrays = [
        [x.dtype.name, x.shape, base64.b64encode(x.tobytes()).decode()]
        for x in (record.value, record.cotangent)
        if x is not None
    ]
    return [record.name, record.axes, record.mesh, record.place, *arrays]


def _unpacked(
    number: int, name: str, axes: int, mesh: Any, place: Any, *packed: Any
) -> TapRecord:
    """The record that was packed, with its number among those of its tap."""
    value, *cotangent = [
        np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
        for dtype, shape, text in packed
    ]
    own = cotangent[0] if cotangent else None
    return _restored(TapRecord(name, axes, value, own, mesh, place, number))


def _add(records: list[TapRecord]) -> None:
    with _lock:
        # None may be active: a program compiled ahead of time can outlive its
        # recording.
        for recording in _active:
            recording._records.extend(records)

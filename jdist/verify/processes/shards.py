"""The shards of an array that this process holds, and whether its replicas agree.

An array over several devices is judged where it lies: each shard beside the same slice
of the reference, so that no host ever holds what it does not hold already. Shards of
one index are replicas; they are compared with each other by a digest of their bits,
since a difference within the bound today is a different model after some more steps.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from jdist._tree import words

Coordinates = Mapping[str, int | str]
"""A device's place along each axis of its mesh; without a mesh, its name."""

DEVICE = "device"
"""The axis of devices without a mesh."""

Replicas = Mapping[str, Mapping[str, list[Coordinates]]]
"""Maps an index to the devices of each digest; only for indices that several devices
hold."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of an array, on the host.

    Attributes:
      index: Position in the whole array; empty for the whole itself.
      values: The numbers, a NumPy array.
      first: Whether it is the first of its replicas, the one that counts in sums.
      blocks: The index of each block, by the coordinates of the devices that hold it,
        where the whole itself is divided.
    """

    index: tuple[slice, ...]
    values: np.ndarray
    first: bool = True
    blocks: Mapping[str, tuple[slice, ...]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Its index as a reader writes it; empty for the whole."""
        return _written(self.index) if self.index else ""

    @property
    def origin(self) -> tuple[int, ...]:
        """The index of its first entry in the whole; empty for the whole."""
        return tuple(each.start or 0 for each in self.index)


@dataclass(frozen=True, slots=True)
class HeldArray:
    """The shards of an array that one process holds.

    Attributes:
      dtype: Name of the dtype.
      shape: Shape of the whole array.
      shards: One shard for each index of which this process has a replica.
      replicas: See `Replicas`.
    """

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    replicas: Replicas = field(default_factory=dict)


def held(leaf: ArrayLike) -> HeldArray:
    """The shards of a leaf in this process; a PRNG key stands for its bits.

    Args:
      leaf: An array of JAX or NumPy, or a number.
    """
    if not isinstance(leaf, jax.Array):
        values = np.asarray(leaf)
        return HeldArray(values.dtype.name, values.shape, (Shard((), values),))
    leaf = words(leaf)
    index_of = leaf.sharding.devices_indices_map(leaf.shape)
    holders = Counter(map(_written, index_of.values()))
    found: dict[str, Shard] = {}
    replicas: dict[str, dict[str, list[Coordinates]]] = {}
    coordinates = _coordinates(leaf)
    for shard in leaf.addressable_shards:
        place, values = _written(shard.index), np.asarray(shard.data)
        first = shard.replica_id == 0
        # The first replica is preferred, because it alone counts in sums.
        if place not in found or first:
            found[place] = Shard(shard.index, values, first)
        if holders[place] > 1:
            # A digest: records pass through the coordinator, which is no place for
            # arrays.
            digest = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
            same = replicas.setdefault(place, {}).setdefault(digest, [])
            same.append(coordinates.get(shard.device, {DEVICE: str(shard.device)}))
    # If this process has all shards, one comparison of the whole says more.
    whole = leaf.is_fully_addressable
    shards = tuple(found.values())
    if whole:
        blocks = _blocks(index_of, coordinates) if coordinates else {}
        shards = (Shard((), np.asarray(leaf), blocks=blocks),)
    return HeldArray(leaf.dtype.name, leaf.shape, shards, replicas)


def _blocks(
    index_of: Mapping[jax.Device, tuple[slice, ...]],
    coordinates: Mapping[jax.Device, Coordinates],
) -> dict[str, tuple[slice, ...]]:
    """The index of each block, by its coordinates along the axes that divide."""
    holders: dict[str, list[Coordinates]] = {}
    for device, index in index_of.items():
        holders.setdefault(_written(index), []).append(coordinates[device])
    axes = [
        axis for axis in next(iter(coordinates.values()))
        if len(holders) > 1
        and len({x[axis] for x in coordinates.values()}) > 1
        and all(len({x[axis] for x in own}) == 1 for own in holders.values())
    ]  # fmt: skip
    return {
        ", ".join(_named(axis, coordinates[device][axis]) for axis in axes): index
        for device, index in index_of.items()
        if axes
    }


def _coordinates(array: jax.Array) -> dict[jax.Device, Coordinates]:
    """The place of each device of a mesh; empty if the array is on none."""
    if not isinstance(array.sharding, NamedSharding):
        return {}
    mesh: Any = array.sharding.mesh
    return {
        device: dict(zip(mesh.axis_names, place, strict=True))
        for place, device in np.ndenumerate(mesh.devices)
    }


def replicas_differ(parts: Iterable[Replicas]) -> str:
    """The axes along which replicas have different bits, in words; empty if none do.

    Args:
      parts: What each process has found.
    """
    joined: dict[str, dict[str, list[Coordinates]]] = {}
    for part in parts:
        for place, digests in part.items():
            for digest, devices in digests.items():
                joined.setdefault(place, {}).setdefault(digest, []).extend(devices)
    told = [
        _differing(place, list(digests.values()))
        for place, digests in joined.items()
        if len(digests) > 1
    ]
    return f"replicas differ {'; '.join(told)}" if told else ""


def _differing(place: str, groups: list[list[Coordinates]]) -> str:
    """The axes along which neighbours differ, and the coordinates of each group."""
    along = {
        next(iter(changed))
        for one, other in combinations(groups, 2)
        for x, y in product(one, other)
        if len(changed := {axis for axis in x if x[axis] != y[axis]}) == 1
    }
    axes = [axis for axis in groups[0][0] if axis in along]
    named = [
        dict.fromkeys(" ".join(_named(axis, x[axis]) for axis in axes) for x in group)
        for group in groups
    ]
    over = "" if axes == [DEVICE] else f"over {', '.join(axes)} "
    return f"{over}at {place}: {' other than '.join(map(', '.join, named))}"


def _named(axis: str, index: int | str) -> str:
    return str(index) if axis == DEVICE else f"{axis}={index}"


def _written(index: tuple[slice, ...]) -> str:
    """An index as text: `[0:2, :]`."""

    def one(each: slice) -> str:
        if each.start is None and each.stop is None:
            return ":"
        start = "" if each.start is None else each.start
        return f"{start}:{'' if each.stop is None else each.stop}"

    return f"[{', '.join(map(one, index))}]"

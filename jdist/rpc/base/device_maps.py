"""Device maps: on which of a worker's devices the arrays of another one arrive.

An array arrives on the callee's one device unless the caller has a map for it. A map
leads from devices of the caller to devices of the callee, each given by its place in
`jax.local_devices()` of its process. Answers come back by the inverse: an array on a
device to which the map leads arrives on the device it leads from. So do the messages
that the callee sends by itself, unless it has a map of its own for that device; that is
how cotangents find their way back. Arrays on other devices, and those sharded over
several, arrive on the receiver's one device, as without a map.

Only the sender of a message has to know: it writes the number of the receiver's device
beside the array. A worker with a map tells it to its callee when it joins, for the
answers; the callee refuses a device that it does not have. So in an elastic group a map
holds for workers that have joined before, and no longer when they have left.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.wire.frame import ANSWERS

__all__ = [
    "CALL",
    "DeviceMaps",
    "Table",
    "check",
    "device_of",
    "exchange",
    "install",
    "number_beside",
    "number_of",
]


if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent

Table = Mapping[jax.Device, int]
"""From devices of this worker to numbers of another one's."""

CALL = "RpcOptions(device_maps=...)"
_KIND = "device map"


class DeviceMaps:
    """What one worker has to know to send its arrays to the others.

    They go by the names that they prove to its transport.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Table] = {}
        self._answers: dict[str, Table] = {}

    def towards(self, peer: str, kind: str) -> Table | None:
        """The table for messages of this kind to that worker, if there is one."""
        return (self._answers if kind in ANSWERS else self._requests).get(peer)

    def lead(self, peer: str, table: Table) -> None:
        """Arrays that go to `peer` arrive there as in `table`."""
        self._requests[peer] = {**self._requests.get(peer, {}), **table}

    def answer(self, peer: str, table: Table) -> None:
        """Arrays in answers to `peer` do, and others where nothing else is said."""
        self._answers[peer] = table
        self._requests[peer] = {**table, **self._requests.get(peer, {})}


def number_of(leaf: jax.Array, table: Table) -> int | None:
    """The number of the receiver's device for this array; None for its one device."""
    devices = leaf.devices()
    return table.get(next(iter(devices))) if len(devices) == 1 else None


def number_beside(leaf: jax.Array, table: Table | None) -> int:
    """What travels beside an array: the number plus one, or 0 for the one device."""
    number = None if table is None else number_of(leaf, table)
    return 0 if number is None else number + 1


def device_of(number: int) -> jax.Device:
    """The device of this number on this worker.

    Raises:
      ProtocolError: There is none.
    """
    devices = jax.local_devices()
    if not 0 <= number < len(devices):
        raise ProtocolError(f"There is no device {number} among {len(devices)}.")
    return devices[number]


def check(maps: object) -> None:
    """Refuses what is no device maps; which devices there are is seen at the start.

    Raises:
      TypeError, ValueError: See the message, which keeps torch's words.
    """
    if not isinstance(maps, Mapping):
        raise TypeError(requirement(CALL, "must be maps by worker's name", maps))
    for name, table in maps.items():
        if not isinstance(name, str) or not isinstance(table, Mapping):
            rule = "must have a map from devices to numbers for the name of a worker"
            raise TypeError(requirement(CALL, rule, f"{name!r}: {table!r}"))
        for source, target in table.items():
            _check_pair(name, source, target)
        if len(set(table.values())) < len(table):
            rule = "must lead to each device once: device maps only support 1-to-1 "
            rule += f"mapping, that for {name!r} has duplicated target devices"
            raise ValueError(requirement(CALL, rule, dict(table)))


def _check_pair(name: str, source: object, target: object) -> None:
    numbers = [target] if isinstance(source, jax.Device) else [source, target]
    shown = f"{source!r}: {target!r} for {name!r}"
    if any(not isinstance(n, int) or isinstance(n, bool) for n in numbers):
        rule = "must lead from devices, or their numbers, to numbers of devices"
        raise TypeError(requirement(CALL, rule, shown))
    if any(isinstance(n, int) and n < 0 for n in numbers):
        rule = "must have numbers from 0: Device index must not be negative"
        raise ValueError(requirement(CALL, rule, shown))


def install(agent: "Agent") -> None:
    """Lets others tell `agent` how their arrays are to come back."""

    def answer(caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> None:
        if type(body) is not dict or not all(type(n) is int for n in body.values()):
            raise ProtocolError("A device map is a dictionary of numbers.")
        devices = jax.local_devices()
        strange = [target for target in body if target not in range(len(devices))]
        if strange:
            rule = f"has target devices with invalid indices: {agent.info.name!r} has "
            rule += f"{len(devices)} devices, from 0 on"
            raise ValueError(requirement(CALL, rule, strange))
        inverse = {devices[target]: source for target, source in body.items()}
        peer = agent.directory.find(caller)
        peer.device_maps.answer(peer.transport_name, inverse)

    agent.register(_KIND, answer)


def exchange(agent: "Agent") -> None:
    """Puts the maps of `agent` in force; its group is complete.

    Raises:
      ValueError: A worker or a device does not exist.
    """
    maps = agent.options.device_maps
    known = [peer.info.name for peer in agent.directory.peers()]
    strangers = sorted(set(maps) - set(known))
    if strangers:
        rule = f"has invalid target node names in its device maps; there are {known}"
        raise ValueError(requirement(CALL, rule, strangers))
    for name, chosen in maps.items():
        sources = _sources(name, chosen)
        inverse = {target: number for number, target in sources.items()}
        peer = agent.directory.find(name)
        agent.call(peer.info, _KIND, inverse)
        devices = jax.local_devices()
        table = {devices[number]: target for number, target in sources.items()}
        peer.device_maps.lead(peer.transport_name, table)


def _sources(name: str, chosen: Mapping[Any, int]) -> dict[int, int]:
    """The map with all devices by their numbers."""
    devices = jax.local_devices()
    found: dict[int, int] = {}
    for source, target in chosen.items():
        if isinstance(source, jax.Device):
            number = devices.index(source) if source in devices else len(devices)
        else:
            number = source
        if number >= len(devices) or number in found:
            rule = f"has source devices with invalid indices in the map for {name!r}: "
            rule += f"each one once, and of the {len(devices)} in jax.local_devices()"
            raise ValueError(requirement(CALL, rule, source))
        found[number] = target
    return found

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

import jax

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError

__all__ = [
    "CALL", "DeviceMaps", "Table", "check", "device_of", "number_beside", "number_of",
]  # fmt: skip


Table = Mapping[jax.Device, int]
"""Maps devices of this worker to numbers of devices of another worker."""

CALL = "RpcOptions(device_maps=...)"


class DeviceMaps:
    """The device maps of one worker, by the workers to which they lead.

    They go by the names that they prove to its transport.
    """

    def __init__(self) -> None:
        self.in_force = False
        self._requests: dict[str, Table] = {}
        self._answers: dict[str, Table] = {}

    def towards(self, peer: str, answers: bool) -> Table | None:
        """The table for answers, or for requests, to that worker, if there is one."""
        return (self._answers if answers else self._requests).get(peer)

    def lead(self, peer: str, table: Table) -> None:
        """Sets the table for requests to `peer`."""
        self.in_force = True
        self._requests[peer] = {**self._requests.get(peer, {}), **table}

    def answer(self, peer: str, table: Table) -> None:
        """Sets the table for answers to `peer`, and the default for requests."""
        self.in_force = True
        self._answers[peer] = table
        # Its own map comes last and wins. The inverse serves messages that the callee
        # sends by itself: cotangents find their way back.
        self._requests[peer] = {**table, **self._requests.get(peer, {})}


def number_of(leaf: jax.Array, table: Table) -> int | None:
    """Look up the receiver's device for an array; None for the receiver's default."""
    devices = leaf.devices()
    return table.get(next(iter(devices))) if len(devices) == 1 else None


def number_beside(leaf: jax.Array, table: Table | None) -> int:
    """Encode an array's device for the wire: its number plus one, 0 for none."""
    number = None if table is None else number_of(leaf, table)
    return 0 if number is None else number + 1


def device_of(number: int) -> jax.Device:
    """Return the device of this number on this worker.

    Raises:
      ProtocolError: No device has this number.
    """
    devices = jax.local_devices()
    if not 0 <= number < len(devices):
        raise ProtocolError(f"There is no device {number} among {len(devices)}.")
    return devices[number]


def check(maps: object) -> None:
    """Check the form of device maps; the devices are checked when the worker joins.

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

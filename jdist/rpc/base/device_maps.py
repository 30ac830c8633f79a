"""Device maps: on which of a worker's devices the arrays of another one arrive.

An array arrives on the callee's one device unless the caller has a map for it. A map
leads from devices of the caller to devices of the callee, each given by its place in
`jax.local_devices()` of its process. Answers come back by the inverse: an array on a
device to which the map leads arrives on the device it leads from. So do the messages
that the callee sends by itself, unless it has a map of its own for that device; that is
how cotangents find their way back. Arrays on other devices, and those sharded over
several, arrive on the receiver's one device, as without a map.

Only the sender of a message has to know: its metadata name the receiver's device for
each array that has one, and the receiver moves those arrays after they have arrived. A
worker with a map tells it to its callee when it joins, for the answers; the callee
refuses a device that it does not have. So in an elastic group a map holds for workers
that have joined before, and no longer when they have left.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jdist._errors import check_type, type_error, value_error
from jdist.rpc.base.errors import ProtocolError

Table = Mapping[jax.Device, int]
"""Maps devices of this worker to numbers of devices of another worker."""

CALL = "RpcOptions(device_maps=...)"

DEVICES = "devices"
"""The entry of a message's metadata with pairs: an array's number, and a device's."""


class DeviceMaps:
    """The device maps of one worker, by the incarnations of those they lead to."""

    def __init__(self) -> None:
        self.in_force = False
        self._requests: dict[int | None, Table] = {}
        self._answers: dict[int | None, Table] = {}

    def lead(self, peer: int, table: Table) -> None:
        """Sets the table for requests to `peer`."""
        self.in_force = True
        self._requests[peer] = {**self._requests.get(peer, {}), **table}

    def answer(self, peer: int, table: Table) -> None:
        """Sets the table for answers to `peer`, and the default for requests."""
        self.in_force = True
        self._answers[peer] = table
        # Its own map comes last and wins. The inverse serves messages that the callee
        # sends by itself: cotangents find their way back.
        self._requests[peer] = {**table, **self._requests.get(peer, {})}

    def label(
        self,
        leaves: Sequence[Any],
        meta: dict[str, Any],
        peer: int | None,
        answer: bool,
    ) -> None:
        """Names, in a message's metadata, the devices of `peer` for its arrays."""
        table = (self._answers if answer else self._requests).get(peer, {})
        pairs = []
        for index, leaf in enumerate(leaves):
            devices = leaf.devices() if isinstance(leaf, jax.Array) else ()
            # One that is sharded over several arrives on the receiver's default.
            number = table.get(next(iter(devices))) if len(devices) == 1 else None
            if number is not None:
                pairs.append([index, number])
        if pairs:
            meta[DEVICES] = pairs


def placed(leaves: list[Any], meta: Mapping[str, Any]) -> list[Any]:
    """Moves a message's arrays to the devices that its metadata name.

    Raises:
      ProtocolError: There is no such array, or no such device.
    """
    arrays = {i: one for i, one in enumerate(leaves) if isinstance(one, jax.Array)}
    devices = dict(enumerate(jax.local_devices()))
    found, pairs = list(leaves), meta[DEVICES]
    for pair in pairs if isinstance(pairs, list) else (pairs,):
        match pair:
            case [int(index), int(number)] if index in arrays and number in devices:
                place = SingleDeviceSharding(devices[number])
                found[index] = jax.device_put(arrays[index], place)
            case _:
                raise ProtocolError(
                    f"There is no array and device {pair!r}: the message has "
                    f"{len(found)} values, and this process {len(devices)} devices."
                )
    return found


def check(maps: object) -> None:
    """Check the form of device maps; the devices are checked when the worker joins.

    Raises:
      TypeError, ValueError: See the message, which keeps torch's words.
    """
    check_type(CALL, maps, Mapping, "must be maps by worker's name")
    assert isinstance(maps, Mapping)
    for name, table in maps.items():
        rule = "must have a map from devices to numbers for the name of a worker"
        if not isinstance(name, str) or not isinstance(table, Mapping):
            raise type_error(CALL, rule, f"{name!r}: {table!r}")
        for pair in table.items():
            shown = f"{pair[0]!r}: {pair[1]!r} for {name!r}"
            if any(type(number) is not int for number in pair):
                rule = "must lead from numbers of devices to numbers of devices"
                raise type_error(CALL, rule, shown)
            if min(pair) < 0:
                rule = "must have numbers from 0: Device index must not be negative"
                raise value_error(CALL, rule, shown)
        if len(set(table.values())) < len(table):
            rule = "must lead to each device once: device maps only support 1-to-1 "
            rule += f"mapping, that for {name!r} has duplicated target devices"
            raise value_error(CALL, rule, dict(table))

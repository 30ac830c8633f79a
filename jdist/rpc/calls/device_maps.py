"""Exchange of device maps: each worker sends its callees the maps for their answers."""

from typing import Any

import jax

from jdist._errors import value_error
from jdist.rpc.base.current import Meta
from jdist.rpc.base.device_maps import CALL
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls.agent import Agent

_KIND = "device map"


def install(agent: Agent) -> None:
    """Registers the handler of callers' device maps."""

    def answer(caller: WorkerInfo, body: Any, meta: Meta) -> None:
        if type(body) is not dict or not all(type(n) is int for n in body.values()):
            raise ProtocolError("A device map is a dictionary of numbers.")
        devices = jax.local_devices()
        strange = [target for target in body if target not in range(len(devices))]
        if strange:
            rule = f"has target devices with invalid indices: {agent.info.name!r} has "
            rule += f"{len(devices)} devices, from 0 on"
            raise value_error(CALL, rule, strange)
        inverse = {devices[target]: source for target, source in body.items()}
        agent.device_maps.answer(incarnation_of(caller), inverse)

    agent.register(_KIND, answer)


def exchange(agent: Agent) -> None:
    """Sends the worker's device maps and puts them in force; the group is complete.

    Raises:
      ValueError: A worker or a device does not exist.
    """
    maps = agent.options.device_maps
    known = [peer.info.name for peer in agent.directory.peers()]
    strangers = sorted(set(maps) - set(known))
    if strangers:
        rule = f"has invalid target node names in its device maps; there are {known}"
        raise value_error(CALL, rule, strangers)
    for name, chosen in maps.items():
        # Not without a map: the first call starts JAX's backend and its threads.
        devices = jax.local_devices()
        if max(chosen, default=0) >= len(devices):
            rule = f"has source devices with invalid indices in the map for {name!r}: "
            rule += f"there are {len(devices)} in jax.local_devices()"
            raise value_error(CALL, rule, max(chosen))
        peer = agent.directory.find(name)
        # The callee checks the devices first: a map that it refuses must not be used.
        agent.call(peer.info, _KIND, {target: n for n, target in chosen.items()})
        table = {devices[number]: target for number, target in chosen.items()}
        agent.device_maps.lead(incarnation_of(peer.info), table)

"""The life of a worker: it joins a group, belongs to it, and leaves it."""

import secrets
import socket
import threading
import time
import warnings
from typing import NamedTuple

from jdist._errors import requirement
from jdist.rpc.base import current, device_maps
from jdist.rpc.base.deadline import Deadline, moment
from jdist.rpc.base.errors import CollectiveMismatch, RpcError, RpcTimeout, WorkerLost
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import caller, debug, extensions
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.group.coordinator import NAME, Coordinator
from jdist.rpc.group.elastic_roster import ElasticRoster
from jdist.rpc.group.fixed_roster import FixedRoster
from jdist.rpc.group.membership import Group
from jdist.rpc.group.termination import wait_for_all
from jdist.rpc.rref.install import install as install_references
from jdist.rpc.wire.channel import ChannelClosed, Transport
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.sockets import is_loopback

_LEAVING_SECONDS = 2.0
_RELEASE_SECONDS = 30.0


class Place(NamedTuple):
    """A worker's place in a group.

    Attributes:
      info: Its name and rank.
      world_size: How many workers make the group; 0 for an elastic one.
      coordinator: Host and port where rank 0 listens for the others.
      key: The cluster's secret.
    """

    info: WorkerInfo
    world_size: int
    coordinator: tuple[str, int]
    key: bytes

    def __repr__(self) -> str:
        """Without the key: representations end up in logs."""
        shown = f"{self.info!r}, {self.world_size}, {self.coordinator!r}"
        return f"Place({shown}, key=...)"


def join(place: Place, functions: FunctionTable, options: RpcOptions) -> Agent:
    """A worker that belongs to its group.

    Raises:
      RpcTimeout: Somebody has not come, or has not said that he knows of it, in time.
      RpcError: It cannot belong to the group, or that will never be complete.
      AuthenticationError: The other side has another key.
      OSError: The coordinator cannot listen where it should.
    """
    until = moment(options.join_timeout)
    coordinator = _listen(place, options) if place.info.id == 0 else None
    agent: Agent | None = None
    try:
        at = place.coordinator if coordinator is None else coordinator.address
        name = identity(place.info.name, place.world_size)
        transport = _transport(place, options, name, _host(place, options))
        agent = make_agent(place.info, transport, functions, options)
        agent.coordinator = coordinator
        _meet(agent, transport, place, at, until)
        device_maps.exchange(agent)
        return agent
    except BaseException as error:
        if coordinator is not None:
            if isinstance(error, RpcError) and not isinstance(error, RpcTimeout):
                left = 0.0 if until is None else until - time.monotonic()
                coordinator.wait_until_told(max(0.0, left))
            coordinator.close(f"{place.info.name} gave up: {error}")
        if agent is not None:
            agent.close()
        raise


def identity(name: str, world_size: int) -> str:
    """What the transport of a worker is called, see `PeerRecord.identity`."""
    return name if world_size else f"{name[:100]}:{secrets.token_hex(8)}"


def make_coordinator(
    transport: Transport, world_size: int, options: RpcOptions, beats: bool = True
) -> Coordinator:
    """That of a group of this size; 0 for an elastic one."""
    roster = FixedRoster(world_size) if world_size else ElasticRoster()
    return Coordinator(transport, roster, options, beats)


def make_agent(
    info: WorkerInfo,
    transport: Transport,
    functions: FunctionTable,
    options: RpcOptions,
) -> Agent:
    """A worker that can be called, once it belongs to a group."""
    agent = Agent(info, transport, functions, options)
    caller.install(agent)
    debug.install(agent)
    device_maps.install(agent)
    install_references(agent)
    extensions.equip(agent)
    return agent


def leave(agent: Agent, graceful: bool, deadline: Deadline) -> None:
    """Ends a worker, whatever happens.

    Raises:
      RpcTimeout: The others did not finish in time.
      WorkerLost: A worker of the group was lost, before or meanwhile; in an elastic
        group only the coordinator.
      CollectiveMismatch: The others wait for this worker in a collective.
    """
    patience = 0.0
    try:
        if graceful:
            _finish(agent, deadline)
            # Everybody gives its references up, and only then somebody goes.
            agent.references.release(deadline, _RELEASE_SECONDS)
            _finish(agent, deadline)
            patience = _LEAVING_SECONDS
    except CollectiveMismatch:
        # The others go on, and may end in an orderly way.
        patience = _LEAVING_SECONDS
        raise
    except WorkerLost:
        _raise_lost(agent)
        raise
    finally:
        _end(agent, patience)
    if graceful:
        _raise_lost(agent)
        _report(agent.references.leaks(), agent.options)


def _finish(agent: Agent, deadline: Deadline) -> None:
    if agent.group.elastic:
        _finish_alone(agent, deadline)
        return
    while True:
        names = [p.info.name for p in agent.directory.peers() if p.departed is None]
        try:
            wait_for_all(agent, agent.group, names, deadline)
            return
        except WorkerLost as error:
            orderly = error.worker in names and error.worker in agent.group.left()
            if agent.group.lost() or not orderly:
                raise
            # It left without waiting for anybody, so nobody waits for it.


def _finish_alone(agent: Agent, deadline: Deadline) -> None:
    """Waits until this worker has nothing to do any more; the others go on.

    With rank 0 goes the coordinator, so it leaves last.
    """
    if agent.coordinator is not None:
        agent.coordinator.wait_for_leavers(deadline)
    agent.outstanding.when_empty(deadline, lambda: None)


def _report(leaks: list[str], options: RpcOptions) -> None:
    if not leaks:
        return
    text = f"Leaking RRef: values that others hold at the end: {'; '.join(leaks)}."
    if options.leaks == "error":
        raise RpcError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _raise_lost(agent: Agent) -> None:
    agent.group.check("shutdown")


def _end(agent: Agent, patience: float) -> None:
    current.remove([agent])
    agent.ending = True
    try:
        agent.group.leave(_LEAVING_SECONDS)
        if agent.coordinator is not None:
            agent.coordinator.wait_until_alone(patience)
            agent.coordinator.close("it was shut down")
    finally:
        agent.references.close()
        agent.close()


def _listen(place: Place, options: RpcOptions) -> Coordinator:
    host, port = place.coordinator
    try:
        transport = _transport(place, options, NAME, host, port)
    except OSError as error:
        rule = "must be an address of rank 0's machine and a free port"
        shown = f"{host}:{port} ({error.strerror or error})"
        raise OSError(
            error.errno, requirement("init_rpc(coordinator)", rule, shown)
        ) from error
    return make_coordinator(transport, place.world_size, options)


def _transport(
    place: Place, options: RpcOptions, name: str, host: str, port: int = 0
) -> SocketTransport:
    transport = SocketTransport(
        name,
        place.key,
        host,
        port,
        device=options.device,
        limits=options.limits,
        tls=options.tls,
        insecure=options.insecure,
    )
    transport.polling = options.polling
    return transport


def _host(place: Place, options: RpcOptions) -> str:
    if options.host is not None:
        return options.host
    host, port = place.coordinator
    return host if is_loopback(host) else _own_address_towards(host, port)


def _own_address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another one; nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def _meet(
    agent: Agent,
    transport: SocketTransport,
    place: Place,
    at: object,
    until: float | None,
) -> None:
    pause = threading.Event()
    seconds = 0.01
    while True:
        try:
            # Before it joins: others may call as soon as it has.
            agent.group = Group(agent, transport.connect("", at, until))
            left = 0.0 if until is None else max(0.01, until - time.monotonic())
            joined = agent.group.join(place.info.id, place.world_size, left)
            for stranger in agent.group.strangers(joined):
                warnings.warn(stranger, RuntimeWarning, stacklevel=4)
            joined.wait()
            return
        except (ChannelClosed, WorkerLost, TimeoutError) as error:
            if isinstance(error, RpcTimeout):
                raise
            if until is not None and time.monotonic() + seconds >= until:
                host, port = place.coordinator
                raise RpcTimeout(
                    f"{place.info.name!r} could not reach the coordinator at "
                    f"{host}:{port} within {agent.options.join_timeout} s: {error}. Is "
                    "rank 0 running, and is this its address?"
                ) from error
        # Workers start in any order; rank 0 may not listen yet.
        pause.wait(seconds)
        seconds = min(2 * seconds, 0.25)


def random_key() -> bytes:
    """For a group of one: nobody else has to know it."""
    return secrets.token_bytes(32)

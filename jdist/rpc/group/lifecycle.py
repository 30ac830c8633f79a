"""Joining and leaving a group: `init_rpc` and `shutdown`."""

import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from jdist._errors import check_type, requirement, type_error, value_error
from jdist.rpc.base import current
from jdist.rpc.base.current import Deadline, moment, resolve
from jdist.rpc.base.errors import CollectiveMismatch, RpcError, RpcTimeout, WorkerLost
from jdist.rpc.base.options import RpcOptions, check_options
from jdist.rpc.base.posix import require_posix
from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.calls import debug, device_maps, function_calls
from jdist.rpc.calls.agent import Agent, current_agent, equip
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.group import termination
from jdist.rpc.group.coordinator import NAME, Coordinator
from jdist.rpc.group.coordinator_client import CoordinatorClient, client_of
from jdist.rpc.group.rendezvous import KEY_VARIABLE, LAST_PORT, LOOPBACK
from jdist.rpc.group.termination import wait_for_all, wait_until_idle
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import Limits
from jdist.rpc.wire.handshake import check_key
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.sockets import is_loopback, once_known
from jdist.rpc.wire.tls import TlsConfig

T = TypeVar("T")

_COORDINATOR = "init_rpc(coordinator=...)"
_NAMELESS = (
    "Is it spelled as the machine's name, and does the cluster publish that name (in "
    "Kubernetes a headless Service does)? An address in numbers needs no name."
)
_LEAVING_SECONDS = 2.0
_RELEASE_SECONDS = 30.0


class JoinRequest(NamedTuple):
    """A worker's identity and the group that it is to join.

    Attributes:
      info: The worker's name and rank.
      world_size: Number of workers of the group; 0 for an elastic one.
      coordinator: Host and port where rank 0 listens for the others.
      key: The cluster's secret.
      options: Options of the worker.
      until: The moment at which to give up; None for never.
    """

    info: WorkerInfo
    world_size: int
    coordinator: tuple[str, int]
    key: bytes
    options: RpcOptions = RpcOptions()
    until: float | None = None

    def __repr__(self) -> str:
        """Without the key: representations end up in logs."""
        shown = f"{self.info!r}, {self.world_size}, {self.coordinator!r}"
        return f"JoinRequest({shown}, key=...)"


def init_rpc(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | tuple[str, int] | None = None,
    allow: Iterable[str] = (),
    options: RpcOptions | None = None,
) -> WorkerInfo:
    """Makes this process a worker of a group.

    A group of a fixed size, its `world_size`, forms once: all of its workers wait here
    for each other. An elastic group has none. A newcomer waits only until all members
    know of it, and when a worker shuts down the others continue.

    The workers meet at the coordinator, which runs in the process of rank 0; they may
    start in any order. `spawn` and `python -m jdist.launch` set the variables that
    stand for the arguments left out.

    Args:
      name: Unique in the group, of the characters `A-Za-z0-9_:-`.
      rank: 0 to world_size - 1, or to 65535 in an elastic group; by default `RANK`.
      world_size: Number of workers, or 0 for an elastic group; by default
        `WORLD_SIZE`, and 0 where that is not set either.
      coordinator: `"host:port"` or `(host, port)` of rank 0; by default `MASTER_ADDR`
        and `MASTER_PORT`. A group of one needs none.
      allow: What other workers may call beside the main program, its package,
        `jax.numpy`, `jax.nn` and `jdist`: modules (`"mypkg"`) or objects
        (`"mypkg.ops:step"`).
      options: See `RpcOptions`.

    Returns:
      This worker's name and rank.

    Raises:
      RpcError: RPC is initialized already; a name or rank is not unique; some workers
        were given a world_size and others none.
      RpcTimeout: Not all workers came in time; the message says which are missing. Or
        the name of a host was not known in time.
      AuthenticationError: The coordinator has another key. There, and on all who wait,
        a `RuntimeWarning` tells of this worker at once; the wait continues.
      TypeError, ValueError: An argument, or a variable in its place, is wrong.
      Unavailable: This is Windows.

    Source: `torch.distributed.rpc.init_rpc`. In torch, too, a group without a
    world_size is dynamic; what `WORLD_SIZE` says does not count there.

    Example:
      >>> from jdist import rpc
      >>> rpc.init_rpc("me", rank=0, world_size=1)
      WorkerInfo(name='me', id=0)
      >>> rpc.rpc_sync("me", max, args=(2, 3))
      3
      >>> rpc.shutdown()
    """
    require_posix("init_rpc")
    options = RpcOptions() if options is None else options
    check_options("init_rpc(options=...)", options)
    rank = _number("rank", "RANK", rank)
    world_size = _number("world_size", "WORLD_SIZE", world_size, default=0)
    if not 0 <= world_size <= MOST_WORKERS:
        rule = f"must be in 1..{MOST_WORKERS}, or 0 for an elastic group"
        raise value_error("init_rpc(world_size=...)", rule, world_size)
    if not 0 <= rank < (world_size or MOST_WORKERS):
        rule = f"must be in 0..{(world_size or MOST_WORKERS) - 1}"
        raise value_error("init_rpc(rank=...)", rule, rank)
    info = WorkerInfo(name, rank)
    at, key = _address(coordinator, world_size), _key(options, world_size)
    functions = FunctionTable(allow)
    with current.becoming():
        until = moment(options.join_timeout)
        request = JoinRequest(info, world_size, at, key, options, until)
        agent = join(request, functions)
        current.add([agent])
    return info


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this worker. Threads, sockets and memory are gone afterwards, in any case.

    In an elastic group only this worker ends, the others continue: it waits until no
    call to it or from it is under way, and until all others know that it leaves. Rank 0
    leaves last: it waits for all others.

    Args:
      graceful: Wait until all workers have called this and all calls are done, those
        too that calls have made in turn. Otherwise go at once: calls of others to this
        worker end with WorkerLost.
      timeout: Seconds for a graceful end. By default there is no limit but that the
        others live, because a worker that only serves waits here for as long as they
        work: one that dies or freezes ends the wait, and so do calls that are still
        under way a minute after their own deadlines. A call without a deadline is
        waited for as long as it runs, and for five minutes where its caller waits for
        an answer and its callee runs no such call, or the other way round.

    Raises:
      RpcError: RPC has not been initialized.
      RpcTimeout: The others were not ready in time; the message says which, or which
        calls are under way. This worker has ended nevertheless.
      WorkerLost: A worker of the group was lost, before or meanwhile; likewise. In an
        elastic group only the coordinator.

    Source: `torch.distributed.rpc.shutdown`.
    """
    leave(current_agent(), graceful, resolve(timeout, 0, current.deadline()))


# --- joining ---


def join(request: JoinRequest, functions: FunctionTable) -> Agent:
    """Creates a worker and joins its group.

    Raises:
      RpcTimeout: A worker has not come, or has not said that it knows of this one, in
        time.
      RpcError: It cannot belong to the group, or that will never be complete.
      AuthenticationError: The other side has another key.
      OSError: The coordinator cannot listen where it should.
    """
    until = request.until
    # Before this worker's own transport: the others may already be trying to connect.
    coordinator = _listen(request) if request.info.id == 0 else None
    agent: Agent | None = None
    try:
        at = request.coordinator if coordinator is None else coordinator.address
        transport = _own_transport(request)
        agent = prepared(Agent(request.info, transport, functions, request.options))
        group = _meet(agent, transport, request, at)
        group.coordinator = coordinator
        device_maps.exchange(agent)
        return agent
    except BaseException as error:
        if coordinator is not None:
            # If the group failed, the others get that reason as long as they may come;
            # after a timeout they gave up at the same moment.
            if isinstance(error, RpcError) and not isinstance(error, RpcTimeout):
                left = 0.0 if until is None else until - time.monotonic()
                coordinator.wait_until_told(max(0.0, left))
            coordinator.close(f"{request.info.name} gave up: {error}")
        if agent is not None:
            agent.close()
        raise


def transport_name(name: str, world_size: int) -> str:
    """The name that a new worker's transport proves, see `PeerRecord`."""
    # In an elastic group a name may come again: a random suffix keeps the connections
    # of a lost worker apart from its successor's. It keeps those to a worker with the
    # coordinator's name apart from those to the coordinator, too.
    plain = world_size and name != NAME
    return name if plain else f"{name[:100]}:{secrets.token_hex(8)}"


def prepared(agent: Agent) -> Agent:
    """Returns a new worker, which can be called once it belongs to a group."""
    function_calls.install(agent)
    debug.install(agent)
    termination.install(agent)
    device_maps.install(agent)
    equip(agent)
    return agent


def _listen(request: JoinRequest) -> Coordinator:
    host, port = request.coordinator
    try:
        transport = _once_known(
            request, _COORDINATOR, host, lambda: _transport(request, NAME, host, port)
        )
    except OSError as error:
        if isinstance(error, RpcTimeout):
            raise
        rule = "must be an address of rank 0's machine and a free port"
        shown = f"{host}:{port} ({error.strerror or error})"
        raise OSError(error.errno, requirement(_COORDINATOR, rule, shown)) from error
    return Coordinator(transport, request.world_size, request.options)


def _own_transport(request: JoinRequest) -> SocketTransport:
    """The transport at which the other workers reach this one."""
    name = transport_name(request.info.name, request.world_size)
    host, port = request.coordinator
    own = request.options.host
    if own is not None:
        origin = "RpcOptions(host=...)"
        return _once_known(request, origin, own, lambda: _transport(request, name, own))

    def listen() -> SocketTransport:
        own = host if is_loopback(host) else _own_address_towards(host, port)
        return _transport(request, name, own)

    return _once_known(request, _COORDINATOR, host, listen)


def _once_known(
    request: JoinRequest, origin: str, host: str, use: Callable[[], T]
) -> T:
    """As `sockets.once_known`, until the time to join is over."""
    try:
        return once_known(host, request.until, use)
    except TimeoutError as error:
        rule = f"must be a host of which {request.info.name!r} finds an address"
        seconds = request.options.join_timeout
        got = f"{host!r}, not found within {seconds} s ({error.__cause__})"
        raise RpcTimeout(requirement(origin, rule, got, _NAMELESS)) from error


def _transport(
    request: JoinRequest, name: str, host: str, port: int = 0
) -> SocketTransport:
    options, rule = request.options, "must be an rpc.TlsConfig, or None"
    check_type("RpcOptions(tls=...)", options.tls, TlsConfig | None, rule)
    transport = SocketTransport(
        name,
        request.key,
        host,
        port,
        device=options.device,
        limits=Limits(body_bytes=options.max_array_bytes),
        tls=options.tls,
        insecure=options.insecure,
    )
    transport.polling = options.polling
    return transport


def _own_address_towards(host: str, port: int) -> str:
    """Finds the address of this machine on the route to another one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, there = found[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: the kernel only picks the route.
        probe.connect(there)
        return str(probe.getsockname()[0])


def _meet(
    agent: Agent, transport: SocketTransport, request: JoinRequest, at: object
) -> CoordinatorClient:
    pause, seconds, until = threading.Event(), 0.01, request.until
    while True:
        try:
            group = CoordinatorClient(agent, transport.connect("", at, until))
            agent.group = group  # before it joins: others may call as soon as it has
            left = 0.0 if until is None else max(0.01, until - time.monotonic())
            joined = group.join(request.info.id, request.world_size, left)
            for stranger in group.strangers(joined):
                warnings.warn(stranger, RuntimeWarning, stacklevel=4)
            joined.wait()
            return group
        except (ChannelClosed, WorkerLost, TimeoutError) as error:
            if isinstance(error, RpcTimeout):
                raise
            if until is not None and time.monotonic() + seconds >= until:
                host, port = request.coordinator
                raise RpcTimeout(
                    f"{request.info.name!r} could not reach the coordinator at "
                    f"{host}:{port} within {agent.options.join_timeout} s: {error}. Is "
                    "rank 0 running, and is this its address?"
                ) from error
        # Workers start in any order; rank 0 may not listen yet.
        pause.wait(seconds)
        seconds = min(2 * seconds, 0.25)


# --- leaving ---


def leave(agent: Agent, graceful: bool, deadline: Deadline) -> None:
    """Ends a worker, also when waiting for the others fails.

    Raises:
      RpcTimeout: The others did not finish in time.
      WorkerLost: A worker of the group was lost, before or meanwhile; in an elastic
        group only the coordinator.
      CollectiveMismatch: The others wait for this worker in a collective.
    """
    patience, together = 0.0, False
    try:
        if graceful:
            _finish(agent, deadline)
            # All release their references before the first one goes: an owner that has
            # gone could not be told.
            agent.references.release(deadline, _RELEASE_SECONDS)
            # Again, so that no worker leaves before all have released theirs.
            _finish(agent, deadline)
            patience = _LEAVING_SECONDS
            # Only if it waited for all: one that it took for lost waits for it.
            all_wait = len(_live(agent)) == len(agent.directory.peers())
            together = all_wait and not agent.group.elastic
    except CollectiveMismatch:
        # The others continue, and may end in an orderly way.
        patience = _LEAVING_SECONDS
        raise
    except WorkerLost:
        # The first loss says more than its consequence here.
        agent.group.check("shutdown")
        raise
    finally:
        _end(agent, patience, together)
    if graceful:
        agent.group.check("shutdown")
        _report(agent.references.leaks(), agent.options)


def _finish(agent: Agent, deadline: Deadline) -> None:
    if agent.group.elastic:
        _finish_alone(agent, deadline)
        return
    while True:
        names = _live(agent)
        try:
            wait_for_all(agent, names, deadline)
            return
        except WorkerLost as error:
            if agent.group.lost() or error.worker not in {*names} - {*_live(agent)}:
                raise
            # It left without waiting for the others, so they do not wait for it.


def _live(agent: Agent) -> list[str]:
    return [p.info.name for p in agent.directory.peers() if p.departed is None]


def _finish_alone(agent: Agent, deadline: Deadline) -> None:
    """Waits until this worker of an elastic group is idle."""
    # The coordinator ends with rank 0, so rank 0 leaves last.
    coordinator = client_of(agent).coordinator
    if coordinator is not None:
        coordinator.wait_for_leavers(deadline)
    wait_until_idle(agent, deadline, lambda: None)


def _report(leaks: list[str], options: RpcOptions) -> None:
    if not leaks:
        return
    text = f"Leaking RRef: values that others hold at the end: {'; '.join(leaks)}."
    if options.leaks == "error":
        raise RpcError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _end(agent: Agent, patience: float, together: bool = False) -> None:
    try:
        # Within the `try`: an interrupt must not leave a worker that is neither
        # registered, to be shut down again, nor closed.
        current.remove([agent])
        agent.ending = True
        client, options = client_of(agent), agent.options
        if patience and client.elastic:
            # By then a frozen member is lost and is no longer waited for.
            seconds = options.heartbeat_timeout + options.heartbeat_interval
            client.leave(seconds, noted=True)
        else:
            client.leave(_LEAVING_SECONDS, together=together)
        if client.coordinator is not None:
            client.coordinator.wait_until_alone(patience)
            client.coordinator.close("it was shut down")
    finally:
        agent.references.close()
        agent.close()


# --- arguments, or environment variables in their place ---


def _number(
    argument: str, variable: str, given: int | None, default: int | None = None
) -> int:
    call = f"init_rpc({argument}=...)"
    if given is None:
        text = os.environ.get(variable)
        if text is None and default is not None:
            return default
        if text is None:
            rule = f"{argument} parameter missing, and environment variable {variable} "
            rule += "expected"
            raise value_error(call, rule, "neither")
        try:
            return int(text)
        except ValueError:
            rule = f"must be a number, here from the environment variable {variable}"
            raise value_error(call, rule, text) from None
    if not isinstance(given, int) or isinstance(given, bool):
        raise type_error(call, "must be an integer", given)
    return given


def _address(given: str | tuple[str, int] | None, world_size: int) -> tuple[str, int]:
    call = _COORDINATOR
    if given is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None:
            if world_size == 1:
                return (LOOPBACK, 0)
            rule = "must be given, or MASTER_ADDR and MASTER_PORT be set"
            raise value_error(call, rule, "neither")
        given = f"{host}:{port}"
    if isinstance(given, str):
        host, _, port = given.rpartition(":")
        parts: object = (host.strip("[]"), _port(port))
    else:
        parts = given
    match parts:
        case (str() as host, int() as number) if host and 0 <= number <= LAST_PORT:
            return (host, number)
    raise value_error(call, 'must be "host:port" or (host, port)', given)


def _port(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _key(options: RpcOptions, world_size: int) -> bytes:
    origin, key = "RpcOptions(key=...)", options.key
    if key is None:
        origin, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if key is not None:
        return check_key(key.encode() if isinstance(key, str) else key, origin)
    if world_size == 1:
        return secrets.token_bytes(32)  # a group of one shares it with no other worker
    raise RpcError(
        f"The workers need a secret that they share. Set {KEY_VARIABLE} on all of them "
        "to the same text, such as one made by rpc.new_cluster_key(), or give it as "
        "RpcOptions(key=...). rpc.spawn and jdist.launch do so by themselves."
    )

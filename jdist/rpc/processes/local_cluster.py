"""Several workers in one process."""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jdist._compat import require_backend
from jdist._errors import requirement
from jdist.rpc.base import current, device_maps
from jdist.rpc.base.current import Scope
from jdist.rpc.base.deadline import Deadline, resolve
from jdist.rpc.base.future import Future
from jdist.rpc.base.options import RpcOptions, check_options
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.group.coordinator import NAME
from jdist.rpc.group.lifecycle import identity, leave, make_agent, make_coordinator
from jdist.rpc.group.membership import Group
from jdist.rpc.wire.in_process import Hub, InProcessTransport


@contextlib.contextmanager
def local_cluster(
    names: Iterable[str],
    devices: Sequence[jax.Device] | None = None,
    options: RpcOptions | None = None,
    allow: Iterable[str] = (),
) -> Iterator[list[WorkerInfo]]:
    """Several workers in this process; the calling thread is the first of them.

    All of rpc works as between processes, without a socket: what the wire refuses is
    refused, NumPy arrays are copied, JAX arrays are shared or put on the callee's
    device. A synchronous call without a timeout of its own runs in the caller's thread
    and is not interrupted by the default timeout. Other threads say who they are with
    `use_worker`.

    At the end of the block the workers shut down: gracefully, or at once when the block
    raised an exception.

    Args:
      names: Of the workers, in the order of their ranks.
      devices: One for each worker; by default JAX's devices in turn.
      options: For all of them; `key`, `host`, `tls` and the heartbeat have no meaning
        here.
      allow: As for `init_rpc`.

    Yields:
      Names and ranks.

    Raises:
      RpcError: This process has workers already.
      ValueError: Names are not unique or not valid, or too few devices.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     rpc.rpc_sync("worker1", sum, args=([1, 2],))
      3
    """
    infos = [WorkerInfo(name, rank) for rank, name in enumerate(names)]
    options = RpcOptions() if options is None else options
    check_options("local_cluster(options=...)", options)
    places = _places(infos, devices)
    functions = FunctionTable(allow)
    with current.becoming():
        agents = _start(infos, places, functions, options)
        current.add(agents)
    graceful = False
    try:
        token = current.scope.set(Scope(agents[0]))
        try:
            yield infos
            graceful = True
        finally:
            current.scope.reset(token)
    finally:
        stop(agents, graceful)


def _places(
    infos: list[WorkerInfo], devices: Sequence[jax.Device] | None
) -> list[jax.Device]:
    if len({info.name for info in infos}) != len(infos) or not infos:
        rule = "must be one or more unique names"
        got = [info.name for info in infos]
        raise ValueError(requirement("local_cluster(names)", rule, got))
    if devices is None:
        require_backend()
        found = jax.local_devices()
        return [found[rank % len(found)] for rank in range(len(infos))]
    if len(devices) != len(infos):
        rule = f"must be one device for each of the {len(infos)} workers"
        raise ValueError(requirement("local_cluster(devices=...)", rule, list(devices)))
    return list(devices)


def _start(
    infos: list[WorkerInfo],
    devices: list[jax.Device],
    functions: FunctionTable,
    options: RpcOptions,
) -> list[Agent]:
    meeting = Meeting(len(infos), functions, options)
    started = [meeting.begin(*place) for place in zip(infos, devices, strict=True)]
    agents = [agent for agent, _ in started]
    try:
        for _, joined in started:
            joined.wait()
        for agent in agents:
            device_maps.exchange(agent)
    except BaseException:
        for agent in agents:
            agent.close()
        meeting.coordinator.close("the cluster did not start")
        raise
    agents[0].coordinator = meeting.coordinator
    return agents


class Meeting:
    """Where the workers of one process join one group.

    Args:
      world_size: How many they are; 0 for an elastic group.
      functions: What they may call of each other.
      options: For all of them.
    """

    def __init__(
        self, world_size: int, functions: FunctionTable, options: RpcOptions
    ) -> None:
        self._world_size = world_size
        self._functions = functions
        self._options = options
        self._hub = Hub()
        self._at = InProcessTransport(NAME, Hub())
        # One process: nobody can fall silent alone.
        self.coordinator = make_coordinator(self._at, world_size, options, beats=False)

    def begin(self, info: WorkerInfo, device: jax.Device) -> tuple[Agent, Future[None]]:
        """A worker that is about to join; done when it has."""
        name = identity(info.name, self._world_size)
        transport = InProcessTransport(name, self._hub, device)
        options = dataclasses.replace(self._options, device=device)
        agent = make_agent(info, transport, self._functions, options)
        agent.group = Group(agent, self._at.connect_from(name), beats=False)
        seconds = options.join_timeout
        return agent, agent.group.join(info.id, self._world_size, seconds)


def stop(agents: list[Agent], graceful: bool) -> None:
    """Each worker leaves on a thread of its own, because they wait for each other."""
    errors: list[BaseException] = []
    deadline = resolve(0, 0, Deadline())

    def end(agent: Agent) -> None:
        try:
            if not agent.closed:  # the block may have shut it down itself
                leave(agent, graceful, deadline)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [_thread(end, agent) for agent in agents]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _thread(target: Callable[[Any], None], agent: Agent) -> threading.Thread:
    context = contextvars.Context()
    context.run(current.scope.set, Scope(agent))
    thread = threading.Thread(target=context.run, args=(target, agent), daemon=True)
    thread.start()
    return thread

"""Several workers in one process."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jdist._errors import requirement
from jdist.rpc import current, device_maps
from jdist.rpc.agent import Agent
from jdist.rpc.coordinator import NAME, Coordinator
from jdist.rpc.current import Scope
from jdist.rpc.deadline import Deadline, resolve
from jdist.rpc.functions import FunctionTable
from jdist.rpc.group import Group
from jdist.rpc.in_process import Hub, InProcessTransport
from jdist.rpc.membership import leave, make_agent
from jdist.rpc.options import RpcOptions, check_options
from jdist.rpc.worker_info import WorkerInfo


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
        _stop(agents, graceful)


def _places(
    infos: list[WorkerInfo], devices: Sequence[jax.Device] | None
) -> list[jax.Device]:
    if len({info.name for info in infos}) != len(infos) or not infos:
        rule = "must be one or more unique names"
        got = [info.name for info in infos]
        raise ValueError(requirement("local_cluster(names)", rule, got))
    if devices is None:
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
    hub = Hub()
    at = InProcessTransport(NAME, Hub())
    # One process: nobody can fall silent alone.
    coordinator = Coordinator(at, len(infos), options, beats=False)
    agents, joining = [], []
    for info, device in zip(infos, devices, strict=True):
        transport = InProcessTransport(info.name, hub, device)
        agent = make_agent(info, transport, functions, options)
        agent.group = Group(agent, at.connect_from(info.name), beats=False)
        agents.append(agent)
        joining.append(agent.group.join(info.id, len(infos), options.join_timeout))
    agents[0].coordinator = coordinator
    try:
        for joined in joining:
            joined.wait()
        for agent in agents:
            device_maps.exchange(agent)
    except BaseException:
        for agent in agents:
            agent.close()
        coordinator.close("the cluster did not start")
        raise
    return agents


def _stop(agents: list[Agent], graceful: bool) -> None:
    """Each worker leaves on a thread of its own, because they wait for each other."""
    errors: list[BaseException] = []
    deadline = resolve(0, 0, Deadline())

    def stop(agent: Agent) -> None:
        try:
            if not agent.closed:  # the block may have shut it down itself
                leave(agent, graceful, deadline)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [_thread(stop, agent) for agent in agents]
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

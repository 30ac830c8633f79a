"""Groups of workers within this process, of fixed size or elastic."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jdist._compat import require_backend
from jdist._errors import check_sequence, listed, value_error
from jdist.rpc.base import current
from jdist.rpc.base.current import Deadline, Scope, resolve
from jdist.rpc.base.future import Future
from jdist.rpc.base.options import RpcOptions, check_options
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import device_maps
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.group.coordinator import NAME, Coordinator
from jdist.rpc.group.coordinator_client import CoordinatorClient, client_of
from jdist.rpc.group.lifecycle import leave, prepared, transport_name
from jdist.rpc.wire.in_process import Hub, InProcessTransport


@contextlib.contextmanager
def local_cluster(
    names: Iterable[str],
    devices: Sequence[jax.Device] | None = None,
    options: RpcOptions | None = None,
    allow: Iterable[str] = (),
) -> Iterator[list[WorkerInfo]]:
    """Runs several workers in this process; the calling thread is the first of them.

    All of rpc works as between processes, without a socket: what the wire refuses is
    refused, NumPy arrays are copied, JAX arrays are shared or put on the callee's
    device. A synchronous call without a timeout of its own runs in the caller's thread
    and is not interrupted by the default timeout. Other threads choose their worker
    with `use_worker`.

    At the end of the block the workers shut down: gracefully, or at once when the block
    raised an exception.

    Args:
      names: Names of the workers, in the order of their ranks.
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
    rule = "must be one or more unique names"
    names = listed("local_cluster(names)", names, str, rule)
    infos = [WorkerInfo(name, rank) for rank, name in enumerate(names)]
    options = RpcOptions() if options is None else options
    check_options("local_cluster(options=...)", options)
    places = _places(infos, devices)
    with current.becoming():
        group = _Meeting(len(infos), FunctionTable(allow), options)
        group.start(list(zip(infos, places, strict=True)))
    with group.acting_as_its_first():
        yield infos


@contextlib.contextmanager
def elastic_cluster(
    name: str = "worker0",
    options: RpcOptions | None = None,
    allow: Iterable[str] = (),
) -> Iterator[Callable[..., WorkerInfo]]:
    """Runs an elastic group in this process; the calling thread is its first worker.

    Everything else is as in `local_cluster`, and as between processes where `init_rpc`
    was called without a `world_size`. At the end of the block all workers leave.

    Args:
      name: Name of the worker of rank 0, which hosts the coordinator.
      options: As for `local_cluster`.
      allow: As for `init_rpc`.

    Yields:
      `join(name, device=None)`, which adds a worker, with the lowest rank that is free
      and by default JAX's devices in turn, and returns its name and rank. It leaves
      like any other: `with rpc.use_worker(name): rpc.shutdown()`. RpcError if a live
      worker has the name.

    Raises:
      RpcError: This process has workers already.

    Example:
      >>> from jdist import rpc
      >>> with rpc.elastic_cluster("first") as join:
      ...     info = join("second")
      ...     with rpc.use_worker("second"):
      ...         rpc.rpc_sync("first", max, args=(3, 5))
      ...         rpc.shutdown()  # all others know of it then
      5
    """
    options = RpcOptions() if options is None else options
    check_options("elastic_cluster(options=...)", options)
    with current.becoming():
        group = _Meeting(0, FunctionTable(allow), options)
        group.join(name)
    with group.acting_as_its_first():
        yield group.join


def _places(
    infos: list[WorkerInfo], devices: Sequence[jax.Device] | None
) -> list[jax.Device]:
    if len({info.name for info in infos}) != len(infos) or not infos:
        rule = "must be one or more unique names"
        raise value_error("local_cluster(names)", rule, [info.name for info in infos])
    if devices is None:
        return [_device_in_turn(info.id) for info in infos]
    rule = f"must be one device for each of the {len(infos)} workers"
    check_sequence("local_cluster(devices=...)", devices, jax.Device, rule)
    if len(devices) != len(infos):
        raise value_error("local_cluster(devices=...)", rule, list(devices))
    return list(devices)


class _Meeting:
    """The rendezvous at which the workers of one process form a group.

    Args:
      world_size: How many they are; 0 for an elastic group.
      functions: The functions that they may call on each other.
      options: For all of them.

    Attributes:
      agents: The workers that have joined; of an elastic group those that are open.
    """

    def __init__(
        self, world_size: int, functions: FunctionTable, options: RpcOptions
    ) -> None:
        self._made_of = functions, options
        self._world_size = world_size
        self._hub = Hub()
        # A hub of its own: a worker may have the coordinator's name.
        self._at = InProcessTransport(NAME, Hub())
        # One process: no worker can fall silent alone.
        self.coordinator = Coordinator(self._at, world_size, options, beats=False)
        self.agents: list[Agent] = []
        self._lock = threading.Lock()

    def start(self, places: Sequence[tuple[WorkerInfo, jax.Device]]) -> None:
        """Adds workers to the group; they have all joined when this returns."""
        # All begin before one is awaited: a group of fixed size forms with the last.
        begun = [self._begin(*place) for place in places]
        agents = [agent for agent, _ in begun]
        try:
            for _, joined in begun:
                joined.wait()
            for agent in agents:
                device_maps.exchange(agent)
        except BaseException:
            for agent in agents:
                agent.group.leave(1.0)
                agent.references.close()
                agent.close()
            if not self.agents:
                self.coordinator.close("the cluster did not start")
            raise
        if not self.agents:
            client_of(agents[0]).coordinator = self.coordinator
        self.agents += agents
        current.add(agents)

    def _begin(
        self, info: WorkerInfo, device: jax.Device
    ) -> tuple[Agent, Future[None]]:
        """Makes a worker and begins its join; the future is done once it has joined."""
        functions, options = self._made_of
        name = transport_name(info.name, self._world_size)
        transport = InProcessTransport(name, self._hub, device)
        options = dataclasses.replace(options, device=device)
        agent = prepared(Agent(info, transport, functions, options))
        agent.group = CoordinatorClient(agent, self._at.connect_from(name), beats=False)
        seconds = options.join_timeout
        return agent, agent.group.join(info.id, self._world_size, seconds)

    def join(self, name: str, device: jax.Device | None = None) -> WorkerInfo:
        """Adds a worker to an elastic group; see `elastic_cluster`."""
        with self._lock:
            self.agents = [agent for agent in self.agents if not agent.closed]
            ranks = {agent.info.id for agent in self.agents}
            rank = min(set(range(len(ranks) + 1)) - ranks)
            chosen = _device_in_turn(rank) if device is None else device
            self.start([(WorkerInfo(name, rank), chosen)])
            return self.agents[-1].info

    @contextlib.contextmanager
    def acting_as_its_first(self) -> Iterator[None]:
        """Acts as the first worker within the block, and ends all workers after it."""
        # True only after the block: after an exception a graceful end might wait for
        # calls that never return.
        graceful = False
        try:
            token = current.scope.set(Scope(self.agents[0]))
            try:
                yield
                graceful = True
            finally:
                current.scope.reset(token)
        finally:
            _stop(self.agents, graceful)


def _device_in_turn(rank: int) -> jax.Device:
    require_backend()
    devices = jax.local_devices()
    return devices[rank % len(devices)]


def _stop(agents: list[Agent], graceful: bool) -> None:
    """Shuts workers down in parallel."""
    # Each on a thread of its own, because a graceful end waits for all the others.
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
    # An empty context: what the caller has set is not the worker's.
    context = contextvars.Context()
    context.run(current.scope.set, Scope(agent))
    thread = threading.Thread(target=context.run, args=(target, agent), daemon=True)
    thread.start()
    return thread

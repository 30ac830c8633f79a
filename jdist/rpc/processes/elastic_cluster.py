"""Workers of one process that come and go."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

import jax

from jdist._compat import require_backend
from jdist.rpc.base import current
from jdist.rpc.base.current import Scope
from jdist.rpc.base.options import RpcOptions, check_options
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.processes.local_cluster import Meeting, stop


class ElasticCluster:
    """An elastic group in this process; `elastic_cluster` makes one."""

    def __init__(self, functions: FunctionTable, options: RpcOptions) -> None:
        self._meeting = Meeting(0, functions, options)
        self.agents: list[Agent] = []
        self._lock = threading.Lock()

    def join(self, name: str, device: jax.Device | None = None) -> WorkerInfo:
        """One more worker, with the lowest rank that nobody has.

        It leaves like any other: `with rpc.use_worker(name): rpc.shutdown()`.

        Args:
          name: That nobody has just now.
          device: By default JAX's devices in turn.

        Raises:
          RpcError: The name is not unique.
        """
        with self._lock:
            self.agents = [agent for agent in self.agents if not agent.closed]
            ranks = {agent.info.id for agent in self.agents}
            rank = min(set(range(len(ranks) + 1)) - ranks)
            require_backend()
            devices = jax.local_devices()
            chosen = devices[rank % len(devices)] if device is None else device
            agent, joined = self._meeting.begin(WorkerInfo(name, rank), chosen)
            try:
                joined.wait()
            except BaseException:
                agent.group.leave(1.0)
                agent.references.close()
                agent.close()
                raise
            if not self.agents:
                agent.coordinator = self._meeting.coordinator
            self.agents.append(agent)
            current.add([agent])
        return agent.info


@contextlib.contextmanager
def elastic_cluster(
    name: str = "worker0",
    options: RpcOptions | None = None,
    allow: Iterable[str] = (),
) -> Iterator[ElasticCluster]:
    """An elastic group in this process; the calling thread is its first worker.

    Everything else is as in `local_cluster`, and as between processes where `init_rpc`
    was called without a `world_size`. At the end of the block all workers leave.

    Args:
      name: Of the worker of rank 0, which the coordinator is with.
      options: As for `local_cluster`.
      allow: As for `init_rpc`.

    Yields:
      What lets more workers join.

    Raises:
      RpcError: This process has workers already.

    Example:
      >>> from jdist import rpc
      >>> with rpc.elastic_cluster("first") as cluster:
      ...     info = cluster.join("second")
      ...     with rpc.use_worker("second"):
      ...         rpc.rpc_sync("first", max, args=(3, 5))
      ...         rpc.shutdown()  # the others are told a moment later
      5
    """
    options = RpcOptions() if options is None else options
    check_options("elastic_cluster(options=...)", options)
    with current.becoming():
        cluster = ElasticCluster(FunctionTable(allow), options)
        cluster.join(name)
    graceful = False
    try:
        token = current.scope.set(Scope(cluster.agents[0]))
        try:
            yield cluster
            graceful = True
        finally:
            current.scope.reset(token)
    finally:
        stop(cluster.agents, graceful)

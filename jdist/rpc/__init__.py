"""Calls between workers: threads of one process, processes, or machines.

    from jdist import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)   # and "worker1" elsewhere
    rpc.rpc_sync("worker1", jnp.add, args=(x, y))
    rpc.shutdown()

`local_cluster` has all workers in this process, `spawn` starts processes, and
`python -m jdist.launch` starts programs.
"""

from jdist.rpc.base.current import use_worker
from jdist.rpc.base.errors import (
    AuthenticationError,
    CollectiveMismatch,
    ForbiddenFunction,
    ProcessFailed,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    WorkerLost,
)
from jdist.rpc.base.future import Future, collect_all, wait_all
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.function_calls import async_execution, rpc_async, rpc_sync
from jdist.rpc.group.api import (
    all_gather,
    barrier,
    debug_info,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    set_rpc_timeout,
)
from jdist.rpc.group.lifecycle import init_rpc, shutdown
from jdist.rpc.group.rendezvous import new_cluster_key
from jdist.rpc.modules.parameters import Parameter
from jdist.rpc.modules.remote_module import RemoteModule
from jdist.rpc.processes.local_cluster import elastic_cluster, local_cluster
from jdist.rpc.processes.process_settings import ProcessSettings
from jdist.rpc.processes.spawn import Processes, spawn
from jdist.rpc.rref import RRef, remote
from jdist.rpc.wire.tls import TlsConfig

__all__ = [
    "AuthenticationError", "CollectiveMismatch", "ForbiddenFunction", "Future",
    "Parameter", "ProcessFailed", "ProcessSettings", "Processes", "ProtocolError",
    "RRef", "RemoteError", "RemoteModule", "RpcError", "RpcOptions", "RpcTimeout",
    "TlsConfig", "WorkerInfo", "WorkerLost", "all_gather", "async_execution", "barrier",
    "collect_all", "debug_info", "elastic_cluster", "get_rpc_timeout",
    "get_worker_info", "get_worker_infos", "init_rpc", "local_cluster",
    "new_cluster_key", "remote", "rpc_async", "rpc_sync", "set_rpc_timeout", "shutdown",
    "spawn", "use_worker", "wait_all",
]  # fmt: skip


def __dir__() -> list[str]:
    """What users may touch: neither rooms nor dunder names."""
    return __all__

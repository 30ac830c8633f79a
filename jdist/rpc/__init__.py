"""Calls between workers: threads of one process, processes, or machines.

    from jdist import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)   # and "worker1" elsewhere
    rpc.rpc_sync("worker1", jnp.add, args=(x, y))
    rpc.shutdown()

`local_cluster` has all workers in this process, `spawn` starts processes, and
`python -m jdist.launch` starts programs.
"""

from jdist.rpc.base.current import use_worker as use_worker
from jdist.rpc.base.errors import AuthenticationError as AuthenticationError
from jdist.rpc.base.errors import CollectiveMismatch as CollectiveMismatch
from jdist.rpc.base.errors import ForbiddenFunction as ForbiddenFunction
from jdist.rpc.base.errors import ProcessFailed as ProcessFailed
from jdist.rpc.base.errors import ProtocolError as ProtocolError
from jdist.rpc.base.errors import RemoteError as RemoteError
from jdist.rpc.base.errors import RpcError as RpcError
from jdist.rpc.base.errors import RpcTimeout as RpcTimeout
from jdist.rpc.base.errors import WorkerLost as WorkerLost
from jdist.rpc.base.future import Future as Future
from jdist.rpc.base.future import collect_all as collect_all
from jdist.rpc.base.future import wait_all as wait_all
from jdist.rpc.base.future import wait_all_calls as wait_all_calls
from jdist.rpc.base.options import RpcOptions as RpcOptions
from jdist.rpc.base.worker_info import WorkerInfo as WorkerInfo
from jdist.rpc.calls.function_calls import async_execution as async_execution
from jdist.rpc.calls.function_calls import rpc_async as rpc_async
from jdist.rpc.calls.function_calls import rpc_sync as rpc_sync
from jdist.rpc.group.api import all_gather as all_gather
from jdist.rpc.group.api import barrier as barrier
from jdist.rpc.group.api import debug_info as debug_info
from jdist.rpc.group.api import get_rpc_timeout as get_rpc_timeout
from jdist.rpc.group.api import get_worker_info as get_worker_info
from jdist.rpc.group.api import get_worker_infos as get_worker_infos
from jdist.rpc.group.api import new_cluster_key as new_cluster_key
from jdist.rpc.group.api import set_rpc_timeout as set_rpc_timeout
from jdist.rpc.group.lifecycle import init_rpc as init_rpc
from jdist.rpc.group.lifecycle import shutdown as shutdown
from jdist.rpc.modules.parameters import Parameter as Parameter
from jdist.rpc.modules.remote_module import RemoteModule as RemoteModule
from jdist.rpc.modules.remote_module import remote_module as remote_module
from jdist.rpc.processes.local_cluster import ElasticCluster as ElasticCluster
from jdist.rpc.processes.local_cluster import elastic_cluster as elastic_cluster
from jdist.rpc.processes.local_cluster import local_cluster as local_cluster
from jdist.rpc.processes.process_settings import ProcessSettings as ProcessSettings
from jdist.rpc.processes.spawn import Processes as Processes
from jdist.rpc.processes.spawn import spawn as spawn
from jdist.rpc.rref import RRef as RRef
from jdist.rpc.rref import remote as remote
from jdist.rpc.wire.tls import TlsConfig as TlsConfig

"""Public functions on a worker's group: its workers, timeouts and collectives."""

from collections.abc import Iterable
from typing import Any

from jdist.rpc.base.current import DEFAULT
from jdist.rpc.base.options import check_seconds
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls import debug
from jdist.rpc.calls.agent import current_agent


def get_worker_info(name: str | None = None) -> WorkerInfo:
    """Returns the name and rank of a worker; by default of this one.

    Raises:
      RpcError: The group has no worker of that name.

    Source: `torch.distributed.rpc.get_worker_info`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a", "b"]):
      ...     rpc.get_worker_info("b")
      WorkerInfo(name='b', id=1)
    """
    agent = current_agent()
    return agent.info if name is None else agent.directory.find(name).info


def get_worker_infos() -> list[WorkerInfo]:
    """Returns all workers of the group, by rank.

    Those that have gone are among them in a group of fixed size, and are not in an
    elastic one.
    """
    return current_agent().group.workers()


def get_rpc_timeout() -> float:
    """The default timeout of this worker's calls in seconds; 0 means no limit."""
    return current_agent().default_timeout


def set_rpc_timeout(seconds: float) -> float:
    """Sets the default timeout of this worker's calls; those under way keep theirs.

    Args:
      seconds: 0 for no limit.

    Returns:
      The default before, in seconds.

    Raises:
      TypeError: Not a number of seconds.
      ValueError: Negative or infinite.

    Source: `torch.distributed.rpc._set_rpc_timeout`.
    """
    check_seconds("set_rpc_timeout(seconds)", seconds)
    agent = current_agent()
    before, agent.default_timeout = agent.default_timeout, seconds
    return before


def all_gather(
    obj: Any,
    names: Iterable[str] | None = None,
    timeout: float = DEFAULT,
    tag: str = "",
) -> dict[str, Any]:
    """Gathers every worker's `obj`, by name, once all of them have called this.

    Workers that meet several times in the same set meet in the order of their calls.
    All of them must come for the same: `all_gather` or `barrier`, with the same tag.
    Several threads of a worker may do the same at a time, and meet in any order.

    In an elastic group, "all" means the members at the moment of the first call; a
    member that leaves is not waited for. A worker in `names` is waited for even if it
    has not joined yet, and must not leave.

    Args:
      obj: Anything that can be sent.
      names: The workers that take part, this one among them; by default all.
      timeout: Seconds; -1 for the default, 0 for no limit.
      tag: Says what it is for, and must be the same on all of them. Where the order of
        calls could differ between workers, a tag makes the difference an error. At most
        200 characters.

    Raises:
      CollectiveMismatch: They came for different collectives. It is raised on all of
        them, also on one that comes late, and the next one is in step again.
      RpcTimeout: Some did not come in time; the message says who, and whether they wait
        in another collective or in `shutdown`. It is raised on all, likewise.
      RpcError: One of them had no value that can be sent; likewise.
      WorkerLost: One of them died, froze or left the group.
      TypeError, ValueError: `obj` cannot be sent, which all of them are told; `names`
        are not of the group, or do not contain this worker.

    Source: `torch.distributed.rpc.api._all_gather`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a"]):
      ...     rpc.all_gather(7)
      {'a': 7}
    """
    return current_agent().group.all_gather(obj, names, timeout, "all_gather", tag)


def barrier(
    names: Iterable[str] | None = None, timeout: float = DEFAULT, tag: str = ""
) -> None:
    """Waits until all workers, or those of `names`, have called this.

    Takes and raises what `all_gather` does; nothing is swallowed.

    Source: `torch.distributed.rpc.api._barrier`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a"]):
      ...     rpc.barrier()
    """
    current_agent().group.all_gather(None, names, timeout, "barrier", tag)


def debug_info() -> dict[str, Any]:
    """Counts and descriptions of the work of this worker.

    Returns:
      By name: threads (`agent.thread_pool_size`, `agent.num_free_places`), calls
      waiting and being served (`agent.client_active_calls`,
      `agent.server_active_calls`, of these without a thread
      `agent.server_active_async_calls`), all of them in words (`agent.activity`: who
      waits for whom), and the group (`group.workers`, `group.lost`). It counts the
      values here that others refer to (`num_owner_rrefs`) and these references
      (`num_forks`); references to values elsewhere (`num_user_rrefs`), those that are
      not confirmed yet (`num_pending_users`), those that calls wait for
      (`num_pending_futures`), and those sent but not yet received
      (`num_forks_under_way`).

    Source: `torch.distributed.rpc._get_debug_info`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a"]):
      ...     rpc.debug_info()["agent.client_active_calls"]
      0
    """
    return debug.information(current_agent())

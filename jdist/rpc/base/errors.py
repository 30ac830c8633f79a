"""Exceptions of rpc.

All derive from `RpcError`. An exception that the called *function* raises arrives at
the caller as its own type, see `jdist.rpc.codec.remote_exception`.
"""

from jdist._errors import JdistError


class RpcError(JdistError, RuntimeError):
    """Base class; a `RuntimeError` too, because torch raises that."""


class WorkerLost(RpcError):
    """A worker died, froze or was cut off while it was needed.

    Attributes:
      worker: Name of the lost worker.
      operation: The operation under way, such as `"rpc_sync(add)"`.
      reason: How the loss was noticed, such as `"its connection closed"`.
    """

    def __init__(self, worker: str, operation: str, reason: str) -> None:
        super().__init__(worker, operation, reason)
        self.worker = worker
        self.operation = operation
        self.reason = reason

    def __str__(self) -> str:
        return f"Lost worker {self.worker!r} during {self.operation}: {self.reason}."


class RpcTimeout(RpcError, TimeoutError):
    """A deadline passed. The message names what was waited for, and the worker."""


class CollectiveMismatch(RpcError):
    """Workers met for different collectives. The message names both.

    It is raised on all of them, and on those that come late. The next collective of
    the same workers is in step again.
    """


class ProcessFailed(RpcError):
    """A process that `spawn` started raised, or ended without a result.

    Attributes:
      rank: Rank of the process.
      pid: Its process id, which another process may have taken over.
      what: How it ended, such as `"was killed by SIGKILL"`.
      traceback: Traceback of the exception; empty if it ended otherwise.
    """

    def __init__(self, rank: int, pid: int, what: str, traceback: str = "") -> None:
        super().__init__(rank, pid, what, traceback)
        self.rank = rank
        self.pid = pid
        self.what = what
        self.traceback = traceback

    def __str__(self) -> str:
        said = f"Rank {self.rank} (pid {self.pid}) {self.what}."
        return f"{said}\n\n{self.traceback}".rstrip()


class RemoteError(RpcError):
    """A remote exception whose own type cannot be rebuilt on this side.

    The message carries the original type, its text and the remote traceback.
    """


class AuthenticationError(RpcError):
    """The other side could not prove that it knows the cluster's key."""


class ProtocolError(RpcError):
    """Bytes that are not a message of this version, or one beyond the limits."""


class ForbiddenFunction(RpcError):
    """A function or type that this worker does not allow others to name."""

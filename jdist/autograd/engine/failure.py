"""The failure of a backward pass, as it is raised and as it travels."""

from typing import NamedTuple

from jdist.autograd.recording.errors import AutogradError
from jdist.rpc import ProtocolError, RpcError


class BackwardError(AutogradError):
    """A backward pass failed; `__cause__` is what was raised, of its own type.

    It is raised on the worker that called `backward`, whichever worker failed. The
    text begins as torch's does, with the name in place of the node's number.

    Attributes:
      worker: Name of the worker on which it failed.
      reason: What was raised there, in words.

    Example:
      >>> print(BackwardError("worker1", "matrix is singular"))
      Error on worker worker1: matrix is singular
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"Error on worker {self.worker}: {self.reason}"


class UnusedSend(BackwardError):
    """FAST mode waited for a gradient that no worker will send.

    `mode="smart"` does not wait for it; torch waits for ever here.
    """


class PassFailure(NamedTuple):
    """An error and the worker on which it was raised; it travels as a value.

    Attributes:
      worker: Name of the worker.
      error: What was raised there.
    """

    worker: str
    error: Exception

    def exception(self) -> Exception:
        """The error that `backward` raises: rpc's own, or one that names the worker.

        Example:
          >>> PassFailure("worker1", KeyError("w")).exception()
          BackwardError('worker1', "'w'")
        """
        # Raised as they are: each says itself what has failed, and where.
        if isinstance(self.error, BackwardError | RpcError):
            return self.error
        reason = str(self.error) or repr(self.error)
        told = BackwardError(self.worker, reason)
        told.__cause__ = self.error
        return told

    @classmethod
    def unpack(cls, value: object) -> "PassFailure":
        """The failure that arrived as this value.

        Raises:
          ProtocolError: The value is no failure.
        """
        worker, error = value if type(value) is tuple and len(value) == 2 else (0, 0)
        if type(worker) is not str or not isinstance(error, Exception):
            raise ProtocolError("A failure has the name of a worker and an exception.")
        return cls(worker, error)

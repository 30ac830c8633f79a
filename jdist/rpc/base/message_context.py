"""The context of one message while it is encoded or decoded."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jdist.rpc.base.current import RunningCall
from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.interceptor import Operation
from jdist.rpc.base.worker_info import WorkerInfo

__all__ = ["MessageContext", "ReferenceCounting"]


_NONE = Operation("")


class MessageContext:
    """Context of one call or answer, for the codec's hooks of registered types.

    The hooks fill it in; the caller of the codec reads it. Most messages need none of
    it, so an empty one is cheap: its lists are shared empty tuples.

    Args:
      worker: The receiver of a message that is sent, the sender of one that came.
      meta: The message's metadata. What encode hooks put there travels with it.
      operation: Of a message that is sent: the call that it belongs to.

    Attributes:
      forks: The references that are sent in it.
      unsettled: Futures that must be complete before the decoded value may be used.
      crossing: State of a package built upon rpc, from the message's first value on.
      if_lost: Called when the call that it is of has failed: encoding it, on its way,
        or on the callee. Of answers, when encoding one failed.
    """

    __slots__ = (
        "__weakref__", "crossing", "forks", "if_lost", "meta", "operation", "unsettled",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        worker: WorkerInfo,
        meta: dict[str, Any] | None = None,
        operation: Operation = _NONE,
    ) -> None:
        self.worker = worker
        self.operation = operation
        self.meta: dict[str, Any] = {} if meta is None else meta
        self.crossing: Any = None
        # Shared empty tuples: most messages need none of the three.
        self.forks: Sequence[GloballyUniqueId] = ()
        self.unsettled: Sequence[Future[Any]] = ()
        self.if_lost: Sequence[Callable[[], None]] = ()


class ReferenceCounting(Protocol):
    """Reference counting, as far as calls and the end of a worker need it."""

    def begin(self, incarnation: int) -> None:
        """The worker belongs to a group."""

    def undelivered(self, message: MessageContext) -> None:
        """The message with these references is lost, or may be."""

    def answer(self, execution: RunningCall, message: MessageContext) -> None:
        """An answer brings references; if it is given up, they are undelivered."""

    def decline(self, tree: Any, giver: WorkerInfo) -> None:
        """Takes and drops the references in an answer that could not be read."""

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is lost or has left."""

    def release(self, deadline: Deadline, seconds: float) -> None:
        """Gives up all references, and waits until all their owners know."""

    def leaks(self) -> list[str]:
        """Values that others still hold although all references were released."""

    def counts(self) -> dict[str, int]:
        """For `rpc.debug_info`."""

    def close(self) -> None:
        """Ends at once."""

"""What has to be known of one message apart from its bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.interceptor import Operation
from jdist.rpc.base.worker_info import WorkerInfo

_NONE = Operation("")


class MessageContext:
    """What the hooks of registered types say to each other about one call or answer.

    Whoever encodes or decodes a message passes one along, and the hooks fill it in.
    Most messages need nothing of it, so an empty one costs next to nothing.

    Args:
      worker: Whom the message goes to, or whom it comes from.
      meta: The message's metadata. What encode hooks put there travels with it.
      operation: Of a message that is sent: what it is a part of.

    Attributes:
      forks: The references that are sent in it.
      unsettled: What must be complete before what has arrived may be used.
      crossing: What a part built upon rpc keeps for the message while its values pass.
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
        self.forks: Sequence[GloballyUniqueId] = ()
        self.unsettled: Sequence[Future[Any]] = ()
        self.if_lost: Sequence[Callable[[], None]] = ()

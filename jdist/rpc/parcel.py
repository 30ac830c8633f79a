"""The references that one message brings, apart from its bytes."""

from collections.abc import Sequence
from typing import Any

from jdist.rpc.future import Future
from jdist.rpc.ids import GloballyUniqueId
from jdist.rpc.worker_info import WorkerInfo


class Parcel:
    """What has to be known of the references in one call or answer.

    Whoever encodes or decodes a message passes one along, and the hooks of references
    fill it in. Most messages bring none, so an empty one costs next to nothing.

    Args:
      worker: Whom the message goes to, or whom it comes from.

    Attributes:
      forks: Those that are sent in it.
      unsettled: What must be complete before what has arrived may be used.
    """

    __slots__ = ("__weakref__", "forks", "unsettled", "worker")

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.forks: Sequence[GloballyUniqueId] = ()
        self.unsettled: Sequence[Future[Any]] = ()

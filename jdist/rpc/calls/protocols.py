"""What a worker needs of the rooms above this one: its group and its references."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jdist.rpc.base.current import RunningCall
from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.base.worker_info import WorkerInfo

__all__ = ["GroupLink", "ReferenceCounting"]


class GroupLink(Protocol):
    """A worker's place in its group; `jdist.rpc.group` has it."""

    elastic: bool

    def expelled(self) -> str | None:
        """Why the others take this worker for lost, if they do."""

    def workers(self) -> list[WorkerInfo]:
        """All workers, by rank; departed ones only in a group of fixed size."""

    def lost(self) -> dict[str, str]:
        """The workers that were lost, and how that was noticed."""

    def left(self) -> set[str]:
        """The workers that left in an orderly way."""

    def on_lost(self, listener: Callable[[str, str], None]) -> None:
        """Has `listener(name, reason)` called for each worker that gets lost."""

    def check(self, purpose: str) -> None:
        """Raises WorkerLost if a worker is lost without which nothing can go on."""

    def all_gather(
        self,
        value: Any,
        names: Iterable[str] | None,
        timeout: float,
        operation: str = "all_gather",
        tag: str = "",
    ) -> dict[str, Any]:
        """What every one of `names` gave, by name."""

    def refuse(
        self, names: Iterable[str], error: BaseException, operation: str, tag: str
    ) -> None:
        """Makes the next collective of these workers fail on all of them."""

    def leave(self, seconds: float) -> None:
        """Tells the coordinator that this worker leaves."""


class ReferenceCounting(Protocol):
    """The counts of a worker's references; `jdist.rpc.rref` has them."""

    def begin(self, incarnation: int) -> None:
        """This worker belongs to a group, and has this incarnation there."""

    def undelivered(self, message: MessageContext) -> None:
        """The message with these references is lost, or may be."""

    def decline(self, tree: Any, giver: WorkerInfo) -> None:
        """Takes and drops the references in an answer that could not be read."""

    def answer(self, execution: RunningCall, message: MessageContext) -> None:
        """An answer brings references; if it is given up, they are undelivered."""

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is lost or has left."""

    def release(self, deadline: Deadline, seconds: float) -> None:
        """Gives up all references, and waits until their owners know."""

    def leaks(self) -> list[str]:
        """Values that others still hold although all references were released."""

    def counts(self) -> dict[str, int]:
        """For `rpc.debug_info`."""

    def close(self) -> None:
        """Does nothing more."""

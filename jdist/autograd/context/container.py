"""The contexts of one worker, and the ids that it gives out."""

import threading
from collections import deque
from typing import TYPE_CHECKING

from jdist._errors import requirement
from jdist.autograd.context.context import Context
from jdist.autograd.context.ids import Ids, maker
from jdist.autograd.errors import ContextNotFound, no_context
from jdist.rpc.base import current
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.future import Future
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of

if TYPE_CHECKING:
    from jdist.autograd.context.release import Releases
    from jdist.rpc.calls.agent import Agent

PART = "jdist.autograd"
"""Under which an agent has its container."""

_ENDED = 4096
"""So many ended contexts are remembered, for messages that the end has overtaken."""


class Container:
    """All contexts of one worker.

    Args:
      agent: The worker.

    Attributes:
      agent: The worker.
      releases: Ends contexts on other workers.

    Source: `torch/csrc/distributed/autograd/context/container.h`.
    """

    releases: "Releases"

    def __init__(self, agent: "Agent") -> None:
        self.agent = agent
        self._lock = threading.Lock()
        self._ids: Ids | None = None
        self._contexts: dict[int, Context] = {}
        self._ended: set[int] = set()
        self._ended_in_order: deque[int] = deque()

    @property
    def ids(self) -> Ids:
        """Gives out ids of contexts and messages, once the worker is in a group."""
        if self._ids is None:
            with self._lock:  # two would give out the same ids
                self._ids = self._ids or Ids(incarnation_of(self.agent.info))
        return self._ids

    def worker(self, number: int) -> WorkerInfo:
        """The worker that gave out ids with this number on top.

        Raises:
          ContextNotFound: It was gone before this worker came.
        """
        peer = self.agent.directory.of_incarnation(number)
        if peer is None:
            raise ContextNotFound(
                f"Could not find the worker of number {number}: it was gone before "
                f"{self.agent.info.name!r} joined."
            )
        return peer.info

    def is_gone(self, number: int | None) -> bool:
        """Whether the worker of this number is not there any more."""
        peer = None if number is None else self.agent.directory.of_incarnation(number)
        return peer is None or peer.departed is not None

    def new(self) -> Context:
        """A new context, made by this worker.

        Raises:
          OverflowError: There are no ids left.
        """
        context = Context(self.ids.context(), self)
        with self._lock:
            self._contexts[context.id] = context
        return context

    def find(self, context_id: int) -> Context | None:
        """The context of this id, if this worker has it."""
        return self._contexts.get(context_id)

    def retrieve(self, context_id: int) -> Context:
        """The context of this id.

        Raises:
          TypeError: That is no id.
          ContextNotFound: This worker does not have it, or not any more.
        """
        if type(context_id) is not int:
            rule = "must be the id that autograd.context gives"
            raise TypeError(requirement("autograd(context_id)", rule, context_id))
        found = self.find(context_id)
        if found is None:
            raise no_context(context_id)
        return found

    def get_or_create(self, context_id: int) -> Context:
        """The context of this id, of which a message came.

        Raises:
          ContextNotFound: It has ended, or the worker that made it has: the message
            was overtaken by that.
        """
        found = self._contexts.get(context_id)
        if found is not None:
            return found
        with self._lock:
            found = self._contexts.get(context_id)
            if found is None:
                if context_id in self._ended:
                    raise no_context(context_id, "It was released.")
                if self.is_gone(maker(context_id)):
                    raise no_context(context_id, "The worker that made it is gone.")
                found = self._contexts[context_id] = Context(context_id, self)
        return found

    def contexts(self) -> list[Context]:
        """All contexts, in the order in which this worker got to know them."""
        with self._lock:
            return list(self._contexts.values())

    def end(self, context_id: int, reason: str) -> set[int]:
        """Forgets a context; numbers of the workers that have to be told."""
        with self._lock:
            found = self._contexts.pop(context_id, None)
            if context_id not in self._ended:
                self._ended.add(context_id)
                self._ended_in_order.append(context_id)
                if len(self._ended_in_order) > _ENDED:
                    self._ended.discard(self._ended_in_order.popleft())
        return set() if found is None else found.end(reason)

    def release(self, context_id: int) -> Future[None]:
        """Ends a context here and on all workers that took part; done when all have.

        Raises:
          TypeError, ContextNotFound: As `retrieve`.
        """
        self.retrieve(context_id)
        return self.releases.release(context_id)


def of(agent: "Agent") -> Container:
    """The container of a worker.

    Raises:
      RpcError: `jdist.autograd` was not installed on it.
    """
    found = agent.parts.get(PART)
    if not isinstance(found, Container):
        raise RpcError(f"{agent.info.name!r} has no autograd: import jdist.autograd.")
    return found


def here() -> Container:
    """The container of the current worker.

    Raises:
      RpcError: RPC has not been initialized.
    """
    return of(current.agent())

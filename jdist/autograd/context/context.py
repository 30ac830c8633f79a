"""A context: one distributed computation and its gradients, as one worker sees it."""

import threading
from typing import TYPE_CHECKING, Any

from jdist.autograd.context.ids import maker
from jdist.autograd.errors import no_context
from jdist.autograd.graph.node import RecvNode, SendNode
from jdist.rpc.base.future import Future
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of

if TYPE_CHECKING:
    from jdist.autograd.context.container import Container
    from jdist.autograd.engine.local_pass import LocalPass
    from jdist.autograd.graph.variable import Variable


class Context:
    """What one worker keeps for one context. All workers know it by the same id.

    Made by `autograd.context` on the first worker, and by the first message of the
    context on every other one. Whatever reads or changes it holds `lock`.

    Args:
      context_id: Its id.
      container: That of the worker.

    Attributes:
      id: Its id; the worker that made it is in the top 16 bits.
      sends: Send functions by message id.
      recvs: Receive functions by message id.
      known: The workers with which this one exchanged messages in it: names by
        numbers, because a lost worker's successor may bear its name.
      gradients: What backward passes have added up for this worker's variables.
      passes: Parts of backward passes under way, by the passes' ids; the engine's.
      ended: Why it is not there any more, or None.
      lock: Guards all of it.

    Source: `torch/csrc/distributed/autograd/context/context.h`.
    """

    def __init__(self, context_id: int, container: "Container") -> None:
        self.id = context_id
        self.container = container
        self.lock = threading.RLock()
        self.sends: dict[int, SendNode] = {}
        self.recvs: dict[int, RecvNode] = {}
        self.known: dict[int, str] = {}
        self.gradients: dict[Variable, Any] = {}
        self.passes: dict[int, LocalPass] = {}
        self.ended: str | None = None

    @property
    def origin(self) -> int:
        """Number of the worker that made it."""
        return maker(self.id)

    def send_functions(self) -> dict[int, SendNode]:
        """The send functions by message id, as they are now."""
        with self.lock:
            return dict(self.sends)

    def recv_functions(self) -> dict[int, RecvNode]:
        """The receive functions by message id, as they are now."""
        with self.lock:
            return dict(self.recvs)

    def known_workers(self) -> set[str]:
        """Names of the workers with which this one exchanged messages in it."""
        with self.lock:
            return set(self.known.values())

    def known_numbers(self) -> set[int]:
        """Their numbers."""
        with self.lock:
            return set(self.known)

    def release(self) -> Future[None]:
        """Ends it here and on all workers that took part; done when all have."""
        return self.container.release(self.id)

    def check(self) -> None:
        """Refuses to go on once it has ended.

        Raises:
          ContextNotFound: It was released.
        """
        if self.ended is not None:
            raise no_context(self.id, self.ended)

    def meet(self, worker: WorkerInfo) -> None:
        """A message goes to that worker: it has to be told of the end.

        Raises:
          ContextNotFound: It was released.
        """
        with self.lock:
            self.check()
            self.known[incarnation_of(worker)] = worker.name

    def end(self, reason: str) -> set[int]:
        """Forgets everything, and ends passes; numbers of the workers to be told."""
        with self.lock:
            if self.ended is not None:
                return set()
            self.ended = reason
            parts = list(self.passes.values())
            known = set(self.known)
        for part in parts:
            part.released(reason)
        with self.lock:
            for kept in (self.sends, self.recvs, self.gradients, self.passes):
                kept.clear()
        return known

"""State that packages built upon rpc keep per worker, and the events they hear of."""

import functools
from collections.abc import Callable
from typing import Any

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo

__all__ = ["NEEDS", "ExtensionState", "Gone"]


NEEDS = "needs"
"""In the metadata of a request: `module:function` of the package that reads it."""

Gone = Callable[[WorkerInfo, str], None]
"""`gone(worker, reason)`: called when a worker is lost or has left."""


class ExtensionState(dict[str, Any]):
    """State of one worker, by the names of the packages that keep it.

    An entry with a method `counts` adds what that returns to `rpc.debug_info`.

    Args:
      pool: Runs listeners.
    """

    def __init__(self, pool: ThreadPool) -> None:
        super().__init__()
        self._pool = pool
        self._on_gone: list[Gone] = []
        self._on_close: list[Callable[[], None]] = []

    def on_gone(self, listener: Gone) -> None:
        """Has `listener(worker, reason)` called for each that is lost or leaves.

        On a thread of its own, after calls to that worker have ended.
        """
        self._on_gone.append(listener)

    def on_close(self, listener: Callable[[], None]) -> None:
        """Has `listener()` called when this worker ends."""
        self._on_close.append(listener)

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is lost or has left."""
        for listener in tuple(self._on_gone):
            # Each on a thread of its own: a listener may wait, and must not delay
            # others.
            self._pool.run(functools.partial(listener, worker, reason))

    def close(self) -> None:
        """This worker ends."""
        for listener in tuple(self._on_close):
            listener()

    def counts(self) -> dict[str, Any]:
        """For `rpc.debug_info`."""
        counting = (getattr(part, "counts", None) for part in self.values())
        return {key: n for counts in counting if counts for key, n in counts().items()}

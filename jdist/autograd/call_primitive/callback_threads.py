"""A limit on the calls that wait on the threads on which XLA runs programs.

A callback inside a jitted function runs on the thread that called the function, or,
for instance in a loop with a large body, on one of the threads that XLA's CPU client
has for all programs of the process. While it waits for another worker, that thread is
blocked. If all of them are, no program that needs one goes on; and if what is waited
for needs such a program (a function that calls back, a worker in the same process),
that is a deadlock.

The last thread is therefore never given to a waiting call. With one thread left
programs go on, if slowly, and a callback that comes to the last thread and would wait
is refused at once: no set of calls, however nested, waits for ever.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jdist._compat import thread_pool_size
from jdist._errors import requirement
from jdist.rpc import RpcError


class CallbackThreads:
    """Counts the calls that wait on XLA's threads.

    Args:
      size: How many threads there are.

    Attributes:
      size: The same.
      waiting: How many calls wait on them now.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting = 0
        self._lock = threading.Lock()

    @contextmanager
    def occupied(self, call: str) -> Iterator[None]:
        """Around a wait in a callback; `call` is what waits, for the message.

        Raises:
          RpcError: It would occupy the last thread.
        """
        if _of_python():
            yield
            return
        with self._lock:
            # The last thread stays free: what is waited for may need it.
            if self.waiting + 1 >= self.size:
                raise RpcError(self._refusal(call))
            self.waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self.waiting -= 1

    def _refusal(self, call: str) -> str:
        rule = "inside a jitted function must leave one of XLA's threads free"
        got = f"{self.waiting} calls that wait on its {self.size} threads already"
        remedy = (
            "Start the process with more threads: PJRT_NPROC in its environment before "
            "JAX starts, or `ProcessSettings(callback_threads=...)` of rpc.spawn and "
            "jdist.launch. A call that is not jitted needs none."
        )
        return requirement(call, rule, got, remedy)


def _of_python() -> bool:
    """Whether this thread was started by Python, and so is not XLA's."""
    # `threading.current_thread()` would enter a foreign thread among Python's for good.
    own = threading.get_ident()
    found = (t for t in threading.enumerate() if t.ident == own)
    return any(not t.name.startswith("Dummy-") for t in found)


@functools.cache
def callback_threads() -> CallbackThreads:
    """The threads of this process. XLA has fixed their number once it runs programs."""
    return CallbackThreads(thread_pool_size())

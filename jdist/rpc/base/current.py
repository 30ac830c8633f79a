"""The scope of a thread of control: its worker, the running call and its deadline.

A process may hold several workers. Which one acts is part of the running call, kept in
one context variable, never in a process-wide singleton. A function called by rpc runs
in a fresh context, so nothing of the caller leaks into it even when both share a
thread.

A deadline is a moment of `time.monotonic()`, or None for no limit; timeouts, which are
relative, stand in the public interface and remaining seconds on the wire. It is *firm*
when a timeout was given, and soft when it only follows from the default timeout, which
is there so that nothing hangs.
"""

import contextlib
import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from jdist._errors import requirement, type_error, value_error
from jdist._scheduling import leave_batch_class
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.options import DEFAULT_TIMEOUT
from jdist.rpc.base.posix import after_fork_in_child
from jdist.rpc.base.worker_info import WorkerInfo

# --- deadlines ---

DEFAULT = -1.0
"""The timeout that stands for the worker's default."""


Meta = dict[str, Any]
"""Metadata of a message: small values by name that travel beside its body."""


class Deadline(msgspec.Struct, frozen=True):
    """The moment at which to give up, and whether a timeout was given.

    Attributes:
      at: Moment of `time.monotonic()`, or None.
      timeout: The timeout in seconds, for messages.
      firm: Whether a timeout was given.
    """

    at: float | None = None
    timeout: float = 0.0
    firm: bool = False

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None without a limit."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())


NEVER = Deadline()

_NUMBERS = (float, int)  # a tuple: a union would be made anew in each call

LONGEST = 1e6
"""Seconds. Longer timeouts count as no limit: poll(2) counts milliseconds in 31 bits,
and a lock refuses to wait for more than some centuries."""


def moment(seconds: float) -> float | None:
    """Return the moment `seconds` from now; None for 0 and beyond LONGEST."""
    return time.monotonic() + seconds if 0 < seconds <= LONGEST else None


def resolve(timeout: float, default: float, enclosing: Deadline) -> Deadline:
    """Return the deadline of a call, at most that of the enclosing call.

    Args:
      timeout: Seconds; -1 for the default, 0 for no limit.
      default: The worker's default in seconds, 0 for no limit.
      enclosing: Deadline of the call within which this one is made.

    Raises:
      TypeError: `timeout` is not a number.
      ValueError: `timeout` is negative and not -1, or not finite.
    """
    # An array is no number here, and compared it has no truth.
    if isinstance(timeout, _NUMBERS) and timeout == DEFAULT:
        # A default that was set by the user is as firm as a timeout of the call.
        seconds, firm = default, default not in (DEFAULT_TIMEOUT, 0)
    else:
        check_timeout("timeout", timeout)
        seconds, firm = timeout, timeout > 0
    at = time.monotonic() + seconds if 0 < seconds <= LONGEST else None
    if enclosing.at is not None and (at is None or enclosing.at < at):
        return enclosing
    return Deadline(at, seconds, firm)


def check_timeout(call: str, timeout: object) -> None:
    """Check that a timeout is -1 or a finite, non-negative number of seconds."""
    if not isinstance(timeout, _NUMBERS) or isinstance(timeout, bool):
        raise type_error(call, "must be a number of seconds", timeout)
    if timeout != DEFAULT and not 0 <= timeout < math.inf:
        rule = "must be finite and RPC Timeout must be non-negative"
        raise value_error(call, rule, timeout, "0 means no limit and -1 the default.")


def with_deadline(meta: Meta, deadline: Deadline) -> Meta:
    """Copy a request's metadata and add its deadline."""
    meta = meta.copy()
    if deadline.at is not None:
        # The seconds that are left, because clocks of two machines differ.
        meta["deadline"] = deadline.at - time.monotonic()
        if deadline.firm:
            meta["firm"] = True
    return meta


def from_meta(meta: Meta) -> Deadline:
    """Read the deadline in metadata; a value that is no number counts as none."""
    seconds = meta.get("deadline")
    if not isinstance(seconds, _NUMBERS) or not math.isfinite(seconds):
        return NEVER
    # A peer may send any number; a lock refuses to wait for some.
    at = time.monotonic() + min(seconds, LONGEST)
    return Deadline(at, seconds, meta.get("firm") is True)


def exceeded(deadline: Deadline) -> str:
    """Return the beginning of every message of a timeout, in torch's words."""
    milliseconds = round(deadline.timeout * 1000)
    return f"RPC ran for more than set timeout ({milliseconds} ms)"


# --- the running call ---


class Operation(msgspec.Struct, frozen=True):
    """An operation for messages and logs, formatted only when it is printed."""

    verb: str
    function: Any = None

    def __str__(self) -> str:
        return self.verb if self.function is None else f"{self.verb}({self.name})"

    @property
    def name(self) -> str:
        """The function's name, or the verb where there is no function."""
        if self.function is None:
            return self.verb
        return getattr(self.function, "__qualname__", None) or repr(self.function)


class Worker(Protocol):
    """The part of `jdist.rpc.calls.agent.Agent` that this room uses."""

    info: WorkerInfo
    closed: bool


class Cancellable(Protocol):
    """A wait within a running call, which ends with that call."""

    def give_up(self, reason: str) -> None:
        """Ends the wait; any thread, any number of times."""


class RunningCall(Protocol):
    """A call being executed on this worker for another one."""

    worker: WorkerInfo
    operation: Operation
    cancelled: str | None

    def begin(self, nested: Cancellable) -> None:
        """Records that the function waits for `nested`."""

    def end(self, nested: Cancellable) -> None:
        """Records that the function no longer waits for `nested`."""

    def defer(self, future: Any) -> None:
        """Records that the result comes from `future`, or from the last one given."""

    def bring(self, undelivered: Callable[[], None]) -> None:
        """Registers a callback for an answer with references that is given up."""


class Scope(msgspec.Struct, frozen=True):
    """The worker as which a thread of control acts, and its deadline.

    Attributes:
      agent: The worker.
      deadline: Deadline of the call being executed.
      execution: The call being executed, if it is one.
      depth: Number of calls below this one on the same thread's stack.
      reading: Whether this is the thread that reads a connection, which must not wait.
    """

    agent: Worker
    deadline: Deadline = NEVER
    execution: RunningCall | None = None
    depth: int = 0
    reading: bool = False


scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar(
    "jdist.rpc.scope", default=None
)


# --- the workers of this process ---

_workers: dict[str, Worker] = {}
_lock = threading.Lock()
# Guards against two threads that initialize at a time; see `becoming`.
_becoming = False
_inherited: tuple[str, ...] = ()
"""Names of the workers of the process from which this one was forked."""

NOT_INITIALIZED = (
    "RPC has not been initialized. Call rpc.init_rpc first, or work within "
    "rpc.local_cluster. (Current RPC agent is not set! Did you initialize the RPC "
    "framework, or was it shut down?)"
)


@contextlib.contextmanager
def becoming() -> Iterator[None]:
    """Guards the block in which this process gets its workers, one at a time.

    Raises:
      RpcError: It has workers already. (torch's "is already initialized".)
    """
    global _becoming
    with _lock:
        if _workers or _becoming:
            names = ", ".join(sorted(_workers)) or "another thread is about to"
            remedy = "Call rpc.shutdown() before initializing again."
            raise RpcError(
                f"RPC is already initialized in this process: {names}. {remedy}"
            )
        _becoming = True
    try:
        # This thread calls and awaits answers; the workers' threads inherit its class.
        leave_batch_class()
        yield
    finally:
        _becoming = False


def add(agents: Sequence[Worker]) -> None:
    """Adds workers of this process."""
    with _lock:
        _workers.update({agent.info.name: agent for agent in agents})


def remove(agents: Sequence[Worker]) -> None:
    """Removes workers; idempotent."""
    with _lock:
        for agent in agents:
            # In an elastic group another worker may have the name meanwhile.
            if _workers.get(agent.info.name) is agent:
                del _workers[agent.info.name]


def worker() -> Worker:
    """Return the worker as which the calling code acts.

    Raises:
      RpcError: There is none, it was shut down, or there are several to choose from.
    """
    current = scope.get()
    if current is not None:
        if current.agent.closed:
            raise RpcError(why_none())
        return current.agent
    # A copy: another thread may add or remove workers meanwhile.
    only = tuple(_workers.values())
    if len(only) == 1:
        return only[0]
    if not only:
        raise RpcError(why_none())
    names = ", ".join(sorted(_workers))
    raise RpcError(
        f"This process has several workers ({names}), and this thread has not said "
        "which one it is. Say `with rpc.use_worker(name):` around what it does."
    )


def why_none() -> str:
    """Return the reason why this process has no worker, for messages."""
    if not _inherited:
        return NOT_INITIALIZED
    names = ", ".join(_inherited)
    return (
        f"This process was forked from that of {names}, whose connections and threads "
        "stay there: it cannot call as that worker. Call in the parent, or have the "
        "child become a worker of its own by rpc.init_rpc. (rpc.spawn starts processes "
        "that are workers.)"
    )


def _leave_to_parent() -> None:
    """Close the copies of the workers that a forked process inherits.

    The workers are the parent's. Inherited references and futures do nothing.
    """
    global _lock, _becoming, _inherited
    # The scope may name a worker that has been removed from the table.
    inherited = scope.get()
    agents = list(_workers.values())
    if inherited is not None and inherited.agent not in agents:
        agents.append(inherited.agent)
    for agent in agents:
        agent.closed = True
    _inherited = tuple(sorted(agent.info.name for agent in agents)) or _inherited
    # A thread of the parent may have held it at the fork, and does not exist here.
    _lock = threading.Lock()
    _becoming = False
    _workers.clear()
    scope.set(None)


after_fork_in_child(_leave_to_parent)


def check_may_wait() -> None:
    """Check that this is no thread that reads a connection; see `Agent.register`.

    Raises:
      RpcError: It is.
    """
    current = scope.get()
    if current is not None and current.reading:
        rule = "must never wait: its connection is not read meanwhile"
        call = "Agent.register(inline=...)"
        operation = "" if current.execution is None else current.execution.operation
        raise RpcError(requirement(call, rule, f"a wait within {operation}"))


def deadline() -> Deadline:
    """Return the deadline of the call being executed, or no limit outside of one."""
    current = scope.get()
    return NEVER if current is None else current.deadline


@contextlib.contextmanager
def use_worker(name: str) -> Iterator[None]:
    """Act as the worker `name` of this process within the block.

    Raises:
      ValueError: This process has no worker of that name.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a", "b"]), rpc.use_worker("b"):
      ...     rpc.get_worker_info().name
      'b'
    """
    chosen = _workers.get(name) if isinstance(name, str) else None
    if chosen is None:
        rule = f"must be a worker of this process, one of {sorted(_workers)}"
        raise value_error("use_worker(name)", rule, name)
    with acting_as(chosen):
        yield


@contextlib.contextmanager
def acting_as(chosen: Worker) -> Iterator[None]:
    """Act as that worker within the block, under the running call's deadline."""
    before = scope.get()
    if before is not None and before.agent is chosen:
        yield
        return
    inherited = NEVER if before is None else before.deadline
    token = scope.set(Scope(chosen, inherited))
    try:
        yield
    finally:
        scope.reset(token)

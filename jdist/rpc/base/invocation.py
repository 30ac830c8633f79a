"""Calls as data: functions with their arguments, and the contexts of their messages.

An interceptor around calls is the one hook that rpc offers to packages built upon it.
Distributed autograd registers one; rpc itself knows nothing of gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jdist._errors import requirement
from jdist.rpc.base.current import Deadline, Meta, Operation, RunningCall
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.worker_info import WorkerInfo

__all__ = [
    "Interceptor", "Invocation", "MessageContext", "ReferenceCounting",
    "UnboundFunction", "named", "positional",
]  # fmt: skip


class UnboundFunction:
    """Base class for a function that is looked up when its call begins."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Looks the function up and calls it."""
        return self.bound()(*args, **kwargs)

    def bound(self) -> Callable[..., Any]:
        """The function itself."""
        raise NotImplementedError


class Invocation(NamedTuple):
    """A function about to be called on another worker (or being called here)."""

    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def unpack(cls, kind: str, body: Any) -> "Invocation":
        """Decodes a call that arrived.

        Raises:
          ProtocolError: `body` is not a call.
        """
        # A peer may send anything.
        if type(body) is tuple and len(body) == 3:
            function, args, kwargs = body
            if callable(function) and type(args) is tuple and type(kwargs) is dict:
                return cls(kind, function, args, kwargs)
        raise ProtocolError("A call has a function, arguments and keywords.")


class Interceptor(Protocol):
    """Sees every user-level call on its way out, at the callee, and back."""

    def request(self, to: WorkerInfo, call: Invocation) -> tuple[Invocation, Meta]:
        """On the caller, before encoding: returns the call to send and its metadata."""

    def execute(
        self,
        caller: WorkerInfo,
        call: Invocation,
        meta: Meta,
        run: Callable[[Invocation], Any],
    ) -> tuple[Any, Meta]:
        """On the callee: runs the call; returns its result and the reply's metadata.

        The result may be a Future when the function is an async_execution one.
        """

    def reply(self, to: WorkerInfo, value: Any, meta: Meta) -> Any:
        """On the caller, after decoding: returns the value for the user."""

    def local(self, value: Any) -> Any:
        """On the owner of a reference: returns the result of `to_here`."""


# --- messages ---

_NONE = Operation("")


class MessageContext:
    """Context of one call or answer, for the codec's hooks of registered types.

    The hooks fill it in; the caller of the codec reads it. Most messages need none of
    it, so an empty one is cheap: its lists are shared empty tuples.

    Args:
      worker: The receiver of a message that is sent, the sender of one that came.
      meta: The message's metadata. Entries of encode hooks travel with it.
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
        meta: Meta | None = None,
        operation: Operation = _NONE,
    ) -> None:
        self.worker = worker
        self.operation = operation
        self.meta: Meta = {} if meta is None else meta
        self.crossing: Any = None
        # Shared empty tuples: most messages need none of the three.
        self.forks: Sequence[GloballyUniqueId] = ()
        self.unsettled: Sequence[Future[Any]] = ()
        self.if_lost: Sequence[Callable[[], None]] = ()


class ReferenceCounting(Protocol):
    """Reference counting as calls and the shutdown of a worker use it."""

    def begin(self, incarnation: int) -> None:
        """Starts counting as a member of a group."""

    def undelivered(self, message: MessageContext) -> None:
        """Handles a message with references that is, or may be, lost."""

    def answer(self, execution: RunningCall, message: MessageContext) -> None:
        """Registers an answer with references: undelivered if it is given up."""

    def decline(self, tree: Any, giver: WorkerInfo) -> None:
        """Takes and drops the references in an answer that could not be read."""

    def gone(self, worker: WorkerInfo, reason: str) -> None:
        """Handles the loss or departure of a worker."""

    def release(self, deadline: Deadline, seconds: float) -> None:
        """Drops all references and waits until their owners know."""

    def leaks(self) -> list[str]:
        """Describes values that others still hold after `release`."""

    def counts(self) -> dict[str, int]:
        """Counts of references, for `rpc.debug_info`."""

    def close(self) -> None:
        """Ends at once."""


# --- arguments ---


def positional(call: str, args: Any) -> tuple[Any, ...]:
    """Check positional arguments, a tuple or a list; None stands for none.

    Args:
      call: The public function, for the message.
      args: As the user gave them.

    Raises:
      TypeError: `args` is anything else.

    Example:
      >>> positional("rpc_sync", [1, "a"])
      (1, 'a')
    """
    if args is None:
        return ()
    # Exact types: `args=(x)` without the comma is `x` itself, and an array, a string or
    # a named tuple would be taken apart.
    if type(args) is tuple or type(args) is list:
        return tuple(args)
    rule = "must be a tuple or a list of the positional arguments"
    remedy = (
        "All of them go together, `args=(x, y)`; a single one takes a comma, "
        "`args=(x,)`."
    )
    raise TypeError(requirement(f"{call}(args=...)", rule, _kind(args), remedy))


def named(call: str, kwargs: Any) -> dict[str, Any]:
    """Check keyword arguments, a mapping; None stands for none.

    Args:
      call: The public function, for the message.
      kwargs: As the user gave them.

    Raises:
      TypeError: `kwargs` is no mapping, or a key is no string.

    Example:
      >>> named("rpc_sync", {"axis": 0})
      {'axis': 0}
    """
    if kwargs is None:
        return {}
    rule = "must be a mapping from the names of arguments to their values"
    remedy = 'For example: `kwargs={"x": x}`.'
    what = f"{call}(kwargs=...)"
    if not isinstance(kwargs, Mapping):
        raise TypeError(requirement(what, rule, _kind(kwargs), remedy))
    for key in kwargs:
        if type(key) is not str:
            raise TypeError(requirement(what, rule, f"the key {key!r}", remedy))
    return dict(kwargs)


def _kind(value: Any) -> str:
    # Its type alone: the value may be large, or on a device that is busy.
    kind = type(value)
    return f"a value of type {kind.__module__}.{kind.__qualname__}"

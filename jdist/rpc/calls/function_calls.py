"""`rpc_sync` and `rpc_async`: calls of functions on other workers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax.profiler import TraceAnnotation
from msgspec.structs import replace

from jdist._errors import quoted, type_error
from jdist._tree import type_name
from jdist.rpc.base import current
from jdist.rpc.base.current import DEFAULT, Meta, Operation, RunningCall
from jdist.rpc.base.future import Future
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent, Interceptor, Invocation, current_agent
from jdist.rpc.calls.callee import Reply
from jdist.rpc.calls.outstanding_calls import Outgoing
from jdist.rpc.wire.frame import CALL


class UnboundFunction:
    """Base class for a function that is looked up when its call begins."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Looks the function up and calls it."""
        return self.bound()(*args, **kwargs)

    def bound(self) -> Callable[..., Any]:
        """The function itself."""
        raise NotImplementedError


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT,
) -> Any:
    """Calls `func(*args, **kwargs)` on the worker `to` and returns its result.

    The function travels by name: it must be importable on the callee, and allowed
    there (see `init_rpc`). Arrays arrive as what they are, a JAX array on the callee's
    device. Nested calls are given up with the outer one.

    Args:
      to: Name, rank or WorkerInfo; it may be this worker itself.
      func: A function, a class, or a method of an importable class.
      args: Positional arguments, in a tuple or a list.
      kwargs: Keyword arguments, by their names.
      timeout: Seconds; -1 for the default, 0 for no limit. Within a called function
        the outer call's deadline holds in any case.

    Returns:
      What the function returned, of the same types.

    Raises:
      RpcTimeout: It took longer. The callee is told to stop where that is possible.
      WorkerLost: The callee died, froze or left.
      ForbiddenFunction: The callee does not allow the function.
      TypeError: `func` cannot be called; `args` is neither a tuple nor a list, as in
        `args=(x)`; `kwargs` is no mapping from strings.
      Exception: What the function raised, as its own type, with the remote traceback
        as a note.

    Source: `torch.distributed.rpc.rpc_sync`.

    Example:
      >>> import numpy as np
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     rpc.rpc_sync("worker1", max, args=(2, 3))
      3
    """
    agent = current_agent()
    return agent.exchange(
        outgoing(agent, to, CALL, func, args, kwargs, timeout, "rpc_sync")
    )


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT,
) -> Future[Any]:
    """As `rpc_sync`, but returns at once, with a future of the result.

    Calls run on the callee side by side, in no particular order. The future can be
    dropped: the call is made nevertheless. Arrays among the arguments may be read until
    the call is answered, so do not write to them before.

    Raises:
      TypeError, ValueError, ForbiddenFunction: The call itself is wrong. All else that
        `rpc_sync` raises is raised by the future.

    Source: `torch.distributed.rpc.rpc_async`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     future = rpc.rpc_async("worker1", max, args=(2, 3))
      ...     future.wait()
      3
    """
    agent = current_agent()
    return agent.request(
        outgoing(agent, to, CALL, func, args, kwargs, timeout, "rpc_async")
    )


def install(agent: Agent) -> None:
    """Registers the handler of function calls."""

    def answer(caller: WorkerInfo, body: Any, meta: Meta) -> Any:
        return execute(agent, caller, Invocation.unpack(CALL, body), meta)

    # Limited: users' functions may hold their threads for ever, and what the library
    # itself sends must not wait for one of those.
    agent.register(CALL, answer, limited=True)


def execute(agent: Agent, caller: WorkerInfo, call: Invocation, meta: Meta) -> Any:
    """Runs a call that has arrived; returns a value, a Future, or a Reply.

    Raises:
      Exception: Whatever the function raised.
    """
    if isinstance(call.function, UnboundFunction):
        call = replace(call, function=call.function.bound())
    _execution().operation = Operation(call.kind, call.function)
    if agent.interceptor is None:
        return run(call)
    return _intercepted(agent.interceptor, caller, call, meta)


def _execution() -> RunningCall:
    """Returns the call that this thread is running."""
    scope = current.scope.get()
    assert scope is not None
    assert scope.execution is not None
    return scope.execution


def run(call: Invocation) -> Any:
    """Runs the function; returns its value, or its future if it is asynchronous.

    Raises:
      TypeError: The function is marked and did not return a future.
      Exception: Whatever the function raised.
    """
    function = call.function
    if TraceAnnotation.is_enabled():
        with TraceAnnotation("rpc " + getattr(function, "__qualname__", "call")):
            result = function(*call.args, **call.kwargs)
    else:  # an annotation costs 1.5 us also where no profiler reads it
        result = function(*call.args, **call.kwargs)
    if is_asynchronous(function):
        check_result(function, result)
    elif isinstance(result, Future):
        # Wrapped so that it is refused as a value, not taken for a deferred answer.
        return Reply(result, {})
    return result


def _intercepted(
    interceptor: Interceptor, caller: WorkerInfo, call: Invocation, meta: Meta
) -> Any:
    value, answer_meta = interceptor.execute(caller, call, meta, run)
    if isinstance(value, Future):
        # The future that the answer is made of is given up with the call.
        _execution().defer(value)
        return value.then(lambda done: Reply(done.value(), answer_meta))
    if type(value) is Reply:  # its value is a future, which is to be refused
        return value
    return Reply(value, answer_meta)


def outgoing(
    agent: Agent,
    to: Any,
    kind: str,
    func: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    verb: str,
) -> Outgoing:
    """Makes the request for a call of a function.

    Raises:
      TypeError: `func` cannot be called, or `args` or `kwargs` is of a wrong type.
    """
    if not callable(func):
        rule = "function should be callable"
        remedy = f"Give the function itself: `{verb}(to, fn, args=(x, y))`."
        raise type_error(f"{verb}(func)", rule, quoted(func), remedy)
    body = (func, positional(verb, args), named(verb, kwargs))
    found = agent.outgoing(to, kind, body, timeout, None, Operation(verb, func))
    return intercepted(agent, found, Invocation(kind, *body))


def intercepted(agent: Agent, outgoing: Outgoing, call: Invocation) -> Outgoing:
    """Shows a call to the worker's interceptor, if it has one, before it is sent.

    Returns:
      The request for the call that the interceptor makes of it.
    """
    interceptor = agent.interceptor
    if interceptor is None:
        return outgoing
    info = outgoing.peer.info
    sent, meta = interceptor.request(info, call)
    body = (sent.function, sent.args, sent.kwargs)
    receive = functools.partial(interceptor.reply, info)
    return replace(outgoing, body=body, meta=meta, receive=receive)


F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__jdist_async_execution__"


def async_execution(fn: F) -> F:
    """Marks a function that returns a Future of its caller's result.

    The callee's thread is free at once, and the answer is sent when the future is
    completed. If the caller gives up the call, the future is completed with a timeout
    error. Called directly, the function is unchanged.

    It may stand on either side of `staticmethod` and `classmethod`.

    Args:
      fn: A function that returns an `rpc.Future`.

    Raises:
      TypeError: `fn` is not a Python function.

    Source: `torch.distributed.rpc.functions.async_execution`.

    Example:
      >>> @async_execution
      ... def later(x):
      ...     future = Future()
      ...     future.set_result(x + 1)
      ...     return future
      >>> later(1).wait()
      2
    """
    inner = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
    try:
        setattr(inner, _MARK, True)
    except (AttributeError, TypeError):
        rule = "must be a Python function"
        raise type_error("async_execution(fn)", rule, fn) from None
    return fn


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether `function` is marked by `async_execution`."""
    return getattr(function, _MARK, False) is True


def check_result(function: Callable[..., Any], result: Any) -> None:
    """Checks that a marked function has returned a future.

    Raises:
      TypeError: With the words that torch's users search for.
    """
    if not isinstance(result, Future):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            "Functions decorated with @rpc.async_execution must return a Future "
            f"(in torch: @rpc.async_function must return a torch.futures.Future "
            f"object). {name} returned {type_name(result)}."
        )


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
    raise type_error(f"{call}(args=...)", rule, _kind(args), remedy)


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
        raise type_error(what, rule, _kind(kwargs), remedy)
    for key in kwargs:
        if type(key) is not str:
            raise type_error(what, rule, f"the key {key!r}", remedy)
    return dict(kwargs)


def _kind(value: Any) -> str:
    # Its type alone: the value may be large, or on a device that is busy.
    kind = type(value)
    return f"a value of type {kind.__module__}.{kind.__qualname__}"

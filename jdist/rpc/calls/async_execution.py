"""Functions whose result comes later, without a thread that waits for it."""

from collections.abc import Callable
from typing import Any, TypeVar

from jdist._errors import requirement
from jdist.rpc.base.future import Future

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__jdist_async_execution__"


def async_execution(fn: F) -> F:
    """Marks a function that returns a Future of what its caller shall get.

    Its callee's thread is free at once, and the answer is sent when the future is
    completed. Where the caller gives the call up, the future is completed with a
    timeout error. Called directly, the function is what it was.

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
        raise TypeError(requirement("async_execution(fn)", rule, fn)) from None
    return fn


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether `function`, or the function of this bound method, is so marked."""
    return getattr(function, _MARK, False) is True


def check_result(function: Callable[..., Any], result: Any) -> None:
    """Refuses what is no future from a marked function.

    Raises:
      TypeError: With the words that torch's users search for.
    """
    if not isinstance(result, Future):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            "Functions decorated with @rpc.async_execution must return a Future "
            f"(in torch: @rpc.async_function must return a torch.futures.Future "
            f"object). {name} returned {type(result).__name__}."
        )

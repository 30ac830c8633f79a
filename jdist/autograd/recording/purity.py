"""Pure functions, which are compiled, and eager ones, which run as Python.

A called function with recorded arguments is taken as pure unless it is marked by
`eager`. While a pure function is traced, what it must not do is refused.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from jdist._errors import requirement
from jdist.rpc.extension import is_asynchronous

F = TypeVar("F", bound=Callable[..., object])
_MARK = "__jdist_autograd_eager__"


def eager(fn: F) -> F:
    """Marks a function that runs as Python when it is called with recorded values.

    Without the mark a function so called by another worker is taken as pure: it
    receives arrays and is compiled. One that makes calls itself, holds references, or
    uses variables of its own worker is not: marked, it receives recorded values, and
    records what it does with them by operators and `autograd.apply`.

    Methods, classes and functions marked by `rpc.async_execution` run as Python anyway.

    Args:
      fn: A Python function. It may stand on either side of `staticmethod` and
        `classmethod`.

    Raises:
      TypeError: `fn` is not a Python function.

    Example:
      >>> @eager
      ... def through(x, next_worker):
      ...     return rpc.rpc_sync(next_worker, double, args=(x,))
    """
    inner = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
    try:
        # On the function itself: a wrapper would have another name, by which it
        # travels.
        setattr(inner, _MARK, True)
    except (AttributeError, TypeError):
        rule = "must be a Python function"
        raise TypeError(requirement("eager(fn)", rule, fn)) from None
    return fn


def is_pure(function: Callable[..., object]) -> bool:
    """Whether a call of `function` with recorded values is compiled."""
    # The mark is on the function inside.
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type | types.MethodType):
        return False
    return not getattr(function, _MARK, False) and not is_asynchronous(function)


# The public call that is tracing a pure function in this thread of control.
_tracing: ContextVar[str | None] = ContextVar("jdist.autograd.tracing", default=None)


@contextlib.contextmanager
def tracing(call: str) -> Iterator[None]:
    """Marks what runs within it as a pure function that `call` is tracing."""
    token = _tracing.set(call)
    try:
        yield
    finally:
        _tracing.reset(token)


def refuse_in_pure(what: str, *names: object) -> None:
    """Refuses what a pure function must not do: it would be done once, at compilation.

    Args:
      what: What is refused, with `{}` for each of the names.
      *names: Formatted into `what`, in the error only.

    Raises:
      TypeError: A pure function is being traced.
    """
    call = _tracing.get()
    if call is not None:
        raise TypeError(
            requirement(
                call,
                "must be a pure function of its arguments: it is compiled",
                what.format(*names),
                "Pass recorded values and variables as arguments, or mark the function "
                "with @autograd.eager: then it runs as Python, with recorded values.",
            )
        )

"""Functions that run as Python although their arguments are recorded."""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from jdist._errors import requirement
from jdist.rpc.calls.async_execution import is_asynchronous

F = TypeVar("F", bound=Callable[..., Any])
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
        setattr(inner, _MARK, True)
    except (AttributeError, TypeError):
        rule = "must be a Python function"
        raise TypeError(requirement("eager(fn)", rule, fn)) from None
    return fn


def is_pure(function: Any) -> bool:
    """Whether a call of `function` with recorded values is compiled."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type | types.MethodType):
        return False
    return not getattr(function, _MARK, False) and not is_asynchronous(function)

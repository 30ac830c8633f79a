"""A value's place on its owner: holds the value, an exception, or neither yet."""

import contextvars
from typing import Any

from jdist.rpc.base.future import Future, cancel, error_of
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe, rebuild

OwnerValue = Future[Any]
"""Completed once. An exception in it has its traceback in words only, see `fail`."""


def new_owner_value() -> OwnerValue:
    """Makes an empty place."""
    # In an empty context: the place may live for long, and the context of the running
    # call would keep that call's answer alive.
    return contextvars.Context().run(Future)


def fail(
    owner_value: OwnerValue, error: BaseException, worker: str, table: FunctionTable
) -> None:
    """Completes a place with the reason why there is no value; a later one is dropped.

    Args:
      owner_value: Not changed if it is completed.
      error: What the function raised on `worker`, or why it was not called.
      worker: Name of that worker.
      table: Which types of exceptions can be made again.
    """
    # Rebuilt without frames: those of the function and of its callers in this process
    # hold references that would never be dropped.
    cancel(owner_value, rebuild(describe(error, worker), table))


def read(owner_value: OwnerValue, table: FunctionTable) -> Any:
    """Returns the value or raises a copy of the exception."""
    # A copy, because raising the original would give it a traceback, and that frames.
    error = error_of(owner_value)
    if error is not None:
        raise again(error, table)
    return owner_value.value()


def again(error: BaseException, table: FunctionTable) -> Exception:
    """Copies an exception, so that raising it leaves the original without frames."""
    return rebuild(describe(error, ""), table)

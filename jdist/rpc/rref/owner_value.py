"""The place of a value on its owner: the value, an exception, or neither yet."""

import contextvars
from typing import Any

from jdist.rpc.base.future import Future, complete, error_of, run_all
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe, rebuild

__all__ = ["OwnerValue", "again", "fail", "fill", "new_owner_value", "read"]


OwnerValue = Future[Any]
"""Completed once. An exception in it has its traceback in words only, see `fail`."""


def new_owner_value() -> OwnerValue:
    """A new place, outside the context of the running call.

    It may live for long, and that context would keep the call's answer alive.
    """
    return contextvars.Context().run(Future)


def fill(owner_value: OwnerValue, value: Any) -> None:
    """Completes it with the value; without effect after a failure."""
    _complete(owner_value, value, None)


def fail(
    owner_value: OwnerValue, error: BaseException, worker: str, table: FunctionTable
) -> None:
    """Completes it with the reason why there is no value.

    The exception is one without frames: those of the function and of its
    callers in this process hold references that would never be dropped.

    Args:
      owner_value: Not changed if it is completed.
      error: What the function raised on `worker`, or why it was not called.
      worker: Name of that worker.
      table: Which types of exceptions can be made again.
    """
    _complete(owner_value, None, rebuild(describe(error, worker), table))


def read(owner_value: OwnerValue, table: FunctionTable) -> Any:
    """The value; raises a copy of the exception, so that the original stays bare."""
    error = error_of(owner_value)
    if error is not None:
        raise again(error, table)
    return owner_value.value()


def again(error: BaseException, table: FunctionTable) -> Exception:
    """A copy of an exception, to be raised and to keep what it then gets."""
    return rebuild(describe(error, ""), table)


def _complete(owner_value: OwnerValue, value: Any, error: BaseException | None) -> None:
    run_all(complete(owner_value, value, error) or [])

"""Arguments of a function that runs elsewhere, given as a tuple and a mapping."""

from collections.abc import Mapping
from typing import Any

from jdist._errors import requirement

__all__ = ["named", "positional"]


def positional(call: str, args: Any) -> tuple[Any, ...]:
    """The positional arguments; None stands for none.

    Only a tuple or a list is taken. `args=(x)` without the comma is `x` itself: an
    array, a string or a named tuple would be taken apart, and an array whose truth is
    False would count as no arguments at all.

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
    # Exact types: a named tuple or an array would be taken apart.
    if type(args) is tuple or type(args) is list:
        return tuple(args)
    rule = "must be a tuple or a list of the positional arguments"
    remedy = (
        "All of them go together, `args=(x, y)`; a single one takes a comma, "
        "`args=(x,)`."
    )
    raise TypeError(requirement(f"{call}(args=...)", rule, _kind(args), remedy))


def named(call: str, kwargs: Any) -> dict[str, Any]:
    """The keyword arguments; None stands for none.

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

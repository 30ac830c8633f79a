"""What a thread of control records into: its context, and the order of its nodes.

Both are kept in context variables, so that they travel with a call and its callbacks,
and never with the thread that happens to run them.
"""

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

from jdist._errors import requirement
from jdist.autograd.graph.node import Order

if TYPE_CHECKING:
    from jdist.autograd.context.container import Container
    from jdist.autograd.context.context import Context

LAST = 1 << 62
"""The place of a call's answer in the order: after all that was done in the call."""

_outside = itertools.count()


class Recording:
    """One thread of control within a context: who says `with recording:` is.

    Args:
      context: The context.
      message_id: Of the request that is being executed; 0 where the context was made.
    """

    __slots__ = ("_numbers", "_token", "context", "message_id")

    _token: Token["Recording | None"]

    def __init__(self, context: "Context", message_id: int = 0) -> None:
        self.context = context
        self.message_id = message_id
        # What was computed before the context was made comes before what is in it.
        self._numbers = itertools.count() if message_id else _outside

    def order(self) -> Order:
        """The place of the next node."""
        return (self.message_id, next(self._numbers))

    def __enter__(self) -> None:
        self._token = _current.set(self)

    def __exit__(self, *details: object) -> None:
        _current.reset(self._token)


_current: ContextVar[Recording | None] = ContextVar(
    "jdist.autograd.context.recording", default=None
)
_pure: ContextVar[str | None] = ContextVar("jdist.autograd.graph.pure", default=None)


def current(container: "Container") -> Recording | None:
    """What this thread of control records into as that worker, if anything."""
    found = _current.get()
    if found is None or found.context.container is not container:
        return None
    return found


def next_order() -> Order:
    """The place of a node that is made now."""
    found = _current.get()
    return (0, next(_outside)) if found is None else found.order()


# --- pure functions ---


@contextlib.contextmanager
def tracing(call: str) -> Iterator[None]:
    """Within it, a pure function is being traced; `call` is what does it."""
    token = _pure.set(call)
    try:
        yield
    finally:
        _pure.reset(token)


def refuse_in_pure(what: str, *names: object) -> None:
    """Refuses what a pure function must not do: it would be done once, at compilation.

    Args:
      what: In words, with `{}` for each of the names.
      *names: What is put there if somebody reads it.

    Raises:
      TypeError: A pure function is being traced.
    """
    call = _pure.get()
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

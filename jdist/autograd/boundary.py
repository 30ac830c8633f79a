"""Where the graph crosses workers: a send function here, a receive function there.

Every call that is made within a context carries the context's id and a message id. A
recorded value in it travels as its array and a number, its *slot*. The sender's send
function has an edge for each slot, the receiver's receive function an output for each;
both are known by the message id. Answers do the same the other way.

Recorded values are met by the codec, wherever in a message they are: this file is what
the codec calls then, and what rpc calls before and after.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jdist.autograd.container import Container
from jdist.autograd.context import Context
from jdist.autograd.eager import is_pure
from jdist.autograd.ids import maker
from jdist.autograd.node import Edge, Reach, RecvNode, SendNode, join
from jdist.autograd.recorded import Recorded, record
from jdist.autograd.recording import (
    LAST,
    Recording,
    active,
    current,
    next_order,
    refuse_in_pure,
)
from jdist.autograd.variable import Variable
from jdist.rpc.errors import ProtocolError
from jdist.rpc.extensions import NEEDS
from jdist.rpc.interceptor import Invocation
from jdist.rpc.parcel import Parcel
from jdist.rpc.worker_info import WorkerInfo

META = "autograd"
"""Under which a message's metadata has its `Header`, as a list."""

_NEEDED = f"{Recorded.__module__}:{Recorded.__qualname__}"


class Header(NamedTuple):
    """What a message within a context says of itself.

    Attributes:
      context: Id of the context.
      answers: Message id of the request that this is the answer to; 0 of a request.
      message: Its message id; 0 of an answer without recorded values.
      slots: How many recorded values it has.
      reach: Message ids of the send functions that its cotangents would reach, its own
        among them; None when they are too many.
    """

    context: int
    answers: int
    message: int
    slots: int = 0
    reach: list[int] | None = None

    @classmethod
    def of(cls, meta: dict[str, Any]) -> "Header | None":
        """That of a message which has arrived, if it has one.

        Raises:
          ProtocolError: It is malformed.
        """
        row = meta.get(META)
        if row is None:
            return None
        if type(row) is list and len(row) == len(cls._fields):
            *numbers, reach = row
            ids = numbers if reach is None else [*numbers, *_checked(reach)]
            if all(type(n) is int and 0 <= n < 1 << 64 for n in ids):
                return cls(*row)
        raise ProtocolError("The autograd part of a message is malformed.")


class Boundary:
    """The interceptor of one worker, and the codec's hooks for recorded values.

    Args:
      container: That of the worker.
    """

    def __init__(self, container: Container) -> None:
        self._container = container

    # --- around calls, see `Interceptor` ---

    def request(
        self, to: WorkerInfo, call: Invocation
    ) -> tuple[Invocation, dict[str, Any]]:
        """A call goes out: within a context it carries the ids."""
        refuse_in_pure(f"a call to {to.name!r}")
        recording = current(self._container)
        if recording is None:
            return call, {}
        context = recording.context
        context.meet(to.name)
        header = Header(context.id, 0, self._container.ids.message(), 0, [])
        return call, {META: list(header), NEEDS: _NEEDED}

    def execute(
        self,
        caller: WorkerInfo,
        call: Invocation,
        meta: dict[str, Any],
        run: Callable[[Invocation], Any],
    ) -> tuple[Any, dict[str, Any]]:
        """A call has come: it runs within the caller's context."""
        header = Header.of(meta)
        if header is None:
            return run(call), {}
        context = self._container.get_or_create(header.context)
        context.meet(caller.name)
        if self._container.is_gone(caller.number):
            self._container.releases.seek_end([context])
        if header.slots and is_pure(call.function):
            call = call._replace(function=_recording(call.function))
        with active(Recording(context, header.message)):
            value = run(call)
        return value, {META: list(Header(context.id, header.message, 0, 0, []))}

    def reply(self, to: WorkerInfo, value: Any, meta: dict[str, Any]) -> Any:
        """An answer has come; the codec has seen to what is recorded in it."""
        return value

    # --- values on their way ---

    def give(self, value: Recorded, parcel: Parcel | None) -> Any:
        """A recorded value is sent: within a context its slot goes with the array."""
        row = None if parcel is None else parcel.meta.get(META)
        if row is None or parcel is None:
            return value.value
        send = self._send_function(row, parcel)
        slot = send.slot(value.edge, value.value)
        mine = (self._container.ids.worker, send.message_id)
        row[3:] = [send.outputs, _packed(join(frozenset((mine,)), send.reach))]
        return (slot, value.value)

    def give_variable(self, variable: Variable, parcel: Parcel | None) -> Any:
        """A variable is sent: its tree, recorded or not."""
        inside = parcel is not None and META in parcel.meta
        return variable.recorded() if inside else variable.value

    def take(self, row: Any, parcel: Parcel | None) -> Any:
        """A recorded value has come, or only its array."""
        header = None if parcel is None else Header.of(parcel.meta)
        if type(row) is not tuple:
            return row
        if header is None or parcel is None or len(row) != 2:
            raise ProtocolError("A recorded value belongs to a context.")
        slot, array = row
        if type(slot) is not int or not 0 <= slot < header.slots:
            raise ProtocolError("A recorded value has a slot of its message.")
        return Recorded(array, Edge(self._receive_function(header, parcel), slot))

    def _send_function(self, row: list[Any], parcel: Parcel) -> SendNode:
        context = self._container.retrieve(row[0])
        with context.lock:
            context.check()
            known = context.sends.get(row[2])
            if known is not None:
                return known
            answers = row[1]
            if answers:
                row[2] = self._container.ids.message()
            order = (answers, LAST) if answers else next_order()
            label = (
                f"answer of {parcel.operation}" if answers else str(parcel.operation)
            )
            made = SendNode(row[2], parcel.worker.name, label, order)
            context.sends[row[2]] = made
        lost = functools.partial(_forget, context, row[2])
        parcel.if_lost = [*parcel.if_lost, lost]
        return made

    def _receive_function(self, header: Header, parcel: Parcel) -> RecvNode:
        context: Context | None
        if header.answers:
            # After the end of the context it leads nowhere, and is told so if used.
            context = self._container.find(header.context)
        else:
            context = self._container.get_or_create(header.context)
        made = RecvNode(
            header.context,
            header.message,
            parcel.worker.name,
            header.slots,
            _unpacked(header.reach),
        )
        if context is None:
            return made
        with context.lock:
            if context.ended is not None:
                return made
            return context.recvs.setdefault(header.message, made)


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `apply` runs it."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        return record(function, args, kwargs)

    return recorded


def _forget(context: Context, message_id: int) -> None:
    """The call has failed, so nothing will come back to its send function."""
    with context.lock:
        context.sends.pop(message_id, None)


def _packed(reach: Reach | None) -> list[int] | None:
    return None if reach is None else sorted([message for _, message in reach])


def _unpacked(numbers: list[int] | None) -> Reach | None:
    if numbers is None:
        return None
    # A send function is on the worker that made the message, and with it the id.
    return frozenset([(maker(message), message) for message in numbers])


def _checked(reach: Any) -> list[Any]:
    if type(reach) is not list:
        raise ProtocolError("The autograd part of a message is malformed.")
    return reach

"""Hooks of rpc that record send and receive functions for calls between workers.

Every call that is made within a context carries the context's id and a message id. A
recorded value in it travels as its array and a number, its *slot*. The sender's send
function has an edge for each slot, the receiver's receive function an output for each;
both are known by the message id. Answers do the same the other way.

rpc calls the interceptor's methods around calls. The codec calls `give` and `take`
wherever in a message it meets a recorded value.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from jdist._errors import type_error
from jdist._flax import is_module
from jdist._tree import PyTree, type_name
from jdist.autograd.contexts import (
    Container,
    Context,
    Recording,
    recorded_into,
)
from jdist.autograd.recording.node import (
    LAST,
    Edge,
    Id,
    Reach,
    RecvNode,
    SendNode,
    light,
    next_order,
)
from jdist.autograd.recording.pure import is_pure, refuse_in_pure
from jdist.autograd.recording.recorded import Recorded, record
from jdist.autograd.recording.variable import Variable
from jdist.rpc import ProtocolError, WorkerInfo
from jdist.rpc.extension import NEEDS, Invocation, MessageContext, unpacked

META = "autograd"
"""The entry of a message's metadata that holds its `CrossingHeader`."""

_NEEDED = f"{Recorded.__module__}:{Recorded.__qualname__}"


class CrossingHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The metadata of a message within a context, to which the codec's hooks add.

    Attributes:
      context: Id of the context.
      answers: For an answer the message id of its request; 0 for a request.
      message: Message id; 0 for an answer without recorded values.
      slots: Number of recorded values in it.
      reach: Message ids of the send functions that its cotangents would reach, its own
        among them: see `node.Reach`.
    """

    context: Id
    answers: Id
    message: Id
    slots: Id
    reach: Reach

    @classmethod
    def begun(cls, context: int, answers: int, message: int) -> "CrossingHeader":
        """Makes the header of a message without recorded values."""
        return cls(context, answers, message, 0, {})

    @classmethod
    def of(cls, meta: dict[str, object]) -> "CrossingHeader | None":
        """Returns the header of a message that has arrived, or None.

        Raises:
          ProtocolError: It is malformed.
        """
        row = meta.get(META)
        if row is None or type(row) is cls:
            return row
        malformed = "The autograd part of a message is malformed"
        header: CrossingHeader = unpacked(row, cls, malformed)
        ids = (header.context, header.answers, header.message)
        # A bound that msgspec cannot express.
        if max(*ids, *header.reach, *header.reach.values()) >> 64:
            raise ProtocolError(f"{malformed}: ids have 64 bits.")
        meta[META] = header  # the next caller finds it checked
        return header


class RpcHooks:
    """The interceptor of one worker, and the codec's hooks for recorded values.

    Args:
      container: That of the worker.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        # Incarnations of the workers that certainly have imported autograd.
        self._prepared: set[int | None] = set()

    # --- around calls, see `Interceptor` ---

    def request(
        self, to: WorkerInfo, call: Invocation
    ) -> tuple[Invocation, dict[str, object]]:
        """Adds the ids to a call that is made within a context."""
        refuse_in_pure("a call to {!r}", to.name)
        context = recorded_into(self._container)
        if context is None:
            return call, {}
        # Before the call goes out: if it fails half-way, the callee must get the end of
        # the context, too.
        assert to.incarnation is not None  # it belongs to the group
        context.meet(to)
        message = self._container.ids.message()
        meta: dict[str, object] = {META: CrossingHeader.begun(context.id, 0, message)}
        if to.incarnation not in self._prepared:
            meta[NEEDS] = _NEEDED
        return call, meta

    def execute(
        self,
        caller: WorkerInfo,
        call: Invocation,
        meta: dict[str, object],
        run: Callable[[Invocation], object],
    ) -> tuple[object, dict[str, object]]:
        """Runs a call within its caller's context."""
        header = CrossingHeader.of(meta)
        if header is None:
            return run(call), {}
        context = self._container.get_or_create(header.context)
        # If its loss was noticed before this message was read, it will not be noticed
        # again.
        if context.meet(caller) and self._container.is_gone(caller.incarnation):
            self._container.releases.seek_end([context])
        if header.slots:
            _refuse_untrainable(call.function)
        if header.slots and is_pure(call.function):
            # Recorded as one function, compiled; an eager one gets recorded values.
            applied = _Applied(call.function)
            call = Invocation(call.kind, applied, call.args, call.kwargs)
        with Recording(context, header.message):
            value = run(call)
        return value, {META: CrossingHeader.begun(context.id, header.message, 0)}

    def local(self, value: object) -> object:
        """Returns the result of `to_here` on the owner, as another worker gets it."""
        if type(value) is not Variable:
            return value
        return (
            value.value if recorded_into(self._container) is None else value.recorded()
        )

    def reply(self, to: WorkerInfo, value: object, meta: dict[str, object]) -> object:
        """Returns the answer unchanged; the codec's hooks have recorded its values."""
        # Only autograd puts it there, so the callee has imported that.
        if META in meta:
            self._prepared.add(to.incarnation)
        return value

    # --- values on their way ---

    def give(self, value: Recorded, message: MessageContext | None) -> object:
        """Encodes a recorded value: its array, within a context with its slot."""
        header = None if message is None else message.meta.get(META)
        # Outside of contexts nothing is recorded: the receiver gets the plain array.
        if header is None or message is None:
            return value.value
        send = message.crossing or self._send_function(header, message)
        _, (array,), (edge,) = value.flat()
        # The header is packed after the body, so it has the last count and reach.
        before = send.outputs
        slot = send.slot(edge, array)
        if send.outputs != before:
            header.slots, header.reach = send.outputs, send.reach
        return (slot, light(array) if send.light else array)

    def give_variable(
        self, variable: Variable, message: MessageContext | None
    ) -> PyTree:
        """Encodes a variable: its tree, recorded within a context."""
        if message is None or message.meta.get(META) is None:
            return variable.value
        # Within a context each leaf is recorded by itself and travels by `give`.
        return variable.recorded()

    def take(self, row: object, message: MessageContext | None) -> object:
        """Decodes a recorded value, or an array that was sent outside of contexts."""
        if type(row) is not tuple:
            return row
        if message is None or message.meta.get(META) is None or len(row) != 2:
            raise ProtocolError("A recorded value belongs to a context.")
        receive = message.crossing
        if receive is None:
            receive = message.crossing = self._receive_function(message)
        slot, array = row
        if type(slot) is not int or not 0 <= slot < receive.outputs:
            raise ProtocolError("A recorded value has a slot of its message.")
        return Recorded(self._container.received(array), Edge(receive, slot))

    def _send_function(
        self, header: CrossingHeader, message: MessageContext
    ) -> SendNode:
        context = self._container.retrieve(header.context)
        with context.lock:
            context.check()
            answers = header.answers
            # A request has its message id already; an answer gets one only if it needs
            # it, so that ids repeat from run to run.
            if answers:
                header.message = self._container.ids.message()
            order = (answers, LAST) if answers else next_order()
            label = _AnswerOf(message.operation) if answers else message.operation
            made = SendNode(header.message, message.worker, label, order)
            made.light = self._container.takes_numpy(made.incarnation)
            context.sends[made.message_id] = made
        # A call that fails sends no cotangent back, and a FAST pass would wait for one.
        lost = functools.partial(_forget, context, made.message_id)
        message.if_lost = [*message.if_lost, lost]
        message.crossing = made
        return made

    def _receive_function(self, message: MessageContext) -> RecvNode:
        header = CrossingHeader.of(message.meta)
        assert header is not None
        context: Context | None
        if header.answers:
            # After the end of the context a pass that uses the value is refused.
            context = self._container.find(header.context)
        else:
            context = self._container.get_or_create(header.context)
        made = RecvNode(
            header.context,
            header.message,
            message.worker,
            header.slots,
            header.reach,
        )
        if context is None:
            return made
        with context.lock:
            if context.ended is not None:
                return made
            # A request may arrive twice on two threads, and has one receive function.
            return context.recvs.setdefault(header.message, made)


class _AnswerOf(NamedTuple):
    """Describes an answer; formatted only when it is shown."""

    operation: object

    def __str__(self) -> str:
        return f"answer of {self.operation}"


class _Applied:
    """A function that runs as by `apply` and keeps its name."""

    __slots__ = ("__qualname__", "_function")

    def __init__(self, function: Callable[..., PyTree]) -> None:
        self._function = function
        self.__qualname__ = getattr(function, "__qualname__", "call")

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return record(self._function, args, kwargs)


def _refuse_untrainable(function: Callable[..., PyTree]) -> None:
    """Refuses recorded arguments of a module that is not trainable."""
    owner = getattr(function, "__self__", None)
    if owner is not None and is_module(owner):
        rule = "must be trainable to be called with recorded values"
        remedy = "Make it by `rpc.RemoteModule(to, factory, args, trainable=True)`."
        got = f"{type_name(owner)} that is not"
        raise type_error("RemoteModule", rule, got, remedy)


def _forget(context: Context, message_id: int) -> None:
    """Drops the send function of a call that has failed: it gets no cotangent."""
    with context.lock:
        context.sends.pop(message_id, None)

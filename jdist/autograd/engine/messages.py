"""The messages of backward passes, packed and unpacked.

A *gradient* is the cotangents of one message of the forward pass, by its id. A request
carries gradients for the callee's send functions, the answer to it gradients for the
caller's. Arrays go in the body; everything else, and which cotangents are absent, goes
in the metadata. An absent cotangent is a missing position and takes no bytes at all.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from jdist.autograd.contexts import are_ids
from jdist.autograd.recording.errors import BackwardError
from jdist.autograd.recording.node import Cotangent, Numbers, light
from jdist.rpc import ProtocolError, RpcError
from jdist.rpc.extension import Reply, unpacked

GRADIENTS = "autograd.backward"
"""Kind of the requests with gradients."""

END = "autograd.end"
"""Kind of the requests that end a pass that has failed."""

REACH = "autograd.reach"
"""Kind of the requests that ask for the reach of send functions."""

_FIELD = "gradients"


class MessageGradient(msgspec.Struct, frozen=True):
    """The cotangents of the recorded arrays of one message.

    Attributes:
      message_id: Id of the message.
      cotangents: One for each array; None where no cotangent flows.
    """

    message_id: int
    cotangents: Sequence[Cotangent]


class StarvingSend(NamedTuple):
    """A send function whose gradient has not come.

    Attributes:
      message_id: Id of its message.
      peer: Name of the worker that it was sent to.
      name: Name of the send function.
    """

    message_id: int
    peer: str
    name: str


class StarvationReport(NamedTuple):
    """The send functions that one worker waits for while it has no work.

    Attributes:
      number: Counts this worker's reports; a later one replaces an earlier one.
      starving: The send functions.
    """

    number: int
    starving: tuple[StarvingSend, ...]


Reports = Mapping[str, StarvationReport]
"""Reports by name of the worker."""


class PassTerms(NamedTuple):
    """The description of a pass, for workers that are new to it.

    Attributes:
      context_id: Id of the context.
      pass_id: Id of the pass; unique in the group.
      smart: Whether it is SMART mode.
      retain_graph: Whether the functions can be run again.
    """

    context_id: int
    pass_id: int
    smart: bool
    retain_graph: bool


_Row = tuple[int, int, list[int]]
"""A gradient without its arrays: message id, size, positions that are not absent."""


class _RequestHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The metadata of a request with gradients."""

    terms: PassTerms
    marks: list[int] | None
    rows: list[_Row]


class _AnswerHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The metadata of an answer, with the reports of workers by their names."""

    rows: list[_Row]
    told: list[tuple[str, StarvationReport]]


class PassFailure(NamedTuple):
    """An error and the worker on which it was raised; it travels as a value.

    Attributes:
      worker: Name of the worker.
      error: The exception that was raised there.
    """

    worker: str
    error: Exception

    def exception(self) -> Exception:
        """Returns the error that `backward` raises: rpc's own, or a `BackwardError`.

        Example:
          >>> PassFailure("worker1", KeyError("w")).exception()
          BackwardError('worker1', "'w'")
        """
        # Raised as they are: each says itself what has failed, and where.
        if isinstance(self.error, BackwardError | RpcError):
            return self.error
        reason = str(self.error) or repr(self.error)
        told = BackwardError(self.worker, reason)
        told.__cause__ = self.error
        return told

    @classmethod
    def unpack(cls, value: object) -> "PassFailure":
        """Decodes a failure.

        Raises:
          ProtocolError: The value is no failure.
        """
        rule = "A failure has the name of a worker and an exception"
        found: PassFailure = unpacked(value, cls, rule)
        return found


# msgspec reads the types of a class's fields at its first use, and another thread that
# uses the class meanwhile ends the process (0.22). An import has one thread.
for _kind in (_RequestHeader, _AnswerHeader, PassFailure):
    msgspec.msgpack.Decoder(_kind)


class GradientRequest(msgspec.Struct, frozen=True):
    """A message with gradients.

    Attributes:
      terms: Description of the pass.
      marks: In SMART mode, the ids of all marked messages; None if sent before.
      gradients: Gradients for send functions of the callee.
    """

    terms: PassTerms
    marks: Sequence[int] | None
    gradients: Sequence[MessageGradient]

    def pack(self, to_numpy: bool = False) -> tuple[list[Numbers], dict[str, object]]:
        """Encodes the request as a body and metadata.

        Args:
          to_numpy: Whether small arrays go as NumPy's.
        """
        rows, arrays = _flat(self.gradients)
        if to_numpy:
            arrays = list(map(light, arrays))
        marks = None if self.marks is None else list(self.marks)
        return arrays, {_FIELD: [self.terms, marks, rows]}

    @classmethod
    def unpack(cls, body: object, meta: dict[str, object]) -> "GradientRequest":
        """Decodes a request.

        Raises:
          ProtocolError: The message is malformed.
        """
        found = meta.get(_FIELD)
        header = unpacked(found, _RequestHeader, "No request with gradients")
        return cls(header.terms, header.marks, _restored(header.rows, body))


class GradientAnswer(msgspec.Struct, frozen=True):
    """The answer to a message with gradients.

    Attributes:
      gradients: Gradients for send functions of the caller.
      reports: Reports of the callee and the workers that it asked, where they have
        changed.
      failure: The failure that ended the pass on the callee, if any.
    """

    gradients: Sequence[MessageGradient]
    reports: Reports
    failure: PassFailure | None = None

    def pack(self) -> Reply:
        """Encodes the answer as a handler's reply."""
        if self.failure is not None:
            return Reply(tuple(self.failure), {_FIELD: None})
        rows, arrays = _flat(self.gradients)
        return Reply(arrays, {_FIELD: [rows, list(self.reports.items())]})

    @classmethod
    def unpack(cls, body: object, meta: dict[str, object]) -> "GradientAnswer":
        """Decodes an answer.

        Raises:
          ProtocolError: The message is malformed.
        """
        found = meta.get(_FIELD, ())
        if found is None:
            return cls((), {}, PassFailure.unpack(body))
        header = unpacked(found, _AnswerHeader, "No answer to gradients")
        return cls(_restored(header.rows, body), dict(header.told))


def unpack_end(body: object) -> tuple[int, int, PassFailure]:
    """Decode the context, pass and failure of a pass that has ended.

    Raises:
      ProtocolError: The message is malformed.
    """
    if type(body) is not tuple or [type(part) for part in body[:2]] != [int, int]:
        raise ProtocolError("The end of a pass names a context and a pass.")
    return body[0], body[1], PassFailure.unpack(body[2:])


def unpack_reach(body: object) -> tuple[int, list[int]]:
    """Decode the context and message ids of a question for reach.

    Raises:
      ProtocolError: The message is malformed.
    """
    if type(body) is tuple and len(body) == 2:
        context_id, ids = body
        if type(context_id) is int and are_ids(ids):
            return context_id, ids
    raise ProtocolError("What is asked for is a context and ids of messages.")


def unpack_reached(body: object) -> tuple[set[int], set[int]]:
    """Decode the answer to a question for reach: see `reached_from`.

    Raises:
      ProtocolError: The message is malformed.
    """
    if type(body) is tuple and len(body) == 2 and all(map(are_ids, body)):
        return set(body[0]), set(body[1])
    raise ProtocolError("The answer has ids of messages.")


def _flat(gradients: Sequence[MessageGradient]) -> tuple[list[_Row], list[Numbers]]:
    rows: list[_Row] = []
    arrays: list[Numbers] = []
    for gradient in gradients:
        there = []
        for position, value in enumerate(gradient.cotangents):
            if value is not None:
                there.append(position)
                arrays.append(value)
        rows.append((gradient.message_id, len(gradient.cotangents), there))
    return rows, arrays


def _restored(rows: Sequence[_Row], arrays: object) -> list[MessageGradient]:
    if type(arrays) is not list:
        raise ProtocolError("Gradients are rows and arrays.")
    taken, gradients = 0, []
    for message_id, size, there in rows:
        # Checked before anything is allocated: the sender may be hostile.
        twice = len(set(there)) < len(there)
        if twice or (there and not 0 <= min(there) <= max(there) < size):
            raise ProtocolError("A gradient has more positions than its size.")
        if len(there) > len(arrays) - taken:
            raise ProtocolError("A gradient has fewer arrays than positions.")
        cotangents: list[Cotangent] = [None] * size
        for position in there:
            cotangents[position] = arrays[taken]
            taken += 1
        gradients.append(MessageGradient(message_id, cotangents))
    if taken < len(arrays):
        raise ProtocolError("There are more arrays than gradients have positions.")
    return gradients

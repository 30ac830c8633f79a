"""The messages of backward passes, packed and unpacked.

A *gradient* is the cotangents of one message of the forward pass, by its id. A request
carries gradients for the callee's send functions, the answer to it gradients for the
caller's. Both go in the body, absent cotangents as None; all else in the metadata.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jdist.autograd.recording.errors import BackwardError
from jdist.autograd.recording.node import Cotangent, Reach, light
from jdist.rpc import ProtocolError, RpcError
from jdist.rpc.extension import Reply, unpacked

GRADIENTS = "autograd.backward"
"""Kind of the requests with gradients."""

END = "autograd.end"
"""Kind of the requests that end a pass that has failed."""

TERMS = "terms"
"""The entry of a request's metadata that holds its `PassTerms`."""

_NEWS = "news"
"""The entry of an answer's metadata that holds its news; None for a failure."""


class MessageGradient(NamedTuple):
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
      worker: Name of the worker that waits for it.
      name: Name of the send function.
    """

    worker: str
    name: str


News = Mapping[int, StarvingSend | None]
"""By message id what workers without work wait for; None once it has come."""


class PassTerms(NamedTuple):
    """The description of a pass, for workers that are new to it.

    Attributes:
      context_id: Id of the context.
      pass_id: Id of the pass; unique in the group.
      retain_graph: Whether the functions can be run again.
      marks: In SMART mode, the ids of the messages that take part, of all workers, as
        a `Reach`; None in FAST mode.
    """

    context_id: int
    pass_id: int
    retain_graph: bool
    marks: Reach | None


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


# msgspec reads the types of a class's fields at its first use, and another thread that
# uses the class meanwhile ends the process (0.22). An import has one thread.
for _kind in (PassTerms, StarvingSend, PassFailure):
    msgspec.msgpack.Decoder(_kind)


class GradientAnswer(NamedTuple):
    """The answer to a message with gradients.

    Attributes:
      gradients: Gradients for send functions of the caller.
      news: What the callee and the workers that it asked wait for, as far as it has
        changed.
      failure: The failure that ended the pass on the callee, if any.
    """

    gradients: Sequence[MessageGradient]
    news: News
    failure: PassFailure | None = None

    def pack(self) -> Reply:
        """Encodes the answer as a handler's reply."""
        if self.failure is not None:
            return Reply(tuple(self.failure), {_NEWS: None})
        return Reply(pack_gradients(self.gradients), {_NEWS: self.news})

    @classmethod
    def unpack(cls, body: object, meta: dict[str, object]) -> "GradientAnswer":
        """Decodes an answer.

        Raises:
          ProtocolError: The message is malformed.
        """
        found = meta.get(_NEWS, ())
        if found is None:
            rule = "A failure has the name of a worker and an exception"
            return cls((), {}, unpacked(body, PassFailure, rule))
        news = unpacked(found, dict[int, StarvingSend | None], "No answer to gradients")
        return cls(unpack_gradients(body), news)


def pack_gradients(
    gradients: Iterable[MessageGradient], to_numpy: bool = False
) -> list[tuple[int, list[Cotangent]]]:
    """Encodes gradients; small arrays as NumPy's if `to_numpy`."""
    return [
        (
            message_id,
            [light(x) if to_numpy and x is not None else x for x in cotangents],
        )
        for message_id, cotangents in gradients
    ]


def unpack_gradients(body: object) -> list[MessageGradient]:
    """Decodes gradients.

    Raises:
      ProtocolError: The message is malformed.
    """
    rows = body if type(body) is list else [body]
    for row in rows:
        if type(row) is not tuple or [type(part) for part in row] != [int, list]:
            raise ProtocolError("A gradient has a message's id and cotangents.")
    return list(map(MessageGradient._make, rows))

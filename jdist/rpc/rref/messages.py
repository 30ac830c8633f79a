"""Messages of the reference protocol, and their form on the wire.

A *fork* is one worker's share in a reference: it is what the owner counts. The *giver*
of a fork is the worker that sent the reference in a call or an answer, the *receiver*
the one that got it. `ReliableDelivery` has every message below handled exactly once, in
any order.
"""

from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec

from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.codec.codes import unpacked

REFERENCE = "rref"
"""The code by which a reference stands in the tree of a value."""

Number = Annotated[int, msgspec.Meta(ge=0)]


class Ref(NamedTuple):
    """A reference within a call or an answer: a fork in transit.

    Attributes:
      owner: Incarnation of the worker that has the value.
      rref: Id of the reference, the same for all its forks.
      fork: Id of this fork; made by the giver.
      low_water_mark: All forks below it from this giver to this receiver have arrived.
    """

    owner: Number
    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: Number


class Fork(NamedTuple):
    """Receiver to owner: count this fork as mine. Answer: see `Protocol`."""

    rref: GloballyUniqueId
    fork: GloballyUniqueId


class Accept(NamedTuple):
    """Receiver to giver: this fork has arrived and the owner counts it."""

    fork: GloballyUniqueId


class Delete(NamedTuple):
    """Holder to owner: this fork is no longer in use."""

    rref: GloballyUniqueId
    fork: GloballyUniqueId


class Take(NamedTuple):
    """Giver to receiver: the call or answer with this fork was lost.

    A receiver that has not got the fork takes it now and drops it at once, so that it
    ends as every other one does. Should the lost message arrive after all, it is
    refused.
    """

    ref: Ref


class Abort(NamedTuple):
    """Creator to owner: the request to create the value has failed.

    If that did not arrive, it counts as having arrived and raised this. Either way the
    creator's fork is counted afterwards.
    """

    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: Number
    reason: str


class CreationName(NamedTuple):
    """The name of a value, in the request to create it; it comes with a call.

    Attributes:
      rref: Id of the reference.
      fork: Id of the creator's fork; on the creator itself that of the reference.
      low_water_mark: All requests of this creator below it are settled.
    """

    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: Number


Message = Fork | Accept | Delete | Take | Abort

KINDS: dict[type, str] = {
    kind: f"rref.{kind.__name__.lower()}" for kind in get_args(Message)
}
"""The kind of frame in which each message travels."""

_MALFORMED = "A message about references has ids, numbers and a text"

T = TypeVar("T", bound=NamedTuple)


def pack(message: NamedTuple) -> Any:
    """Encodes a message, an id, a reference or a name by plain values."""
    return msgspec.to_builtins(message)


def unpack(kind: type[T], row: Any) -> T:
    """Decodes what is of this kind; the inverse of `pack`.

    Raises:
      ProtocolError: It is not what `pack` makes of something of this kind.
    """
    found: T = unpacked(row, kind, _MALFORMED)
    return found

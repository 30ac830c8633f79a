"""Messages of the reference protocol, and their form on the wire.

A *fork* is one worker's share in a reference: it is what the owner counts. The *giver*
of a fork is the worker that sent the reference in a call or an answer, the *receiver*
the one that got it. `ReliableDelivery` has every message below handled exactly once, in
any order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.ids import GloballyUniqueId

REFERENCE = "rref"
"""The code by which a reference stands in the tree of a value."""


class Ref(NamedTuple):
    """A reference within a call or an answer: a fork in transit.

    Attributes:
      owner: Incarnation of the worker that has the value.
      rref: Id of the reference, the same for all its forks.
      fork: Id of this fork; made by the giver.
      low_water_mark: All forks below it from this giver to this receiver have arrived.
    """

    owner: int
    rref: GloballyUniqueId
    fork: GloballyUniqueId
    low_water_mark: int


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
    low_water_mark: int
    reason: str


Message = Fork | Accept | Delete | Take | Abort

KINDS: dict[type, str] = {
    Fork: "rref.fork",
    Accept: "rref.accept",
    Delete: "rref.delete",
    Take: "rref.take",
    Abort: "rref.abort",
}
"""The kind of frame in which each message travels."""


def pack_ref(ref: Ref) -> tuple[int, ...]:
    """Encodes a reference as four numbers."""
    return (ref.owner, ref.rref.packed(), ref.fork.packed(), ref.low_water_mark)


def unpack_ref(row: Any) -> Ref:
    """Decodes a reference; the inverse of `pack_ref`.

    Raises:
      ProtocolError: It is not what `pack_ref` makes.
    """
    owner, rref, fork, low_water_mark = _numbers(row, 4)
    return Ref(owner, unpack_id(rref), unpack_id(fork), low_water_mark)


def pack(message: Message) -> tuple[Any, ...]:
    """Encodes a message as numbers, and an `Abort`'s reason."""
    if isinstance(message, Take):
        return pack_ref(message.ref)
    return tuple(
        part.packed() if isinstance(part, GloballyUniqueId) else part
        for part in message
    )


def unpack(kind: type, row: Any) -> Message:
    """Decodes a message; the inverse of `pack`.

    Raises:
      ProtocolError: It is not what `pack` makes of a message of this kind.
    """
    return _UNPACK[kind](row)


def unpack_id(number: Any) -> GloballyUniqueId:
    """Decodes an id.

    Raises:
      ProtocolError: `number` is not an id.
    """
    if type(number) is not int or not 0 <= number < 1 << 64:
        raise ProtocolError("An id is a number of 64 bits.")
    return GloballyUniqueId.unpacked(number)


def _abort(row: Any) -> Abort:
    if type(row) is not tuple or len(row) != 4 or type(row[3]) is not str:
        raise ProtocolError("An rref.abort is malformed.")
    rref, fork, low_water_mark = _numbers(row[:3], 3)
    return Abort(unpack_id(rref), unpack_id(fork), low_water_mark, row[3])


def _numbers(row: Any, count: int) -> tuple[int, ...]:
    if type(row) is not tuple or len(row) != count:
        raise ProtocolError("A message about references is malformed.")
    # Exact types: `isinstance` would take True for a number.
    if not all(type(number) is int and number >= 0 for number in row):
        raise ProtocolError("A message about references needs numbers.")
    return row


_UNPACK: dict[type, Callable[[Any], Message]] = {
    Fork: lambda row: Fork(*map(unpack_id, _numbers(row, 2))),
    Accept: lambda row: Accept(*map(unpack_id, _numbers(row, 1))),
    Delete: lambda row: Delete(*map(unpack_id, _numbers(row, 2))),
    Take: lambda row: Take(unpack_ref(row)),
    Abort: _abort,
}

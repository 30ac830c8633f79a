"""Messages about references as plain values, and back: nothing is believed."""

from collections.abc import Callable, Iterator
from typing import Any

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.codec import Codec, codes
from jdist.rpc.rref.messages import Abort, Accept, Delete, Fork, Message, Ref, Take

KINDS: dict[type, str] = {
    Fork: "rref.fork",
    Accept: "rref.accept",
    Delete: "rref.delete",
    Take: "rref.take",
    Abort: "rref.abort",
}
"""The kind of frame in which each travels."""


REFERENCE = "rref"
"""The code by which a reference stands in the tree of a value."""


def refs_in(codec: Codec, tree: Any) -> Iterator[Ref]:
    """The references in a tree that could not be decoded as a whole."""
    rest = [tree]
    while rest:
        node = rest.pop()
        if type(node) is not list:
            continue
        if node[:2] == [codes.REGISTERED, REFERENCE]:
            try:
                yield unpack_ref(codec.decode(node[2], ()))
            except (IndexError, ProtocolError):
                continue
        rest += node


def pack_ref(ref: Ref) -> tuple[int, ...]:
    """A reference as four numbers."""
    return (ref.owner, ref.rref.packed(), ref.fork.packed(), ref.low_water_mark)


def unpack_ref(row: Any) -> Ref:
    """The inverse of `pack_ref`.

    Raises:
      ProtocolError: It is not what `pack_ref` makes.
    """
    owner, rref, fork, low_water_mark = _numbers(row, 4)
    return Ref(owner, unpack_id(rref), unpack_id(fork), low_water_mark)


def pack(message: Message) -> tuple[Any, ...]:
    """A message as numbers, and an `Abort`'s reason."""
    if isinstance(message, Take):
        return pack_ref(message.ref)
    return tuple(
        part.packed() if isinstance(part, GloballyUniqueId) else part
        for part in message
    )


def unpack(kind: type, row: Any) -> Message:
    """The inverse of `pack`.

    Raises:
      ProtocolError: It is not what `pack` makes of a message of this kind.
    """
    return _UNPACK[kind](row)


def unpack_id(number: Any) -> GloballyUniqueId:
    """An id of the number that it travels as.

    Raises:
      ProtocolError: It is none.
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

"""Frames, the messages between workers, and their encoding as bytes.

A frame is the same object over every transport. Inside one process its leaves travel as
references; through a socket it is a prefix, a msgpack header, and the arrays' own
memory:

    prefix   4 bytes    size of the header
    header   msgpack    kind, id, meta, tree, shared, and of each leaf flags, dtype
                        and shape
    body     raw        the slab: all small leaves, each at a multiple of 16;
                        then every large leaf

The header tells all sizes before anything is allocated, and the body is received into
final memory: one slab for the small leaves, aligned memory for each large one. On one
machine large leaves may travel *apart* from the body, as memory descriptors (see
`memory`).

Whatever a peer sends, `parse_prefix`, `parse_header`, `allocate` and `assemble` raise
nothing but `ProtocolError`, and nothing beyond `Limits` is ever allocated.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import msgspec
import numpy as np

from jdist._compat import placed
from jdist._errors import value_error
from jdist.rpc.base.current import Meta
from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec.codes import DTYPE_NAMES, Tree, dtype_name, dtype_named

# Kinds are plain strings so that a part built on rpc can add its own (autograd adds
# "autograd.backward", say) and so that faults can be injected per kind.
CALL = "call"
REPLY = "reply"
ERROR = "error"
CANCEL = "cancel"

ANSWERS = frozenset((REPLY, ERROR))
_UNNUMBERED = ANSWERS | {CANCEL}


class Frame(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
      kind: Its kind: that of a request ("call", "group.join", ...), or one of "reply"
        and "error" for the answer, or "cancel" for a request given up.
      id: Number of the request on its channel, rising from 1. An answer bears its
        request's number; a number seen before is a duplicate and ignored.
      meta: Small msgpack-able values by name: the deadline's remaining seconds, the
        caller, what interceptors add.
      tree: The body's structure as `codec.encode` makes it: scalars and nested lists.
      leaves: The body's arrays in order, `numpy.ndarray` or `jax.Array`.
      shared: Whether the channel carries other requests meanwhile, so that its reader
        must not make them wait for this one.
    """

    kind: str
    id: int
    meta: Meta
    tree: Tree
    leaves: list[Any]
    shared: bool = False


_WINDOW = 4096


def is_duplicate(frame: Frame, requests: DedupWindow) -> bool:
    """Records a request of a channel; returns whether its number came before.

    A number far behind the highest one counts as come: better to lose a request (its
    caller gets a timeout) than to execute one twice. Number 0 is not answered, and
    always new; other frames bear the number of the request that they are about.
    """
    if frame.kind in _UNNUMBERED or not frame.id:
        return False
    return not requests.take(frame.id, frame.id - _WINDOW)


# --- as bytes ---

PREFIX_BYTES = 4

_SMALL = 1 << 15
"""Leaves of fewer bytes share the slab: copying them costs less than memory of their
own, and a program that keeps one of them does not keep much."""

_ALIGNMENT = 16  # In the slab; what malloc gives, and the widest dtype needs.
_JAX, _APART, _WEAK = 1, 2, 4

Bytes = bytes | bytearray | memoryview


class Limits(NamedTuple):
    """Limits of a peer's frames; checked before anything is allocated.

    Attributes:
      header_bytes: Largest size in bytes of a frame's header: structure, scalars, short
        texts.
      body_bytes: Largest total size in bytes of a frame's arrays.
      leaves: Largest number of arrays of a frame.
    """

    header_bytes: int = 1 << 24
    body_bytes: int = 1 << 36
    leaves: int = 1 << 16


_LIMITS = Limits()


_Described = tuple[int, str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]]
"""Flags, dtype and shape of a leaf."""


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header as msgpack; of each leaf flags, dtype and shape."""

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    id: Annotated[int, msgspec.Meta(ge=0)]
    meta: Meta
    tree: Any
    shared: bool
    leaves: tuple[_Described, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


# --- sending ---


def pack(
    frame: Frame,
    limits: Limits = _LIMITS,
    apart: Callable[[memoryview], bool] | None = None,
) -> list[bytes | memoryview]:
    """Encodes a frame as bytes: prefix, header and slab, then each large leaf.

    Args:
      frame: The frame. Its JAX arrays are waited for, and gathered if sharded.
      limits: Limits that it must keep.
      apart: Sends a large leaf as a memory descriptor; False if it cannot.

    Returns:
      The pieces in order. Those of large leaves are their own memory, not a copy.

    Raises:
      TypeError: A dtype, or a value of the metadata, cannot travel.
      ValueError: The frame is beyond the limits.
    """
    described = []
    slab: list[bytes] = []
    filled = total = 0
    large: list[memoryview] = []
    for leaf in frame.leaves:
        array = host(leaf)
        flags = 0
        if type(leaf) is not np.ndarray:
            flags = _JAX | _WEAK if leaf.weak_type else _JAX
        nbytes = array.nbytes
        total += nbytes
        if nbytes < _SMALL:
            gap = -filled % _ALIGNMENT
            slab += (bytes(gap), array.tobytes())
            filled += gap + nbytes
        else:
            data = array.reshape(-1).view(np.uint8).data
            if apart is not None and apart(data):
                flags |= _APART
            else:
                large.append(data)
        # As in `dtype_name`, without a call for each array.
        name = DTYPE_NAMES.get(array.dtype) or dtype_name(array.dtype)
        described.append((flags, name, array.shape))
    fields = (frame.kind, frame.id, frame.meta, frame.tree, frame.shared, described)
    header = _encoder.encode(fields)
    sizes = (len(header), total, len(described))
    for size, limit, (what, other) in zip(sizes, limits, _LIMITED, strict=True):
        if size > limit:
            rule = f"must have {what} at most {limit}"
            raise value_error("rpc(value)", rule, size, f"Send it in parts{other}.")
    prefix = len(header).to_bytes(PREFIX_BYTES, "little")
    return [b"".join((prefix, header, *slab)), *large]


_LIMITED = (
    ("a header of", ""),
    (
        "arrays of together",
        ", or raise RpcOptions(max_array_bytes=...) on every worker",
    ),
    ("a number of arrays of", ""),
)
"""What `Limits` limit, in words, and what else helps."""


def host(leaf: Any) -> np.ndarray:
    """Return the elements of a leaf in C order, as a view if possible.

    Waits for a JAX array that is being computed, and gathers one that is sharded.
    """
    array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


# --- receiving ---


def parse_prefix(data: Bytes, limits: Limits) -> int:
    """Decodes the size of the header in a prefix of `PREFIX_BYTES`.

    Raises:
      ProtocolError: It is beyond the limits.
    """
    header = int.from_bytes(data, "little")
    if header > limits.header_bytes:
        raise _beyond("header", header, limits.header_bytes)
    return header


def parse_header(data: Bytes, limits: Limits) -> Header:
    """Decodes a header.

    Raises:
      ProtocolError: It is malformed, or beyond the limits.
    """
    try:
        header = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A header cannot be read: {error}") from error
    if len(header.leaves) > limits.leaves:
        got = len(header.leaves)
        raise _beyond("number of arrays", got, limits.leaves)
    return header


def allocate(header: Header, limits: Limits) -> tuple["FrameLayout", list[memoryview]]:
    """Allocate the memory to receive the body into.

    Returns:
      The places of the arrays; and the slab and the memory of each large leaf, in the
      order in which they are sent.

    Raises:
      ProtocolError: The arrays are none, or beyond the limits.
    """
    # Only short descriptions are cached, which bounds the cache's memory.
    lay_out = _known_layout if len(header.leaves) <= _FEW else _layout
    layout = lay_out(header.leaves)
    for what, size in (("array", layout.most), ("body", layout.total)):
        if size > limits.body_bytes:
            raise _beyond(what, size, limits.body_bytes, _RAISED)
    slab = memoryview(bytearray(layout.slab))
    return layout, [slab, *map(aligned, layout.large)]


class FrameLayout(NamedTuple):
    """The places of a frame's arrays in the memory that receives them.

    Attributes:
      leaves: Of each array dtype, shape, flags, and the offset in the slab or None.
      slab: Size of the slab in bytes.
      large: Size in bytes of each array with memory of its own, in order.
      apart: Size in bytes of each array that travels apart, in order.
      most: The largest size of an array, to be compared with the limit.
      total: The size of all.
    """

    leaves: Sequence[tuple[np.dtype, tuple[int, ...], int, int | None]]
    slab: int
    large: Sequence[int]
    apart: Sequence[int]
    most: int
    total: int


def _layout(described: tuple[_Described, ...]) -> FrameLayout:
    leaves: list[tuple[np.dtype, tuple[int, ...], int, int | None]] = []
    large: list[int] = []
    apart: list[int] = []
    filled = most = 0
    for flags, name, shape in described:
        dtype = dtype_named(name)
        if len(shape) > 64:
            raise ProtocolError(f"An array has {len(shape)} dimensions.")
        nbytes = dtype.itemsize * math.prod(shape)
        # An empty array, too, must not have dimensions whose product overflows.
        full = nbytes or max(dtype.itemsize, 1) * math.prod(n or 1 for n in shape)
        most = max(most, full)
        offset = None
        if flags & _APART:
            apart.append(nbytes)
        elif nbytes >= _SMALL:
            large.append(nbytes)
        else:
            offset = filled + -filled % _ALIGNMENT
            filled = offset + nbytes
        leaves.append((dtype, shape, flags, offset))
    total = filled + sum(large) + sum(apart)
    return FrameLayout(leaves, filled, large, apart, most, total)


_FEW = 8
_known_layout = functools.lru_cache(1024)(_layout)


_RAISED = " RpcOptions(max_array_bytes=...) raises it."


def _beyond(what: str, size: int, limit: int, remedy: str = "") -> ProtocolError:
    return ProtocolError(
        f"A frame's {what} of {size} is beyond this worker's limit of {limit}.{remedy}"
    )


_ADOPTED = 64
"""JAX on CPU takes NumPy memory over without a copy exactly where its address is a
multiple of this."""


def aligned(nbytes: int) -> memoryview:
    """Allocate uninitialised, writable memory whose address is a multiple of 64.

    Example:
      >>> len(aligned(100))
      100
    """
    # NumPy itself aligns to 16 bytes only.
    whole = np.empty(nbytes + _ADOPTED, np.uint8)
    start = -whole.__array_interface__["data"][0] % _ADOPTED
    return whole.data[start : start + nbytes]


def assemble(
    header: Header,
    layout: FrameLayout,
    buffers: Sequence[memoryview],
    device: jax.Device | None,
    apart: Sequence[memoryview] = (),
) -> Frame:
    """Build the frame over the received memory, which its leaves then own.

    Args:
      header: As `parse_header` gave it.
      layout: As `allocate` gave it.
      buffers: Likewise, filled.
      device: Where JAX arrays are placed; None for JAX's default.
      apart: The memory behind the descriptors, writable, in order; each piece of at
        least the size in the layout.

    Raises:
      ProtocolError: JAX cannot hold an array.
    """
    large, separate = iter(buffers), iter(apart)
    slab = next(large)
    leaves: list[Any] = []
    for dtype, shape, flags, offset in layout.leaves:
        if offset is None:
            memory = next(separate if flags & _APART else large)
            array = np.ndarray(shape, dtype, memory)
        else:
            array = np.ndarray(shape, dtype, slab, offset)
        leaves.append(_received(array, flags, device) if flags & _JAX else array)
    return Frame(
        header.kind, header.id, header.meta, header.tree, leaves, header.shared
    )


def _received(array: np.ndarray, flags: int, device: jax.Device | None) -> jax.Array:
    try:
        if array.dtype.isnative:
            return placed(array, device, bool(flags & _WEAK))
        reason = "it is of another byte order"
    except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
        reason = str(error)
    shown = f"{array.dtype} and shape {array.shape}"
    raise ProtocolError(f"JAX cannot hold an array of {shown}: {reason}.")

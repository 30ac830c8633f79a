"""Frames as bytes: a fixed prefix, a msgpack header, and the arrays' own memory.

    prefix   24 bytes   magic, version, descriptors, header and body sizes
    header   msgpack    kind, id, meta, tree, shared, one description per leaf
    body     raw        first the slab: all small leaves, each at a multiple of 64;
                        then every large leaf, back to back

The receiver knows all sizes before it allocates, and receives into final memory: one
aligned slab for the small leaves, a piece of its own for each large one. Leaves may
also travel *apart* from the body, as memory descriptors on one machine; the prefix
says how many.

Whatever a peer sends, `parse_prefix`, `parse_header` and `assemble` raise nothing but
`ProtocolError`, and allocate nothing beyond `Limits`.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgspec
import numpy as np

from jdist._errors import requirement
from jdist.rpc.arrays import ALIGNMENT, aligned, host, place
from jdist.rpc.errors import ProtocolError
from jdist.rpc.frame import Frame

VERSION = 1
_MAGIC = b"jdst"
_PREFIX = struct.Struct("<4sHHIIQ")
PREFIX_BYTES = _PREFIX.size

_SMALL = 1 << 15
"""Leaves of fewer bytes share the slab: no allocation each, and not much kept alive
by one of them."""

_JAX, _APART = 1, 2


class Limits(NamedTuple):
    """How much a peer may announce before anything is allocated for it.

    Attributes:
      header_bytes: Of one frame's header: structure, strings, scalars.
      body_bytes: Of one frame's arrays together.
      depth: Nesting of a value.
      leaves: Arrays of one frame.
    """

    header_bytes: int = 1 << 24
    body_bytes: int = 1 << 36
    depth: int = 100
    leaves: int = 1 << 16


class Sizes(NamedTuple):
    """What a prefix announces.

    Attributes:
      header: Bytes of the header, which follow the prefix.
      body: Bytes of the body, which follow the header.
      apart: Number of leaves that come as memory descriptors.
    """

    header: int
    body: int
    apart: int


class Packed(NamedTuple):
    """A frame as bytes, in the order in which they are sent.

    Attributes:
      head: Prefix and header.
      body: The parts of the body; the leaves' own memory, not copies, where large.
      apart: Leaves to be sent as memory descriptors, in order.
    """

    head: bytes
    body: list[memoryview]
    apart: list[memoryview]


class _Leaf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    flags: int
    dtype: str
    shape: tuple[int, ...]


class _Message(msgspec.Struct, array_like=True, gc=False):
    kind: str
    id: int
    meta: dict[str, Any]
    tree: Any
    shared: bool
    leaves: list[_Leaf]


class _Place(NamedTuple):
    """Where a leaf's bytes are: in which list, at which index and offset."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_jax: bool
    apart: bool
    index: int
    offset: int


class Header(NamedTuple):
    """A parsed and checked header: what to receive, and what it will become.

    Attributes:
      message: The header's fields.
      places: Where each leaf's bytes are.
      body: Sizes of the memory to receive the body into, in order.
      apart: Sizes of the leaves that come as memory descriptors, in order.
    """

    message: _Message
    places: list[_Place]
    body: list[int]
    apart: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


# --- dtypes by name ---


def _named_dtypes() -> dict[str, np.dtype]:
    plain = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 "
    plain += "float64 complex64 complex128"
    dtypes = [np.dtype(name) for name in plain.split()]
    for thing in vars(ml_dtypes).values():
        if isinstance(thing, type) and issubclass(thing, np.generic):
            dtypes.append(np.dtype(thing))
    return {dtype.name: dtype for dtype in dtypes} | {"float0": jax.dtypes.float0}


_DTYPES = _named_dtypes()
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Other byte orders, texts of fixed length, dates: NumPy's own notation.
_OTHER_DTYPE = re.compile(r"[<>][fiucUMm]\d{1,9}(\[\d{0,9}[A-Za-z]{1,7}\])?|\|S\d{1,9}")


def dtype_name(dtype: np.dtype) -> str:
    """The name under which a dtype travels.

    Raises:
      TypeError: Arrays of this dtype cannot travel: Python objects, records.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is not None:
        return name
    if _OTHER_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return dtype.str
    rule = "must be numbers, booleans, dates or texts of fixed length"
    remedy = "Send the fields of a record as arrays of their own."
    raise TypeError(requirement("rpc(array.dtype)", rule, str(dtype), remedy))


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name.

    Raises:
      ProtocolError: There is none.
    """
    dtype = _DTYPES.get(name)
    if dtype is not None:
        return dtype
    try:
        if _OTHER_DTYPE.fullmatch(name):
            return np.dtype(name)
    except TypeError:
        pass  # Such as "<f3": refused below like every other unknown name.
    raise ProtocolError(f"No dtype has the name {name[:40]!r}.")


# --- sending ---


def pack(frame: Frame, apart: int | None = None) -> Packed:
    """The bytes of a frame.

    Args:
      frame: The frame; it waits for those of its JAX arrays that are not computed yet.
      apart: Leaves of at least this many bytes travel as memory descriptors.

    Raises:
      TypeError: A dtype or a value of the metadata cannot travel.
      ValueError: The header is beyond any limit.
    """
    leaves: list[_Leaf] = []
    slab: list[Any] = []
    filled = 0
    large: list[memoryview] = []
    separate: list[memoryview] = []
    for leaf in frame.leaves:
        array = host(leaf)
        flags = 0 if array is leaf or type(leaf) is np.ndarray else _JAX
        nbytes = array.nbytes
        if apart is not None and nbytes >= apart and nbytes:
            flags |= _APART
            separate.append(_bytes_of(array))
        elif nbytes < _SMALL:
            gap = -filled % ALIGNMENT
            slab += (bytes(gap), array.tobytes())
            filled += gap + nbytes
        else:
            large.append(_bytes_of(array))
        leaves.append(_Leaf(flags, dtype_name(array.dtype), array.shape))
    header = _encoder.encode(
        _Message(frame.kind, frame.id, frame.meta, frame.tree, frame.shared, leaves)
    )
    body = [memoryview(b"".join(slab)), *large] if filled else large
    size = filled + sum(map(len, large))
    prefix = _PREFIX.pack(_MAGIC, VERSION, 0, len(header), len(separate), size)
    return Packed(prefix + header, body, separate)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


# --- receiving ---


def parse_prefix(data: bytes | bytearray | memoryview, limits: Limits) -> Sizes:
    """The sizes that a prefix of `PREFIX_BYTES` announces.

    Raises:
      ProtocolError: It is no prefix, of another version, or beyond the limits.
    """
    if len(data) != PREFIX_BYTES:
        raise ProtocolError(f"A prefix has {PREFIX_BYTES} bytes. Got {len(data)}.")
    magic, version, reserved, header, apart, body = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"Not a message of jdist: it begins with {magic!r}.")
    if version != VERSION or reserved:
        raise ProtocolError(
            f"The peer speaks version {version} of the protocol, this worker version "
            f"{VERSION}. Install the same jdist on both."
        )
    for what, size, most in (
        ("header", header, limits.header_bytes),
        ("body", body, limits.body_bytes),
        ("number of memory descriptors", apart, limits.leaves),
    ):
        if size > most:
            raise ProtocolError(f"A {what} of {size} is beyond the limit of {most}.")
    return Sizes(header, body, apart)


def parse_header(
    data: bytes | bytearray | memoryview, sizes: Sizes, limits: Limits
) -> Header:
    """The header, with every field checked against the sizes announced.

    Raises:
      ProtocolError: It is malformed, inconsistent or beyond the limits.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A header cannot be read: {error}") from error
    if len(message.leaves) > limits.leaves:
        raise ProtocolError(f"A frame has more than {limits.leaves} arrays.")
    if message.id < 0 or len(message.kind) > 64:
        raise ProtocolError("A frame's number is negative or its kind too long.")
    header = _planned(message, limits)
    if sum(header.body) != sizes.body or len(header.apart) != sizes.apart:
        raise ProtocolError("A header's arrays do not fill the body announced.")
    return header


def _planned(message: _Message, limits: Limits) -> Header:
    places: list[_Place] = []
    large: list[int] = []
    apart: list[int] = []
    filled = total = 0
    for flags, dtype, shape, nbytes in _described(message.leaves, limits):
        total += nbytes
        is_apart = bool(flags & _APART)
        if is_apart:
            index, offset = len(apart), 0
            apart.append(nbytes)
        elif nbytes < _SMALL:
            index, offset = 0, filled + -filled % ALIGNMENT
            filled = offset + nbytes
        else:
            large.append(nbytes)
            index, offset = len(large), 0
        places.append(_Place(dtype, shape, bool(flags & _JAX), is_apart, index, offset))
    if total > limits.body_bytes:
        raise ProtocolError(f"Arrays of {total} bytes are beyond the limit.")
    if not filled:
        places = [p._replace(index=p.index - (not p.apart)) for p in places]
    return Header(message, places, [filled, *large] if filled else large, apart)


def _described(
    leaves: list[_Leaf], limits: Limits
) -> Iterator[tuple[int, np.dtype, tuple[int, ...], int]]:
    for leaf in leaves:
        dtype = dtype_named(leaf.dtype)
        shape = leaf.shape
        extent = 1
        for n in shape:
            if n < 0:
                raise ProtocolError(f"An array has the shape {shape}.")
            extent *= n or 1
        if len(shape) > 32 or extent * dtype.itemsize > limits.body_bytes:
            raise ProtocolError("An array is larger than this worker accepts.")
        nbytes = 0 if 0 in shape else extent * dtype.itemsize
        yield leaf.flags, dtype, shape, nbytes


def allocate(header: Header) -> list[memoryview]:
    """Memory to receive the body into, in order; together exactly the body's size."""
    return [aligned(size) for size in header.body]


def assemble(
    header: Header,
    buffers: Sequence[memoryview],
    device: jax.Device | None,
    apart: Sequence[memoryview] = (),
) -> Frame:
    """The frame over the memory received, which it takes over.

    Args:
      header: As `parse_header` gave it.
      buffers: As `allocate` gave them, filled.
      device: Where JAX arrays are placed; None for JAX's default.
      apart: Memory behind the descriptors, writable, of `header.apart` bytes each.

    Raises:
      ProtocolError: The memory is not what the header describes.
    """
    if [len(b) for b in apart] != header.apart:
        raise ProtocolError("Memory descriptors are not of the sizes announced.")
    leaves: list[Any] = []
    placed: list[int] = []
    for place_ in header.places:
        memory = apart if place_.apart else buffers
        if place_.is_jax:
            placed.append(len(leaves))
        buffer = memory[place_.index] if memory else b""
        leaves.append(np.ndarray(place_.shape, place_.dtype, buffer, place_.offset))
    if placed:
        arrays = place([leaves[i] for i in placed], device)
        for i, array in zip(placed, arrays, strict=True):
            leaves[i] = array
    message = header.message
    return Frame(
        message.kind, message.id, message.meta, message.tree, leaves, message.shared
    )

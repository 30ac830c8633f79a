"""Frames as bytes: what is sent, what is received into, and what is refused."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec.codes import dtype_name, dtype_named
from jdist.rpc.wire import frame as framing
from jdist.rpc.wire.frame import Frame
from tests.rpc.carriers import LIMITS, assert_same, pack_apart, parts, receive


def _frame(*leaves, **changes):
    frame = Frame("call", 3, {"deadline": 1.5, "from": "w"}, [1, None], list(leaves))
    return replace(frame, **changes)


def _address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("least", [1, 1000, 50_000, 10**6])
def test_a_frame_comes_back(rng, shared, least):
    """All fields; small, large and empty leaves in their order, of both kinds."""
    arrays = [
        rng.normal(size=3), rng.normal(size=(0, 5)), rng.normal(size=(300, 70)),
        rng.integers(0, 9, (2, 3)).astype(np.int8), rng.normal(size=(100, 90)),
        np.array(1.5),
    ]  # fmt: skip
    arrays = [a if a.dtype == np.int8 else a.astype(np.float32) for a in arrays]
    leaves = [leaf for a in arrays for leaf in (a, jnp.asarray(a))]
    sent = _frame(*leaves, shared=shared, id=2**40, kind="group.join")
    pieces, apart = pack_apart(sent, least)
    got = receive(pieces, jax.devices("cpu")[1], apart)
    assert replace(got, leaves=[]) == replace(sent, leaves=[])
    assert_same(got.leaves, leaves)
    assert {d for a in got.leaves[1::2] for d in a.devices()} == {jax.devices("cpu")[1]}


def test_frames_without_arrays():
    """No body, no memory: a frame of scalars is its header."""
    pieces = framing.pack(_frame())
    (head,) = pieces
    size = framing.parse_prefix(head[: framing.PREFIX_BYTES], LIMITS)
    assert size == len(head) - framing.PREFIX_BYTES
    layout, buffers = framing.allocate(parts(pieces)[0], LIMITS)
    assert (layout.apart, buffers) == ([], [b""])
    assert receive(pieces) == _frame()


def test_empty_arrays_need_no_memory():
    """Nothing is received for them, and what arrives can be written to."""
    pieces, apart = pack_apart(_frame(np.zeros((0, 3)), jnp.zeros((2, 0))))
    assert (len(pieces), apart) == (1, [])
    first, second = receive(pieces).leaves
    assert (first.shape, second.shape) == ((0, 3), (2, 0))
    assert first.flags.writeable


def test_large_leaves_are_sent_from_their_own_memory(rng):
    """No copy at the sender: NumPy's memory, and JAX's on CPU."""
    array = rng.normal(size=(200, 100))
    placed = jnp.asarray(array)
    pieces = framing.pack(_frame(array, placed))
    ours, jaxs = (np.frombuffer(piece, np.uint8) for piece in pieces[1:])
    assert _address(ours) == _address(array)
    assert _address(jaxs) == _address(np.asarray(placed))
    (apart,) = pack_apart(_frame(array), array.nbytes)[1]
    assert _address(np.frombuffer(apart, np.uint8)) == _address(array)


def test_large_leaves_are_received_into_their_own_memory(rng):
    """Each aligned memory of its own, which the array then is; small ones share."""
    large = [rng.normal(size=(100, 90)) for _ in range(2)]
    small = [rng.normal(size=5) for _ in range(2)]
    sent = _frame(small[0], large[0], small[1], large[1])
    pieces = framing.pack(sent)
    header, *body = parts(pieces)
    layout, buffers = framing.allocate(header, LIMITS)
    assert [len(b) for b in buffers] == [16 * 3 + 40, 72000, 72000]
    starts = [_address(np.frombuffer(b, np.uint8)) for b in buffers[1:]]
    assert [start % 64 for start in starts] == [0, 0]
    for buffer, piece in zip(buffers, body, strict=True):
        buffer[:] = piece
    got = framing.assemble(header, layout, buffers, None).leaves
    assert [_address(got[1]), _address(got[3])] == starts
    assert_same(got, sent.leaves)


def test_received_jax_arrays_are_the_received_memory(rng):
    """From the socket to the device without a copy, on CPU."""
    pieces = framing.pack(_frame(jnp.asarray(rng.normal(size=(100, 90)))))
    header = parts(pieces)[0]
    layout, (slab, buffer) = framing.allocate(header, LIMITS)
    buffer[:] = pieces[1]
    device = jax.devices("cpu")[1]
    (got,) = framing.assemble(header, layout, [slab, buffer], device).leaves
    assert _address(np.asarray(got)) == _address(np.frombuffer(buffer, np.uint8))


def test_of_large_leaves_some_may_travel_apart(rng):
    """Those for which there is memory; the order is that of the leaves."""
    leaves = [np.arange(n, dtype=np.uint8) for n in (9, 32_768, 3, 40_000, 32_767)]
    pieces, apart = pack_apart(_frame(*leaves), 40_000)
    assert [len(piece) for piece in apart] == [40_000]
    assert [len(piece) for piece in parts(pieces)[1:]] == [32 + 32_767, 32_768]
    assert_same(receive(pieces, apart=apart).leaves, leaves)
    offered = []
    framing.pack(_frame(*leaves), apart=lambda leaf: offered.append(len(leaf)))
    assert offered == [32_768, 40_000]


def test_memory_behind_descriptors_may_be_larger(rng):
    """Pages are whole; what is beyond the array is not looked at."""
    array = rng.normal(size=(3, 5))
    pieces, apart = pack_apart(_frame(array))
    page = memoryview(bytearray(4096))
    page[: array.nbytes] = apart[0]
    header = parts(pieces)[0]
    layout, buffers = framing.allocate(header, LIMITS)
    (got,) = framing.assemble(header, layout, buffers, None, [page]).leaves
    assert_same(got, array)


def test_metadata_that_cannot_travel():
    """Packages built on rpc learn at once what they may put there."""
    with pytest.raises(TypeError, match="unsupported"):
        framing.pack(_frame(meta={"x": object()}))


# --- refusals ---


SMALL = framing.Limits(header_bytes=1000, body_bytes=5000, leaves=7)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP", r"header of 1347703880 is beyond.*limit of 1000\."),
        (b"\xe9\x03\0\0", r"header of 1001 is beyond.*limit of 1000\."),
    ],
)
def test_bad_prefixes(data, message):
    """Refused with the limit's name, so that its owner can raise it."""
    with pytest.raises(ProtocolError, match=message):
        framing.parse_prefix(data, SMALL)


def test_limits_are_inclusive():
    """Exactly the limit passes."""
    assert framing.parse_prefix(b"\xe8\x03\0\0", SMALL) == 1000
    good = msgspec.msgpack.encode(_changed(5, [*EMPTY, [0, "uint8", [5000]]]))
    assert _allocated(good) == [5000]


def _allocated(data):
    """The sizes of what is allocated for a header."""
    header = framing.parse_header(data, SMALL)
    return [len(buffer) for buffer in framing.allocate(header, SMALL)[1]]


EMPTY = [[0, "uint8", [0]]] * 6
GOOD = ["call", 1, {}, None, False, [[0, "float32", [2, 3]]]]


def _changed(index, value):
    return [*GOOD[:index], value, *GOOD[index + 1 :]]


def _leaf(*leaf):
    return _changed(5, [list(leaf)])


BAD_HEADERS = {
    "not msgpack": (b"\xc1", "cannot be read"),
    "truncated": (msgspec.msgpack.encode(GOOD)[:-1], "cannot be read"),
    "more after it": (msgspec.msgpack.encode(GOOD) + b"\xc0", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "too deep": (b"\x91" * 100_000 + b"\xc0", "cannot be read"),
    "no utf-8": (b"\x96\xa1\xff", "cannot be read"),
    "map": ({"kind": "call"}, "cannot be read"),
    "too few fields": (GOOD[:-1], "cannot be read"),
    "too many fields": ([*GOOD, 1], "cannot be read"),
    "kind of number": (_changed(0, 1), "cannot be read"),
    "long kind": (_changed(0, "k" * 65), "cannot be read"),
    "negative id": (_changed(1, -1), "cannot be read"),
    "id of text": (_changed(1, "1"), "cannot be read"),
    "meta of list": (_changed(2, []), "cannot be read"),
    "meta of numbers": (_changed(2, {1: 2}), "cannot be read"),
    "shared of number": (_changed(4, 1), "cannot be read"),
    "leaves of number": (_changed(5, 3), "cannot be read"),
    "leaf of text": (_changed(5, ["x"]), "cannot be read"),
    "leaf too short": (_leaf(0, "float32"), "cannot be read"),
    "negative dimension": (_leaf(0, "float32", [2, -3]), "cannot be read"),
    "dimension of float": (_leaf(0, "float32", [2.5]), "cannot be read"),
    "unknown dtype": (_leaf(0, "float33", [6]), "No dtype has the name 'float33'"),
    "objects": (_leaf(0, "O", [6]), "No dtype has the name 'O'"),
    "records": (_leaf(0, "f4,f4", [6]), "No dtype has the name 'f4,f4'"),
    "dtype by class": (_leaf(0, "object_", [6]), "No dtype"),
    "too many dimensions": (_leaf(0, "float32", [1] * 65), "has 65 dimensions"),
    "too large": (_leaf(0, "float32", [2**40]), "of 4398046511104 is beyond"),
    "product too large": (_leaf(0, "float32", [2**62] * 60), "is beyond"),
    "empty but too large": (_leaf(0, "float32", [0, 2**62]), "is beyond"),
    "empty dtype too large": (_leaf(0, "<U0", [2**62]), "is beyond"),
    "apart too large": (_leaf(2, "float32", [2**40]), "is beyond"),
    "together too large": (
        _changed(5, [[2, "uint8", [3000]], [2, "uint8", [3000]]]), "6000 is beyond"),
    "too many": (_changed(5, [[0, "uint8", [0]]] * 8), "number of arrays of 8 is"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(name, monkeypatch):
    """Each field is checked, against the others too, before memory is taken."""
    monkeypatch.setattr(framing, "aligned", None)
    data, message = BAD_HEADERS[name]
    if not isinstance(data, bytes):
        data = msgspec.msgpack.encode(data)
    good = msgspec.msgpack.encode(GOOD)
    assert _allocated(good) == [24]
    with pytest.raises(ProtocolError, match=message):
        _allocated(data)


@pytest.mark.parametrize("dtype", ["<U3", "<M8[s]", ">f4", "float0"])
def test_jax_arrays_of_what_jax_does_not_have(dtype):
    """A peer that says so is refused; JAX's own words are in the error."""
    data = msgspec.msgpack.encode(_leaf(1, dtype, [2]))
    header = framing.parse_header(data, LIMITS)
    layout, buffers = framing.allocate(header, LIMITS)
    for device in (None, jax.devices("cpu")[1]):
        with pytest.raises(ProtocolError, match="JAX cannot hold an array"):
            framing.assemble(header, layout, buffers, device)


def test_the_format_is_that_of_this_version():
    """Changed bytes need a changed version: this frame is written out in full."""
    frame = Frame("call", 7, {"k": 1}, [0, 0], [np.array([1, 2], np.uint8)], True)
    header = (
        b"\x96\xa4call\x07\x81\xa1k\x01\x92\x00\x00\xc3\x91\x93\x00\xa5uint8\x91\x02"
    )
    prefix = bytes([len(header), 0, 0, 0])
    assert framing.pack(frame) == [prefix + header + b"\1\2"]


def test_dtype_names():
    """Every name means its dtype, in both directions."""
    for name in ("bool", "bfloat16", "int4", "float0", ">c16", "<U7", "<M8[25ns]"):
        assert dtype_name(dtype_named(name)) == name
    for name in ("", "f4", "float", "<f4", "O", "|O", "V8", "<U", "longdouble", ">f3"):
        with pytest.raises(ProtocolError, match="No dtype has the name"):
            dtype_named(name)
    with pytest.raises(TypeError, match="numbers, booleans"):
        dtype_name(np.dtype("V3"))

"""Ten thousand frames that nobody honest sends: each is refused or is a frame.

Half of them are good frames, damaged; the others are well-formed headers and trees
with hostile contents, and plain noise. Whatever arrives, nothing is raised but what
`jdist.rpc.wire.frame` and `Codec.decode` promise, no memory is taken beyond the
limits, and nothing runs.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.codec import Codec, codes
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe
from jdist.rpc.wire import frame as framing
from jdist.rpc.wire.frame import Frame
from tests.rpc import nameable
from tests.rpc.carriers import pack_apart

HERE = "tests.rpc.nameable"
LIMITS = framing.Limits(header_bytes=1 << 16, body_bytes=1 << 20, leaves=64)

fuzz = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def worker(monkeypatch):
    """A callee's side of the wire: bytes in, a value out; and what must not happen."""
    taken = []

    def counted(nbytes, allocate=framing.aligned):
        taken.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(framing, "aligned", counted)
    monkeypatch.setattr(nameable, "imported_function", nameable.CALLS.append)
    nameable.CALLS.clear()
    codec = Codec(FunctionTable(allow=["tests"]), depth=50)

    def receive(data):
        """As a transport does: by the prefix, never more than is there."""
        taken.clear()
        size = framing.parse_prefix(data[: framing.PREFIX_BYTES], LIMITS)
        head, data = np.split(
            np.frombuffer(data, np.uint8), [framing.PREFIX_BYTES + size]
        )
        given = head[framing.PREFIX_BYTES :].tobytes()
        header = framing.parse_header(given, LIMITS)
        layout, buffers = framing.allocate(header, LIMITS)
        total = sum(map(len, buffers))
        assert sum(taken) <= total <= LIMITS.body_bytes
        assert sum(layout.apart) <= LIMITS.body_bytes
        if len(data) < total:
            raise ProtocolError("The connection closed in the middle of a frame.")
        for buffer in buffers:
            buffer[:] = data[: len(buffer)].tobytes()
            data = data[len(buffer) :]
        apart = [memoryview(bytearray(size)) for size in layout.apart]
        frame = framing.assemble(header, layout, buffers, jax.devices("cpu")[1], apart)
        return codec.decode(frame.tree, frame.leaves)

    receive.decode = codec.decode
    return receive


def _survives(receive, *arguments):
    """Refused in one of the promised ways, or decoded; either way nothing ran."""
    with contextlib.suppress(ProtocolError, ForbiddenFunction):
        receive(*arguments)
    assert nameable.CALLS == []


# --- good frames, damaged ---


def _good_frames():
    array = np.linspace(0, 1, 12).reshape(3, 4)
    values = [
        ((array, array.astype(np.float32)), {"scale": 2.5}),
        (jnp.asarray(array, jnp.float32), jax.random.key(3), jnp.ones(3, jnp.bfloat16)),
        [nameable.Color.RED, nameable.Pair(1, {2, "x"}), 3**200, "text" * 2000],
        (nameable.add, nameable.compiled, min, slice(1, 2), np.float32(1), 2 - 1j),
        {"big": np.zeros(9000, np.int64), "empty": np.zeros((0, 3)), "b": b"\0" * 5000},
        describe(KeyError("k"), "worker1"),
        [ValueError("x"), np.dtype("int8"), np.int8, frozenset({1}), range(3), ...],
    ]
    codec = Codec(FunctionTable(allow=["tests"]))
    frames = []
    for value in values:
        frame = Frame("call", 5, {"deadline": 1.0}, *codec.encode(value))
        frames += map(b"".join, (framing.pack(frame), pack_apart(frame)[0]))
    return frames


GOOD = _good_frames()


def test_the_good_ones_are_good(worker):
    """Undamaged they all arrive: the fuzzer begins where it should."""
    for data in GOOD:
        worker(data)


_places = st.integers(0, 2**32)
_damage = st.one_of(
    st.tuples(st.just("flip"), _places, st.integers(0, 7)),
    st.tuples(st.just("set"), _places, st.integers(0, 255)),
    st.tuples(st.just("cut"), _places, _places),
    st.tuples(st.just("put"), _places, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("end"), _places, st.none()),
)


def _damaged(data, kind, place, how):
    """In the prefix, the header or the body: most often where it matters."""
    data = bytearray(data)
    reach = max(min(len(data), 400), 1)
    place = place % reach if place % 3 else place % max(len(data), 1)
    if kind == "flip" and data:
        data[place] ^= 1 << how
    elif kind == "set" and data:
        data[place] = how
    elif kind == "cut":
        del data[place : place + how % 20]
    elif kind == "put":
        data[place:place] = how
    else:
        del data[place:]
    return bytes(data)


@fuzz(max_examples=5000)
@given(st.sampled_from(GOOD), st.lists(_damage, min_size=1, max_size=4))
def test_damaged_frames(worker, data, damages):
    """Bits flipped, bytes lost, added and changed, ends missing."""
    for damage in damages:
        data = _damaged(data, *damage)
    _survives(worker, data)


# --- headers and trees that are well-formed, and hostile ---

NAMES = [
    "os:system", "builtins:eval", "builtins:min", "builtins:ValueError",
    "jax.numpy:add", "subprocess:Popen", "", "x", f"{HERE}:imported_function",
    f"{HERE}:module.Popen",
    *(f"{HERE}:{name}" for name in (
        "add", "Point", "Frozen", "Pair", "Color", "Access", "Line", "Counter", "Table",
        "TwoArguments", "FrozenError", "WithState", "Plain", "Level", "instance",
        "Counter.make", "Counter.danger", "add.__globals__")),
]  # fmt: skip
WORDS = ["x", "y", "hidden", "RED", "shifted", "origin", "__class__", "threefry2x32",
         "float32", "bool", "O", "<U4", "type", "args", "state", "f4,f4"]  # fmt: skip
_names, _words = st.sampled_from(NAMES), st.sampled_from(WORDS)
_odd = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(-(2**63), 2**64 - 1),
    st.floats(), _names, _words, st.text(max_size=5), st.binary(max_size=9),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2), st.just([]),
    st.lists(st.integers(-1, 40), max_size=4),
)  # fmt: skip

# What follows each code: tree, name, word, index of a leaf, bytes, anything odd.
SHAPES = {
    codes.LEAF: "i", codes.TUPLE: "tt", codes.LIST: "ttt", codes.SET: "tt",
    codes.FROZENSET: "t", codes.DICT: "tttt", codes.ORDERED_DICT: "tt",
    codes.DEFAULT_DICT: "ttt", codes.BIG_INT: "t", codes.COMPLEX: "oo",
    codes.RANGE: "ttt", codes.SLICE: "ttt", codes.ELLIPSIS: "", codes.BYTES: "i",
    codes.TEXT: "i", codes.BYTE_ARRAY: "t", codes.SCALAR: "wb", codes.DTYPE: "w",
    codes.DTYPE_CLASS: "w", codes.KEY: "wt", codes.REFERENCE: "n", codes.METHOD: "tw",
    codes.PARTIAL: "ttt", codes.DATACLASS: "nwtwtwt", codes.NAMEDTUPLE: "ntt",
    codes.ENUM: "nt", codes.PYTREE: "ntt", codes.EXCEPTION: "t",
    codes.REGISTERED: "wt", codes.PICKLE: "t",
}  # fmt: skip


@st.composite
def _tree_strategy(draw, depth=4):
    """A node as its code wants it, but for one part in sixteen, down to scalars."""
    if not depth or not draw(st.integers(0, 4)):
        return draw(_odd)
    code = draw(st.sampled_from(list(SHAPES)))
    below = _tree_strategy(depth - 1)
    kinds = {"t": below, "n": _names, "w": _words, "i": st.integers(0, 3),
             "b": st.binary(max_size=8), "o": _odd}  # fmt: skip
    parts = [
        draw(_odd if not draw(st.integers(0, 15)) else kinds[kind])
        for kind in SHAPES[code]
    ]
    return [code, *parts][: draw(st.sampled_from([9, 9, 9, 9, 9, 9, 3, 2]))]


_trees = _tree_strategy()
LEAVES = [np.arange(3.0), np.frombuffer(b"ab\xff", np.uint8), jnp.arange(4.0)]


@fuzz(max_examples=2500)
@given(_trees)
def test_hostile_trees(worker, tree):
    """Any nesting of codes, names and values, beside leaves of three kinds."""
    _survives(worker.decode, tree, LEAVES)


_DESCRIPTION = describe(ValueError("x"), "w")


@fuzz(max_examples=500)
@given(st.dictionaries(st.sampled_from(list(_DESCRIPTION)), _trees, min_size=1))
def test_hostile_exceptions(worker, changes):
    """Descriptions of exceptions with any field replaced."""
    plain = {**_DESCRIPTION, "args": [codes.TUPLE, "x"], "state": [codes.DICT]}
    plain["notes"] = [codes.LIST]
    pairs = [part for pair in {**plain, **changes}.items() for part in pair]
    _survives(worker.decode, [codes.EXCEPTION, [codes.DICT, *pairs]], LEAVES)


_dtypes = st.sampled_from(
    ["float32", "int8", "bool", "bfloat16", "int4", "float0", "complex128", "<U3",
     "|S0", "<M8[s]", ">f8", "O", "V8", "f4,f4", "", "float6_e2m3fn"]
)  # fmt: skip
_extent = st.one_of(
    st.integers(0, 4), st.sampled_from([2**15, 2**31, 2**62, 2**64 - 1])
)
_described = st.tuples(
    st.integers(0, 7), _dtypes, st.lists(_extent, max_size=4).map(tuple)
)


@fuzz(max_examples=1500)
@given(st.lists(_described, max_size=5), _trees, st.sampled_from([0, 0, 0, 1, 64]))
def test_hostile_headers(worker, leaves, tree, more):
    """Any arrays announced, with a body that fits them or not."""
    slab = large = 0
    for flags, dtype, shape in leaves:
        nbytes = _size(dtype, shape)
        if flags & 2:
            continue
        if nbytes >= 1 << 15:
            large += nbytes
        else:
            slab += -slab % 16 + nbytes
    header = msgspec.msgpack.encode(["call", 1, {}, tree, False, leaves])
    body = slab + large + more
    prefix = len(header).to_bytes(framing.PREFIX_BYTES, "little")
    _survives(worker, prefix + header + bytes(min(body, LIMITS.body_bytes)))


def _size(dtype, shape):
    try:
        itemsize = framing.dtype_named(dtype).itemsize
    except ProtocolError:
        itemsize = 1
    return itemsize * functools.reduce(lambda a, b: a * b, shape, 1)


# --- noise ---


@fuzz(max_examples=500)
@given(st.binary(max_size=300), st.booleans())
def test_noise(worker, data, with_prefix):
    """Random bytes, alone or behind a prefix that announces them."""
    if with_prefix:
        data = len(data).to_bytes(framing.PREFIX_BYTES, "little") + data
    _survives(worker, data)


# --- sizes that would not fit ---


@pytest.mark.parametrize("announced", [2**21, 2**40, 2**60, 2**64 - 1])
def test_nothing_is_allocated_for_what_is_announced(monkeypatch, announced):
    """The header is refused, however it says so."""
    monkeypatch.setattr(framing, "aligned", None)
    monkeypatch.setattr(framing, "bytearray", None, raising=False)
    for shape in ([announced], [1, announced, 2], [0, announced], [2**32, announced]):
        for flags in range(8):
            header = ["call", 1, {}, None, False, [[flags, "int8", shape]]]
            data = msgspec.msgpack.encode(header)
            with pytest.raises(ProtocolError, match="is beyond this worker's limit"):
                framing.allocate(framing.parse_header(data, LIMITS), LIMITS)


@pytest.mark.parametrize("opening", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"])
def test_counts_in_a_header_are_not_believed(opening):
    """An array, map, bytes or text of 4 G elements that are not there."""
    data = b"\x96\xa1c\x01\x80" + opening + b"\xff\xff\xff\xff"
    with pytest.raises(ProtocolError, match="cannot be read"):
        framing.parse_header(data, framing.Limits())


def test_nested_counts_are_not_believed():
    """Each level claims the whole rest of the header as its elements."""
    size = 1 << 20
    nested = bytearray(b"\x96\xa1c\x01\x80")
    while len(nested) < 4000:
        nested += b"\xdd" + (size - len(nested) - 5).to_bytes(4, "big")
    nested += b"\xc0" * (size - len(nested))
    with pytest.raises(ProtocolError, match="cannot be read"):
        framing.parse_header(nested, framing.Limits())

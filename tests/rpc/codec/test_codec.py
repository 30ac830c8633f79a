"""What arrives is what was sent: scalars and containers, hooks and pickles."""

import collections
import functools
import math
import threading
import types

import numpy as np
import pytest

from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.codec import Codec, codes
from jdist.rpc.codec.functions import FunctionTable
from tests.rpc import nameable
from tests.rpc.carriers import CARRIERS, assert_same, by_wire


@pytest.fixture
def codec():
    return Codec(FunctionTable(allow=["tests"]))


@pytest.fixture(params=CARRIERS, ids=lambda carrier: carrier.__name__)
def there(request, codec):
    """Sends a value from one worker to another."""

    def send(value, device=None):
        return codec.decode(*request.param(*codec.encode(value), device))

    return send


PLAIN = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    3**2000,
    -(2**40000),
    1.5,
    -0.0,
    math.inf,
    1e-310,
    2 - 3.5j,
    "",
    "text\n\0",
    "smörgås 🎂",
    "half a pair \ud800",
    "é" * 5000,
    b"",
    b"\x00\xff",
    bytes(range(256)) * 40,
    bytearray(b"abc"),
    bytearray(5000),
    range(3, 2**70, 7),
    slice(None, 5, -1),
    slice("a", (1, 2)),
    ...,
    (),
    [],
    {},
    (1, [2, (3,)], {"k": []}),
    {"z": 1, "a": 2, 3: "x", (1, "b"): None, None: 0, b"k": 1.0},
    {1, "a", (2, 3)},
    frozenset({frozenset(), 1.5}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"k": [1]}),
    collections.defaultdict(None, {"k": 1}),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(there, value):
    """Types, order and values of Python's own things are kept."""
    assert_same(there(value), value)


def test_nan_keeps_its_bits(there):
    """A NaN with a payload is the same NaN."""
    (nan,) = np.array([0x7FF8_0000_0000_00AB], np.uint64).view(np.float64).tolist()
    assert_same(there([nan]), [nan])


def test_default_dict_has_its_factory(there):
    """A missing key makes what it would have made at the sender."""
    received = there(collections.defaultdict(list, {"a": [1]}))
    received["new"].append(2)
    assert received == {"a": [1], "new": [2]}


def test_a_set_of_many_kinds_of_keys(there):
    """Whatever can be hashed can be a key, enums and dtypes too."""
    value = {nameable.Color.RED: 1, np.dtype("int8"): 2, nameable.Pair(1, 2): 3}
    assert_same(there(value), value)


@pytest.mark.parametrize(
    "make",
    [lambda: (i for i in range(3)), threading.Lock, object, lambda: math,
     lambda: collections.deque([1]), lambda: collections.Counter("a"),
     lambda: nameable.Plain(3), lambda: memoryview(b"a")],
)  # fmt: skip
def test_what_cannot_travel_is_refused_with_its_kind(codec, make):
    """With the type's name and the ways out, not with its contents."""
    value = make()
    module = type(value).__module__
    home = "" if module == "builtins" else f" of {module}"
    shown = f"Got an? {type(value).__qualname__}{home}\\."
    with pytest.raises(TypeError, match=rf"{shown}.*dataclass.*RRef.*allow_pickle"):
        codec.encode([value])


class _Text(str):
    pass


class _Number(int):
    pass


@pytest.mark.parametrize("value", [_Text("a"), _Number(3)])
def test_subclasses_do_not_lose_their_class(codec, value):
    """Better refused than arriving as something else."""
    with pytest.raises(TypeError, match="must be made of scalars"):
        codec.encode(value)


def test_values_that_contain_themselves(codec):
    """A cycle ends in an error, not in a full stack."""
    cycle = []
    cycle.append({"again": cycle})
    with pytest.raises(ValueError, match="nested that deeply, nor contain itself"):
        codec.encode(cycle)


@pytest.mark.parametrize("depth", [1, 30, 100])
def test_the_limit_of_depth_is_exact(depth):
    """As deep as allowed arrives; one deeper is refused on either side."""
    sender = Codec(FunctionTable(), depth=depth + 1)
    receiver = Codec(FunctionTable(), depth=depth)
    nest = functools.reduce(lambda inner, _: [inner], range(depth), 5)
    assert_same(receiver.decode(*by_wire(*receiver.encode(nest))), nest)
    with pytest.raises(ValueError, match="nested"):
        receiver.encode([nest])
    tree, leaves = sender.encode([nest])
    with pytest.raises(ProtocolError, match="nested too deeply"):
        receiver.decode(tree, leaves)


def test_pickle_only_when_asked_for(codec):
    """A worker that does not allow pickles neither writes nor reads one."""
    liberal = Codec(FunctionTable(), allow_pickle=True)
    sent = [nameable.Plain({"a": 1}), np.ones(3), collections.deque([1])]
    tree, leaves = liberal.encode(sent)
    got = liberal.decode(*by_wire(tree, leaves))
    assert got[0].x == {"a": 1}
    assert_same(got[1:], sent[1:])
    with pytest.raises(ForbiddenFunction, match="must not be a pickle"):
        codec.decode(tree, leaves)


def test_pickle_takes_what_the_rules_refuse():
    """Functions of any module, cycles and all: that is what was asked for."""
    liberal = Codec(FunctionTable(), allow_pickle=True)
    value = [nameable.add, nameable.Point(1, [2]), nameable.Plain(None).method]
    got = liberal.decode(*by_wire(*liberal.encode(value)))
    assert got[0] is nameable.add
    assert_same(got[1], value[1])
    assert got[2]() is None


def test_a_failed_attempt_leaves_no_arrays_behind():
    """What the rules began to encode before they refused it is not sent."""
    liberal = Codec(FunctionTable(allow=["tests"]), allow_pickle=True)
    array, kept = np.arange(3.0), np.arange(4.0)
    value = [nameable.Pair(array, lambda: 0), kept]
    with pytest.raises(TypeError, match="at least be something that pickle takes"):
        liberal.encode(value)
    half = nameable.Pair(array, collections.deque([threading]))
    with pytest.raises(TypeError, match="cannot pickle"):
        liberal.encode(half)
    deep = nameable.Pair(array, functools.reduce(lambda x, _: [x], range(200), 0))
    tree, leaves = liberal.encode([deep, kept])
    assert [leaf is kept for leaf in leaves] == [True]
    assert_same(liberal.decode(tree, leaves), [deep, kept])


def test_a_broken_pickle_is_a_protocol_error():
    """An unreadable pickle does not look like a failure of the called function."""
    liberal = Codec(FunctionTable(), allow_pickle=True)
    with pytest.raises(ProtocolError, match="value cannot be made"):
        liberal.decode([codes.PICKLE, b"junk"], [])


class _Reference:
    """Stands for RRef: has a form of its own on the wire."""

    def __init__(self, key):
        self.key = key

    def __reduce__(self):
        raise TypeError("Can not pickle rref in python pickler")


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_registered_types(allow_pickle):
    """The hooks run once for each object that goes and comes."""
    codec = Codec(FunctionTable(), allow_pickle=allow_pickle)
    seen = []

    def encode(reference, message):
        message.append(reference.key)
        seen.append(reference.key)
        return (reference.key, np.arange(3))

    def decode(value, message):
        message.append(value[0])
        seen.append(value)
        return _Reference(value[0])

    codec.register(_Reference, "rref", encode, decode)
    sent, arrived = [], []
    tree, leaves = codec.encode({"r": [_Reference(5), _Reference(6)]}, sent)
    got = codec.decode(*by_wire(tree, leaves), arrived)
    assert sent == arrived == [5, 6]
    assert [reference.key for reference in got["r"]] == [5, 6]
    assert seen[:2] == [5, 6]
    assert_same(seen[2:], [(5, np.arange(3)), (6, np.arange(3))])


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_what_hooks_raise_comes_through(allow_pickle):
    """A deleted reference refuses to go, one to a stranger to come."""
    codec = Codec(FunctionTable(), allow_pickle=allow_pickle)

    def fail(value, message):
        raise RuntimeError(f"cannot fork {value!r}")

    codec.register(_Reference, "out", fail, lambda value, message: value)
    with pytest.raises(RuntimeError, match="cannot fork"):
        codec.encode([_Reference(1)])
    codec.register(nameable.Plain, "in", lambda plain, message: plain.x, fail)
    tree, leaves = codec.encode((nameable.Plain(3),))
    with pytest.raises(RuntimeError, match="cannot fork 3"):
        codec.decode(tree, leaves)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_substitute_goes_and_stays(allow_pickle):
    """What its hook raises comes through, and it may be of a registered type."""
    codec = Codec(FunctionTable(), allow_pickle=allow_pickle)
    codec.substitute(
        nameable.Plain, lambda plain, message: _Reference(plain.x + message)
    )
    codec.register(_Reference, "rref", lambda r, _: 10 * r.key, lambda v, _: (v,))
    plain = codec.encode([nameable.Plain(3), nameable.Plain(4)], 1)
    assert codec.decode(*by_wire(*plain)) == [(40,), (50,)]
    with pytest.raises(TypeError, match="unsupported operand"):
        codec.encode(nameable.Plain(3), None)


def test_a_read_only_view_arrives_as_a_dictionary(there):
    sent = {"a": [1, 2], "b": {3}}
    arrived = there(types.MappingProxyType(sent))
    assert type(arrived) is dict
    assert arrived == sent


class Cell:
    """Hashed by identity, which does not travel."""


@pytest.mark.parametrize("how", ["substituted", "registered"])
def test_what_arrives_as_something_else_is_no_key(how):
    codec = Codec(FunctionTable())
    if how == "substituted":
        codec.substitute(Cell, lambda cell, message: {"of": "a cell"})
    else:
        codec.register(Cell, "cell", lambda *_: 1, lambda *_: Cell(), key=False)
    codec.encode([Cell(), {"cell": Cell()}])
    for lost in (
        {Cell(): 1},
        collections.OrderedDict({"a": 1, Cell(): 2}),
        collections.defaultdict(list, {Cell(): 1}),
        types.MappingProxyType({Cell(): 1}),
        {Cell()},
        frozenset({1, Cell()}),
        [{"deep": {Cell(): 1}}],
    ):
        with pytest.raises(
            TypeError, match="must have no Cell as a key or in a set: i"
        ):
            codec.encode(lost)


def test_short_lived_arrays_are_not_mixed_up(codec):
    """Hooks make arrays that nobody else keeps: an id must not be met again."""
    codec.register(
        nameable.Plain, "plain", lambda p, _: np.full(3, p.x), lambda a, _: a
    )
    tree, leaves = codec.encode([nameable.Plain(i) for i in range(100)])
    got = codec.decode(tree, leaves)
    assert [int(a[0]) for a in got] == list(range(100))


def test_registering_twice(codec):
    """One code means one type."""
    codec.register(_Reference, "rref", str, str)
    with pytest.raises(ValueError, match=r"register\(code=...\).*must be new"):
        codec.register(nameable.Plain, "rref", str, str)


def test_a_peer_with_more_types(codec):
    """A code that only the sender registered is named."""
    other = Codec(FunctionTable())
    other.register(_Reference, "rref", lambda r, _: r.key, _Reference)
    with pytest.raises(ProtocolError, match="No type is registered as 'rref'"):
        codec.decode(*other.encode(_Reference(1)))

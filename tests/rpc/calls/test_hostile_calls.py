"""A member of the group goes mad: it knows the key, and sends what no worker sends.

The worker under attack and its coordinator live in this process, an honest worker in
another one calls it all the time. Every frame is answered with an error, or its
channel is closed; nothing runs, nothing is left, and the honest one notices nothing.
"""

import contextlib
import math
import pickle
import threading
from collections import Counter

import numpy as np
import pytest

from jdist import autograd, pipeline, rpc
from jdist.data_parallel.elasticity import replica_group
from jdist.rpc.base import current, thread_pool
from jdist.rpc.calls.callee import TAKE_BACK
from jdist.rpc.codec import Codec, codes
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import rebuild
from jdist.rpc.group.coordinator import NAME
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import ERROR, REPLY, Frame
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc import nameable
from tests.rpc.hosts import be_one_of
from tests.rpc.sockets import descriptors, nothing_left, soon, stacks, wait_until

HERE = "tests.rpc.nameable"
KEY = rpc.new_cluster_key()
NO_KEYWORDS = [codes.DICT]
_stop = threading.Event()
_doubled = []


def double(x):
    _doubled.append(None)
    return 2 * x


def be_honest(port, key):
    """Calls the worker under attack until it is told to stop."""
    be_one_of(1, 2, port, key=key)
    turns = 0
    while not (_stop.is_set() and turns):
        turns += 1
        array = np.arange(float(turns % 50))
        for start in (rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait()):
            assert np.array_equal(start("worker0", double, (array,)), 2 * array)
    rpc.shutdown()
    return turns


def stop():
    _stop.set()


class Mad:
    """Sends frames as "worker1", on a channel of its own each."""

    def __init__(self, address):
        self.address = address
        self._transport = SocketTransport("worker1", KEY.encode())
        self._codec = Codec(FunctionTable(["tests"]))

    def channel(self):
        return self._transport.connect("", self.address, soon())

    def ask(self, frame):
        """The answer to a frame as a value or an exception; None if it was closed."""
        channel = self.channel()
        try:
            channel.send(frame)
            answer = channel.receive(soon())
        except ChannelClosed:
            return None
        except TimeoutError as error:
            raise AssertionError(f"No answer to {frame}.\n{stacks()}") from error
        finally:
            channel.close()
        value = self._codec.decode(answer.tree, answer.leaves)
        return rebuild(value, self._codec.functions) if answer.kind == ERROR else value

    def call(self, function, *args):
        """Asks for a call; `function` and `args` are trees."""
        body = [codes.TUPLE, function, [codes.TUPLE, *args], NO_KEYWORDS]
        return self.ask(Frame("call", 1, {}, body, []))

    def close(self):
        self._transport.close()


@pytest.fixture(scope="module")
def group(host_processes):
    """The worker under attack; the honest one calls it meanwhile."""
    with (
        pytest.MonkeyPatch.context() as patch,
        nothing_left(),
        ReservedPort() as reserved,
    ):
        # Each attack's threads are to end before it counts as over.
        patch.setattr(thread_pool, "_IDLE_SECONDS", 0.01)
        calling = host_processes.start(1, be_honest, reserved.port, KEY)
        be_one_of(0, 2, reserved.port, key=KEY)
        try:
            yield current.worker()
            before = len(_doubled)
            wait_until(lambda: len(_doubled) > before + 4)  # two turns
        finally:
            rpc.rpc_sync("worker1", stop)
            rpc.shutdown(timeout=30)
        assert calling.result() > 1


def served_by(agent):
    """How many channels come from "worker1", mad ones among them."""
    own = len(agent.directory.find("worker1")._idle)  # no call of its own is under way
    channels = agent._transport._connections.copy()
    return sum(channel.peer == "worker1" for channel in channels) - own


@pytest.fixture
def attacked(group):
    """The worker under attack, which has what it had when the test is over."""
    nameable.CALLS.clear()
    wait_until(lambda: served_by(group) == 2)  # both are the honest one's
    before, threads = set(descriptors().items()), _threads()
    yield group
    wait_until(lambda: served_by(group) == 2)
    wait_until(lambda: set(descriptors().items()) <= before)
    wait_until(lambda: _threads() <= threads)
    assert nameable.CALLS == []
    assert rpc.rpc_sync("worker1", double, args=(21,)) == 42


_COMING_AND_GOING = {"worker0 rpc", "rpc coordinator", f"{NAME} reads"}


def _threads():
    """By name; those that come and go with the honest one's calls left out."""
    names = (thread.name for thread in threading.enumerate())
    return Counter(name for name in names if name not in _COMING_AND_GOING)


@pytest.fixture(params=["worker", "coordinator"])
def mad(request, attacked):
    """Somebody with the key who knows where the worker or its coordinator listens."""
    yield from _mad(
        attacked if request.param == "worker" else attacked.group.coordinator
    )


@pytest.fixture
def caller(attacked):
    yield from _mad(attacked)


def _mad(target):
    mad = Mad(target.address)
    yield mad
    mad.close()


# --- calls of what must not be called ---


FORBIDDEN = [
    "os:system", "posix:system", "builtins:eval", "builtins:exec", "builtins:open",
    "subprocess:run", "importlib:import_module", "sys:exit", "pickle:loads",
    f"{HERE}:imported_function", f"{HERE}:Popen", f"{HERE}:module.Popen",
    f"{HERE}:Shell", f"{HERE}:QuietShell", f"{HERE}:Counter._aside",
    f"{HERE}:Counter.shell", f"{HERE}:add.__globals__", f"{HERE}:add.attribute",
    "jdist.rpc.processes.spawn:subprocess.Popen", "jdist.rpc:shutdown",
    "jax.numpy:load",
    f"{HERE}:absent", "tests.rpc.absent:f", "nowhere:f", "", ":",
]  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_functions_that_must_not_run(caller, tmp_path, name):
    call_log = tmp_path / "call_log"
    command = f"touch {call_log}"
    for function in (
        [codes.REFERENCE, name],
        [codes.PARTIAL, [codes.REFERENCE, name], [codes.TUPLE], NO_KEYWORDS],
        [codes.DATACLASS, name, "x", command],
        [codes.EXCEPTION, [codes.DICT, "type", name, "args", [codes.TUPLE, command]]],
    ):
        error = caller.call(function, command)
        assert isinstance(error, rpc.ForbiddenFunction | rpc.ProtocolError)
        error = caller.call([codes.REFERENCE, f"{HERE}:add"], function, "x")
        assert isinstance(error, rpc.ForbiddenFunction | rpc.ProtocolError)
    assert not call_log.exists()


class _Command:
    def __init__(self, command):
        self._command = command

    def __reduce__(self):
        return nameable.imported_function, (self._command,)


def test_pickles_that_nobody_asked_for(caller, tmp_path):
    call_log = tmp_path / "call_log"
    data = pickle.dumps(_Command(f"touch {call_log}"))
    error = caller.call([codes.REFERENCE, f"{HERE}:add"], [codes.PICKLE, data], 1)
    assert isinstance(error, rpc.ForbiddenFunction)
    assert "allow_pickle=False" in str(error)
    assert not call_log.exists()


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ([codes.REFERENCE, f"{HERE}:Counter"], "twice"),
        ([codes.REFERENCE, f"{HERE}:Counter"], "_make"),
        ([codes.REFERENCE, f"{HERE}:Counter"], "__subclasses__"),
        ([codes.REFERENCE, f"{HERE}:Point"], "mro"),
        ([codes.REFERENCE, f"{HERE}:add"], "__call__"),
        (7, "__class__"),
        ([codes.LIST, 1], "__reduce_ex__"),
    ],
)
def test_methods_that_must_not_run(caller, owner, method):
    error = caller.call([codes.METHOD, owner, method])
    assert isinstance(error, rpc.ForbiddenFunction)


# --- frames that are no requests ---


ADD = [codes.REFERENCE, f"{HERE}:add"]
ONE, TWO = [codes.TUPLE, 1], [codes.TUPLE, 1, 2]
TREES = {
    "nothing": None, "a number": 3, "a text": "x", "an empty list": [],
    "a code": [codes.TUPLE], "two parts": [codes.TUPLE, ADD, TWO],
    "four parts": [codes.TUPLE, ADD, TWO, NO_KEYWORDS, 1],
    "not callable": [codes.TUPLE, 5, TWO, NO_KEYWORDS],
    "no arguments": [codes.TUPLE, ADD, 7, NO_KEYWORDS],
    "keywords that are none": [codes.TUPLE, ADD, ONE, 7],
    "keywords of numbers": [codes.TUPLE, ADD, ONE, [codes.DICT, 2, 2]],
    "too few arguments": [codes.TUPLE, ADD, ONE, NO_KEYWORDS],
    "an array that is not there": [codes.TUPLE, ADD, [codes.TUPLE, [codes.LEAF, 4], 1],
                                   NO_KEYWORDS],
    "an unknown code": [codes.TUPLE, ADD, [codes.TUPLE, [99], 1], NO_KEYWORDS],
    "a code of text": [["call"], ADD],
    "odd pairs": [codes.TUPLE, ADD, ONE, [codes.DICT, "y"]],
    "an unknown extension": [codes.TUPLE, ADD,
                             [codes.TUPLE, [codes.REGISTERED, "x", 1]], NO_KEYWORDS],
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_bodies_that_are_no_calls(caller, name):
    error = caller.ask(Frame("call", 1, {}, TREES[name], []))
    assert isinstance(error, rpc.ProtocolError | TypeError)


def test_a_body_nested_too_deeply(caller):
    tree = 1
    for _ in range(400):
        tree = [codes.LIST, tree]
    assert isinstance(caller.call(ADD, tree, 1), rpc.ProtocolError | None)


ODD = (None, "x", -1, 0, 2**63, math.nan, math.inf, -math.inf, [], [[]], {}, {"a": 1})


@pytest.mark.parametrize("field", ["deadline", "firm", "ticket", "sizes", "names"])
def test_metadata_that_makes_no_sense(caller, field):
    """A deadline that is none does not count; one that has passed is too late."""
    body = [codes.TUPLE, ADD, TWO, NO_KEYWORDS]
    for odd in ODD:
        found = caller.ask(Frame("call", 1, {field: odd}, body, []))
        late = field == "deadline" and odd in (-1, 0)
        assert isinstance(found, rpc.RpcTimeout) if late else found == 3


@pytest.mark.parametrize("kind", [REPLY, ERROR, "cancel", "no such kind", ""])
def test_kinds_that_are_no_requests(mad, kind):
    channel = mad.channel()
    for number in (1, 1, 0, -1, 2**62):
        with contextlib.suppress(ChannelClosed):
            channel.send(Frame(kind, number, {}, None, []))
    channel.close()


PARTS = (autograd, pipeline, replica_group)
"""What registers kinds of its own when it is imported."""


def test_requests_of_every_kind_with_bodies_that_are_none(attacked, caller):
    """What parts built on rpc have registered as well."""
    kinds = set(attacked.callee._handlers)
    assert {"call", "debug.activity", TAKE_BACK} <= kinds
    assert {"autograd.backward", "elastic.report"} <= kinds
    for kind in sorted(kinds):
        for tree in (*TREES.values(), [codes.DICT], [codes.TUPLE, "worker0", 1, None]):
            for meta in ({}, {"ticket": 1, "deadline": 5.0}):
                found = caller.ask(Frame(kind, 1, meta, tree, []))
                if kind == "autograd.graph" and type(tree) is int:
                    # An integer is the id of an unknown context: its graph is empty.
                    assert found == ([], [])
                    continue
                # A request for counts asks nothing of its body.
                answers = list if kind == "calls without a deadline" else str | None
                assert isinstance(found, Exception | answers), (kind, tree)


# --- the coordinator ---


GATHER = {
    "names": ["worker0", "worker1"],
    "operation": "x",
    "tag": "",
    "timeout": 1.0,
    "refused": None,
}
JOIN = {
    "name": "worker1",
    "rank": 1,
    "world_size": 2,
    "address": ["127.0.0.1", 1],
    "timeout": 1.0,
}


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("group.join", JOIN),
        ("group.gather", GATHER),
        ("group.confirm", {"number": 1}),
        ("group.leave", {}),
        ("x", {}),
    ],
)
def test_requests_to_the_coordinator(attacked, kind, good):
    """Each field missing, or odd; a second worker1 never gets in."""
    mad = Mad(attacked.group.coordinator.address)
    try:
        metas = [good] + [
            {name: value for name, value in good.items() if name != left}
            for left in good
        ]
        metas += [good | {name: odd} for name in good for odd in ODD]
        for meta in metas:
            channel = mad.channel()
            with contextlib.suppress(ChannelClosed):
                if kind != "group.join":
                    channel.send(Frame("group.join", 1, JOIN, None, []))
                    assert channel.receive(soon()).kind == ERROR
                channel.send(Frame(kind, 2, meta, None, []))
                if kind == "group.join":
                    assert channel.receive(soon()).kind == ERROR
            channel.close()
    finally:
        mad.close()
    assert rpc.debug_info()["group.lost"] == {}


def test_a_stranger_with_the_key(attacked):
    """It is no member of the group, so nobody serves it."""
    stranger = SocketTransport("worker2", KEY.encode())
    try:
        channel = stranger.connect("worker0", attacked.address, soon())
        with pytest.raises(ChannelClosed, match="its connection"):
            channel.receive(soon())
        with pytest.raises(rpc.AuthenticationError, match="'worker0' listens where"):
            stranger.connect("worker1", attacked.address, soon())
    finally:
        stranger.close()


def test_a_header_larger_than_allowed(mad):
    channel = mad.channel()
    prefix = b"\xff\xff\xff\x7f" + bytes(12)
    channel._stream.send([prefix], soon())
    with pytest.raises(ChannelClosed, match="its connection"):
        channel.receive(soon())

"""One connection: frames in, frames out, whatever comes between."""

import fcntl
import itertools
import os
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.wire import memory
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Terms
from jdist.rpc.wire.frame import Frame, Limits, pack
from jdist.rpc.wire.stream import MOST_DESCRIPTORS, Stream
from tests.rpc.carriers import pack_apart
from tests.rpc.sockets import (
    Outcome,
    call,
    closed_by_peer,
    connected_pair,
    descriptors,
    nothing_left,
    raw_pair,
    soon,
)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture
def pair():
    with connected_pair() as ends:
        yield ends


@pytest.fixture
def raw():
    with raw_pair() as ends:
        yield ends


def _bytes(frame):
    return b"".join(pack(frame))


def _same(got, sent):
    assert replace(got, leaves=[]) == replace(sent, leaves=[])
    assert len(got.leaves) == len(sent.leaves)
    for one, other in zip(got.leaves, sent.leaves, strict=True):
        assert type(one) is type(other) or isinstance(one, jax.Array)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture(params=[False, True], ids=["copied", "memory"])
def either(request):
    with connected_pair(request.param) as ends:
        yield ends


@pytest.fixture
def memory_pair():
    with connected_pair(memory=True) as ends:
        yield ends


@pytest.fixture
def raw_memory():
    with raw_pair(memory=True) as ends:
        yield ends


def test_frames_of_every_size(either, rng):
    """Small and large arrays mixed, around every threshold, NumPy and JAX."""
    left, right = either
    sizes = [
        0,
        1,
        9,
        1000,
        (1 << 15) - 4,
        12_200,
        1 << 14,
        24_500,
        1 << 15,
        (1 << 16) + 1,
        1 << 20,
    ]
    sizes += [(memory.THRESHOLD >> 2) - 1, memory.THRESHOLD >> 2, 2_000_003]
    arrays = [rng.standard_normal(size, np.float32) for size in sizes]
    frames = [call(1 + i, array) for i, array in enumerate(arrays)]
    frames.append(call(50, *arrays, tree=["all", None, 1]))
    frames.append(call(51, jnp.asarray(arrays[3]), arrays[10], jnp.asarray(arrays[9])))
    frames.append(call(52, np.asfortranarray(rng.standard_normal((300, 70)))))
    for frame in frames:
        sending = Outcome(left.send, frame, soon())
        got = right.receive(soon())
        sending.get()
        _same(got, frame)
        assert all(a.flags.writeable for a in got.leaves if isinstance(a, np.ndarray))


def test_large_arrays_go_as_memory(memory_pair, rng):
    """Through the socket go the header, and arrays beyond a number."""
    left, right = memory_pair
    large = rng.standard_normal(memory.THRESHOLD // 8)
    # Nobody reads meanwhile, so what is not in the socket's buffer went elsewhere.
    left.send(call(1, large, large + 1), time.monotonic() + 60.0)
    _same(right.receive(soon()), call(1, large, large + 1))
    many = [large] * (MOST_DESCRIPTORS + 1)
    sending = Outcome(left.send, call(2, *many), soon())
    _same(right.receive(soon()), call(2, *many))
    sending.get()


def test_descriptors_end_with_exec(memory_pair, rng):
    """No program that is started meanwhile inherits a socket or memory."""
    before = descriptors()
    left, right = memory_pair
    large = rng.standard_normal(memory.THRESHOLD // 8)
    left.send(call(1, large), soon())
    frame = right.receive(soon())
    opened = [number for number in descriptors() if number not in before]
    flags = [fcntl.fcntl(number, fcntl.F_GETFD) for number in opened]
    # From Python 3.13 on a mapping keeps no descriptor of its own.
    assert len(flags) >= (2 if sys.version_info >= (3, 13) else 3)
    assert all(flag & fcntl.FD_CLOEXEC for flag in flags)
    del frame


def test_a_descriptor_ends_with_exec_from_the_start():
    """Also between its arrival and its use, when another thread may start a program."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    stream.passes_descriptors = True
    with theirs, open(os.devnull) as file:
        socket.send_fds(theirs, [b"x"], [file.fileno()])
        assert stream.receive_into(memoryview(bytearray(1)), soon()) == 1
        assert not os.get_inheritable(stream.descriptors[0])
    stream.close()


def test_many_frames_arrive_at_once(raw, rng):
    """They are cut apart however the bytes come."""
    ours, theirs = raw
    frames = [
        call(i, rng.standard_normal(int(rng.integers(0, 500)))) for i in range(1, 300)
    ]
    stream = b"".join(map(_bytes, frames))

    def send():
        rest = stream
        while rest:
            size = int(rng.integers(1, 3000))
            theirs.sendall(rest[:size])
            rest = rest[size:]

    sending = Outcome(send)
    for frame in frames:
        _same(ours.receive(soon()), frame)
    sending.get()


def test_a_header_larger_than_the_buffer(raw):
    """It is received, and the frames after it too."""
    ours, theirs = raw
    long = call(1, tree="x" * 300_000)
    sending = Outcome(theirs.sendall, _bytes(long) + _bytes(call(2, np.arange(5))))
    _same(ours.receive(soon()), long)
    _same(ours.receive(soon()), call(2, np.arange(5)))
    sending.get()


def test_many_threads_send(pair, rng):
    """Each frame arrives whole and once, each thread's in order."""
    left, right = pair
    arrays = [rng.standard_normal(100 + 3000 * i) for i in range(8)]

    numbers = itertools.count(1)

    def send(thread):
        for n in range(50):
            frame = Frame("call", next(numbers), {"n": n}, thread, [arrays[thread]])
            left.send(frame, soon())

    sending = [Outcome(send, thread) for thread in range(8)]
    next_of = [0] * 8
    for _ in range(8 * 50):
        frame = right.receive(soon())
        assert frame.meta["n"] == next_of[frame.tree]
        next_of[frame.tree] += 1
        np.testing.assert_array_equal(frame.leaves[0], arrays[frame.tree])
    for thread in sending:
        thread.get()


# --- answers and duplicates ---


def test_stale_answers_are_dropped(raw):
    """The answer to a request given up does not become the next one's."""
    ours, theirs = raw
    with pytest.raises(TimeoutError, match="nothing was received in time"):
        ours.exchange(call(1), time.monotonic() + 0.01)
    for number in (1, 1, 2, 3):
        theirs.sendall(_bytes(Frame("reply", number, {}, number, [])))
    assert ours.exchange(call(2), soon()).tree == 2
    assert ours.exchange(call(3), soon()).tree == 3


@pytest.mark.parametrize("kind", ["reply", "call"])
def test_what_is_no_answer_closes(raw, kind):
    """A request where an answer belongs, an answer that nobody asked for."""
    ours, theirs = raw
    theirs.sendall(_bytes(Frame(kind, 9, {}, None, [])))
    message = rf"Worker 'raw': it sent '{kind}' 9 for an answer to 1"
    with pytest.raises(ProtocolError, match=message):
        ours.exchange(call(1), soon())
    with pytest.raises(ChannelClosed, match=f"it sent '{kind}' 9"):
        ours.send(call(2))


def test_a_request_comes_once(raw):
    """Repeated numbers are ignored, in whatever order; answers and cancels are not."""
    ours, theirs = raw
    numbers = [1, 1, 0, 3, 2, 3, 0, 1, 4, 6, 2, 5, 6, 7]
    theirs.sendall(b"".join(_bytes(call(n)) for n in numbers))
    cancels = [Frame(kind, 3, {}, None, []) for kind in ("cancel", "reply", "error")]
    theirs.sendall(b"".join(map(_bytes, cancels)))
    got = [ours.receive(soon()) for _ in range(12)]
    assert [frame.id for frame in got[:9]] == [1, 0, 3, 2, 0, 4, 6, 5, 7]
    assert [frame.kind for frame in got[9:]] == ["cancel", "reply", "error"]


# --- limits ---


def test_limits_of_what_is_sent():
    """Refused before a byte is sent; the channel is as good as before."""
    terms = Terms(Limits(1000, 10_000, 3))
    with raw_pair(terms, memory=True) as (ours, theirs):
        for frame, message in (
            (call(1, tree="x" * 1000), "must have a header of at most 1000"),
            (
                call(1, np.zeros(1251)),
                "arrays of together at most 10000. Got 10008. Se",
            ),
            (
                call(1, np.zeros(1 << 20)),
                "arrays of together at most 10000. Got 8388608",
            ),
            (call(1, *[np.arange(2)] * 4), "a number of arrays of at most 3. Got 4"),
        ):
            with pytest.raises(ValueError, match=message):
                ours.send(frame)
        ours.send(call(1, np.arange(7)))
        frame = call(1, np.arange(7))
        assert theirs.recv(1 << 16) == _bytes(frame)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (call(1, tree="x" * 1000), r"header of 1\d+ is beyond .* limit of 1000"),
        (call(1, np.zeros(1251)), r"array of 10008 is beyond .* limit of 10000"),
        (call(1, *[np.arange(2)] * 4), r"arrays of 4 is beyond .* limit of 3"),
    ],
)
def test_limits_of_what_is_received(frame, message):
    """Refused before anything is allocated; the channel closes."""
    with raw_pair(Terms(Limits(1000, 10_000, 3))) as (ours, theirs):
        theirs.sendall(_bytes(frame))
        with pytest.raises(ProtocolError, match=message):
            ours.receive(soon())
        with pytest.raises(ChannelClosed, match="it sent what is no frame: "):
            ours.receive()
        closed_by_peer(theirs)


# --- memory descriptors of a hostile peer ---


def test_descriptors_that_are_missing(raw_memory, rng):
    """The header promises memory and none comes."""
    ours, theirs = raw_memory
    socket.send_fds(theirs, pack_apart(call(1, rng.standard_normal(10)))[0], [])
    with pytest.raises(ProtocolError, match="came without its memory descriptors"):
        ours.receive(soon())


def test_descriptors_where_none_were_agreed(raw):
    """Without a pool they are refused, and what the kernel passed on is dropped."""
    ours, theirs = raw
    with open(os.devnull) as file:
        socket.send_fds(theirs, pack(call(1, np.arange(3))), [file.fileno()] * 3)
        _same(ours.receive(soon()), call(1, np.arange(3)))
        pieces, _ = pack_apart(call(2, np.arange(3)))
        socket.send_fds(theirs, pieces, [file.fileno()])
        with pytest.raises(ProtocolError, match="came without its memory descriptors"):
            ours.receive(soon())


def test_descriptors_that_nobody_takes(raw_memory):
    """They are held up to a limit, then the channel closes and lets go of them."""
    ours, theirs = raw_memory
    before = len(descriptors())
    with open(os.devnull) as file:
        for number in range(1, 4):
            socket.send_fds(theirs, pack(call(number)), [file.fileno()] * 30)
        assert [ours.receive(soon()).id for _ in range(2)] == [1, 2]
        assert len(descriptors()) <= before + 1 + MOST_DESCRIPTORS
        with pytest.raises(ProtocolError, match="more than 64 memory descriptors"):
            ours.receive(soon())
        assert len(descriptors()) == before  # The file, less the socket given back.
    ours._pool.close()


def test_more_descriptors_than_there_is_room_for(raw_memory):
    """The kernel closes what does not fit and says so."""
    ours, theirs = raw_memory
    with open(os.devnull) as file:
        socket.send_fds(theirs, pack(call(1)), [file.fileno()] * 200)
        with pytest.raises(ProtocolError, match="more than 64 memory descriptors"):
            ours.receive(soon())


def test_a_file_in_place_of_memory(raw_memory):
    """Some other descriptor is refused and closed."""
    ours, theirs = raw_memory
    with open(os.devnull) as file:
        pieces, _ = pack_apart(call(1, np.arange(3), np.arange(4)))
        socket.send_fds(theirs, pieces, [file.fileno()] * 2)
        with pytest.raises(
            ProtocolError, match="memory descriptor has not its 24 byte"
        ):
            ours.receive(soon())

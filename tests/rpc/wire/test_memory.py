"""Memory descriptors: one copy, used again when and only when nobody holds it."""

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.wire import memory
from jdist.rpc.wire.memory import MemoryPool, receive
from tests.rpc.sockets import PATIENCE, descriptors, nothing_left, soon

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not memory.available(), reason="needs Linux's memory descriptors"
)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture
def pool():
    made = MemoryPool(budget=8 * MIB)
    yield made
    made.close()


def _array(rng, size=MIB + 12345):
    return rng.integers(0, 255, size, np.uint8)


def _send(pool, array):
    """What the other process would map."""
    descriptor = pool.lend(memoryview(array))
    return None if descriptor is None else receive(descriptor, array.nbytes)


def _blocks(pool):
    return [id(block) for block in pool._blocks]


def test_what_arrives_is_what_was_sent(pool, rng):
    """And it stays so when the sender's array changes."""
    sent = _array(rng)
    expected = sent.copy()
    received = np.frombuffer(_send(pool, sent), np.uint8)
    sent[:] = 0
    np.testing.assert_array_equal(received, expected)
    assert received.ctypes.data % 4096 == 0


def test_it_is_writable_and_private(pool, rng):
    """What one receiver writes no other receiver and no sender sees."""
    sent = _array(rng)
    descriptor = pool.lend(memoryview(sent))
    first = receive(os.dup(descriptor), sent.nbytes)
    second = receive(descriptor, sent.nbytes)
    np.frombuffer(first, np.uint8)[:] = 7
    np.testing.assert_array_equal(np.frombuffer(second, np.uint8), sent)
    assert set(bytes(first)) == {7}


def test_memory_is_used_again_when_it_was_dropped(pool, rng):
    """The same block serves array after array."""
    seen = set()
    for _ in range(20):
        sent = _array(rng, int(rng.integers(MIB, 2 * MIB)))
        received = _send(pool, sent)
        np.testing.assert_array_equal(np.frombuffer(received, np.uint8), sent)
        seen.update(_blocks(pool))
        del received
    assert len(seen) == 1


def test_memory_is_not_used_while_it_is_held(pool, rng):
    """By an array, a view of one, or a descriptor on its way."""
    first = _array(rng)
    received = np.frombuffer(_send(pool, first), np.uint8)
    part = received[5:7]
    del received
    second = _array(rng)
    on_its_way = pool.lend(memoryview(second))
    third = _array(rng)
    held = _send(pool, third)
    assert len(_blocks(pool)) == 3
    np.testing.assert_array_equal(part, first[5:7])
    arrived = receive(on_its_way, second.nbytes)
    np.testing.assert_array_equal(np.frombuffer(arrived, np.uint8), second)
    np.testing.assert_array_equal(np.frombuffer(held, np.uint8), third)
    del part
    fourth = _array(rng)
    assert _send(pool, fourth) is not None
    assert len(_blocks(pool)) == 3


def test_the_budget_holds(pool, rng):
    """Beyond it nothing is lent, until something is dropped."""
    held = [_send(pool, _array(rng)) for _ in range(5)]
    assert [part is None for part in held] == [False] * 4 + [True]
    assert pool._kept == 8 * MIB
    held.pop(1)
    sent = _array(rng)
    np.testing.assert_array_equal(np.frombuffer(_send(pool, sent), np.uint8), sent)
    assert _send(pool, _array(rng, 9 * MIB)) is None


def test_free_memory_makes_room_for_other_sizes(pool, rng):
    """Small blocks that nobody holds are dropped for a large one, held ones stay."""
    small = [_array(rng) for _ in range(3)]
    held = [_send(pool, array) for array in small]
    del held[1:]
    assert _send(pool, _array(rng, 6 * MIB)) is not None
    assert pool._kept == 8 * MIB
    assert len(_blocks(pool)) == 2
    np.testing.assert_array_equal(np.frombuffer(held[0], np.uint8), small[0])


def test_a_small_array_does_not_take_large_memory(pool, rng):
    """It would keep four times its size from being used."""
    large = _send(pool, _array(rng, 6 * MIB))
    del large
    small = _send(pool, _array(rng, MIB))
    assert small is not None
    assert len(_blocks(pool)) == 2


def test_threads_lend_at_once(rng):
    """Every receiver gets its own sender's bytes."""
    from concurrent.futures import ThreadPoolExecutor

    pool = MemoryPool()
    arrays = [_array(rng, MIB + 1000 * i) for i in range(8)]

    def rounds(array):
        return all(
            np.array_equal(np.frombuffer(_send(pool, array), np.uint8), array)
            for _ in range(20)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(rounds, arrays))
    pool.close()


def test_a_closed_pool(pool, rng):
    """What is lent lives on; nothing more is lent."""
    sent = _array(rng)
    received = _send(pool, sent)
    pool.close()
    np.testing.assert_array_equal(np.frombuffer(received, np.uint8), sent)
    assert _send(pool, sent) is None


_HOLDER = """
import mmap, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
_, (descriptor,), _, _ = socket.recv_fds(sock, 1, 1)
mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)
sock.send(mapped[:3])
sock.recv(1)
"""


def test_a_killed_receiver_holds_nothing(pool):
    """SIGKILL of the process that maps the memory sets it free."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    command = [sys.executable, "-c", _HOLDER, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as holder, ours, theirs:
        descriptor = pool.lend(memoryview(b"abc" * MIB))
        socket.send_fds(ours, [b"x"], [descriptor])
        os.close(descriptor)
        assert ours.recv(3) == b"abc"
        (block,) = pool._blocks
        assert not block.try_take()
        holder.send_signal(signal.SIGKILL)
        holder.wait(PATIENCE)
        assert block.try_take()


def test_an_undelivered_descriptor_holds_nothing(pool, rng):
    """It was under way in a socket that closed."""
    ours, theirs = socket.socketpair()
    descriptor = pool.lend(memoryview(_array(rng)))
    socket.send_fds(ours, [b"x"], [descriptor])
    os.close(descriptor)
    (block,) = pool._blocks
    assert not block.try_take()
    ours.close()
    theirs.close()
    until = soon()
    # The kernel may collect what was under way a little later.
    while not block.try_take():
        assert until > soon() - PATIENCE


def _file(size, seals=fcntl.F_SEAL_SHRINK):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _plain(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    return os.open(path, os.O_RDWR)


def test_what_is_no_such_memory_is_refused(tmp_path):
    """Too small, able to shrink, no memory at all; closed in every case."""
    before = descriptors().keys()
    for size in (101, 0, -1):
        with pytest.raises(ProtocolError, match=f"has not its {size} bytes"):
            receive(_file(100), size)
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        receive(_file(100, fcntl.F_SEAL_GROW), 100)
    with pytest.raises(ProtocolError, match=r"cannot be used: .*Invalid argument"):
        receive(_plain(tmp_path), 100)
    with pytest.raises(ProtocolError, match="has not its 100 bytes"):
        receive(socket.socket().detach(), 100)
    assert descriptors().keys() == before


def test_lent_memory_cannot_shrink(pool, rng):
    """So a sender cannot make a receiver's reads fail."""
    descriptor = pool.lend(memoryview(_array(rng)))
    with pytest.raises(PermissionError, match="not permitted"):
        os.ftruncate(descriptor, 0)
    assert os.get_inheritable(descriptor) is False
    os.close(descriptor)


def test_without_descriptors_the_socket_copies(pool, rng, monkeypatch):
    """Out of descriptors or memory: nothing is lent and nothing is broken."""

    def fail(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", fail)
        assert _send(pool, _array(rng)) is None
    assert pool._kept == 0
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        assert _send(pool, _array(rng)) is None
    assert _send(pool, _array(rng)) is not None


def test_a_platform_without_it(monkeypatch):
    """macOS has no memory descriptors, and a container may have no /proc."""
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert not memory.available()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(2, "no")))
        assert not memory.available()
    assert memory.available()

"""A channel beside a bare socket: what frames, proofs and memory descriptors cost.

An array travels to another process and back, each process on a core of its own.
"""

import contextlib
import itertools
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from benchmarks._harness import Case, race
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import REPLY, Frame
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.tls import TlsConfig

KIB = 1 << 10
SIZES = [36, 64 * KIB, *(mib * KIB * KIB for mib in (1, 2, 4, 8, 16, 64))]

BARE = "bare Unix socket"
MEMORY, COPIED = "Unix, memory descriptors", "Unix, copied"
TCP, TLS = "TCP on loopback", "TLS on loopback"


def measure() -> list[Case]:
    """Every route at every size; memory descriptors from `memory.THRESHOLD`."""
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    pairs = {size: socket.socketpair() for size in SIZES}
    told, tells = context.Pipe()
    theirs = {size: pair[1] for size, pair in pairs.items()}
    other = context.Process(target=_answer, args=(key, theirs, tells), daemon=True)
    with _on_core(0):
        other.start()
        addresses = told.recv()
        cases = [_case(size, pairs[size][0], addresses, key) for size in SIZES]
    for end in itertools.chain.from_iterable(pairs.values()):
        end.close()
    told.send(None)
    other.join()
    return cases


@contextlib.contextmanager
def _on_core(which: int) -> Iterator[None]:
    """Runs on one core, if the platform allows pinning."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[which % len(before)]})
    yield
    os.sched_setaffinity(0, before)


def _case(size: int, bare: socket.socket, addresses: Any, key: bytes) -> Case:
    array = np.random.default_rng(size).standard_normal(size // 4, np.float32)
    small = size < KIB * KIB
    with contextlib.ExitStack() as stack:
        contenders = {BARE: _bare_echo(bare, array)}
        for route, (name, address) in addresses.items():
            tls = TlsConfig() if route == TLS else None
            here = stack.enter_context(SocketTransport("here", key, tls=tls))
            if route == COPIED:
                here._pool = None  # the peer then sends no descriptors either
            channel = here.connect(name, address, time.monotonic() + 60.0)
            contenders[route] = _echo(channel, array)
        timings = race(contenders, rounds=40, calls=100 if small else 1, warmup=5)
    return Case(f"{_sized(size)} there and back", timings)


def _sized(size: int) -> str:
    return f"{size} B" if size < KIB else f"{size // KIB} KiB"


def _echo(channel: Channel, array: np.ndarray) -> Callable[[], None]:
    numbers = itertools.count(1)

    def call() -> None:
        request = Frame("call", next(numbers), {"deadline": 60.0}, None, [array])
        channel.exchange(request, time.monotonic() + 60.0)

    return call


def _bare_echo(sock: socket.socket, array: np.ndarray) -> Callable[[], None]:
    """Sends the same bytes into preallocated memory."""
    there, back = array.data.cast("B"), memoryview(bytearray(array.nbytes))

    def call() -> None:
        sock.sendall(there)
        _fill(sock, back)

    return call


def _fill(sock: socket.socket, view: memoryview) -> bool:
    while view:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            return False
        view = view[got:]
    return True


# --- the other process ---


def _answer(key: bytes, bare: dict[int, socket.socket], tells: Pipe) -> None:
    with _on_core(1), contextlib.ExitStack() as stack:
        plain = stack.enter_context(SocketTransport("plain", key))
        secured = stack.enter_context(SocketTransport("secured", key, tls=TlsConfig()))
        for transport in (plain, secured):
            transport.serve(_serve)
        for size, sock in bare.items():
            thread = threading.Thread(target=_answer_bare, args=(sock, size))
            thread.start()
            stack.callback(thread.join)
        tells.send({
            MEMORY: ("plain", plain.address),
            COPIED: ("plain", plain.address),
            TCP: ("plain", plain.address[:2]),
            TLS: ("secured", secured.address[:2]),
        })  # fmt: skip
        tells.recv()


def _serve(channel: Channel) -> None:
    try:
        while True:
            frame = channel.receive()
            channel.send(Frame(REPLY, frame.id, {}, frame.tree, frame.leaves))
            del frame  # its memory may be reused at once
    except ChannelClosed:
        channel.close()


def _answer_bare(sock: socket.socket, size: int) -> None:
    view = memoryview(bytearray(size))
    with sock:
        while _fill(sock, view):
            sock.sendall(view)

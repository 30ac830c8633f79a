"""What tests of the socket transport share: peers, raw ends, and what is left over."""

import contextlib
import gc
import inspect
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import unittest.mock
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.memory import MemoryPool
from jdist.rpc.wire.silent_connections import SilentConnections
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.stream import Stream
from jdist.rpc.wire.tls import TlsConfig

KEY = secrets.token_bytes(32)
PATIENCE = 60.0  # Of what must happen. Nothing waits this long unless it fails.

ROUTES = ("unix", "tcp", "tls")
SILENT = SilentConnections((), ThreadPool("readers", 1))


def soon():
    """A deadline that only a failure reaches."""
    return time.monotonic() + PATIENCE


def wait_until(condition):
    """Returns when the condition holds, fails when it never does."""
    deadline, pause = soon(), threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.002)


def stacks():
    """What every thread of this process is doing, for the message of a failure."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def descriptors():
    """The open descriptors of this process and what they lead to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The listing's own is gone by now.
            found[int(entry.name)] = os.readlink(entry)
    return found


@contextlib.contextmanager
def nothing_left():
    """Fails if descriptors or threads remain that were not there before."""
    jax.block_until_ready(jax.device_put(np.ones(3)))  # Opens what JAX needs.
    before, threads = descriptors(), set(threading.enumerate())
    yield
    until, pause = time.monotonic() + PATIENCE, threading.Event()
    while time.monotonic() < until:
        left = set(threading.enumerate()) - threads
        more = {n: to for n, to in descriptors().items() if before.get(n) != to}
        if not left and not more:
            return
        gc.collect()
        pause.wait(0.01)
    raise AssertionError(f"left over: {left}, {more}")


def blocked(thread, function):
    """Waits until the thread sleeps in the kernel within a function."""
    wait_until(lambda: _sleeps(thread, function))


def _sleeps(thread, function):
    # Its state alone would not do: a thread that waits for the interpreter sleeps too,
    # and may be anywhere.
    frame, code = sys._current_frames().get(thread.ident), inspect.unwrap(function)
    while frame is not None and frame.f_code is not code.__code__:
        frame = frame.f_back
    main = thread is threading.main_thread()  # whose id is the process's, also forked
    state = Path(f"/proc/self/task/{os.getpid() if main else thread.native_id}/stat")
    return frame and state.read_text().rpartition(") ")[2][0] == "S"


@contextlib.contextmanager
def names_unknown_at_first(looks=5):
    """Names that end in ".svc" lead to this machine, after so many looks in vain."""
    plain, seen = socket.getaddrinfo, Counter()

    def look_up(host, *args, **options):
        if not str(host).endswith(".svc"):
            return plain(host, *args, **options)
        seen[host] += 1
        if seen[host] <= looks:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return plain("127.0.0.1", *args, **options)

    with unittest.mock.patch("socket.getaddrinfo", look_up):
        yield


@contextlib.contextmanager
def interrupted_in(function):
    """Ctrl-C for the main thread, once it sleeps in the kernel within a function."""
    # Not after a time: it might not be there yet.
    main = threading.main_thread()

    def interrupt():
        blocked(main, function)
        signal.pthread_kill(main.ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        yield
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


class Outcome:
    """A function on a thread of its own; `get` gives its result or raises its error."""

    def __init__(self, function, *args):
        self._function = function
        self._args = args
        self._result = self._error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self._result = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 (`get` raises it)
            self._error = error

    def get(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


def echo(channel):
    """Answers every request with what it brought."""
    try:
        while True:
            frame = channel.receive()
            channel.send(Frame("reply", frame.id, {}, frame.tree, frame.leaves))
            del frame  # Or its memory is held until the next one comes.
    except (ChannelClosed, ProtocolError):
        channel.close()


class Peers:
    """Two transports, "here" and "there", the second of which serves."""

    def __init__(self, route="unix", on_channel=echo, key=KEY, **settings):
        settings.setdefault("tls", TlsConfig() if route == "tls" else None)
        self.route = route
        self.here = SocketTransport("here", key, **settings)
        self.there = SocketTransport("there", key, **settings)
        self.there.serve(on_channel)

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.here.close()
        self.there.close()

    @property
    def address(self):
        return self.there.address if self.route == "unix" else self.there.address[:2]

    def connect(self):
        return self.here.connect("there", self.address, soon())


@contextlib.contextmanager
def raw_pair(terms=None, memory=False):
    """A connection, and the bare socket at its other end."""
    pool = MemoryPool() if memory else None
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    stream.passes_descriptors = memory
    theirs.settimeout(PATIENCE)
    connection = Connection(stream, "raw", terms or Terms(), SILENT, pool)
    try:
        with theirs:
            yield connection, theirs
    finally:
        connection.close()
        if pool is not None:
            pool.close()


@contextlib.contextmanager
def connected_pair(memory=False):
    """Two connections with each other."""
    pool = MemoryPool() if memory else None
    ends = []
    for end, name in zip(socket.socketpair(), ("left", "right"), strict=True):
        stream = Stream(end)
        stream.passes_descriptors = memory
        ends.append(Connection(stream, name, Terms(), SILENT, pool))
    try:
        yield ends
    finally:
        for connection in ends:
            connection.close()
        if pool is not None:
            pool.close()


def call(number, *leaves, kind="call", tree=None):
    return Frame(kind, number, {"deadline": 60.0}, tree, list(leaves))


def closed_by_peer(sock):
    """Waits until the other side closes; what it sent before."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data

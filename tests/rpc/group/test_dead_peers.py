"""Processes that are killed, frozen or forked while others are connected to them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jdist.rpc.wire import sockets
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.stream import Stream
from tests.rpc.sockets import KEY, PATIENCE, Outcome, blocked, call, nothing_left, soon


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


_WORKER = """
import os, sys, threading
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.socket_transport import SocketTransport
transport = SocketTransport("victim", bytes.fromhex(sys.argv[1]))
def serve(channel):
    while True:
        frame = channel.receive()
        child = 0
        if frame.kind == "fork":
            child = os.fork()
            if child == 0:
                threading.Event().wait()
        channel.send(Frame("reply", frame.id, {}, child, frame.leaves))
transport.serve(serve)
print(*transport.address, flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def _worker():
    command = [sys.executable, "-W", "ignore", "-c", _WORKER, KEY.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _address(line):
    host, port, unix = line.split()
    return [host, int(port), unix]


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_a_killed_worker_is_noticed(route):
    """By who waits for it, at once."""
    with _worker() as process, SocketTransport("here", KEY) as here:
        address = _address(process.stdout.readline())
        address = address if route == "unix" else address[:2]
        channel = here.connect("victim", address, soon())
        assert channel.exchange(call(1, np.arange(3)), soon()).id == 1
        waiting = Outcome(channel.receive)
        blocked(waiting.thread, Connection._next)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ChannelClosed, match=r"its connection (closed|broke)"):
            waiting.get()
        process.wait(PATIENCE)
        with pytest.raises(ChannelClosed, match="no worker listens"):
            here.connect("victim", address, soon())


def test_a_frozen_worker_costs_only_the_deadline():
    """SIGSTOP: its sockets are open and nothing comes."""
    with _worker() as process, SocketTransport("here", KEY) as here:
        address = _address(process.stdout.readline())
        channel = here.connect("victim", address, soon())
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            channel.exchange(call(1), time.monotonic() + 0.05)
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            here.connect("victim", address, time.monotonic() + 0.05)
        process.send_signal(signal.SIGCONT)
        assert channel.exchange(call(2), soon()).id == 2


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_connecting_to_a_frozen_worker_is_given_up(route):
    """The handshake has no deadline; the worker is taken for lost meanwhile."""
    with _worker() as process, SocketTransport("here", KEY) as here:
        address = _address(process.stdout.readline())
        address = address if route == "unix" else address[:2]
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        connecting = Outcome(here.connect, "victim", address)
        blocked(connecting.thread, Stream._receive_once)
        here.abandon("another", "it left")
        assert connecting.thread.is_alive()
        here.abandon("victim", "no sign of life")
        with pytest.raises(ChannelClosed, match=r"^no sign of life$"):
            connecting.get()
        with pytest.raises(ChannelClosed, match=r"^no sign of life$"):
            here.connect("victim", address)


def test_who_ends_gives_up_connecting():
    with _worker() as process, SocketTransport("here", KEY) as here:
        address = _address(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        connecting = Outcome(here.connect, "victim", address)
        blocked(connecting.thread, Stream._receive_once)
        here.close()
        with pytest.raises(ChannelClosed, match=r"^this worker has ended$"):
            connecting.get()


def test_a_listener_with_a_full_queue_is_given_up():
    """Not even the connection is made: its first packet gets no answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = ["127.0.0.1", listening.getsockname()[1]]
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(tuple(address))
            here = stack.enter_context(SocketTransport("here", KEY))
            connecting = Outcome(here.connect, "victim", address)
            blocked(connecting.thread, sockets._dial_tcp)
            here.abandon("victim", "no sign of life")
            with pytest.raises(ChannelClosed, match=r"^no sign of life$"):
                connecting.get()


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_a_forked_child_keeps_nothing_alive(route):
    """Its parent's death is noticed although the child lives, and the port is free."""
    with _worker() as process, SocketTransport("here", KEY) as here:
        address = _address(process.stdout.readline())
        address = address if route == "unix" else address[:2]
        channel = here.connect("victim", address, soon())
        child = channel.exchange(call(1, kind="fork"), soon()).tree
        try:
            assert channel.exchange(call(2), soon()).id == 2
            process.send_signal(signal.SIGKILL)
            with pytest.raises(ChannelClosed, match=r"its connection (closed|broke)"):
                channel.receive(soon())
            process.wait(PATIENCE)
            with pytest.raises(ChannelClosed, match="no worker listens"):
                here.connect("victim", address, soon())
        finally:
            os.kill(child, signal.SIGKILL)

"""Processes that tell a test that they run, and whose ends it can await.

Imported by the processes themselves, so it needs the standard library only.
"""

import os
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

PATIENCE = 60.0
_STARTED = []
_REPORT = """
import os, signal, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(f"{sys.argv[2]} {os.getpid()}\\n".encode())
signal.pause()
"""


class ProcessWatch:
    """The test's side: where processes report."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE)
        self.port = self._listener.getsockname()[1]

    def expect(self, count):
        """Waits for `count` reports, then lets all go on; process ids by name."""
        found = {}
        with ExitStack() as stack:
            for _ in range(count):
                peer, _ = self._listener.accept()
                lines = stack.enter_context(stack.enter_context(peer).makefile())
                name, pid = lines.readline().split()
                found[name] = int(pid)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self._listener.close()


def report(port, name):
    """This process tells the test that it runs, and waits until it has heard all."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(f"{name} {os.getpid()}\n".encode())
        peer.recv(1)


def report_with_child(port, name):
    """So does a process that it starts, which would go on for ever."""
    command = [sys.executable, "-S", "-c", _REPORT, str(port), f"{name}-child"]
    _STARTED.append(subprocess.Popen(command))
    report(port, name)


def pause():
    """Goes on until a signal ends it.

    `signal.pause` would miss one that comes between Python's check and its own call.
    """
    while True:
        select.select([], [], [], 0.05)


def await_gone(pids):
    """Waits until every one of these processes has ended."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            ended, _, _ = select.select([descriptor], [], [], PATIENCE)
            assert ended, f"process {pid} still runs"


def leftovers():
    """What a test may leave in its own process: nothing new."""
    try:
        zombie = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        zombie = None
    return (
        sorted(thread.name for thread in threading.enumerate()),
        len(os.listdir("/proc/self/fd")),
        zombie,
    )

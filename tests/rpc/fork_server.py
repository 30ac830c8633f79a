"""A process that forks others, which so begin with JAX imported.

To import it takes a process two thirds of a second of computing, and the tests need
hundreds. The one that forks has a single thread, and no backend of JAX, so that nothing
is lost by it.
"""

import os
import secrets
import signal
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path

from jdist.rpc.processes.spawn import spawn


class ForkServer:
    """The test's side of that process; with it all that it has forked end."""

    def __init__(self):
        key = secrets.token_bytes(16)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            address = str(Path(folder) / "fork_server")
            with Listener(address, authkey=key) as listener:
                process = spawn(tend, (address, key), nprocs=1, join=False)
                stack.enter_context(process)
                self._pipe = stack.enter_context(listener.accept())
            self._stack = stack.pop_all()

    def fork(self, function, *args):
        """Begins `function(*args)` in a new process."""
        self._pipe.send((function, args))

    def close(self):
        self._stack.close()


def tend(_, address, key):
    """Forks whenever it is told to."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those who end.
    with Client(address, authkey=key) as pipe:
        while True:
            function, args = pipe.recv()
            if os.fork() == 0:
                break
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    function(*args)
    sys.exit()  # Nobody waits for a result.

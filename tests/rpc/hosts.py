"""Worker processes that run what a test tells them, and how a test tells them.

A *cluster* is a group of workers, and a test's body is a function that runs on one of
them as it would in a user's program. Bodies live at the top level of a test module, so
that every worker can import them. What drives them does not use rpc itself: it is there
when rpc is not initialized, and sees what happens when a worker dies.
"""

import contextlib
import contextvars
import os
import secrets
import select
import signal
import tempfile
import threading
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

from jdist import rpc
from jdist.rpc.group.rendezvous import Rendezvous, ReservedPort, new_cluster_key

PATIENCE = 120.0  # Of what must happen. Nothing waits this long unless it fails.
WORKERS = 4


class Task:
    """A body that runs on a worker.

    Args:
      name: Of the body, for messages.
      receive: `receive(timeout)`: a value and an error, or None if it is not over.
    """

    def __init__(self, name, receive):
        self._name = name
        self._receive = receive
        self._outcome = None

    def done(self, timeout=0.0):
        """Whether the body is over, after waiting so long."""
        if self._outcome is None:
            self._outcome = self._receive(timeout)
        return self._outcome is not None

    def result(self, timeout=PATIENCE):
        """What the body returned; raises what it raised."""
        if not self.done(timeout):
            raise TimeoutError(f"{self._name} has not finished after {timeout} s")
        value, error = self._outcome
        if error is not None:
            raise error
        return value


class Cluster:
    """A group of workers that are up, whatever they are made of.

    Attributes:
      names: Of the workers, by rank.
      kind: "in-process" or "process".
    """

    def __init__(self, kind, names, start):
        self.kind = kind
        self.names = list(names)
        self.start = start
        """`start(rank, body, *args)`: begins it on that worker, as a Task."""

    def run(self, rank, body, *args, **kwargs):
        """What `body(*args, **kwargs)` returns on the worker of this rank."""
        return self.start(rank, body, *args, **kwargs).result()

    def everywhere(self, body, *args, **kwargs):
        """Runs a body on all workers at once; results by rank, or the first error."""
        ranks = range(len(self.names))
        tasks = [self.start(rank, body, *args, **kwargs) for rank in ranks]
        return results(tasks)


class Hosts:
    """Processes, each of which runs one body at a time on its main thread.

    They are started once and may become workers of one group after the other.

    Args:
      fork_server: Where they come from.
      count: How many.
    """

    def __init__(self, fork_server, count):
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        ports = [self._stack.enter_context(ReservedPort()).port for _ in range(2)]
        meeting = Rendezvous(
            nprocs=count, port=ports[0], jax_port=ports[1], key=new_cluster_key()
        )
        key = secrets.token_bytes(16)
        self._pipes, pids = {}, {}
        with Listener(str(Path(folder) / "hosts"), authkey=key) as listener:
            for rank in range(count):
                variables = dict(meeting.variables(rank))
                fork_server.fork(serve, listener.address, key, variables)
            for _ in range(count):
                pipe = self._stack.enter_context(listener.accept())
                rank, pid = pipe.recv()
                self._pipes[rank], pids[rank] = pipe, pid
        self.pids = [pids[rank] for rank in range(count)]
        # A number may be another process's by the time that this one has ended.
        self._processes = [os.pidfd_open(pid) for pid in self.pids]
        for process in self._processes:
            self._stack.callback(os.close, process)
        self.alive = set(range(count))

    def start(self, rank, body, *args, **kwargs):
        """Begins `body(*args)` in that process, as a Task."""
        pipe = self._pipes[rank]
        pipe.send((body, args, kwargs))
        name = f"{body.__name__} on rank {rank}"
        return Task(name, lambda timeout: self._receive(rank, timeout))

    def run(self, rank, body, *args, **kwargs):
        return self.start(rank, body, *args, **kwargs).result()

    def everywhere(self, body, *args, **kwargs):
        """Runs a body in all that live; results in order, or the first error."""
        tasks = [self.start(rank, body, *args, **kwargs) for rank in sorted(self.alive)]
        return results(tasks)

    def signal(self, rank, number):
        """Sends a signal; after SIGKILL the process is not expected to answer."""
        signal.pidfd_send_signal(self._processes[rank], number)
        if number == signal.SIGKILL:
            self.alive.discard(rank)

    def close(self):
        """Ends them, whatever they do."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        for process in self._processes:
            select.select([process], [], [])
        self._stack.close()

    def _receive(self, rank, timeout):
        pipe = self._pipes[rank]
        return pipe.recv() if pipe.poll(timeout) else None


def serve(address, key, variables):
    """What a host process does: body after body, until it is killed."""
    os.environ.update(variables)
    with Client(address, authkey=key) as pipe:
        pipe.send((int(variables["RANK"]), os.getpid()))
        while True:
            _answer(pipe, *pipe.recv())


def _answer(pipe, body, args, kwargs):
    """Runs one body. Nothing of it is kept: an error would keep what it speaks of."""
    outcome = _outcome_of(body, args, kwargs)
    try:
        pipe.send(outcome)
    except Exception:  # noqa: BLE001 - what cannot be sent is told in words
        pipe.send((None, AssertionError(f"cannot send {outcome!r}")))


def in_threads(names):
    """`start` of a cluster whose workers are all in this process."""

    def start(rank, body, *args, **kwargs):
        outcome = []

        def run():
            with rpc.use_worker(names[rank]):
                outcome.append(_outcome_of(body, args, kwargs))

        context = contextvars.Context()
        thread = threading.Thread(target=context.run, args=(run,), daemon=True)
        thread.start()

        def receive(timeout):
            thread.join(timeout)
            return outcome[0] if outcome else None

        return Task(f"{body.__name__} on rank {rank}", receive)

    return start


def names(count=WORKERS):
    return [f"worker{rank}" for rank in range(count)]


def become_worker(**options):
    """What a worker process does first; the rest stands in its environment."""
    rank = int(os.environ["RANK"])
    return rpc.init_rpc(
        f"worker{rank}", allow=["tests"], options=rpc.RpcOptions(**options)
    )


def be_one_of(rank, count, port, name=None, **options):
    """As `become_worker`, but in a group of another size and at another port."""
    return rpc.init_rpc(
        name or f"worker{rank}",
        rank=rank,
        world_size=count,
        coordinator=("127.0.0.1", port),
        allow=["tests"],
        options=rpc.RpcOptions(**options),
    )


def be_no_worker():
    """Cleans up after a test that failed in the middle; most have nothing left."""
    with contextlib.suppress(rpc.RpcError):
        rpc.shutdown(graceful=False)


def results(tasks):
    """What the bodies returned, once all are over; raises the first one's error."""
    outcomes = [_outcome_of(task.result, (), {}) for task in tasks]
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def _outcome_of(body, args, kwargs):
    try:
        return body(*args, **kwargs), None
    except BaseException as error:  # noqa: BLE001 - it is the test's to look at
        text = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):  # such as pytest's "DID NOT RAISE"
            error = AssertionError(str(error))
        error.add_note(text)
        return None, error

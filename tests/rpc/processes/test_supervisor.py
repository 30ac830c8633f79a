"""Ctrl-C at every place of a supervisor: its lock is free, and no process stays."""

import os
import signal
import threading
from pathlib import Path

import pytest

from jdist.rpc.processes import supervisor as supervisor_module
from jdist.rpc.processes.process_settings import resolved
from jdist.rpc.processes.supervisor import Child, ProcessCommand, Supervisor
from tests.rpc.sockets import Outcome
from tests.rpc.test_interrupts import interrupt

PATIENCE = 60


@pytest.fixture
def sleeper():
    return ProcessCommand(
        name="sleeper",
        command=["sleep", str(10 * PATIENCE)],
        environment=dict(os.environ),
        settings=resolved(None, 1),
        python=False,
    )


def free(lock):
    """Whether another thread can have it."""
    taken = lock.acquire(timeout=PATIENCE)
    if taken:
        lock.release()
    return taken


def test_an_interrupted_wait_leaves_the_lock_free(sleeper):
    with Supervisor(grace=0.0) as supervisor:
        supervisor.start(sleeper)
        number = 0
        while interrupt(number, supervisor.wait, 0.001):
            assert Outcome(free, supervisor._lock).get(), number
            assert not supervisor.wait(0.0)
            number += 1
        assert number > 5


def test_an_interrupted_stop_leaves_no_process(sleeper):
    """Its watcher needs the lock too; a second stop finishes what is left."""
    number, going_on = 0, True
    while going_on:
        supervisor = Supervisor(grace=0.05)
        child = supervisor.start(sleeper)
        going_on = interrupt(number, supervisor.stop)
        assert Outcome(free, supervisor._lock).get(), number
        supervisor.close()
        assert child.ending is not None
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(child.pid, 0)
        number += 1
    assert number > 10
    names = [thread.name for thread in threading.enumerate()]
    assert "jdist-watch-sleeper" not in names


def test_an_interrupted_start_leaves_no_process(sleeper, monkeypatch):
    """Not even one that has no thread to watch it: an end gives it one."""
    within = str(Path(supervisor_module.__file__))
    number, going_on, started = 0, True, 0
    while going_on:
        # A process that is interrupted before it is noted ends by its lifeline.
        child = Child(sleeper)
        monkeypatch.setattr(
            supervisor_module, "Child", lambda program, made=child: made
        )
        supervisor = Supervisor(grace=0.05)
        going_on = interrupt(number, supervisor.start, sleeper, within=within)
        started += len(supervisor.children)
        Outcome(supervisor.close).get()
        assert all(child.ending is not None for child in supervisor.children), number
        if not supervisor.children:
            child.send(signal.SIGKILL)
            child.await_end()
            child.bury()
        number += 1
    assert number > 5
    assert started > 2

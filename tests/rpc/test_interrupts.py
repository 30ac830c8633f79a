"""Ctrl-C at every place where Python may raise it: the next call works as ever.

The interpreter looks for signals when it enters a function and when one that is written
in C returns. A profile function is called at the same places and may raise as well, so
each of them is tried in turn, with one interrupt each.
"""

import gc
import sys
import threading

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from tests.rpc.rref.common import make, wait_for_references
from tests.rpc.sockets import Outcome, blocked, wait_until

PATIENCE = 60


def negative(x):
    return -x


def one_more(done):
    return done.value() + 1


def sync(to):
    rpc.rpc_sync(to, negative, args=(1,))


def with_a_deadline(to):
    rpc.rpc_sync(to, negative, args=(1,), timeout=PATIENCE)


def asynchronous(to):
    rpc.rpc_async(to, negative, args=(1,)).wait()


def with_a_callback(to):
    rpc.rpc_async(to, negative, args=(1,)).then(one_more).wait()


def several(to):
    rpc.wait_all([rpc.rpc_async(to, negative, args=(i,)) for i in range(3)])


def large(to):
    rpc.rpc_sync(to, negative, args=(np.ones(100_000),))


OPERATIONS = [sync, with_a_deadline, asynchronous, with_a_callback, several, large]


def interrupt(number, operation, *args, within=""):
    """Calls it with an interrupt at this place; whether it has as many places.

    `within`: only places in code of this folder count.
    """
    # A collection's callbacks swallow an interrupt, and pytest keeps its frames.
    gc.disable()
    left = number

    def look(frame, event, argument):
        nonlocal left
        ours = frame.f_code.co_filename.startswith(within)
        if event in ("call", "c_return") and ours:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        operation(*args)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return left < 0


def interrupt_everywhere(to, operation):
    """After each interrupt both kinds of call work, and nothing is left of it."""
    agent, number = current.worker(), 0
    operation(to)
    while interrupt(number, operation, to):
        assert rpc.rpc_async(to, negative, args=(5,)).wait(PATIENCE) == -5
        assert rpc.rpc_sync(to, negative, args=(7,), timeout=PATIENCE) == -7
        wait_until(lambda: not (agent.outstanding.sent() or agent.outstanding.served()))
        number += 1
    assert number > 20
    wait_until(lambda: not agent.directory.find(to).shared._pending)
    return number


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.__name__)
def test_the_next_call_works(processes, operation):
    processes.run(0, interrupt_everywhere, "worker1", operation)


# --- references ---


def created(to):
    rpc.remote(to, negative, args=(1,)).to_here()


def returned(to):
    rpc.rpc_sync(to, make, args=(1,)).owner_name()


NOTHING_LEFT = {"owner_rrefs": 0, "forks": 0, "forks_under_way": 0}


def interrupt_answers(to):
    """After each interrupt the owner learns that its reference is not in use."""
    number = 0
    returned(to)
    while interrupt(number, returned, to):
        wait_for_references(user_rrefs=0, pending_users=0, forks_under_way=0)
        rpc.rpc_sync(to, wait_for_references, kwargs=NOTHING_LEFT)
        number += 1
    assert number > 40
    return number


def test_an_interrupted_answer_leaves_no_reference(processes):
    processes.run(0, interrupt_answers, "worker1")


def interrupt_creations(to):
    """After each interrupt both workers give up what was created, if anything was."""
    number = 0
    created(to)
    while interrupt(number, created, to):
        wait_for_references(user_rrefs=0, pending_users=0, forks_under_way=0)
        rpc.rpc_sync(to, wait_for_references, kwargs=NOTHING_LEFT)
        number += 1
    assert number > 40
    return number


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_an_interrupted_creation_leaves_no_value(processes, to):
    processes.run(0, interrupt_creations, to)


def test_an_interrupted_creation_leaves_no_value_in_process():
    with rpc.local_cluster(["here", "there"], allow=["tests"]):
        interrupt_creations("there")


@pytest.mark.parametrize("operation", [sync, asynchronous])
def test_the_next_call_works_in_process(operation):
    with rpc.local_cluster(["here", "there"], allow=["tests"]):
        interrupt_everywhere("there", operation)


# --- a turn ---


def use(turn, used):
    def action():
        turn.acquire(None, "busy")
        used.append(turn.held)

    turn.releasing(action)


def test_a_turn_is_never_left_taken():
    turn, number = InterruptSafeLock(), 0
    while interrupt(number, use, turn, []):
        assert Outcome(turn.try_acquire).get()  # its thread ends with it, as below
        turn, number = InterruptSafeLock(), number + 1
    assert number > 5


def test_a_turn_is_taken_by_one_at_a_time():
    turn, ready, done = InterruptSafeLock(), threading.Event(), threading.Event()

    def hold():
        turn.acquire(None, "busy")
        ready.set()
        assert done.wait(PATIENCE)
        turn.release()

    holder = Outcome(hold)
    assert ready.wait(PATIENCE)
    assert not turn.try_acquire()
    assert not turn.held
    turn.release()  # of what another thread has, nothing
    with pytest.raises(TimeoutError, match="another one has it"):
        turn.acquire(0.0, "another one has it")
    waiting = Outcome(use, turn, used := [])
    blocked(waiting.thread, InterruptSafeLock.acquire)
    assert used == []
    done.set()
    holder.get()
    waiting.get()
    assert used == [True]


def test_a_turn_is_refused_to_who_has_it():
    """As a signal handler that calls what it interrupted; the one below keeps it."""
    turn = InterruptSafeLock()

    def action():
        turn.acquire(None, "busy")
        assert not turn.try_acquire()
        with pytest.raises(RuntimeError, match="busy: this one, which was interrupted"):
            turn.releasing(lambda: turn.acquire(None, "busy"))
        return turn.held

    assert turn.releasing(action)
    assert not turn.held

"""Ctrl-C at every place where Python may raise it; the next pass and step succeed.

See `tests/rpc/test_interrupts.py`. Here only places in this library's own code count:
JAX has many more, and is trusted with them.
"""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import autograd, rpc
from jdist.autograd import contexts
from jdist.autograd.engine.engine import StepQueue
from jdist.autograd.recording.variable import holding
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from tests.rpc.sockets import Outcome, blocked, wait_until
from tests.rpc.test_interrupts import interrupt

PATIENCE = 60
WEIGHTS = [5.0, 7.0, 11.0]
OURS = jdist.__path__[0]


def interrupted_pass(number, variable):
    with autograd.context() as context_id:
        loss = (variable * jnp.array(WEIGHTS)).sum()
        return interrupt(number, autograd.backward, context_id, [loss], within=OURS)


def check_a_pass(variable):
    with autograd.context() as context_id:
        loss = (variable * jnp.array(WEIGHTS)).sum()
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        found = autograd.get_gradients(context_id)[variable]
    np.testing.assert_array_equal(found, WEIGHTS)


# What interrupts a generator that is being thrown away, Python reports and goes on.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object")
@pytest.mark.parametrize("replicas", [False, True], ids=["plain", "replicated"])
def test_the_next_pass_works(replicas):
    start = jnp.array([2.0, 3.0, 4.0])
    with rpc.local_cluster(["only"]):
        made = autograd.replicated(start, ["only"]) if replicas else None
        variable = autograd.variable(start) if made is None else made
        for _ in range(2):  # compiled now
            check_a_pass(variable)
        number = 0
        while interrupted_pass(number, variable):
            check_a_pass(variable)
            number += 1
        assert number > 50
        counts = rpc.debug_info
        wait_until(lambda: counts()["num_current_backward_passes"] == 0)


def within_a_context():
    with autograd.context():
        pass


def test_an_interrupted_context_is_left():
    """All but where Python has just called `__exit__`, and nothing of ours has run."""
    number, left_open = 0, []
    with rpc.local_cluster(["only"]):
        while interrupt(number, within_a_context, within=OURS):
            try:
                within_a_context()
            except autograd.AutogradError:  # refused: within another one
                left_open.append(number)
                contexts._recording.set(None)
            number += 1
    assert len(left_open) <= 1
    assert number > 10


def test_a_step_queue_is_never_left_busy():
    steps, number, ran = StepQueue(None), 0, []
    while interrupt(number, steps.put, lambda: ran.append("interrupted")):
        Outcome(steps.put, lambda: ran.append("next")).get()
        assert ran.pop() == "next"
        steps, number = StepQueue(None), number + 1
    assert number > 5


def test_several_turns_are_never_left_taken():
    turns, used, number = [InterruptSafeLock(), InterruptSafeLock()], [], 0
    while interrupt(number, holding, turns, "busy", lambda: used.append(1)):
        for turn in turns:
            assert Outcome(turn.try_acquire).get()
        turns, number = [InterruptSafeLock(), InterruptSafeLock()], number + 1
    assert used
    assert number > 10


def test_turns_are_given_back_where_one_is_refused():
    """By a thread that has it, and by the one that asks and has it from before."""
    first, second, taken, done = (
        InterruptSafeLock(),
        InterruptSafeLock(),
        threading.Event(),
        threading.Event(),
    )

    def hold():
        second.acquire(None, "busy")
        taken.set()
        assert done.wait(PATIENCE)
        second.release()

    holder = Outcome(hold)
    assert taken.wait(PATIENCE)
    waiting = Outcome(holding, [first, second], "while it was busy", lambda: "used")
    blocked(waiting.thread, InterruptSafeLock.acquire)
    assert not first.try_acquire()
    done.set()
    holder.get()
    assert waiting.get() == "used"

    def again():
        with pytest.raises(RuntimeError, match="this one, which was interrupted"):
            holding([first, second], "busy", lambda: None)
        return first.held, second.held

    assert holding([second], "busy", again) == (False, True)
    assert not second.held

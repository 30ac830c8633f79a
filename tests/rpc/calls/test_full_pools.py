"""No message of the library's needs a thread that a function of the user's can hold.

All places of all workers are taken by functions that wait, with more calls queued
behind them on every connection, and the threads of the process take turns much more
often than usual. References, cancellations, collectives, nested and synchronous calls
go on all the same. (Backward passes: `tests/autograd/test_concurrency.py`.)
"""

import contextlib
import sys
import threading

import jax
import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.hosts import in_threads, names, results
from tests.rpc.sockets import wait_until

PLACES = 2
QUEUED = 2
ROUNDS = 200
PATIENCE = 60

_release = threading.Event()
_holding = {name: threading.Semaphore(0) for name in names(3)}
_begun = threading.Semaphore(0)
_cancelled = threading.Semaphore(0)


def hold():
    _holding[rpc.get_worker_info().name].release()
    assert _release.wait(PATIENCE)


@rpc.async_execution
def note_when_cancelled():
    future = rpc.Future()
    future.add_done_callback(lambda done: _cancelled.release())
    _begun.release()
    return future


@rpc.async_execution
def wait_when_cancelled():
    """Its callback is the user's, and holds the thread that runs it."""
    future = rpc.Future()
    future.add_done_callback(lambda done: _release.wait(PATIENCE))
    _begun.release()
    return future


WITHOUT_END = [wait_when_cancelled, note_when_cancelled]


def give_up_calls_without_end():
    """As when the call that made them was cancelled itself."""
    for call in current.worker().outstanding.sent():
        if call.operation.function in WITHOUT_END:
            call.give_up("the call was given up")


def fetch(reference):
    return reference.to_here()


def fetch_there(to, reference):
    """A nested call, which needs no place."""
    return rpc.rpc_async(to, fetch, args=(reference,)).wait()


def gather():
    return sorted(rpc.all_gather(rpc.get_worker_info().id).values())


@contextlib.contextmanager
def all_places_taken():
    """Every pair of workers has calls that hold places and calls that wait for one."""
    held = []
    _release.clear()
    try:
        for caller in names(3):
            with rpc.use_worker(caller):
                held += [
                    rpc.rpc_async(to, hold)
                    for to in names(3)
                    for _ in range(PLACES + QUEUED)
                ]
        for holding in _holding.values():
            for _ in range(PLACES):
                assert holding.acquire(timeout=PATIENCE)
        yield
        assert not any(future.done() for future in held)
    finally:
        _release.set()
    rpc.wait_all(held)
    for holding in _holding.values():
        while holding.acquire(blocking=False):
            pass


@pytest.fixture
def full():
    """Three workers of one process whose threads take turns all the time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        options = rpc.RpcOptions(threads=PLACES)
        with rpc.local_cluster(names(3), options=options, allow=["tests"]):
            yield in_threads(names(3))
    finally:
        sys.setswitchinterval(usual)


def freed():
    return rpc.debug_info()["num_forks"] == 0


def one_round(start, number):
    made = rpc.remote("worker1", divmod, args=(number, 7))
    assert made.to_here() == divmod(number, 7)
    without_end = [rpc.rpc_async("worker2", function) for function in WITHOUT_END]
    for _ in without_end:
        assert _begun.acquire(timeout=PATIENCE)
    with all_places_taken():
        # Synchronous calls, calls within them, and the counts of what they bring.
        assert made.to_here() == divmod(number, 7)
        there = rpc.rpc_sync("worker2", fetch_there, args=("worker0", made))
        assert there == divmod(number, 7)
        del made
        with rpc.use_worker("worker1"):
            wait_until(freed)
        # Cancelled calls end on both sides, although the callback of one of them waits.
        give_up_calls_without_end()
        for future in without_end:
            with pytest.raises(rpc.RpcTimeout, match="the call was given up"):
                future.wait(PATIENCE)
        assert _cancelled.acquire(timeout=PATIENCE)
        # Collectives of all workers.
        gathered = results([start(rank, gather) for rank in range(3)])
        assert gathered == [[0, 1, 2]] * 3


def test_the_librarys_messages_arrive_while_every_place_is_taken(full):
    for number in range(ROUNDS):
        one_round(full, number)


def divide_there(to, left, right):
    return rpc.rpc_async(to, divmod, args=(left, right)).wait()


def test_one_place_is_enough():
    """Calls both ways, each with a call back to where it came from."""
    one = rpc.RpcOptions(threads=1)
    with rpc.local_cluster(names(2), options=one, allow=["tests"]):
        asked = []
        for caller, to in (names(2), reversed(names(2))):
            with rpc.use_worker(caller):
                asked += [
                    rpc.rpc_async(to, divide_there, args=(caller, number, 7))
                    for number in range(40)
                ]
        assert rpc.wait_all(asked) == [divmod(number, 7) for number in range(40)] * 2


_made_again = threading.Event()


@jax.tree_util.register_pytree_node_class
class Slow:
    """Whose making from what arrived takes until another answer has come."""

    def tree_flatten(self):
        return (1,), None

    @classmethod
    def tree_unflatten(cls, static, children):
        assert _made_again.wait(PATIENCE)
        return cls()


def test_making_an_answers_objects_keeps_no_other_answer():
    """They share the connection; the first one is made by code of the user's."""
    _made_again.clear()
    with rpc.local_cluster(names(2), allow=["tests"]):
        slow = rpc.rpc_async("worker1", Slow)
        assert rpc.rpc_async("worker1", divmod, args=(7, 2)).wait() == (3, 1)
        assert not slow.done()
        _made_again.set()
        assert isinstance(slow.wait(), Slow)

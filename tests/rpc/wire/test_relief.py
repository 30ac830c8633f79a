"""What happens to a reading that was left."""

import threading

import pytest

from jdist.rpc.wire.relief import Reading, Relief
from tests.rpc.sockets import nothing_left

PATIENCE = 60


@pytest.fixture
def relief():
    with nothing_left():
        made = Relief("relief")
        yield made
        made.close()


def test_what_was_left_is_relieved_and_what_was_taken_is_not(relief):
    started, taken = threading.Semaphore(0), []
    kept = Reading(relief, lambda: taken.append(1))
    left = Reading(relief, started.release)
    for looks in (1, 2, 5):
        kept.leave(looks)
        assert kept.take()
        left.leave(looks)  # in the same look or a later one than the other
        assert started.acquire(timeout=PATIENCE)
        assert not left.take()
        assert not left.free
    assert taken == []


def test_it_is_relieved_once(relief):
    started = threading.Semaphore(0)
    readings = [Reading(relief, started.release) for _ in range(20)]
    for looks, reading in enumerate(readings):
        reading.leave(1 + looks)
    readings[-1].relieve()
    for _ in readings:
        assert started.acquire(timeout=PATIENCE)
    beside = Reading(relief, started.release)
    beside.leave(25)
    assert started.acquire(timeout=PATIENCE)
    assert not started.acquire(blocking=False)


def test_when_no_thread_is_to_be_had_it_is_tried_again(relief, caplog):
    started, attempts = threading.Event(), []

    def start():
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")
        started.set()

    Reading(relief, start).leave()
    assert started.wait(PATIENCE)
    assert "can't start new thread" in caplog.text


def test_at_the_end_nothing_is_left(relief):
    started = threading.Semaphore(0)
    for _ in range(3):
        Reading(relief, started.release).leave(1_000_000)
    relief.close()
    assert [started.acquire(blocking=False) for _ in range(4)] == [True] * 3 + [False]

"""The one timer thread: alarms, appointments, and what may not hold it up."""

import gc
import threading
import time

import pytest

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from tests.rpc.sockets import nothing_left, wait_until

PATIENCE = 60
LATER = 1000.0


@pytest.fixture
def timer():
    with nothing_left():
        pool = ThreadPool("pool", 1)
        made = Timer("timer", pool)
        yield made
        made.close()
        assert pool.close(PATIENCE) == []


class Rings:
    """Notes when it is called; returns what it is told to."""

    def __init__(self, *upcoming):
        self.at = []
        self._upcoming = list(upcoming)
        self._rung = threading.Semaphore(0)

    def __call__(self, now):
        self.at.append(now)
        self._rung.release()
        return self._upcoming.pop(0) if self._upcoming else None

    def wait(self):
        assert self._rung.acquire(timeout=PATIENCE)

    def again(self):
        return self._rung.acquire(timeout=0.05)


def test_an_alarm_rings_at_the_earliest_moment_once(timer):
    rings = Rings()
    alarm, now = timer.alarm(rings), time.monotonic()
    for seconds in (LATER, 0.02, 0.01, 0.02, LATER):
        alarm.set(now + seconds)
    alarm.set(None)
    rings.wait()
    assert rings.at[0] >= now + 0.01
    assert not rings.again()


def test_an_alarm_rings_again_when_it_says_so(timer):
    now = time.monotonic()
    rings = Rings(now + 0.01, now + 0.02, now + LATER)
    timer.alarm(rings).set(now)
    for _ in range(3):
        rings.wait()
    assert not rings.again()
    assert rings.at == sorted(rings.at)


def test_moments_announced_by_many_threads_are_all_kept(timer):
    announced, rung = [], []

    def ring(now):
        rung.append(now)
        return min((moment for moment in announced if moment > now), default=None)

    alarm, begin = timer.alarm(ring), time.monotonic()

    def announce(number):
        for k in range(number, 50, 5):
            announced.append(begin + 0.001 * (50 - k))
            alarm.set(announced[-1])

    threads = [threading.Thread(target=announce, args=(k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    wait_until(lambda: rung and rung[-1] >= max(announced))


def test_an_alarm_that_fails_rings_again_and_holds_up_no_other(timer, caplog):
    other, now = Rings(), time.monotonic()
    failed = threading.Event()

    def fail(now):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        done.set()

    done = threading.Event()
    timer.alarm(fail).set(now)
    timer.alarm(other).set(now + 0.01)
    other.wait()
    assert done.wait(PATIENCE)
    assert "can't start new thread" in caplog.text


def test_an_action_may_wait_and_holds_up_no_other(timer):
    gate, done = threading.Event(), threading.Event()
    timer.later(0.0, lambda: gate.wait(PATIENCE))
    timer.later(0.001, done.set)
    assert done.wait(PATIENCE)
    gate.set()


def test_a_finalizer_may_make_an_appointment(timer):
    """Also one that runs while this very thread is inside the timer."""
    done = threading.Semaphore(0)

    class Ring:
        def __init__(self):
            self.itself = self

        def __del__(self):
            timer.later(0.0, done.release)

    def ring(now):
        Ring()
        gc.collect()

    timer.alarm(ring).set(time.monotonic())
    assert done.acquire(timeout=PATIENCE)


class Thing:
    """Can be referred to weakly, and be part of a cycle."""


def test_the_end_of_an_object_is_told_while_it_is_watched(timer):
    first, second, third = Rings(), Rings(), Rings()
    plain, cycle, unwatched = Thing(), Thing(), Thing()
    cycle.itself = cycle
    kept = [timer.when_collected(plain, first), timer.when_collected(cycle, second)]
    timer.when_collected(unwatched, third)
    del plain, cycle, unwatched
    first.wait()
    gc.collect()
    second.wait()
    assert [one() for one in kept] == [None, None]
    assert not third.again()


def test_objects_that_end_in_a_row_wake_the_thread_once(timer, monkeypatch):
    """Those that follow the first one are noted while the thread rests."""
    resting, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def rest(seconds):
        assert 0 < seconds < 0.1
        resting.release()
        assert go_on.acquire(timeout=PATIENCE)

    monkeypatch.setattr(timer, "_rest", rest)
    rings = [Rings() for _ in range(20)]
    things = [Thing() for _ in rings]
    kept = [timer.when_collected(*pair) for pair in zip(things, rings, strict=True)]
    things.pop()
    rings[-1].wait()
    assert resting.acquire(timeout=PATIENCE)
    things.clear()
    assert not rings[0].again()
    go_on.release()
    for ring in rings[:-1]:
        ring.wait()
    assert resting.acquire(timeout=PATIENCE)
    assert not resting.acquire(blocking=False)
    go_on.release()
    assert len(kept) == 20


def test_nothing_is_called_after_the_end():
    pool, called = ThreadPool("pool", 1), []
    timer = Timer("timer", pool)
    timer.later(0.05, lambda: called.append(1))
    timer.close()
    timer.close()
    timer.later(0.0, lambda: called.append(2))
    pool.close(PATIENCE)
    assert not timer._thread.is_alive()
    assert called == []

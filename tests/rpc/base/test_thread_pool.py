"""Threads on demand, places for users' functions, and calls when all are taken."""

import inspect
import threading

import pytest

from jdist import rpc
from jdist.rpc.base import thread_pool
from jdist.rpc.base.thread_pool import ThreadPool
from tests.rpc.hosts import in_threads, names, results
from tests.rpc.sockets import nothing_left, wait_until

PATIENCE = 60
RAN = "RPC ran for more than set timeout"


class Tasks:
    """Tasks that begin, and end when they are told to."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.threads = set()

    def __call__(self):
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.go_on.wait(PATIENCE)


@pytest.fixture
def pool():
    with nothing_left():
        made = ThreadPool("pool", 3)
        yield made
        assert made.close(PATIENCE) == []


def await_begun(tasks, count):
    for _ in range(count):
        assert tasks.begun.acquire(timeout=PATIENCE)


def test_limited_tasks_wait_for_a_place_and_others_do_not(pool):
    tasks, urgent = Tasks(), Tasks()
    for _ in range(5):
        pool.run_limited(tasks)
    await_begun(tasks, 3)
    assert pool.free == 0
    assert not tasks.begun.acquire(timeout=0.05)
    pool.run(urgent)
    await_begun(urgent, 1)
    urgent.go_on.set()
    tasks.go_on.set()
    await_begun(tasks, 2)


def test_an_idle_thread_is_used_again(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", PATIENCE)
    seen = []
    done = threading.Semaphore(0)

    def note():
        seen.append(threading.get_ident())
        done.release()

    for _ in range(20):
        pool.run(note)
        assert done.acquire(timeout=PATIENCE)
        wait_until(lambda: pool._idle)
    assert len(set(seen)) == 1


def test_of_the_threads_that_a_burst_leaves_few_stay(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", PATIENCE)
    tasks = Tasks()
    for _ in range(12):
        pool.run(tasks)
    await_begun(tasks, 12)
    tasks.go_on.set()
    wait_until(lambda: len(pool._threads) == thread_pool._FEW_IDLE)
    assert len(pool._idle) == thread_pool._FEW_IDLE


def test_an_idle_thread_ends(pool, monkeypatch):
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", 0.01)
    done = threading.Event()
    pool.run(done.set)
    assert done.wait(PATIENCE)
    wait_until(lambda: not pool._threads)
    pool.run(done.clear)
    wait_until(lambda: not done.is_set())


def test_a_task_that_raises_is_logged_and_the_thread_goes_on(pool, caplog):
    done = threading.Event()

    def fail():
        raise SystemExit("not out of a thread that serves others")

    pool.run(fail)
    pool.run(done.set)
    assert done.wait(PATIENCE)
    assert pool.close(PATIENCE) == []
    assert "not out of a thread" in caplog.text


def test_after_the_end_a_task_runs_at_once():
    pool, seen = ThreadPool("pool", 3), []
    pool.close(PATIENCE)
    pool.run(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]
    assert not pool.start(seen.clear)


_gate, _begun = threading.Event(), []


def wait_at_gate():
    _begun.append(1)
    assert _gate.wait(PATIENCE)
    return True


def ask_another():
    return rpc.rpc_async("worker2", max, args=(1, 2)).wait()


def test_calls_beyond_the_places_wait_their_turn():
    _gate.clear()
    _begun.clear()
    options = rpc.RpcOptions(threads=2)
    with rpc.local_cluster(names(3), options=options, allow=["tests"]):
        slow = [rpc.rpc_async("worker1", wait_at_gate) for _ in range(10)]
        # Later calls may come before them, over other connections.
        wait_until(lambda: len(_begun) == options.threads)
        # Deadlines are kept although nobody is free to serve.
        late = [
            rpc.rpc_async("worker1", max, args=(1, 2), timeout=0.1) for _ in range(5)
        ]
        for future in late:
            with pytest.raises(rpc.RpcTimeout, match=RAN):
                future.wait()
        assert not any(future.done() for future in slow)
        _gate.set()
        assert rpc.wait_all(slow) == [True] * 10


def test_calls_that_call_others_get_their_answers():
    options = rpc.RpcOptions(threads=2)
    with rpc.local_cluster(names(3), options=options, allow=["tests"]):
        futures = [rpc.rpc_async("worker1", ask_another) for _ in range(20)]
        assert rpc.wait_all(futures) == [2] * 20


def test_a_place_goes_on_to_the_task_that_has_waited_for_longest(pool):
    ran, gates = [], [threading.Event() for _ in range(3)]
    for gate in gates:
        pool.run_limited(lambda gate=gate: gate.wait(PATIENCE))
    wait_until(lambda: pool.free == 0)
    for number in range(4):
        pool.run_limited(lambda number=number: ran.append(number))
    assert (pool.free, ran) == (0, [])
    gates[1].set()
    wait_until(lambda: pool.free == 1)
    assert ran == [0, 1, 2, 3]
    gates[0].set()
    gates[2].set()
    wait_until(lambda: pool.free == 3)


def test_of_a_burst_one_thread_at_a_time_is_called(pool, monkeypatch):
    """Each calls the next one when it takes a task; those that are awake go on."""
    called, ran = [], []
    monkeypatch.setattr(pool, "_give", lambda run: called.append(run) or True)
    for number in range(5):
        pool.run_limited(lambda number=number: ran.append((number, len(called))))
    assert (len(called), ran) == (1, [])
    called[0]()  # takes all of them, and calls a second one that has not come yet
    assert ran == [(number, 2) for number in range(5)]
    called[1]()
    assert (len(called), len(ran), pool.free) == (2, 5, 3)


def test_behind_a_task_that_waits_each_other_task_gets_a_thread(pool):
    """Also where every one of them waits for the next one to begin."""
    begun = [threading.Event() for _ in range(4)]
    ended = threading.Semaphore(0)

    def begin(number):
        begun[number].set()
        assert begun[number + 1].wait(PATIENCE)
        ended.release()

    for number in range(3):
        pool.run_limited(lambda number=number: begin(number))
    assert begun[2].wait(PATIENCE)
    begun[3].set()
    for _ in range(3):
        assert ended.acquire(timeout=PATIENCE)


def test_no_task_is_left_when_the_system_gives_no_further_thread(pool, monkeypatch):
    """The thread that could not call another one takes the other tasks too."""
    give, ran = pool._give, []
    gate, done = threading.Event(), threading.Semaphore(0)

    def refuse(run):
        return False

    def note(number):
        assert gate.wait(PATIENCE)
        ran.append((number, threading.get_ident()))
        done.release()

    pool.run_limited(lambda: note(0))
    monkeypatch.setattr(pool, "_give", refuse)
    for number in (1, 2):
        pool._waiting.append(lambda number=number: note(number))
    gate.set()
    for _ in range(3):
        assert done.acquire(timeout=PATIENCE)
    monkeypatch.setattr(pool, "_give", give)
    assert [number for number, _ in ran] == [0, 1, 2]
    assert len({thread for _, thread in ran}) == 1
    wait_until(lambda: pool.free == 3)


def test_after_the_end_the_tasks_that_wait_run_one_after_the_other():
    """Not each within the one before: there may be more than the stack has frames."""
    pool, depths = ThreadPool("pool", 3), []
    pool._waiting.extend([lambda: depths.append(len(inspect.stack(0)))] * 3)
    pool.close(PATIENCE)
    pool.run_limited(lambda: None)
    assert len(depths) == 3
    assert len(set(depths)) == 1


class ClosingLock:
    """A pool's lock; closes the pool as soon as it is first released."""

    def __init__(self, pool, done):
        self._pool, self._lock, self._done = pool, pool._lock, done
        self.left = self.done_by_then = None

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *details):
        self._lock.release()
        if self.left is None:
            self.left = ()
            self.left = self._pool.close(PATIENCE)
            self.done_by_then = list(self._done)


def test_the_end_waits_for_every_task_that_was_given():
    """Also for one that no thread had yet when its place was taken."""
    pool, ran = ThreadPool("pool", 3), []
    pool._lock = lock = ClosingLock(pool, ran)
    pool.run_limited(lambda: ran.append(0))
    assert (lock.left, lock.done_by_then) == ([], [0])


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_without_a_thread_a_task_runs_at_once(pool, monkeypatch, kind):
    """No call is lost when the system has no thread left to give."""
    ran = []

    def refuse(thread):
        raise kind("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.run(lambda: ran.append(0))
    for number in (1, 2):
        pool.run_limited(lambda number=number: ran.append(number))
    assert (ran, pool.free) == ([0, 1, 2], 3)
    assert not pool.start(lambda: ran.append(3))
    assert ran == [0, 1, 2]


def test_calls_that_call_back_end_although_every_place_is_taken():
    """Calls that have all places wait for calls in the other direction."""
    options = rpc.RpcOptions(threads=2)
    with rpc.local_cluster(names(2), options=options, allow=["tests"]):
        futures = [
            rpc.rpc_async("worker1", wait_for, args=("worker0", 40)) for _ in range(2)
        ]
        assert rpc.wait_all(futures) == [[2] * 40] * 2


def wait_for(caller, count):
    return rpc.wait_all([rpc.rpc_async(caller, max, args=(1, 2)) for _ in range(count)])


def call_back(caller, count):
    """Both kinds of call to who called, which do what they ask for themselves."""
    nested = [rpc.rpc_async(caller, max, args=(1, i)) for i in range(count)]
    return sum(rpc.wait_all(nested)) + rpc.rpc_sync(caller, ask, args=(2,))


def ask(depth):
    """Calls back and forth, each asynchronous and within the other."""
    here = rpc.get_worker_info().id
    if depth == 0:
        return here
    return here + rpc.rpc_async(1 - here, ask, args=(depth - 1,)).wait()


def call_at_once(count):
    here = rpc.get_worker_info().id
    asked = [
        rpc.rpc_async(1 - here, call_back, args=(f"worker{here}", i % 3))
        for i in range(count)
    ]
    return rpc.wait_all(asked)


def test_both_ways_calls_that_call_back_end():
    """Many more each way than there are places, all of them waiting for the others."""
    options = rpc.RpcOptions(threads=3)
    with rpc.local_cluster(names(2), options=options, allow=["tests"]):
        start = in_threads(names(2))
        found = results([start(rank, call_at_once, 50) for rank in (0, 1)])
    # The one called back is the caller, then the other one, then the caller again.
    nested = [0, 1, 2]
    for rank, told in enumerate(found):
        ends = 2 * rank + (1 - rank)
        assert told == [nested[i % 3] + ends for i in range(50)]


def test_the_librarys_own_messages_need_no_place():
    """References and synchronous calls, while functions that wait have every place."""
    _gate.clear()
    options = rpc.RpcOptions(threads=2)
    with rpc.local_cluster(names(3), options=options, allow=["tests"]):
        made = rpc.remote("worker1", max, args=(3, 4))
        assert made.to_here() == 4
        slow = [rpc.rpc_async("worker1", wait_at_gate) for _ in range(10)]
        with rpc.use_worker("worker2"):
            slow += [rpc.rpc_async("worker1", wait_at_gate) for _ in range(10)]
        assert made.to_here() == 4
        assert rpc.rpc_sync("worker2", fetch, args=(made,)) == 4
        assert rpc.rpc_sync("worker1", max, args=(1, 2), timeout=PATIENCE) == 2
        assert not any(future.done() for future in slow)
        _gate.set()
        assert rpc.wait_all(slow) == [True] * 20


def fetch(reference):
    return reference.to_here()

"""Many calls share a connection, and each gets its answer."""

import threading

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.future import await_done, watch
from tests.rpc.sockets import interrupted_in

PATIENCE = 60
LARGE = 30_000  # float64: more than the buffer of a connection.

_gates = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def pass_gate(name, value):
    assert gate(name).wait(PATIENCE)
    return value


def numbers(seed, size):
    return np.random.default_rng(seed).random(size)


def negative(x):
    return -x


# --- on the callee ---


def slow_beside_quick(to):
    """Eight calls that block there, and others before, between and after them."""
    slow = []
    for i in range(8):
        slow.append(rpc.rpc_async(to, pass_gate, args=("slow", i)))
        quick = rpc.rpc_async(to, negative, args=(numbers(i, 3),))
        np.testing.assert_array_equal(quick.wait(PATIENCE), -numbers(i, 3))
    assert not any(future.done() for future in slow)
    rpc.rpc_sync(to, open_gate, args=("slow",))
    assert rpc.wait_all(slow) == list(range(8))
    assert rpc.rpc_async(to, negative, args=(5,)).wait(PATIENCE) == -5


def open_gate(name):
    gate(name).set()


def test_a_call_that_blocks_holds_up_no_other(cluster):
    cluster.run(0, slow_beside_quick, "worker1")


def there_and_back(to, depth):
    """Each waits for one behind it on the same connection."""
    if depth == 0:
        return 0
    back = rpc.get_worker_info().name
    return 1 + rpc.rpc_async(to, there_and_back, args=(back, depth - 1)).wait()


def test_calls_that_wait_for_calls_behind_them_end(cluster):
    assert cluster.run(0, there_and_back, "worker1", 30) == 30


# --- on the caller ---


def many_waits(to):
    """More threads than one wait for answers of one connection, in any order."""
    wrong = []

    def wait(seed):
        for i in range(30):
            x = numbers((seed, i), 1 + seed)
            got = rpc.rpc_async(to, negative, args=(x,)).wait(PATIENCE)
            if not (got == -x).all():
                wrong.append((seed, i))

    acting = current.worker()
    threads = [
        threading.Thread(target=run_as, args=(acting, wait, seed)) for seed in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def run_as(agent, function, *args):
    with current.acting_as(agent):
        function(*args)


def test_many_threads_wait_at_once(cluster):
    cluster.run(0, many_waits, "worker1")


def waits_in_vain(to):
    """Time-outs while others wait; what was waited for comes all the same."""
    late = rpc.rpc_async(to, pass_gate, args=("late", "late"))
    for i in range(5):
        with pytest.raises(rpc.RpcTimeout, match="while waiting for a future"):
            late.wait(0.001 * 3**i)
        other = rpc.rpc_async(to, negative, args=(i,))
        assert other.wait(PATIENCE) == -i
    told = threading.Event()
    assert not watch(late, told.set)
    rpc.rpc_sync(to, open_gate, args=("late",))
    assert told.wait(PATIENCE)
    assert late.wait() == "late"


def test_a_wait_with_a_timeout_leaves_the_connection_to_others(cluster):
    cluster.run(0, waits_in_vain, "worker1")


def nobody_waits(to):
    """Answers are taken in although no thread waits for one."""
    told = threading.Semaphore(0)
    futures = [rpc.rpc_async(to, numbers, args=(i, 5000)) for i in range(100)]
    for future in futures:
        future.add_done_callback(lambda done: told.release())
    for _ in futures:
        assert told.acquire(timeout=PATIENCE)
    silent = rpc.rpc_async(to, negative, args=(7,))
    pause = threading.Event()
    for _ in range(PATIENCE * 1000):
        if silent.done():
            break
        pause.wait(0.001)
    assert silent.value() == -7


def test_an_answer_comes_without_a_thread_that_waits(cluster):
    cluster.run(0, nobody_waits, "worker1")


def callback_waits(to):
    """A callback waits for an answer of the connection on which its own came."""

    def then(done):
        return rpc.rpc_async(to, negative, args=(done.value(),)).wait(PATIENCE)

    future = rpc.rpc_async(to, negative, args=(3,))
    for _ in range(20):
        future = future.then(then)
    beside = [rpc.rpc_async(to, negative, args=(i,)) for i in range(20)]
    assert rpc.wait_all(beside, PATIENCE) == [-i for i in range(20)]
    assert future.wait(PATIENCE) == -3


def test_a_callback_may_wait_for_an_answer(cluster):
    cluster.run(0, callback_waits, "worker1")


def large_answers(to):
    """Beside a small one that comes behind them."""
    futures = [rpc.rpc_async(to, numbers, args=(i, LARGE * i)) for i in range(4)]
    last = rpc.rpc_async(to, negative, args=(4,))
    assert last.wait(PATIENCE) == -4
    for i, future in enumerate(futures):
        np.testing.assert_array_equal(future.wait(PATIENCE), numbers(i, LARGE * i))


def test_large_answers(cluster):
    cluster.run(0, large_answers, "worker1")


def first_failure(to):
    """`wait_all` raises what is not the first of its futures, and waits no longer."""
    stuck = rpc.rpc_async(to, pass_gate, args=("stuck", 1))
    fails = rpc.rpc_async(to, divmod, args=(1, 0))
    with pytest.raises(ZeroDivisionError, match="division"):
        rpc.wait_all([stuck, fails], PATIENCE)
    assert not stuck.done()
    rpc.rpc_sync(to, open_gate, args=("stuck",))
    assert rpc.wait_all([stuck], PATIENCE) == [1]


def test_the_first_failure_ends_wait_all(cluster):
    cluster.run(0, first_failure, "worker1")


def creations(to):
    """Behind their creation values are fetched in order; and it can be awaited."""
    seeds = range(30)
    rrefs = [rpc.remote(to, numbers, args=(i, 1 + i)) for i in seeds]
    for i in reversed(seeds):
        np.testing.assert_array_equal(rrefs[i].to_here(), numbers(i, 1 + i))
        assert rrefs[i].confirmed_by_owner()
    lone = rpc.remote(to, negative, args=(2,))
    assert lone.creation().wait(PATIENCE) is None
    slow = rpc.remote(to, pass_gate, args=("creation", 9))
    with pytest.raises(rpc.RpcTimeout, match="to_here"):
        slow.to_here(0.05)
    rpc.rpc_sync(to, open_gate, args=("creation",))
    assert slow.to_here() == 9


def test_a_value_is_fetched_behind_its_creation(cluster):
    cluster.run(0, creations, "worker1")


def failing_reader(to):
    """It costs the calls of this connection, and not the next one."""
    stuck = rpc.rpc_async(to, pass_gate, args=("failing", 1))
    assert rpc.rpc_async(to, negative, args=(1,)).wait(PATIENCE) == -1
    stream = current.worker().directory.find(to).shared._channel._stream

    def fail(*args):
        raise KeyboardInterrupt("from nowhere")

    # The reader waits within the first one, and has the second one for the next answer.
    stream.receive_into = fail
    assert rpc.rpc_async(to, negative, args=(1,)).wait(PATIENCE) == -1
    with pytest.raises(rpc.WorkerLost, match="its reader failed: KeyboardInterrupt"):
        stuck.wait(PATIENCE)
    rpc.rpc_sync(to, open_gate, args=("failing",))
    assert rpc.rpc_async(to, negative, args=(2,)).wait(PATIENCE) == -2


def test_a_reader_that_fails_ends_its_calls(processes):
    processes.run(0, failing_reader, "worker2")


def interrupted_wait(to):
    """Ctrl-C ends the wait of the main thread, and nothing else."""
    assert rpc.rpc_async(to, negative, args=(1,)).wait(PATIENCE) == -1  # it is open
    stuck = rpc.rpc_async(to, pass_gate, args=("awaited", 1))
    shared = current.worker().directory.find(to).shared
    with (
        interrupted_in(await_done),
        pytest.raises(KeyboardInterrupt, match=r"^$"),
    ):
        stuck.wait(PATIENCE)
    rpc.rpc_sync(to, open_gate, args=("awaited",))
    assert stuck.wait(PATIENCE) == 1
    assert current.worker().directory.find(to).shared is shared


def test_an_interrupted_wait_costs_no_connection(processes):
    processes.run(0, interrupted_wait, "worker2")

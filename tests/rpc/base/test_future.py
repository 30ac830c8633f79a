"""Futures: completion, callbacks, and waiting for several."""

import asyncio
import contextvars
import logging
import threading

import pytest

from jdist import rpc
from jdist.rpc.base import future as future_module
from tests.rpc.sockets import wait_until


def add(x, y):
    return x + y


def fail(text):
    raise KeyError(text)


def fail_as(kind):
    raise kind("ended")


def test_a_value():
    future = rpc.Future()
    assert not future.done()
    with pytest.raises(rpc.RpcError, match="has no value yet"):
        future.value()
    future.set_result(3)
    assert future.done()
    assert (future.value(), future.wait(), future.wait()) == (3, 3, 3)


def test_an_exception_stays_what_it_is():
    future = rpc.Future()
    error = LookupError("gone")
    future.set_exception(error)
    assert future.done()
    for ask in (future.wait, future.value, future.wait):
        with pytest.raises(LookupError, match="gone") as caught:
            ask()
        assert caught.value is error


def test_its_traceback_does_not_grow():
    future = rpc.Future()
    future.set_exception(LookupError("gone"))
    lengths = []
    for _ in range(3):
        with pytest.raises(LookupError, match="gone") as caught:
            future.wait()
        lengths.append(len(caught.traceback))
    assert lengths == [lengths[0]] * 3


def test_completed_only_once():
    for complete in ((lambda f: f.set_result(1)), lambda f: f.set_exception(OSError())):
        future = rpc.Future()
        complete(future)
        for again in (lambda f: f.set_result(2), lambda f: f.set_exception(OSError())):
            with pytest.raises(rpc.RpcError, match="can only be marked completed once"):
                again(future)


def test_only_one_of_many_threads_completes_it():
    future, won = rpc.Future(), []
    ready = threading.Barrier(16)

    def complete(i):
        ready.wait()
        try:
            future.set_result(i)
        except rpc.RpcError:
            return
        won.append(i)

    threads = [threading.Thread(target=complete, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [future.value()]


def test_what_is_no_exception():
    with pytest.raises(TypeError, match="must be an exception"):
        rpc.Future().set_exception("text")


@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_what_is_no_callback(method):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(rpc.Future(), method)(None)


def test_waiting_from_many_threads():
    future, got = rpc.Future(), []
    waiting = threading.Semaphore(0)

    def wait():
        waiting.release()
        got.append(future.wait())

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        waiting.acquire()
    future.set_result("x")
    for thread in threads:
        thread.join()
    assert got == ["x"] * 8


def test_a_wait_can_have_a_limit():
    future = rpc.Future()
    with pytest.raises(rpc.RpcTimeout, match=r"more than set timeout \(20 ms\)"):
        future.wait(0.02)
    future.set_result(1)
    assert future.wait(0.02) == 1


@pytest.mark.parametrize("timeout", [-2, float("inf"), float("nan")])
def test_a_limit_that_is_none(timeout):
    with pytest.raises(ValueError, match="non-negative"):
        rpc.Future().wait(timeout)


def test_callbacks_before_and_after_completion():
    future, seen = rpc.Future(), []
    future.add_done_callback(lambda done: seen.append(("early", done.value())))
    child = future.then(lambda done: done.wait() * 2)
    assert not child.done()
    future.set_result(4)
    future.add_done_callback(lambda done: seen.append(("late", done.value())))
    assert seen == [("early", 4), ("late", 4)]
    assert child.value() == 8
    assert future.then(lambda done: None).value() is None


def test_a_chain_of_twenty():
    first = last = rpc.Future()
    for _ in range(20):
        last = last.then(lambda done: done.value() + 1)
    first.set_result(0)
    assert last.wait() == 20


@pytest.mark.parametrize(
    ("callback", "kind", "text"),
    [
        (lambda: 1, TypeError, "takes 0 positional arguments but 1 was given"),
        (lambda done: done.value() + "a", TypeError, "unsupported operand"),
        (lambda done: fail("inside"), KeyError, "inside"),
    ],
)
def test_an_exception_of_a_callback_keeps_its_type(callback, kind, text):
    future = rpc.Future()
    child = future.then(callback)
    grandchild = child.then(lambda done: done.value())
    future.set_result(1)
    for one in (child, grandchild):
        with pytest.raises(kind, match=text):
            one.wait()


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_a_callback_may_end_in_any_way(kind):
    """What is no `Exception` completes the child like one that is."""
    future = rpc.Future()
    child = future.then(lambda done: fail_as(kind))
    future.set_result(1)
    with pytest.raises(kind, match="ended"):
        child.value()


def test_an_interrupt_ends_the_program_and_the_child():
    """A Ctrl-C while callbacks run is raised, and no callback is left out."""
    future, seen = rpc.Future(), []
    child = future.then(lambda done: fail_as(KeyboardInterrupt))
    future.add_done_callback(lambda done: fail_as(KeyboardInterrupt))
    future.add_done_callback(lambda done: seen.append(done.value()))
    with pytest.raises(KeyboardInterrupt, match="ended"):
        future.set_result(3)
    assert seen == [3]
    with pytest.raises(KeyboardInterrupt, match="ended"):
        child.value()


def test_an_interrupt_raised_on_another_thread_is_the_childs():
    """Python interrupts the main thread alone; elsewhere a callback raised it."""
    future = rpc.Future()
    child = future.then(lambda done: fail_as(KeyboardInterrupt))
    thread = threading.Thread(target=future.set_result, args=(1,))
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt, match="ended"):
        child.value()


def test_an_exception_passes_through_callbacks():
    future = rpc.Future()
    child = future.then(lambda done: done.value())
    future.set_exception(ZeroDivisionError("deep"))
    with pytest.raises(ZeroDivisionError, match="deep"):
        child.wait()


def test_an_exception_that_nobody_would_see_is_logged(caplog):
    future, seen = rpc.Future(), []
    future.add_done_callback(lambda done: fail("unseen"))
    future.add_done_callback(lambda done: seen.append(done.value()))
    with caplog.at_level(logging.ERROR, "jdist.rpc"):
        future.set_result(1)
    assert seen == [1]
    assert "unseen" in caplog.text


def test_a_callback_runs_in_the_context_in_which_it_was_added():
    mark = contextvars.ContextVar("mark", default="none")
    future = rpc.Future()
    mark.set("at then")
    child = future.then(lambda done: mark.get())
    mark.set("later")
    thread = threading.Thread(target=future.set_result, args=(1,))
    thread.start()
    thread.join()
    assert child.value() == "at then"
    assert mark.get() == "later"


def test_wait_all():
    futures = [rpc.Future() for _ in range(5)]
    threads = [
        threading.Thread(target=future.set_result, args=(i,))
        for i, future in enumerate(futures)
    ]
    for thread in reversed(threads):
        thread.start()
    assert rpc.wait_all(futures) == list(range(5))
    assert rpc.wait_all([]) == []
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_wait_all_raises_without_waiting_for_the_others(index):
    futures = [rpc.Future() for _ in range(3)]
    futures[index].set_exception(LookupError(f"number {index}"))
    with pytest.raises(LookupError, match=f"number {index}"):
        rpc.wait_all(futures)
    assert [future.done() for future in futures].count(True) == 1


def test_wait_all_raises_while_it_waits():
    futures = [rpc.Future() for _ in range(3)]
    futures[0].set_result(1)
    failing = threading.Thread(target=futures[2].set_exception, args=(OSError("now"),))
    failing.start()
    with pytest.raises(OSError, match="now"):
        rpc.wait_all(futures)
    failing.join()


def test_wait_all_is_woken_once(monkeypatch):
    """Not by each answer: a thread that wakes takes the interpreter from the reader."""
    woken, complete = [], future_module.complete
    futures = [rpc.Future() for _ in range(20)]

    def counting(future, *result):
        if future not in futures:
            woken.append(future)
        return complete(future, *result)

    monkeypatch.setattr(future_module, "complete", counting)
    for number, future in enumerate(futures[:7]):
        future.set_result(number)
    waiting = threading.Thread(target=lambda: found.extend(rpc.wait_all(futures)))
    found = []
    waiting.start()
    wait_until(lambda: all(future._waiters for future in futures[7:]))
    for number, future in enumerate(futures[7:], 7):
        assert woken == []
        future.set_result(number)
    waiting.join(60)
    assert found == list(range(20))
    assert len(woken) == 1


def test_wait_all_has_a_limit():
    done = rpc.Future()
    done.set_result(1)
    with pytest.raises(rpc.RpcTimeout, match="1 of 2 futures are not complete"):
        rpc.wait_all([done, rpc.Future()], timeout=0.02)


@pytest.mark.parametrize("together", [rpc.wait_all, rpc.collect_all])
def test_what_are_no_futures(together):
    with pytest.raises(TypeError, match="must be futures only"):
        together([3])


def test_collect_all_waits_for_all():
    futures = [rpc.Future() for _ in range(3)]
    together = rpc.collect_all(futures)
    futures[1].set_exception(OSError("one"))
    futures[0].set_result("zero")
    assert not together.done()
    futures[2].set_result("two")
    assert together.wait() == futures
    assert rpc.collect_all([]).wait() == []


# --- futures of calls ---


def callbacks_of_calls():
    here = rpc.get_worker_info().name
    future = rpc.rpc_async("worker1", add, args=(1, 2))
    named = future.then(lambda done: (rpc.get_worker_info().name, done.value()))
    assert named.wait() == (here, 3)
    # A callback calls and waits, also for an answer on the same channel as its own.
    again = rpc.rpc_async("worker1", add, args=(1, 2)).then(
        lambda done: (
            rpc.rpc_sync("worker1", add, args=(done.value(), 10))
            + rpc.rpc_async("worker1", add, args=(done.value(), 100)).wait()
        )
    )
    assert again.wait() == 13 + 103
    nested = rpc.rpc_async("worker2", add, args=(0, 0))
    for _ in range(20):
        nested = nested.then(
            lambda done: rpc.rpc_sync("worker3", add, args=(done.value(), 1))
        )
    assert nested.wait() == 20


def test_callbacks_of_calls(cluster):
    cluster.run(0, callbacks_of_calls)
    cluster.run(3, callbacks_of_calls)


def failed_twice():
    future = rpc.rpc_async("worker1", fail, args=("twice",))
    for _ in range(2):
        with pytest.raises(KeyError, match="twice"):
            future.wait()
    assert future.done()


def test_a_failed_call_fails_each_time(cluster):
    cluster.run(2, failed_twice)


_waiting: dict[str, rpc.Future] = {}


@rpc.async_execution
def wait_for(name):
    return _waiting.setdefault(name, rpc.Future())


def complete(name, value):
    _waiting.setdefault(name, rpc.Future()).set_result(value)


def early_error():
    waits = rpc.rpc_async("worker1", wait_for, args=("early",))
    futures = [waits, rpc.rpc_async("worker1", fail, args=("early",))]
    with pytest.raises(KeyError, match="early"):
        rpc.wait_all(futures)
    assert not waits.done()
    rpc.rpc_sync("worker1", complete, args=("early", "finished"))
    assert waits.wait() == "finished"


def test_wait_all_of_calls_raises_early(cluster):
    cluster.run(0, early_error)

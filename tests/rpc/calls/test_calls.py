"""Calls: to whom, of what, nested how deeply, side by side, and what comes back."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import TraceAnnotation

from jdist import rpc
from jdist.rpc.calls import function_calls

NEXT = {f"worker{i}": f"worker{(i + 1) % 4}" for i in range(4)}


def add(x, y):
    return x + y


def name_and(x):
    return rpc.get_worker_info().name, x


def call_all_forms():
    value = np.arange(6.0).reshape(2, 3)
    forms = [2, "worker2", rpc.WorkerInfo("worker2", 2), rpc.get_worker_info("worker2")]
    for to in forms:
        name, same = rpc.rpc_sync(to, name_and, args=(value,))
        assert name == "worker2"
        assert np.array_equal(same, value)
        assert rpc.rpc_async(to, name_and, kwargs={"x": 5}).wait() == ("worker2", 5)


def test_a_worker_is_named_in_three_ways(cluster):
    cluster.run(0, call_all_forms)
    cluster.run(2, call_all_forms)  # to oneself


@pytest.mark.parametrize("to", ["worker9", 4, -1, 17])
def test_nobody_of_that_name_or_rank(cluster, to):
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(rpc.RpcError, match="could not find destination"):
            cluster.run(1, call, to, add, (1, 2))


def test_a_worker_info_of_another_group(cluster):
    with pytest.raises(rpc.RpcError, match="could not find destination"):
        cluster.run(1, rpc.rpc_sync, rpc.WorkerInfo("worker1", 3), add, (1, 2))


@pytest.mark.parametrize("to", [1.5, 0.5, None, True, ("worker1",)])
def test_what_names_nobody_at_all(cluster, to):
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
            cluster.run(1, call, to, add, (1, 2))


def test_what_is_not_callable(cluster):
    for call in (rpc.rpc_sync, rpc.rpc_async):
        text = (
            rf"function should be callable\. Got 'add'\..*{call.__name__}\(to, fn, ar"
        )
        with pytest.raises(TypeError, match=text):
            cluster.run(1, call, "worker2", "add", (1, 2))


class Counter:
    """Has every kind of method; travels by value as a dataclass would."""

    def __init__(self, start=0):
        self.start = start

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def named(cls, x):
        return cls.__name__, x


def call_methods():
    assert rpc.rpc_sync("worker1", Counter.double, args=(4,)) == 8
    assert rpc.rpc_sync("worker1", Counter.named, args=(4,)) == ("Counter", 4)
    assert rpc.rpc_sync("worker1", jnp.add, args=(jnp.ones(2), 1.0)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", min, args=(5, 3)) == 3
    assert rpc.rpc_sync("worker1", complex, args=(1, 2)) == 1 + 2j
    info = rpc.rpc_sync("worker1", rpc.WorkerInfo, args=("x", 7))
    assert info == rpc.WorkerInfo("x", 7)


def test_functions_classes_and_methods(cluster):
    cluster.run(3, call_methods)


def there_and_back(depth):
    """Calls between this worker and the next one, `depth` times in all."""
    if depth == 0:
        return []
    me = rpc.get_worker_info().name
    other = {"worker0": "worker1", "worker1": "worker0"}[me]
    return [me, *rpc.rpc_sync(other, there_and_back, args=(depth - 1,))]


def test_a_hundred_calls_deep_between_two_workers(cluster):
    visited = cluster.run(0, there_and_back, 100)
    assert visited == ["worker0", "worker1"] * 50


def around(ttl):
    if ttl == 0:
        return [rpc.get_worker_info().name]
    me = rpc.get_worker_info().name
    return [me, *rpc.rpc_async(NEXT[me], around, args=(ttl - 1,)).wait()]


def test_nested_asynchronous_calls_around_the_ring(cluster):
    assert cluster.run(1, around, 9) == [f"worker{(1 + i) % 4}" for i in range(10)]


def light(x):
    return x - 1


def thousand():
    futures = [rpc.rpc_async(i % 4, light, args=(i,)) for i in range(1000)]
    return rpc.wait_all(futures) == [i - 1 for i in range(1000)]


def test_a_thousand_light_calls_from_everybody(cluster):
    assert cluster.everywhere(thousand) == [True] * 4


def heavy(x):
    return x @ x


def many_arrays():
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=(100 + i, 100 + i)) for i in range(20)]
    futures = [rpc.rpc_async("worker2", heavy, args=(x,)) for x in arrays]
    for x, product in zip(arrays, rpc.wait_all(futures), strict=True):
        assert np.array_equal(product, x @ x)


def test_heavy_calls(cluster):
    cluster.run(1, many_arrays)


def from_threads(count):
    found, errors = {}, []

    def call(i):
        try:
            with rpc.use_worker("worker0"):
                found[i] = [
                    rpc.rpc_sync(1 + (i + j) % 3, add, args=(i, j)) for j in range(8)
                ]
        except Exception as error:  # noqa: BLE001 - compared below
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == {i: [i + j for j in range(8)] for i in range(count)}


def test_sixty_four_concurrent_callers(cluster):
    cluster.run(0, from_threads, 64)


_gates: dict[str, threading.Event] = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def wait_at(name):
    assert gate(name).wait(60)
    return "slow"


def open_gate(name):
    gate(name).set()
    return "fast"


def fast_behind_slow(name, start):
    slow = start("worker3", wait_at, args=(name,))
    # Only if this one passes the slow one can either end.
    assert rpc.rpc_async("worker3", open_gate, args=(name,)).wait() == "fast"
    assert slow.wait() == "slow"


def test_a_slow_call_does_not_delay_a_fast_one(cluster):
    cluster.run(2, fast_behind_slow, "slow-before-fast", rpc.rpc_async)


def hundred_slow(name):
    slow = [rpc.rpc_async("worker3", wait_at, args=(name,)) for _ in range(100)]
    assert rpc.rpc_async("worker3", open_gate, args=(name,)).wait() == "fast"
    assert rpc.wait_all(slow) == ["slow"] * 100


def test_a_hundred_slow_calls_do_not_delay_a_fast_one(cluster):
    cluster.run(1, hundred_slow, "hundred-slow")


def fail(text):
    raise ValueError(text)


class Picky(Exception):
    """Cannot be made of its own args."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def picky():
    raise Picky("a", "b")


def leave_the_interpreter():
    raise SystemExit(3)


def wait_for(to, fn, args=()):
    future = rpc.rpc_async(to, fn, args=args)
    return future.wait()


@pytest.mark.parametrize("text", ["Expected error", "one\ntwo\t\\three"])
def test_an_exception_arrives_as_its_own_type(cluster, text):
    for start in (rpc.rpc_sync, wait_for):
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            cluster.run(1, start, "worker2", fail, (text,))
        assert str(caught.value) == text  # `match` looks at the notes as well


def remote_details():
    try:
        rpc.rpc_sync("worker2", fail, args=("here",))
    except ValueError as error:
        return error.remote_worker, error.remote_traceback


def test_an_exception_tells_where_it_was_raised(cluster):
    worker, trace = cluster.run(1, remote_details)
    assert worker == "worker2"
    assert "raise ValueError(text)" in trace


def test_the_wrong_number_of_arguments(cluster):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        cluster.run(0, rpc.rpc_sync, "worker1", add, (1,))


def test_an_exception_that_cannot_be_rebuilt(cluster):
    with pytest.raises(
        rpc.RemoteError, match=r"Original exception on remote side was.*Picky"
    ):
        cluster.run(0, rpc.rpc_sync, "worker1", picky)


def fail_often(*texts):
    raise ExceptionGroup("all of them", [ValueError(text) for text in texts])


def handle_values(start):
    """What `except*` finds on the caller; another exception would pass it by."""
    found = None
    try:
        start("worker2", fail_often, args=("five", "six"))
    except* KeyError:
        raise
    except* ValueError as group:
        found = [(str(error), error.remote_worker) for error in group.exceptions]
    return found


@pytest.mark.parametrize("start", [rpc.rpc_sync, wait_for])
def test_a_group_of_exceptions_is_handled_one_by_one(cluster, start):
    found = cluster.run(1, handle_values, start)
    assert found == [("five", "worker2"), ("six", "worker2")]


def test_leaving_the_interpreter_is_an_error_of_the_call(cluster):
    with pytest.raises(rpc.RemoteError, match="SystemExit"):
        cluster.run(0, rpc.rpc_sync, "worker1", leave_the_interpreter)
    assert cluster.run(0, rpc.rpc_sync, "worker1", add, (1, 2)) == 3


def test_functions_that_cannot_travel(cluster):
    with pytest.raises(ValueError, match="lambda"):
        cluster.run(0, call_lambda)
    with pytest.raises(rpc.ForbiddenFunction, match="must be in a module"):
        cluster.run(0, rpc.rpc_sync, "worker1", threading.active_count)


def call_lambda():
    rpc.rpc_sync("worker1", lambda: 1)


def futures_do_not_travel():
    future = rpc.Future()
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(TypeError, match=r"Can not pickle torch.futures.Future"):
            call("worker1", name_and, args=([future],))
    for call in (rpc.rpc_sync, wait_for):
        with pytest.raises(TypeError, match=r"Can not pickle torch.futures.Future"):
            call("worker1", return_future)


def return_future():
    return rpc.Future()


def test_futures_are_neither_arguments_nor_results(cluster):
    cluster.run(0, futures_do_not_travel)


def mutate(x):
    x += 1
    return x


def arrays_are_not_shared():
    x = np.arange(5.0)
    result = rpc.rpc_sync("worker1", mutate, args=(x,))
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert result.tolist() == [1, 2, 3, 4, 5]
    mine = rpc.rpc_sync(rpc.get_worker_info(), mutate, args=(x,))
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert mine.tolist() == [1, 2, 3, 4, 5]


def test_numpy_arrays_are_copied(cluster):
    cluster.run(0, arrays_are_not_shared)


def kinds(x):
    return type(x).__name__, x.dtype.name, x.shape


def types_survive():
    array = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.bfloat16)
    assert rpc.rpc_sync("worker1", kinds, args=(array,)) == (
        "ArrayImpl",
        "bfloat16",
        (3, 5),
    )
    assert rpc.rpc_sync("worker1", kinds, args=(np.ones((2, 3), np.int8),)) == (
        "ndarray",
        "int8",
        (2, 3),
    )
    assert isinstance(rpc.rpc_sync("worker1", add, args=(array, array)), jax.Array)


def test_arrays_arrive_as_what_they_were(cluster):
    cluster.run(0, types_survive)


def returns_nothing():
    pass


def test_no_result(cluster):
    assert cluster.run(0, rpc.rpc_sync, "worker1", returns_nothing) is None


def test_devices_of_a_local_cluster():
    devices = jax.devices()[2:4]
    with rpc.local_cluster(["a", "b"], devices=devices, allow=["tests"]):
        here = jax.device_put(jnp.arange(3.0), devices[0])
        there = rpc.rpc_sync("b", where, args=(here,))
        assert there == str(devices[1])
        assert rpc.rpc_sync("b", name_and, args=(here,))[1].devices() == {devices[0]}


def where(x):
    return ",".join(map(str, x.devices()))


def test_jax_arrays_are_shared_in_process():
    devices = [jax.devices()[0]] * 2
    with rpc.local_cluster(["a", "b"], devices=devices, allow=["tests"]):
        array = jnp.arange(3.0)
        assert rpc.rpc_sync("b", name_and, args=(array,))[1] is array


def test_a_profiler_gets_the_names_of_called_functions(monkeypatch, tmp_path):
    """And without one nothing is made for it."""
    made = []

    class Annotation(TraceAnnotation):
        def __init__(self, name):
            made.append(name)
            super().__init__(name)

    monkeypatch.setattr(function_calls, "TraceAnnotation", Annotation)
    with rpc.local_cluster(["worker0", "worker1"], allow=["tests"]):
        assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
        assert made == []
        with jax.profiler.trace(tmp_path):
            assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
    assert made == ["rpc add"]

"""Which worker a thread of control is."""

import contextvars
import threading

import jax
import pytest

from jdist import rpc
from tests.rpc.hosts import names

MARK = contextvars.ContextVar("mark", default="nothing")


def my_name():
    return rpc.get_worker_info().name


def in_a_thread(body, *args):
    """What `body` returns or raises on a new thread, which has no worker of its own."""
    outcome = []

    def run():
        try:
            outcome.append(body(*args))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_called_function_runs_as_its_worker(cluster):
    for to in cluster.names:
        assert cluster.run(1, rpc.rpc_sync, to, my_name) == to
        assert cluster.run(1, as_future, to) == to
    assert cluster.run(1, my_name) == "worker1"


def as_future(to):
    return rpc.rpc_async(to, my_name).wait()


def test_the_calling_thread_is_the_first_of_a_local_cluster(threads):
    assert my_name() == "worker0"


def test_a_new_thread_takes_the_only_worker(processes):
    assert processes.run(2, in_a_thread, my_name) == "worker2"


def test_a_new_thread_must_choose_among_several(threads):
    error = in_a_thread(my_name)
    assert isinstance(error, rpc.RpcError)
    assert "several workers (worker0, worker1, worker2, worker3)" in str(error)
    assert "rpc.use_worker(name)" in str(error)


def test_choosing_a_worker(threads):
    def body():
        seen = []
        for name in ("worker2", "worker1"):
            with rpc.use_worker(name):
                seen.append(my_name())
                with rpc.use_worker("worker3"):
                    seen.append(my_name())
                seen.append(rpc.rpc_sync("worker0", my_name))
                seen.append(my_name())
        return seen

    one = ["worker2", "worker3", "worker0", "worker2"]
    two = ["worker1", "worker3", "worker0", "worker1"]
    assert in_a_thread(body) == one + two
    assert my_name() == "worker0"


def test_a_worker_of_another_process(threads):
    with (
        pytest.raises(ValueError, match="must be a worker of this process"),
        rpc.use_worker("worker4"),
    ):
        pass


def test_nothing_of_the_caller_leaks_into_a_called_function(threads):
    MARK.set("the caller's")
    assert rpc.rpc_sync("worker1", read) == "nothing"
    assert rpc.rpc_sync("worker0", read) == "nothing"
    assert (
        rpc.rpc_sync("worker1", set_and_read, args=("the callee's",)) == "the callee's"
    )
    assert MARK.get() == "the caller's"


def read():
    return MARK.get()


def set_and_read(value):
    MARK.set(value)
    return MARK.get()


def test_an_exception_brings_the_thread_back_to_its_worker(threads):
    with pytest.raises(ZeroDivisionError, match="zero"):
        rpc.rpc_sync("worker3", divmod, args=(1, 0))
    assert my_name() == "worker0"


def test_callbacks_run_as_the_worker_that_added_them(threads):
    with rpc.use_worker("worker2"):
        future = rpc.rpc_async("worker1", my_name)
        child = future.then(lambda done: (my_name(), done.value()))
    assert child.wait() == ("worker2", "worker1")
    # Also when the thread that adds them is no worker: then as the future's own.
    other = in_a_thread(future.then, lambda done: my_name())
    assert other.wait() == "worker2"


def test_clusters_one_after_the_other_and_not_within():
    for turn in range(3):
        with rpc.local_cluster(names(turn + 1), allow=["tests"]):
            assert len(rpc.get_worker_infos()) == turn + 1
            with (
                pytest.raises(rpc.RpcError, match="already initialized"),
                rpc.local_cluster(["another"]),
            ):
                pass
    with pytest.raises(rpc.RpcError, match="has not been initialized"):
        my_name()


def test_a_scope_outlives_its_worker():
    with rpc.local_cluster(["a"], allow=["tests"]):
        context = contextvars.copy_context()
    with pytest.raises(rpc.RpcError, match="has not been initialized"):
        context.run(my_name)


@pytest.mark.parametrize("given", [[], ["a", "a"]])
def test_names_of_a_local_cluster(given):
    with (
        pytest.raises(ValueError, match="must be one or more unique names"),
        rpc.local_cluster(given),
    ):
        pass


def test_devices_of_a_local_cluster_are_one_for_each():
    with (
        pytest.raises(ValueError, match="must be one device for each of the 2"),
        rpc.local_cluster(["a", "b"], devices=jax.devices()[:1]),
    ):
        pass

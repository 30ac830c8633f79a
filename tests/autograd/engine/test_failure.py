"""A failure ends a pass on every worker with its cause; later passes succeed."""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.context_checks import counts, is_valid_context
from tests.autograd.engine_cases import after, leaves, me, numbers, own
from tests.rpc.hosts import PATIENCE, become_worker
from tests.rpc.rref.common import close_gate, gate, open_gate, wait_for

# --- hooks that fail or wait, on any worker ---

_removers = []


def fail_there(name, seed):
    """This worker's variable fails in backward passes."""

    def fail(gradient):
        raise ValueError("Simulate error on backward pass")

    _removers.append(own(name, seed).register_hook(fail))


def wait_there(name, seed):
    """It waits in backward passes until a gate opens."""

    def wait(gradient):
        open_gate("arrived")
        assert gate("go on").wait(PATIENCE)

    _removers.append(own(name, seed).register_hook(wait))


def arrived():
    return gate("arrived").wait(PATIENCE)


def as_before():
    """Undoes all of it."""
    open_gate("go on")
    while _removers:
        _removers.pop()()
    assert cases.at_rest()
    for name in ("go on", "arrived"):
        close_gate(name)


@autograd.eager
def along(x, name, seed, way):
    """x times the own variable of the last worker on the way; each adds x to it."""
    if not way:
        return own(name, seed) * x
    return rpc.rpc_sync(way[0], along, args=(x, name, seed, way[1:])) + x


WAY = ["worker1", "worker2", "worker3"]
SEED = 17


def chain(name):
    """x, and a loss that goes over worker 1, 2 and 3."""
    (x,) = leaves(1, SEED + 1)
    return x, along(x, name, SEED, WAY).sum()


def check(x, gradients):
    expected = numbers(SEED) + 3.0
    np.testing.assert_allclose(gradients[x], expected, rtol=1e-12)


# --- a user's function raises ---


def raising(mode, times):
    rpc.rpc_sync("worker3", fail_there, args=("failing", SEED))
    with autograd.context() as context_id:
        x, loss = chain("failing")
        for _ in range(times):
            with pytest.raises(
                autograd.BackwardError,
                match=r"^Error on worker worker3: Simulate error on backward pass$",
            ) as caught:
                autograd.backward(context_id, [loss], mode=mode, retain_graph=True)
            assert caught.value.worker == "worker3"
            assert type(caught.value.__cause__) is ValueError
            assert isinstance(caught.value, RuntimeError)
        assert autograd.get_gradients(context_id) == {}
        rpc.rpc_sync("worker3", as_before)
        for number in range(times):
            retain = number < times - 1
            autograd.backward(context_id, [loss], mode=mode, retain_graph=retain)
        gradient = autograd.get_gradients(context_id)[x]
        np.testing.assert_allclose(gradient / times, numbers(SEED) + 3.0, rtol=1e-12)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_an_error_names_its_worker_and_later_passes_work(cluster, mode):
    cluster.run(0, raising, mode, 3)
    assert all(cluster.everywhere(cases.at_rest))


def test_many_failing_passes_and_as_many_that_work(threads):
    threads.run(0, raising, "smart", 50)


def here():
    """The root's own variable fails."""
    x, y = leaves(2, 19)
    remove = x.register_hook(lambda gradient: 1 / 0)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        said = f"^Error on worker {me().name}: division by zero$"
        with pytest.raises(autograd.BackwardError, match=said) as caught:
            autograd.backward(context_id, [loss], retain_graph=True)
        assert type(caught.value.__cause__) is ZeroDivisionError
        remove()
        autograd.backward(context_id, [loss])
        np.testing.assert_array_equal(autograd.get_gradients(context_id)[x], y.value)


def test_an_error_on_the_worker_that_called_backward(cluster):
    cluster.everywhere(here)


def raise_(x):
    raise ValueError("Simulate error on the device")


@jax.custom_vjp
def sensitive(x):
    """Its backward fails when it runs, not when it is traced."""
    return x


def _backward(_, cotangent):
    shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    return (jax.pure_callback(raise_, shape, cotangent),)


sensitive.defvjp(lambda x: (x, None), _backward)


def times_sensitive(x, y):
    return sensitive(x) * y


def on_the_device():
    x, y = leaves(2, 20)
    with autograd.context() as context_id:
        product = rpc.rpc_sync("worker2", times_sensitive, args=(x, y))
        with pytest.raises(
            autograd.BackwardError,
            match=r"(?s)^Error on worker worker2: .*on the device",
        ):
            autograd.backward(context_id, [product.sum()])
        assert autograd.get_gradients(context_id) == {}


def test_an_error_of_the_device_surfaces_with_the_name_of_its_worker(cluster):
    cluster.run(0, on_the_device)
    assert all(cluster.everywhere(cases.at_rest))


def interrupted():
    x, y = leaves(2, 21)

    def interrupt(gradient):
        raise KeyboardInterrupt("Ctrl-C")

    remove = x.register_hook(interrupt)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            autograd.backward(context_id, [loss], retain_graph=True)
        remove()
        autograd.backward(context_id, [loss])
        np.testing.assert_array_equal(autograd.get_gradients(context_id)[x], y.value)


def test_ctrl_c_ends_the_pass(cluster):
    cluster.run(0, interrupted)
    assert all(cluster.everywhere(cases.at_rest))


# --- while a pass is under way ---


def started(act, error, match, timeout=PATIENCE):
    """A pass is held up on worker 3, `act(context_id)` happens, and it ends so."""
    rpc.rpc_sync("worker3", wait_there, args=("waiting", SEED))
    with autograd.context() as context_id:
        x, loss = chain("waiting")
        acting = threading.Thread(target=_act, args=(me().name, act, context_id))
        acting.start()
        with pytest.raises(error, match=match):
            autograd.backward(context_id, [loss], timeout=timeout)
        acting.join()
    # Everybody's part has ended, but worker 3's is still held up in its function.
    for name in WAY[:2]:
        assert rpc.rpc_sync(name, cases.at_rest)
    rpc.rpc_sync("worker3", as_before)
    with autograd.context() as context_id:
        x, loss = chain("waiting")
        autograd.backward(context_id, [loss], mode="fast")
        check(x, autograd.get_gradients(context_id))


def _act(name, act, context_id):
    with rpc.use_worker(name):
        assert rpc.rpc_sync("worker3", arrived)
        act(context_id)


def released_here():
    started(
        lambda context_id: autograd.retrieve_context(context_id).release(),
        autograd.BackwardError,
        "Error on worker worker0: Could not find autograd context with id: ",
    )


def test_a_context_that_is_released_meanwhile(cluster):
    cluster.run(0, released_here)
    assert all(cluster.everywhere(cases.at_rest))


def too_late():
    started(
        lambda context_id: None,
        rpc.RpcTimeout,
        r"RPC ran for more than set timeout \(\d+ ms\)",
        timeout=3.0,
    )


def test_a_pass_that_takes_too_long(cluster):
    cluster.run(0, too_late)
    assert all(cluster.everywhere(cases.at_rest))


def released_inside():
    """A function of the pass itself releases the context."""
    x, y = leaves(2, 22)
    with autograd.context() as context_id:
        x.register_hook(
            lambda gradient: _ignore(autograd.retrieve_context(context_id).release())
        )
        product = x
        for _ in range(100):
            product = rpc.rpc_sync(after(), cases.add, args=(product, y))
        assert len(autograd.retrieve_context(context_id).send_functions()) == 100
        missing = f"Could not find autograd context with id: {context_id}"
        with pytest.raises(autograd.AutogradError, match=missing):
            autograd.backward(context_id, [product.sum()])
        assert not is_valid_context(context_id)


def _ignore(future):
    future.wait()


def test_a_context_that_is_released_from_inside_the_pass(cluster):
    cluster.everywhere(released_inside)
    assert all(cluster.everywhere(cases.at_rest))


def counted(context_id):
    """While the pass is held up, every worker on the way takes part in it."""
    told = [rpc.rpc_sync(name, counts) for name in ["worker0", *WAY]]
    assert [info["num_current_backward_passes"] for info in told] == [1] * 4
    assert all(info["num_autograd_contexts"] >= 1 for info in told)
    assert rpc.debug_info()["num_current_backward_passes"] == 1
    autograd.retrieve_context(context_id).release()


def observed():
    missing = "Could not find autograd context with id: "
    started(counted, autograd.BackwardError, missing)


def test_passes_under_way_are_counted(cluster):
    cluster.run(0, observed)


# --- a worker dies ---


def dying():
    """Held up on worker 3, which is killed meanwhile; who waits for it, and who not."""
    rpc.rpc_sync("worker3", wait_there, args=("waiting", SEED))
    with autograd.context() as context_id:
        x, loss = chain("waiting")
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker3'"):
            autograd.backward(context_id, [loss], retain_graph=True)
        for name in WAY[:2]:
            assert rpc.rpc_sync(name, cases.at_rest)
        # In the same context, over those that are left.
        y = rpc.rpc_sync("worker1", cases.mul, args=(x, x))
        autograd.backward(context_id, [y.sum()])
        gradient = autograd.get_gradients(context_id)[x]
        np.testing.assert_allclose(gradient, 2 * x.value, rtol=1e-12)
        # And what needs the one that is gone, again.
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker3'"):
            autograd.backward(context_id, [loss])


def leave():
    rpc.shutdown(graceful=False)


def test_a_worker_that_dies_during_the_pass_is_named_everywhere(fresh_hosts):
    hosts = fresh_hosts(4)
    hosts.everywhere(become_worker)
    task = hosts.start(0, dying)
    assert hosts.run(3, arrived)
    hosts.signal(3, signal.SIGKILL)
    task.result()
    hosts.everywhere(leave)


# --- wrong arguments ---


def wrong():
    x, y = leaves(2, 23)
    with autograd.context() as context_id:
        loss = (x * y).sum()
        cases = [
            ((context_id, None), TypeError, "incompatible function arguments"),
            ((None, None), TypeError, "must be the id"),
            ((context_id, []), RuntimeError, "No tensors provided for gradient"),
            ((context_id, [jnp.ones(())]), RuntimeError, "requires_grad not set on"),
            ((context_id, [loss, 3.0]), RuntimeError, r"roots\[1\].*requires_grad not"),
            (
                (context_id, [x * y]),
                RuntimeError,
                "is not a scalar, all roots need to be scalar",
            ),
            ((context_id, [x]), RuntimeError, "does not have a valid gradient func"),
            (
                (context_id, [x.recorded()]),
                RuntimeError,
                "does not have a valid gradient function",
            ),
            (
                (100, [loss]),
                RuntimeError,
                "Could not find autograd context with id: 100",
            ),
            (
                (context_id, [loss], "slow"),
                ValueError,
                "must be one of 'smart', 'fast'",
            ),
            ((context_id, [loss], "fast", False, -2), ValueError, "non-negative"),
        ]
        for arguments, error, match in cases:
            with pytest.raises(error, match=match):
                autograd.backward(*arguments)
        given = [
            (numbers(24, shape=(3, 2)), "of its root's shape"),
            (numbers(24, dtype=np.float32), "of its root's shape"),
        ]
        for value, match in given:
            with pytest.raises(ValueError, match=match):
                autograd.backward(context_id, [x * y], cotangents=[value])
        with pytest.raises(ValueError, match="must be 1 arrays, one for each root"):
            autograd.backward(context_id, [loss], cotangents=[])
        with pytest.raises(TypeError, match="must be a list of arrays"):
            autograd.backward(context_id, [loss], cotangents=numbers(24))
        autograd.backward(context_id, [autograd.apply(jnp.reshape, loss, (1, 1))])
        assert len(autograd.get_gradients(context_id)) == 2
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        autograd.get_gradients(context_id)


def test_wrong_arguments_are_refused(threads):
    threads.run(0, wrong)


def nothing_to_wait_for():
    return wait_for(lambda: rpc.debug_info()["num_autograd_contexts"] == 0)


def test_no_context_is_left(cluster):
    cluster.run(0, raising, "smart", 1)
    assert all(cluster.everywhere(nothing_to_wait_for))

"""Gradients of other workers' variables: each is in its owner's context."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.context_checks import is_valid_context
from tests.autograd.engine_cases import after, leaves, me, numbers, own
from tests.rpc.hosts import PATIENCE
from tests.rpc.rref.common import wait_for


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    cases.forget_own()


def only_on_the_result():
    """The callee returns its own variable; no argument is recorded."""
    name = f"result of {me().name}"
    with autograd.context() as context_id:
        theirs = rpc.rpc_sync(after(), cases.return_own, args=(name, 1))
        autograd.backward(context_id, [(theirs * theirs).sum()])
        assert autograd.get_gradients(context_id) == {}
        args = (context_id, name)
        found = rpc.rpc_sync(after(), cases.gradient_of_own, args=args)
    np.testing.assert_array_equal(found, 2 * numbers(1))


def test_a_variable_that_only_the_result_brings(cluster):
    cluster.everywhere(only_on_the_result)
    cluster.everywhere(cases.forget_own)


@autograd.eager
def add_to_reference(reference, y):
    """On the owner of the reference or elsewhere."""
    return autograd.apply(cases.mul, reference.to_here(), y)


def by_reference(callee_steps, owner, how):
    """The variable is at `owner`, and another worker fetches it in the context."""
    name = f"reference of {me().name}"
    (y,) = leaves(1, 2)
    with autograd.context() as context_id:
        theirs = rpc.remote(owner, cases.return_own, args=(name, 3))
        call = rpc.remote if how == "remote" else rpc.rpc_sync
        product = call(after(callee_steps), add_to_reference, args=(theirs, y))
        if how == "remote":
            product = product.to_here()
        autograd.backward(context_id, [product.sum()], mode="fast")
        gradients = autograd.get_gradients(context_id)
        assert len(gradients) == (2 if owner == me().name else 1)
        np.testing.assert_array_equal(gradients[y], numbers(3))
        args = (context_id, name)
        found = rpc.rpc_sync(owner, cases.gradient_of_own, args=args)
        np.testing.assert_array_equal(found, y.value)


@pytest.mark.parametrize("how", ["sync", "remote"])
@pytest.mark.parametrize(("steps", "owner"), [(1, 1), (2, 1)])
def test_a_variable_by_reference(cluster, steps, owner, how):
    """The callee owns it; and the callee fetches it from another one."""
    cluster.run(0, by_reference, steps, f"worker{owner}", how)
    cluster.everywhere(cases.forget_own)


def test_a_variable_of_one_worker_that_all_others_use(cluster):
    cluster.everywhere(by_reference, 2, "worker0", "remote")
    cluster.everywhere(cases.forget_own)


# --- trainers and a parameter server ---


def train(server, rounds):
    """One context for each step; the gradient on the server is this trainer's only."""
    if me().name == server:
        return
    for number in range(rounds):
        x = autograd.variable(numbers(me().id, number))
        with autograd.context() as context_id:
            args = ("weights", 5, x)
            product = rpc.rpc_sync(server, cases.times_own, args=args)
            autograd.backward(context_id, [(product * product).sum()])
            gradient = autograd.get_gradients(context_id)[x]
            args = (context_id, "weights")
            theirs = rpc.rpc_sync(server, cases.gradient_of_own, args=args)
        weights = numbers(5)
        expected = 2 * x.value * weights
        np.testing.assert_allclose(gradient, expected * weights, rtol=1e-12)
        np.testing.assert_allclose(theirs, expected * x.value, rtol=1e-12)


def test_contexts_keep_trainers_apart(cluster):
    cluster.everywhere(train, "worker0", 3)
    cluster.everywhere(cases.forget_own)


# --- RRef.backward ---


@autograd.eager
def loss_there(name, x):
    return autograd.apply(cases.total, own(name, 6) * x)


@autograd.eager
def product_there(name, x):
    return own(name, 6) * x


def gone(context_id):
    return wait_for(lambda: not is_valid_context(context_id))


def from_reference(given):
    name = f"loss for {me().name}"
    (x,) = leaves(1, 7)
    with autograd.context() as context_id:
        loss = rpc.remote(after(), loss_there, args=(name, x))
        loss.backward(context_id if given else -1, retain_graph=True)
        loss.backward(context_id)
        gradients = autograd.get_gradients(context_id)
        args = (context_id, name)
        theirs = rpc.rpc_sync(after(), cases.gradient_of_own, args=args)
    np.testing.assert_array_equal(gradients[x], 2 * numbers(6))
    np.testing.assert_array_equal(theirs, 2 * x.value)
    assert rpc.rpc_sync(after(), gone, args=(context_id,))
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        loss.backward(context_id)


@pytest.mark.parametrize("given", [True, False])
def test_a_pass_that_begins_where_the_value_is(cluster, given):
    cluster.run(0, from_reference, given)
    cluster.everywhere(cases.forget_own)


def from_own_reference():
    (x,) = leaves(1, 8)
    with autograd.context() as context_id:
        loss = rpc.RRef(autograd.apply(jnp.sum, x * x))
        loss.backward(context_id)
        gradient = autograd.get_gradients(context_id)[x]
    np.testing.assert_array_equal(gradient, 2 * x.value)
    with pytest.raises(RuntimeError, match="must be the id of a context, outside of"):
        loss.backward()


def test_a_reference_to_a_value_of_this_worker(cluster):
    cluster.run(0, from_own_reference)


def wrong_reference():
    (x,) = leaves(1, 9)
    with autograd.context() as context_id:
        product = rpc.remote(after(), product_there, args=("wrong", x))
        with pytest.raises(RuntimeError, match="is not a scalar"):
            product.backward(context_id)
        plain = rpc.remote(after(), sum, args=([1, 2],))
        with pytest.raises(RuntimeError, match="requires_grad not set on"):
            plain.backward(context_id)


def test_references_that_are_no_roots(cluster):
    cluster.run(0, wrong_reference)
    cluster.everywhere(cases.forget_own)


# --- the context travels with the request, not with the thread ---


def begun_before():
    """The call is made before the context, its value is fetched within it."""
    name = f"early of {me().name}"
    early = rpc.remote(after(), cases.return_own, args=(name, 10))
    with autograd.context() as context_id:
        theirs = early.to_here()
        autograd.backward(context_id, [(theirs * theirs).sum()])
        args = (context_id, name)
        found = rpc.rpc_sync(after(), cases.gradient_of_own, args=args)
    np.testing.assert_array_equal(found, 2 * numbers(10))


def test_a_value_that_was_asked_for_before_the_context(cluster):
    cluster.everywhere(begun_before)
    cluster.everywhere(cases.forget_own)


# --- two passes at a time, in one context ---


def two_at_a_time(count):
    """Passes of one context at the same time: each by itself, and all are added."""
    x, y = leaves(2, 11)
    with autograd.context() as context_id:
        product = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        errors, name = [], me().name

        def run():
            try:
                with rpc.use_worker(name):
                    autograd.backward(context_id, [product], retain_graph=True)
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert errors == []
        gradients = autograd.get_gradients(context_id)
    np.testing.assert_allclose(gradients[x], count * y.value, rtol=1e-12)
    np.testing.assert_allclose(gradients[y], count * x.value, rtol=1e-12)


def test_passes_of_one_context_at_the_same_time(cluster):
    cluster.everywhere(two_at_a_time, 8)
    assert all(cluster.everywhere(cases.at_rest))


def roots_on_two_workers():
    """Two workers differentiate in one context at the same time."""
    name = f"shared by {me().name}"
    (x,) = leaves(1, 12)
    with autograd.context() as context_id:
        there = rpc.remote(after(), loss_there, args=(name, x))
        back = rpc.rpc_sync(after(2), cases.total, args=(x * x,))
        worker = me().name

        def from_there():
            with rpc.use_worker(worker):
                there.backward(context_id)

        thread = threading.Thread(target=from_there)
        thread.start()
        autograd.backward(context_id, [back])
        thread.join(PATIENCE)
        gradient = autograd.get_gradients(context_id)[x]
        args = (context_id, name)
        theirs = rpc.rpc_sync(after(), cases.gradient_of_own, args=args)
    np.testing.assert_allclose(gradient, numbers(6) + 2 * x.value, rtol=1e-12)
    np.testing.assert_array_equal(theirs, x.value)


def test_passes_that_begin_on_two_workers_at_the_same_time(cluster):
    cluster.everywhere(roots_on_two_workers)
    cluster.everywhere(cases.forget_own)

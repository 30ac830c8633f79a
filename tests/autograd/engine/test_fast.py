"""FAST mode: it waits for every send, and an unused send is an error, not a hang."""

import numpy as np
import pytest

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.context_checks import counts
from tests.autograd.engine_cases import after, leaves, me
from tests.rpc.rref.common import wait_for


def shape_of(x):
    return list(x.shape)


@autograd.eager
def returns_nothing_recorded(x):
    return list(x.shape)


def unused_result():
    x, y = leaves(2, 1)
    with autograd.context() as context_id:
        rpc.rpc_sync(after(), cases.add, args=(x, y))
        loss = (x * y).sum()
        context = autograd.retrieve_context(context_id)
        (send,) = context.send_functions()
        with pytest.raises(autograd.UnusedSend, match="none will come for") as caught:
            autograd.backward(context_id, [loss], mode="fast", retain_graph=True)
        said = str(caught.value)
        assert said.startswith(f"Error on worker {me().name}: FAST mode waits")
        assert f"send rpc_sync(add) to {after()} (message {send}, on" in said
        assert said.endswith("Use mode='smart', which waits only for what the roots "
                             "depend on.")  # fmt: skip
        assert autograd.get_gradients(context_id) == {}
        # It is no hang, and later passes work: SMART, and FAST again if all is used.
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
        np.testing.assert_array_equal(gradients[x], y.value)
        np.testing.assert_array_equal(gradients[y], x.value)
    assert cases.at_rest()


def test_an_unused_result_is_named(cluster):
    cluster.everywhere(unused_result)


def unused_deeper():
    x, y = leaves(2, 2)
    with autograd.context() as context_id:
        total = rpc.rpc_sync(after(), cases.drops, args=(x, y))
        with pytest.raises(autograd.UnusedSend, match="none will come for") as caught:
            autograd.backward(context_id, [total.sum()], mode="fast", retain_graph=True)
        assert caught.value.worker == after()
        assert f"send rpc_sync(mul) to {after(2)} (message " in str(caught.value)
        # Others have ended the pass too: this one would find their parts in its way.
        autograd.backward(context_id, [total.sum()])
        gradients = autograd.get_gradients(context_id)
        np.testing.assert_array_equal(gradients[x], np.ones((3, 3)))


def test_a_result_that_another_worker_does_not_use_is_named_too(cluster):
    cluster.run(0, unused_deeper)
    assert all(cluster.everywhere(cases.at_rest))


def never_fetched():
    x, y = leaves(2, 3)
    with autograd.context() as context_id:
        rref = rpc.remote(after(), cases.add, args=(x, y))
        rref.creation().wait()
        autograd.backward(context_id, [(x * y).sum()], retain_graph=True)
        with pytest.raises(autograd.UnusedSend, match=r"send remote\(add\) to "):
            autograd.backward(context_id, [(x * y).sum()], mode="fast")


def test_a_reference_whose_value_is_never_fetched_is_unused(cluster):
    cluster.run(0, never_fetched)


@pytest.mark.parametrize("function", [shape_of, returns_nothing_recorded])
def test_a_result_without_history_leaves_its_call_unused(cluster, function):
    cluster.run(1, nothing_recorded, function)


def nothing_recorded(function):
    (x,) = leaves(1, 4)
    with autograd.context() as context_id:
        assert rpc.rpc_sync(after(), function, args=(x,)) == [3, 3]
        loss = (x * x).sum()
        with pytest.raises(autograd.UnusedSend, match=function.__name__):
            autograd.backward(context_id, [loss], mode="fast", retain_graph=True)
        autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[x]
        np.testing.assert_array_equal(gradient, x.value + x.value)


def unasked():
    """The other worker waits for nothing as long as it is sent nothing."""
    (x,) = leaves(1, 5)
    with autograd.context() as context_id:
        rpc.rpc_sync(after(), cases.return_own, args=("fast", 6))
        autograd.backward(context_id, [(x * x).sum()], mode="fast")
        assert len(autograd.get_gradients(context_id)) == 1


def test_what_only_an_unasked_worker_could_wait_for_does_no_harm(cluster):
    cluster.run(2, unasked)
    cluster.everywhere(cases.forget_own)


def used_by_other_roots():
    """Each pass alone leaves a send unused; together they use both."""
    x, y = leaves(2, 7)
    with autograd.context() as context_id:
        first = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        second = rpc.rpc_sync(after(2), cases.sine, args=(x,)).sum()
        for root in (first, second):
            with pytest.raises(autograd.UnusedSend, match="none will come for"):
                autograd.backward(context_id, [root], mode="fast", retain_graph=True)
        autograd.backward(context_id, [first, second], mode="fast")
        gradients = autograd.get_gradients(context_id)
        np.testing.assert_array_equal(gradients[x], y.value + np.cos(x.value))


def test_a_pass_that_uses_all_sends_works_after_some_that_did_not(cluster):
    cluster.run(0, used_by_other_roots)
    assert all(cluster.everywhere(cases.at_rest))


def silent():
    """A failure leaves nothing behind: no part of a pass, no context."""
    x, y = leaves(2, 8)
    with autograd.context() as context_id:
        rpc.rpc_sync(after(), cases.add, args=(x, y))
        for _ in range(20):
            with pytest.raises(autograd.UnusedSend, match="none will come for"):
                autograd.backward(
                    context_id, [(x * y).sum()], mode="fast", retain_graph=True
                )
    nothing = {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    return wait_for(lambda: counts() == nothing)


def test_passes_that_fail_leave_nothing_behind(cluster):
    assert cluster.run(3, silent)

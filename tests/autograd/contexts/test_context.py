"""Contexts: ids, the current one, nesting, threads, and what is refused."""

import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.contexts import here
from tests.autograd.context_checks import is_valid_context
from tests.autograd.recording_cases import (
    add,
    current_id,
    has_none,
    leaf,
    name,
    nothing,
    rank,
)


def two_hundred():
    ids = []
    for _ in range(200):
        with autograd.context() as context_id:
            found = autograd.retrieve_context(context_id)
            assert found is autograd.current_context()
            assert found.id == context_id
            assert context_id >> 48 == found.origin == rank()
            assert is_valid_context(context_id)
            ids.append(context_id)
    for context_id in ids:
        assert not is_valid_context(context_id)
        message = f"Could not find autograd context with id: {context_id}"
        with pytest.raises(autograd.ContextNotFound, match=message):
            autograd.retrieve_context(context_id)
    assert len(here().contexts()) == 0
    return [after - before for before, after in itertools.pairwise(ids)]


def test_contexts_one_after_the_other(cluster):
    """torch: test_autograd_context."""
    assert cluster.everywhere(two_hundred) == [[1] * 199] * 4


def looked_up(value):
    w, other = leaf(1), leaf(2)
    with autograd.context() as context_id:
        autograd.backward(context_id, [autograd.apply(jnp.sum, w)])
        found = autograd.get_gradients(context_id)
        assert list(found) == [w]
        assert (len(found), w in found, other in found) == (1, True, False)
        assert found.get(other) is None
        np.testing.assert_array_equal(found[w], np.ones((3, 4)))
        wrong = {"array": w.value, "number": 3, "other": other}[value]
        with pytest.raises((TypeError, KeyError)) as caught:
            found[wrong]
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (
            "array",
            "TypeError",
            "a Variable. Got an array. Keep what `autograd.",
        ),
        ("number", "TypeError", "must be looked up by a Variable. Got an int. Keep"),
        ("other", "KeyError", "has those that a backward pass reached. Got "),
    ],
)
def test_gradients_are_looked_up_by_variable(threads, value, kind, said):
    found, text = threads.run(0, looked_up, value)
    assert found == kind
    assert "`get_gradients(context_id)[...]`" in text
    assert said in text


def nested():
    with autograd.context() as outer:
        with (
            pytest.raises(
                RuntimeError, match=f"Already have an .* for this thread: {outer}"
            ),
            autograd.context(),
        ):
            pytest.fail("nested")
        assert autograd.current_context().id == outer
    with autograd.context() as after:
        return after - outer


def test_nested_contexts_are_refused(cluster):
    """torch: test_nested_context; nothing of the refused one is left."""
    assert cluster.run(1, nested) == 1
    assert cluster.run(1, has_none)


def context_in_a_call():
    with (
        pytest.raises(autograd.AutogradError, match="Already have an autograd"),
        autograd.context(),
    ):
        pytest.fail("nested")
    return current_id()


def call_within():
    with autograd.context() as context_id:
        return rpc.rpc_sync(name(1), context_in_a_call) == context_id


def test_a_called_function_is_within_the_callers(cluster):
    assert cluster.run(0, call_within)


def fails_within():
    with pytest.raises(ZeroDivisionError, match="division"), autograd.context():
        _ = 1 / 0
    with pytest.raises(autograd.AutogradError, match="valid autograd context"):
        autograd.current_context()
    return len(here().contexts())


def test_an_exception_ends_the_context(cluster):
    assert cluster.run(0, fails_within) == 0


def in_threads():
    """Each thread of control has its own, and inherits none."""
    found, both = [], threading.Barrier(2, timeout=60.0)
    me = rpc.get_worker_info().name

    def body():
        with rpc.use_worker(me):
            with pytest.raises(autograd.AutogradError, match="valid autograd context"):
                autograd.current_context()
            with autograd.context() as context_id:
                both.wait()
                found.append((context_id, rpc.rpc_sync(name(1), current_id)))
                both.wait()

    with autograd.context() as outer:
        threads = [threading.Thread(target=body) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append((outer, rpc.rpc_sync(name(1), current_id)))
    return found


def test_threads_have_contexts_of_their_own(cluster):
    found = cluster.run(2, in_threads)
    assert len({mine for mine, _ in found}) == 3
    assert all(mine == there for mine, there in found)


def in_callbacks():
    with autograd.context() as context_id:
        future = rpc.rpc_async(name(1), nothing).then(lambda done: current_id())
        return future.wait() == context_id


def test_callbacks_are_within_the_context_in_which_they_were_added(cluster):
    assert cluster.run(0, in_callbacks)


def test_another_worker_of_the_thread_has_no_part_in_it(threads):
    with autograd.context() as outer, rpc.use_worker("worker1"):
        with pytest.raises(autograd.AutogradError, match="valid autograd context"):
            autograd.current_context()
        with autograd.context() as inner:
            assert (outer >> 48, inner >> 48) == (0, 1)
        with pytest.raises(autograd.ContextNotFound, match=f"with id: {outer}"):
            autograd.retrieve_context(outer)


def released_within():
    with autograd.context() as context_id:
        rpc.rpc_sync(name(1), nothing)
        autograd.retrieve_context(context_id).release().wait(30.0)
        assert not is_valid_context(context_id)
        text = f"Could not find autograd context with id: {context_id}"
        for refused in (
            lambda: rpc.rpc_sync(name(1), add, args=(leaf(1), leaf(2))),
            lambda: autograd.retrieve_context(context_id).release(),
        ):
            with pytest.raises(autograd.ContextNotFound, match=text):
                refused()
    return len(here().contexts())


def test_nothing_is_recorded_after_the_release(cluster):
    assert cluster.run(0, released_within) == 0
    assert cluster.run(1, has_none)


@pytest.mark.parametrize("wrong", [None, "1", 1.0, True])
def test_an_id_is_a_number(threads, wrong):
    with pytest.raises(TypeError, match=r"must be the id that autograd\.context gives"):
        autograd.retrieve_context(wrong)


def test_without_workers_there_is_no_context():
    for refused in (
        lambda: autograd.context().__enter__(),
        autograd.current_context,
        lambda: autograd.retrieve_context(1),
    ):
        with pytest.raises(rpc.RpcError, match="RPC has not been initialized"):
            refused()


def test_the_worker_id_is_that_of_the_worker(threads):
    """Installed once; no message of another kind makes a second container."""
    before = here()
    with autograd.context():
        assert rpc.rpc_sync("worker1", rank) == 1
        assert here() is before
        assert before.ids.worker == 0

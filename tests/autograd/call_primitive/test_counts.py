"""Counts of executions, messages and compilations of a remote call."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist._lru_cache import LRUCache
from jdist.autograd.call_primitive import callee
from jdist.autograd.call_primitive.caller import RemoteFunctions
from jdist.autograd.call_primitive.transforms import Pullback, Vmap
from tests.autograd import remote_functions as functions


@contextlib.contextmanager
def calls():
    """The calls over rpc that this process makes: operations, shapes sent and got."""
    made = []
    make = RemoteFunctions.make

    def noted(self, call, arrays, host):
        sent = [np.shape(x) for x in arrays]
        made.append((call.operations, sent, [kind.shape for kind in call.results]))
        return make(self, call, arrays, host)

    with mock.patch.object(RemoteFunctions, "make", noted):
        yield made


def layer(params, x):
    return autograd.remote_call("worker1", functions.layer, params, x)


def loss(params, x):
    return (layer(params, x)["h"] ** 2).sum()


WEIGHTS = [(5,), (3, 5)]


def one_call_for_a_batch(jit):
    params, x = functions.params(1), functions.rows(2, shape=(7, 4, 3))
    per_example = jax.vmap(jax.grad(loss), (None, 0))
    with calls() as made:
        jax.block_until_ready((jax.jit(per_example) if jit else per_example)(params, x))
    forward, backward = made
    batch = Vmap((None, None, 0))
    assert forward == ((batch,), [*WEIGHTS, (7, 4, 3)], [(7, 4, 5), (7,)])
    # The integer result has no cotangent, and none is asked for the example.
    operations, sent, got = backward
    assert operations == (Pullback((0, 1), (0,)), Vmap((None, None, 0, 0)))
    assert sent == [*WEIGHTS, (7, 4, 3), (7, 4, 5)]
    assert got == [(7, 5), (7, 3, 5)]


@pytest.mark.parametrize("jit", [False, True])
def test_a_batch_is_one_call_forward_and_one_backward(cluster, jit):
    cluster.run(0, one_call_for_a_batch, jit)


def calls_of_jacobians():
    x = jnp.array([0.5, 1.0, -2.0])

    def f(x):
        return autograd.remote_call("worker1", functions.shift, x, x + 1)

    with calls() as made:
        jax.jacrev(f)(x)
        assert [len(operations) for operations, *_ in made] == [0, 2]
        made.clear()
        jax.jacrev(jax.jacrev(f))(x)
        # Forward, its pullback, and the pullback of that.
        assert len(made) == 3
    with calls() as made:
        jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 5)[0])(x)
    assert len(made) == 5


def test_jacobians_and_loops_make_one_call_for_each_step(cluster):
    cluster.run(0, calls_of_jacobians)


def nothing_flows(jit):
    table = functions.rows(3, shape=(6, 2))
    indices, mask = jnp.array([1, 4]), jnp.array([[True, False]] * 2)

    def only_integers(table):
        _, following = autograd.remote_call(
            "worker1", functions.pick, table, indices, mask
        )
        return table.sum() * following.sum().astype(table.dtype)

    gradient = jax.grad(only_integers)
    with calls() as made:
        found = (jax.jit(gradient) if jit else gradient)(table)
    assert (found == 7.0).all()
    assert [operations for operations, *_ in made] == [()]  # No backward call.


@pytest.mark.parametrize("jit", [False, True])
def test_without_a_cotangent_there_is_no_backward_call(cluster, jit):
    cluster.run(0, nothing_flows, jit)


def unused_results_are_not_dropped():
    """A call in a program is made once, though nobody uses it, and twice if twice."""

    def program(x):
        autograd.remote_call("worker1", functions.shift, x, 1.0)
        once = autograd.remote_call("worker1", functions.shift, x, 2.0)
        return once + autograd.remote_call("worker1", functions.shift, x, 2.0)

    with calls() as made:
        jax.block_until_ready(jax.jit(program)(jnp.ones(2)))
    assert len(made) == 3


def test_calls_are_neither_dropped_nor_merged(cluster):
    cluster.run(0, unused_results_are_not_dropped)


# --- compilation ---

traced_here = []


def compiled_once():
    params, x = functions.params(4), functions.rows(5, shape=(6, 3))
    traced_here.clear()

    @jax.jit
    def step(params, x):
        traced_here.append("step")
        return jax.grad(loss)(params, x)

    def traces():
        return rpc.rpc_sync("worker1", functions.traces)

    def after(call):
        before = traces()
        jax.block_until_ready(call())
        return traces() - before

    # Asked for shapes; forward and backward compiled, each at its first call.
    assert after(lambda: step(params, x)) == 3
    for turn in range(5):
        assert after(lambda turn=turn: step(params, x + turn)) == 0
        # A new function each time is traced here, but is the same call there.
        again = jax.jit(lambda p, x, turn=turn: jax.grad(loss)(p, x * turn))
        assert after(lambda again=again: again(params, x)) == 0
        assert after(lambda: loss(params, x)) == 0
        assert after(lambda: jax.grad(loss)(params, x)) == 0
    assert traced_here == ["step"]
    return after(lambda: step(params, x[:5]))


def asked_by_another():
    before = rpc.rpc_sync("worker1", functions.traces)
    jax.grad(loss)(functions.params(4), functions.rows(5, shape=(6, 3)))
    return rpc.rpc_sync("worker1", functions.traces) - before


def test_everything_is_compiled_once(cluster):
    assert cluster.run(0, compiled_once) == 3  # Other shapes.
    assert cluster.run(2, asked_by_another) == 1  # For the shapes only.


def forgotten():
    x = jnp.array([1.0, 2.0])
    call = functools.partial(autograd.remote_call, "worker1", functions.shift)
    compiled = jax.jit(call)
    first = compiled(x, 2.0)
    rpc.rpc_sync("worker1", forget_programs)
    assert (compiled(x, 2.0) == first).all()
    assert (call(x, 2.0) == first).all()


def forget_programs():
    callee.COMPILED.clear()


def test_a_callee_that_has_forgotten_a_function_compiles_it_again(cluster):
    cluster.run(0, forgotten)


def test_what_is_remembered_is_bounded(threads):
    with mock.patch.object(callee, "COMPILED", LRUCache(3)):
        for name in "abcdefgh":
            given, kwargs = (jnp.tanh, jnp.ones(2)), {"name": name}
            autograd.remote_call("worker1", functions.activated, *given, kwargs=kwargs)
        assert len(callee.COMPILED) == 3

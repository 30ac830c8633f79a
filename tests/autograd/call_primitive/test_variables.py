"""The callee's variables as arguments: their gradients stay in its context."""

import functools
import gc

import jax
import jax.numpy as jnp
import pytest

from jdist import autograd, rpc, verify
from jdist.autograd.contexts import here
from tests.autograd import remote_functions as functions
from tests.autograd.context_checks import is_valid_context
from tests.rpc.rref.common import settle

both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
TERMS = 20


def variable_on(to, *seed):
    return rpc.remote(to, autograd.variable, args=(functions.params(*seed),))


def gradient_of(rref, context_id):
    """On the owner: what the context has for the variable, or None."""
    if not is_valid_context(context_id):
        return None
    return autograd.get_gradients(context_id).get(rref.local_value())


def found_there(rref, context_id):
    return rpc.rpc_sync(rref.owner_name(), gradient_of, (rref, context_id))


def loss(layer, x):
    return (layer(jnp.sin(x))["h"] ** 2).sum()


def remote_loss(rref):
    layer = functools.partial(autograd.remote_call, "worker1", functions.layer, rref)
    return functools.partial(loss, layer)


def local_loss(params, x):
    return loss(functools.partial(functions.layer, params), x)


def same(expected, found, terms=TERMS):
    verify.compare(expected, found, terms=terms).raise_if_failed()


def stays_there(jit):
    params, x = functions.params(1), functions.rows(2)
    rref = variable_on("worker1", 1)
    gradient = jax.value_and_grad(remote_loss(rref))
    gradient = jax.jit(gradient) if jit else gradient
    d_params, d_x = jax.grad(local_loss, (0, 1))(params, x)
    with autograd.context() as context_id:
        value, found = gradient(x)
        same(local_loss(params, x), value)
        same(d_x, found)
        same(d_params, found_there(rref, context_id))
        # What is computed again is added.
        gradient(2 * x)
        more = jax.grad(local_loss)(params, 2 * x)
        both = jax.tree.map(jnp.add, d_params, more)
        same(both, found_there(rref, context_id))
        # Nobody but the owner has it.
        assert dict(autograd.get_gradients(context_id)) == {}
    # Outside of a context it is a constant; the next context begins with nothing.
    same(d_x, gradient(x)[1])
    with autograd.context() as context_id:
        assert found_there(rref, context_id) is None
        gradient(x)
        same(d_params, found_there(rref, context_id))


@both_ways
def test_the_gradient_stays_with_the_variable(cluster, jit):
    cluster.run(0, stays_there, jit)
    gc.collect()
    settle(cluster)  # Nothing that is remembered keeps the variable alive.


def summed_over_a_batch(jit):
    params, x = functions.params(3), functions.rows(4, shape=(6, 4, 3))
    rref = variable_on("worker1", 3)

    def batched(loss):
        return lambda x: jax.vmap(loss)(x).sum()

    expected = jax.grad(lambda p: jax.vmap(local_loss, (None, 0))(p, x).sum())(params)
    inside = jax.vmap(jax.grad(remote_loss(rref)))
    outside = jax.grad(batched(remote_loss(rref)))
    for gradient in (inside, outside):
        with autograd.context() as context_id:
            (jax.jit(gradient) if jit else gradient)(x)
            same(expected, found_there(rref, context_id), terms=6 * TERMS)


@both_ways
def test_over_a_batch_it_is_the_sum(cluster, jit):
    cluster.run(0, summed_over_a_batch, jit)


def twice_and_with_a_hook():
    rref = variable_on("worker1", 5)
    rpc.rpc_sync("worker1", double_the_gradient, (rref,))
    x = functions.rows(6)

    def twice(layers, x):
        return loss(layers, x)

    call = functools.partial(
        autograd.remote_call, "worker1", functions.two_layers, rref, rref
    )
    expected = jax.grad(
        lambda p: loss(functools.partial(functions.two_layers, p, p), x)
    )(functions.params(5))
    with autograd.context() as context_id:
        jax.grad(functools.partial(loss, call))(x)
        doubled = jax.tree.map(lambda g: 2 * g, expected)
        same(doubled, found_there(rref, context_id), terms=10 * TERMS)


def double_the_gradient(rref):
    rref.local_value().register_hook(lambda g: jax.tree.map(lambda x: 2 * x, g))


def test_two_references_to_one_variable_are_one_gradient_for_hooks(cluster):
    cluster.run(0, twice_and_with_a_hook)


def current_value():
    rref, x = variable_on("worker1", 7), functions.rows(8)
    compiled = jax.jit(remote_loss(rref))
    same(local_loss(functions.params(7), x), compiled(x))
    rpc.rpc_sync("worker1", assign, (rref, functions.params(9)))
    same(local_loss(functions.params(9), x), compiled(x))


def assign(rref, value):
    rref.local_value().value = value


def test_a_jitted_caller_sees_the_value_of_the_moment(cluster):
    cluster.run(0, current_value)


def only_first_order():
    rref, x = variable_on("worker1", 10), functions.rows(11)

    def second(loss):
        return jax.grad(lambda x: jax.grad(loss)(x).sum())(x)

    local = functools.partial(local_loss, functions.params(10))
    same(second(local), second(remote_loss(rref)), terms=10 * TERMS)
    match = "has gradients of first order only.*Leave the context, or pass the"
    with autograd.context(), pytest.raises(TypeError, match=match):
        second(remote_loss(rref))


def test_derivatives_of_higher_order_are_without_a_context(cluster):
    cluster.run(0, only_first_order)


def test_a_jitted_call_does_not_guess_among_contexts(threads):
    rref, x = variable_on("worker1", 12), functions.rows(13)
    gradient = jax.jit(jax.grad(remote_loss(rref)))
    with autograd.context() as context_id:
        second = here().new()
        match = "'worker0' has 2 contexts to which it could go. Have one context at a"
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            gradient(x)
        second.release().wait()
        gradient(x)
        assert found_there(rref, context_id) is not None


def test_a_released_context_refuses_late_gradients(threads):
    rref, x = variable_on("worker1", 14), functions.rows(15)
    with autograd.context() as context_id:
        _, pullback = jax.vjp(remote_loss(rref), x)
        pullback(jnp.asarray(1.0))
        autograd.retrieve_context(context_id).release().wait()
        with pytest.raises(autograd.ContextNotFound, match=str(context_id)):
            pullback(jnp.asarray(1.0))


def test_the_context_ends_on_the_callee_too(threads):
    rref = variable_on("worker1", 16)
    with autograd.context() as context_id:
        jax.grad(remote_loss(rref))(functions.rows(17))
        autograd.retrieve_context(context_id).release().wait()
    assert not rpc.rpc_sync("worker1", is_valid_context, (context_id,))


# --- what is refused ---


@both_ways
def test_a_reference_must_live_as_long_as_what_was_traced_with_it(threads, jit):
    kept, x = [variable_on("worker1", 22)], functions.rows(23)
    call = jax.jit(lambda x: remote_loss(kept[0])(x))
    if not jit:
        _, call = jax.vjp(call, x)
        x = jnp.asarray(1.0)
    call(x)
    kept.clear()
    gc.collect()
    error = jax.errors.JaxRuntimeError
    with pytest.raises(error, match=r"one that was dropped meanwhile. Keep the RRef"):
        call(x)


def test_other_references_are_refused(threads):
    x = functions.rows(18)
    elsewhere, text = variable_on("worker2", 19), rpc.remote("worker1", str, args=(7,))
    with pytest.raises(ValueError, match="reference to a variable of the worker that"):
        autograd.remote_call("worker1", functions.layer, elsewhere, x)
    with pytest.raises(TypeError, match=r"to a variable. Got one to a str"):
        autograd.remote_call("worker1", functions.layer, text, x)


def test_recorded_values_are_refused_with_the_way_out(threads):
    own = autograd.variable(functions.params(20))
    match = r"remote_call\(\*args\)` must not be recorded.*Pass the value of a variable"
    with pytest.raises(TypeError, match=match):
        autograd.remote_call("worker1", functions.layer, own, functions.rows(21))


def test_a_function_does_not_read_variables_of_its_own(threads):
    match = (
        r"remote_call\(fn=reads_a_global\)` must be a pure function.*variables as arg"
    )
    with pytest.raises(TypeError, match=match):
        autograd.remote_call("worker1", functions.reads_a_global, 2.0)

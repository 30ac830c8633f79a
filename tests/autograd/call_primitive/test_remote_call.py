"""JAX's transformations of a remote call, compared with those of the same function."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, verify
from jdist.autograd.call_primitive.callback import staged_elsewhere
from jdist.autograd.call_primitive.caller import RemoteFunctions
from jdist.autograd.call_primitive.transforms import Pullback, transformed
from tests.autograd import remote_functions as functions


def composed(layer):
    """A loss that calls a layer twice, with arithmetic of this worker around it."""

    def loss(params, x):
        first = layer(params, x)
        second = layer(params, jnp.sin(first["h"][:, :3]) + x)
        return (first["h"] * second["h"] ** 2).sum() * second["rows"].astype(x.dtype)

    return loss


def carried(loss):
    def over_steps(params, x):
        def step(carry, shift):
            return jnp.cos(carry) * 0.9, loss(params, carry + shift)

        return jax.lax.scan(step, x, jnp.array([0.1, -0.2, 0.3], x.dtype))[1].sum()

    return over_steps


def chosen(loss):
    def of_sign(params, x):
        return jax.lax.cond(x.sum() > 0, loss, lambda p, x: p["bias"].sum(), params, x)

    return of_sign


def summed_gradient(loss):
    def of_gradient(params, x):
        return sum(jax.tree.leaves(jax.tree.map(jnp.sum, jax.grad(loss)(params, x))))

    return of_gradient


def over_batch(loss):
    return jax.vmap(loss, in_axes=(None, 2))


def total(losses):
    return lambda params, x: losses(params, x).sum()


X = (4, 3)
TERMS = 4 * 5 * 3 * 3
"""Of any sum in these derivatives: rows, columns, steps of a scan, products each."""

TRANSFORMATIONS = {
    "value": (lambda f: f, X),
    "grad": (lambda f: jax.grad(f, (0, 1)), X),
    "value_and_grad": (jax.value_and_grad, X),
    "vjp": (lambda f: lambda p, x: jax.vjp(f, p, x)[1](jnp.asarray(2.5, x.dtype)), X),
    "jacrev": (lambda f: jax.jacrev(jax.grad(f, 1), 1), X),
    "third order": (lambda f: jax.grad(summed_gradient(summed_gradient(f))), X),
    "vmap": (over_batch, (*X, 2)),
    "vmap of grad": (lambda f: over_batch(jax.grad(f, (0, 1))), (*X, 2)),
    "grad of vmap": (lambda f: jax.grad(total(over_batch(f)), (0, 1)), (*X, 2)),
    "grad in scan": (lambda f: carried(lambda p, x: jax.grad(f, 1)(p, x)), X),
    "grad of scan": (lambda f: jax.grad(carried(f), (0, 1)), X),
    "vmap of grad of scan": (lambda f: over_batch(jax.grad(carried(f))), (*X, 2)),
    "grad of cond": (lambda f: jax.grad(chosen(f), (0, 1)), X),
    "vmap of grad of cond": (lambda f: over_batch(jax.grad(chosen(f))), (*X, 2)),
}


def looped(loss):
    def until_large(params, x):
        def step(carry):
            return carry + loss(params, x + carry) ** 2 + 1

        return jax.lax.while_loop(
            lambda carry: carry < 30, step, jnp.zeros((), x.dtype)
        )

    return until_large


TRANSFORMATIONS["while"] = (looped, X)
ACROSS_PROCESSES = ["value_and_grad", "third order", "vmap of grad of scan"]
"""What a transformation becomes does not depend on the transport: a few suffice."""


def calling(to, name):
    layer = functools.partial(autograd.remote_call, to, functions.layer)
    return TRANSFORMATIONS[name][0](composed(layer))


def given(name):
    return functions.params(1), functions.rows(2, shape=TRANSFORMATIONS[name][1])


def as_jax_does(name):
    """Without jit and within, as the function itself would do."""
    expected = jax.jit(TRANSFORMATIONS[name][0](composed(functions.layer)))
    found = calling("worker1", name)
    reference = expected(*given(name))
    for wrap in (lambda f: f, jax.jit):
        result = wrap(found)(*given(name))
        verify.compare(reference, result, terms=TERMS).raise_if_failed()


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(threads, name):
    threads.run(0, as_jax_does, name)


@pytest.mark.parametrize("name", ACROSS_PROCESSES)
def test_transformations_across_processes(processes, name):
    processes.run(0, as_jax_does, name)


def bit_for_bit(name):
    """The same compiled functions, called where they are and on another worker."""
    for wrap in (lambda f: f, jax.jit):
        there = wrap(calling("worker1", name))(*given(name))
        here = wrap(calling("worker0", name))(*given(name))
        assert jax.tree.all(jax.tree.map(same_bits, there, here))


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["value_and_grad", "grad of vmap"])
def test_bits_do_not_depend_on_the_place(cluster, name):
    cluster.run(0, bit_for_bit, name)


def bits_of_the_programs():
    """The callee's program is `transformed`, jitted: nothing else is in the bits."""
    params, x = functions.params(3), functions.rows(4)

    def flat(bias, kernel, x):
        layer = functions.layer({"kernel": kernel, "bias": bias}, x)
        return [layer["h"], layer["rows"]]

    def remote(params, x):
        return autograd.remote_call("worker1", functions.layer, params, x)["h"]

    operations = [Pullback((0, 1, 2), (0,))]
    y, pullback = jax.vjp(remote, params, x)
    d_params, d_x = pullback(jnp.cos(y))
    forward, backward = jax.jit(flat), jax.jit(transformed(flat, operations))
    leaves = (params["bias"], params["kernel"], x)
    assert same_bits(y, forward(*leaves)[0])
    expected = backward(*leaves, jnp.cos(y))
    found = [d_params["bias"], d_params["kernel"], d_x]
    assert all(map(same_bits, found, expected))


def test_bits_are_those_of_the_same_program_run_here(cluster):
    cluster.run(0, bits_of_the_programs)


def test_the_callback_for_accelerators_gives_the_same(threads):
    """What is compiled there is JAX's `io_callback`, which runs on CPU too."""
    seen, make = [], RemoteFunctions.make

    def noted(self, call, arrays, host):
        seen.append((call, arrays))
        return make(self, call, arrays, host)

    x = functions.rows(5)
    with mock.patch.object(RemoteFunctions, "make", noted):
        function = functools.partial(autograd.remote_call, "worker1", functions.loss)
        value, gradient = jax.value_and_grad(function)(x)
    for (call, arrays), expected in zip(seen, (value, gradient), strict=True):
        staged = jax.jit(lambda *arrays, call=call: staged_elsewhere(call, arrays))
        (found,) = staged(*arrays)
        assert same_bits(found, expected)


# --- across workers, to third order ---


def relayed_derivatives(order, jit):
    x = functions.rows(3, shape=(5,))
    path = ("worker2", "worker0", "worker3")

    def derivative(function):
        def once(x):
            return function(x).sum()

        for _ in range(order):
            once = functools.partial(lambda f, x: jax.grad(f)(x).sum(), once)
        return jax.jit(once) if jit else once

    def remote(x):
        return autograd.remote_call("worker1", functions.relayed, x, path)

    def local(x):
        return functions.relayed_locally(x, path)

    found = derivative(remote)(x)
    verify.compare(derivative(local)(x), found, terms=TERMS).raise_if_failed()


@pytest.mark.parametrize(("order", "jit"), [(0, True), (1, False), (3, True)])
def test_nested_calls_across_four_workers_and_back(cluster, order, jit):
    cluster.run(0, relayed_derivatives, order, jit)

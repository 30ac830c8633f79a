"""A remote call is, for all of JAX's transformations, the function that it calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, verify
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


def compared(name):
    transform, shape = TRANSFORMATIONS[name]
    given = functions.params(1), functions.rows(2, shape=shape)

    def calling(to):
        layer = functools.partial(autograd.remote_call, to, functions.layer)
        return transform(composed(layer))

    expected = transform(composed(functions.layer))(*given)
    for wrap in (lambda f: f, jax.jit):
        found = wrap(calling("worker1"))(*given)
        verify.compare(expected, found, terms=TERMS).raise_if_failed()
        # The same compiled functions, without going anywhere.
        here = wrap(calling("worker0"))(*given)
        assert jax.tree.all(jax.tree.map(same_bits, found, here))


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(cluster, name):
    cluster.run(0, compared, name)


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


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("order", [0, 1, 3])
def test_nested_calls_across_four_workers_and_back(cluster, order, jit):
    cluster.run(0, relayed_derivatives, order, jit)

"""A gradient lies on the devices of its variable, whatever path it took."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.engine_cases import numbers


def places():
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
    return {
        "another device": SingleDeviceSharding(jax.devices()[5]),
        "sharded": NamedSharding(mesh, PartitionSpec("rows")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }


def placed(name, also_here):
    place = places()[name]
    x = autograd.variable(jax.device_put(numbers(1, shape=(8, 3)), place))
    y = numbers(2, shape=(8, 3))
    with autograd.context() as context_id:
        product = rpc.rpc_sync("worker2", cases.mul, args=(x, y))
        squares = autograd.apply(cases.total, x * x)
        roots = [product.sum(), squares] if also_here else [product.sum()]
        for retain in (True, False):
            autograd.backward(context_id, roots, retain_graph=retain)
        gradient = autograd.get_gradients(context_id)[x]
    assert gradient.sharding.is_equivalent_to(place, 2)
    expected = y + 2 * np.asarray(x.value) if also_here else y
    np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-12)


@pytest.mark.parametrize("also_here", [False, True])
@pytest.mark.parametrize("name", places())
def test_a_gradient_has_the_place_of_its_variable(cluster, name, also_here):
    """Where it was used remotely alone, and where that is added to what is here."""
    cluster.run(0, placed, name, also_here)


def on_each_worker():
    """In one process the workers have a device each, and values go to and fro."""
    x = autograd.variable(numbers(3))
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", cases.sine, args=(x,))
        z = rpc.rpc_sync("worker2", cases.mul, args=(y, x))
        autograd.backward(context_id, [(z * y).sum()])
        gradient = autograd.get_gradients(context_id)[x]
    assert gradient.sharding == x.value.sharding
    sine, cosine = np.sin(x.value), np.cos(x.value)
    expected = sine * (sine + 2 * cosine * x.value)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def nowhere():
    """A value that is not committed is used here with one that is, and elsewhere."""
    x, far = autograd.variable(numbers(4)), jax.device_put(numbers(5), jax.devices()[6])
    with autograd.context() as context_id:
        here = autograd.apply(cases.mul, x, far)
        there = rpc.rpc_sync("worker1", cases.sine, args=(x,))
        roots = [here.sum(), there.sum()]
        for retain in (True, False):
            autograd.backward(context_id, roots, retain_graph=retain)
        gradient = autograd.get_gradients(context_id)[x]
    expected = 2 * (np.asarray(far) + np.cos(x.value))
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_a_value_that_is_not_committed_may_be_anywhere(cluster):
    cluster.run(2, nowhere)


def test_values_that_go_over_several_devices(cluster):
    cluster.run(0, on_each_worker)

"""Arguments and results of a remote call: kinds, trees, placement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc, verify
from tests.autograd import remote_functions as functions

on_worker1 = functools.partial(functools.partial, autograd.remote_call, "worker1")
DTYPES = [
    *("bool", "int8", "uint64", "int4", "uint2", "float4_e2m1fn", "float8_e4m3fn"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]
both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


def wrapped(function, jit):
    return jax.jit(function) if jit else function


def same(a, b):
    """The same bits, types and weak types."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def integers_and_booleans(jit):
    table = functions.rows(4, shape=(6, 2))
    indices, mask = jnp.array([5, 0, 5]), np.array([[True, False]] * 3)

    def gradient(pick):
        def loss(table):
            chosen, following = pick(table, indices, mask)
            return (chosen * following[:, None].astype(chosen.dtype)).sum(), following

        return wrapped(jax.value_and_grad(loss, has_aux=True), jit)(table)

    found = gradient(on_worker1(functions.pick))
    expected = gradient(functions.pick)
    assert found[0][1].tolist() == [6, 1, 6]
    verify.compare(expected, found, terms=6).raise_if_failed()


@both_ways
def test_integers_and_booleans_have_no_cotangent(cluster, jit):
    cluster.run(0, integers_and_booleans, jit)


def with_dtype(name, jit):
    dtype = jnp.dtype(name)
    x = functions.rows(5).astype(dtype)
    by = jnp.asarray(1.5, dtype)
    call = wrapped(on_worker1(functions.scaled), jit)
    same(call(x, by), jax.jit(functions.scaled)(x, by))


@both_ways
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(cluster, name, jit):
    cluster.run(0, with_dtype, name, jit)


def mixed_precision(jit):
    params = functions.params(6, dtype=np.float32)
    params["bias"] = params["bias"].astype(jnp.float16).astype(jnp.float32)
    x = functions.rows(7, dtype=np.float32)

    def gradients(layer):
        def loss(params, x):
            return (layer(params, x)["h"] ** 2).sum()

        return wrapped(jax.grad(loss, (0, 1)), jit)(params, x)

    found, expected = gradients(on_worker1(functions.layer)), gradients(functions.layer)
    verify.compare(expected, found, terms=20).raise_if_failed()


@both_ways
def test_gradients_have_the_dtypes_of_their_arguments(cluster, jit):
    cluster.run(0, mixed_precision, jit)


def complex_gradient(jit):
    z = jax.lax.complex(functions.rows(8), functions.rows(9))

    def gradient(shift):
        return wrapped(jax.grad(lambda z: jnp.abs(shift(z, 2.0 - 1j)).sum()), jit)(z)

    found = gradient(on_worker1(functions.shift))
    verify.compare(gradient(functions.shift), found, terms=4).raise_if_failed()


@both_ways
def test_complex_gradients_are_those_of_jax(cluster, jit):
    cluster.run(0, complex_gradient, jit)


def numbers_of_python(jit):
    x = functions.rows(10, dtype=np.float32)
    call = wrapped(on_worker1(functions.shift), jit)
    # A Python number does not widen a float32, a float64 array would.
    same(call(x, 2.5), jax.jit(functions.shift)(x, 2.5))
    same(call(0.5, 3), jax.jit(functions.shift)(0.5, 3))
    assert call(0.5, 3).weak_type


@both_ways
def test_numbers_stay_weakly_typed(cluster, jit):
    cluster.run(0, numbers_of_python, jit)


def keys(jit):
    x = functions.rows(11)
    for impl in ("threefry2x32", "rbg") if jit else ("threefry2x32",):
        key = jax.random.key(3, impl=impl)
        values, following = wrapped(on_worker1(functions.noise), jit)(key, x)
        expected, next_key = jax.jit(functions.noise)(key, x)
        same(values, expected)
        same(jax.random.key_data(following), jax.random.key_data(next_key))
        assert jax.random.key_impl(following) == jax.random.key_impl(key)
    if not jit:
        return
    split = jax.random.split(key, 3)
    batched = jax.vmap(functions.noise, (0, None))
    found = jax.jit(jax.vmap(on_worker1(functions.noise), (0, None)))(split, x)
    same(found[0], jax.jit(batched)(split, x)[0])


@both_ways
def test_random_keys_come_and_go(cluster, jit):
    cluster.run(0, keys, jit)


def static_leaves(jit):
    x = functions.rows(12)

    def call(x, **kwargs):
        arguments = {"name": "answer", **kwargs}
        return autograd.remote_call(
            "worker1", functions.activated, jnp.tanh, x, kwargs=arguments
        )

    def local(x, **kwargs):
        return functions.activated(jnp.tanh, x, name="answer", **kwargs)

    same(wrapped(call, jit)(x), jax.jit(local)(x))
    same(wrapped(call, jit)(x, scale=x), jax.jit(local)(x, scale=x))
    by = jax.grad(lambda s: wrapped(call, jit)(x, scale=s)["answer"].sum())(1.25)
    verify.compare(jnp.tanh(x).sum(), by, terms=12).raise_if_failed()


@both_ways
def test_texts_functions_and_keyword_arguments(cluster, jit):
    cluster.run(0, static_leaves, jit)


def bound(jit):
    weight, x, by = functions.rows(18), functions.rows(19), functions.rows(20)

    def gradients(call):
        def loss(weight, x, by):
            method = functions.Layer(weight, "tanh").apply
            return call(functools.partial(method, by=by))(x).sum()

        return wrapped(jax.grad(loss, (0, 1, 2)), jit)(weight, x, by)

    verify.compare(gradients(lambda f: f), gradients(on_worker1)).raise_if_failed()


@both_ways
def test_what_is_bound_to_a_function_are_arguments(cluster, jit):
    cluster.run(0, bound, jit)


def containers(jit):
    pair = nested = {"a": [functions.rows(13), None], "b": (functions.rows(14), {})}
    found = wrapped(on_worker1(functions.mirrored), jit)(nested, pair)
    same(found, jax.jit(functions.mirrored)(nested, pair))
    assert type(found) is functions.Result


@both_ways
def test_results_of_any_tree(cluster, jit):
    cluster.run(0, containers, jit)


def placement():
    device = jax.local_devices()[5]
    x = jax.device_put(functions.rows(15), device)
    y, pullback = jax.vjp(lambda x: autograd.remote_call(1, functions.shift, x, 2.0), x)
    (d_x,) = pullback(jnp.ones_like(y))
    assert d_x.devices() == {device}
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)),
        jax.sharding.PartitionSpec("rows"),
    )
    sharded = jax.device_put(functions.rows(16), sharding)
    gradient = jax.grad(lambda x: autograd.remote_call(1, functions.loss, x))(sharded)
    assert gradient.sharding == sharding
    verify.compare(jax.grad(functions.loss)(sharded), gradient).raise_if_failed()


def test_a_cotangent_is_where_its_argument_is(cluster):
    cluster.run(0, placement)


def test_results_are_on_the_devices_of_the_workers():
    devices = jax.local_devices()[2:4]
    names = ["worker0", "worker1"]
    with rpc.local_cluster(names, devices, allow=["tests"]):
        y = autograd.remote_call("worker1", functions.shift, functions.rows(17), 2.0)
        assert y.devices() == {devices[0]}


def test_arguments_that_are_nothing_to_jax_are_refused(threads):
    with pytest.raises(TypeError, match=r"remote_call\(\*args\).*hashed.*Got a set"):
        autograd.remote_call("worker1", functions.shift, {1, 2}, 3)


def test_results_that_are_no_arrays_are_refused(threads):
    with pytest.raises(TypeError, match=r"nothing_but_text.*must return arrays.*a str"):
        autograd.remote_call("worker1", functions.nothing_but_text, 1.0)

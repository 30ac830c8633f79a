"""A segment that runs over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist.segment import segment
from tests.segment.cases import assert_close, normal


def _mlp(p, x):
    return jnp.tanh(x @ p["w"].T + p["b"]) @ p["v"]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    """Several devices are there on the CPU; arrays start on one of them."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def grid():
    def make(types):
        devices = np.array(jax.devices("cpu")[:8]).reshape(4, 2)
        return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(types,) * 2)

    return make


SPECS = {"w": P("model", None), "b": P(None, "model"), "v": P("model", None)}


def _placed(mesh, rng):
    params = {"w": normal(rng, 6, 5), "b": normal(rng, 1, 6), "v": normal(rng, 6, 3)}
    x, d_outputs = normal(rng, 8, 5), normal(rng, 8, 3)
    placed = {
        k: jax.device_put(params[k], NamedSharding(mesh, SPECS[k])) for k in params
    }
    rows = NamedSharding(mesh, P("data", None))
    sharded = placed, jax.device_put(x, rows), jax.device_put(d_outputs, rows)
    return (params, x, d_outputs), sharded


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_keep_their_shardings(grid, rng, recompute):
    """d_params lie like the parameters, d_inputs like the inputs, whole and split."""
    mesh = grid(AxisType.Auto)
    (params, x, d_outputs), sharded = _placed(mesh, rng)
    _, pull_back = jax.vjp(_mlp, params, x)
    d_params, d_x = pull_back(d_outputs)
    seg = segment(_mlp, recompute=recompute)
    _, residuals = seg.forward(*sharded[:2])
    whole = seg.backward(sharded[0], residuals, sharded[2])
    d_inputs, rest = seg.backward_inputs(sharded[0], residuals, sharded[2])
    for found in (whole, (seg.backward_params(rest), d_inputs)):
        assert_close(jax.device_get(found), jax.device_get((d_params, (d_x,))))
        for name, spec in SPECS.items():
            expected = NamedSharding(mesh, spec)
            assert found[0][name].sharding.is_equivalent_to(expected, 2), name
        assert found[1][0].sharding.is_equivalent_to(sharded[1].sharding, 2)


def test_residuals_are_sharded(grid, rng):
    """Kept values are spread over the devices like the activations, not gathered."""
    mesh = grid(AxisType.Auto)
    _, sharded = _placed(mesh, rng)
    _, residuals = segment(_mlp).forward(*sharded[:2])
    assert sorted(x.shape for x in residuals.arrays) == [(8, 5), (8, 6)]
    assert {x.shape: x.sharding.shard_shape(x.shape) for x in residuals.arrays} == {
        (8, 5): (2, 5),
        (8, 6): (2, 3),
    }


def test_explicit_axes(grid, rng):
    """With explicit axes shardings are part of types, and equal those of `jax.vjp`."""
    mesh = grid(AxisType.Explicit)
    with jax.set_mesh(mesh):
        (params, x, d_outputs), _ = _placed(grid(AxisType.Auto), rng)
        p = {"w": jax.device_put(params["w"], NamedSharding(mesh, P(None, None)))}
        rows = NamedSharding(mesh, P("data", None))
        x = jax.device_put(x, rows)
        d = jax.device_put(d_outputs @ jnp.ones((3, 6), np.float32), rows)

        def fn(p, x):
            return jnp.sin(x @ p["w"].T)

        seg = segment(fn)
        _, residuals = seg.forward(p, x)
        found = seg.backward(p, residuals, d)
        _, pull_back = jax.vjp(fn, p, x)
        d_p, d_x = pull_back(d)
        assert_close(found, (d_p, (d_x,)))
        assert found[0]["w"].sharding == d_p["w"].sharding
        assert found[1][0].sharding == d_x.sharding


def test_each_device_its_own_copy(rng):
    """On several devices a function is traced once; gradients stay on their device."""
    traced = [0]

    def fn(p, x):
        traced[0] += 1
        return jnp.tanh(x @ p)

    seg = segment(fn)
    for device in jax.devices("cpu")[:3]:
        p, x, d = (
            jax.device_put(normal(rng, *shape), device)
            for shape in ((5, 3), (4, 5), (4, 3))
        )
        outputs, residuals = seg.forward(p, x)
        d_p, (d_x,) = seg.backward(p, residuals, d)
        assert {x.device for x in (outputs, d_p, d_x)} == {device}
    assert traced == [1]


def test_inside_shard_map(grid, rng):
    """A segment in the body of a shard_map, with and without its check of axes."""
    mesh = grid(AxisType.Auto)
    (params, x, d_outputs), _ = _placed(mesh, rng)
    seg = segment(_mlp)

    def body(params, x, d):
        _, residuals = seg.forward(params, x)
        d_params, d_inputs = seg.backward(params, residuals, d)
        return jax.lax.psum(d_params, "data"), d_inputs

    _, pull_back = jax.vjp(_mlp, params, x)
    d_params, d_x = pull_back(d_outputs)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), (P("data"),)), check_vma=False,
    )  # fmt: skip
    found = jax.jit(mapped)(params, x, d_outputs)
    assert_close(jax.device_get(found), jax.device_get((d_params, (d_x,))))

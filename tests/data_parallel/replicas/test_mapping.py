"""Sums over replicas: on the devices of a mesh, and of those that share a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import data_parallel, optim
from jdist.data_parallel import value_and_grad
from jdist.data_parallel.replicas.mapping import (
    EACH,
    over_replicas,
    share_a_device,
    summed,
    summed_in_order,
)
from jdist.data_parallel.replicas.placement import Placement
from tests.replicas import over

ROWS = PartitionSpec("data")


@pytest.mark.parametrize("of", [summed, summed_in_order])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_sum_is_in_rank_order(mesh, rng, of, count):
    """On one device to the bit; on a mesh, where XLA chooses the order, to rounding."""
    x = jnp.asarray(rng.normal(size=(count, 7)) * 10.0 ** rng.uniform(-3, 3, 7))
    by_hand = sum(x[1:], x[0])
    for place in (Placement(None, count, "data"), Placement.of("", mesh(count))):
        both = over_replicas(lambda a: (of(a[0], "data"),), place, [ROWS], [EACH])
        (found,) = jax.jit(both)(x)
        if place.mesh is None:
            np.testing.assert_array_equal(found, by_hand)
        allowed = count * 2.0**-53 * np.abs(x).sum(axis=0)
        assert np.all(np.abs(found - by_hand) <= allowed)


def test_who_shares_a_device(mesh):
    """Also where the program itself runs on a mesh with an axis of that name."""
    seen = []

    def note(x):
        seen.append(share_a_device("data"))
        return (x,)

    with jax.set_mesh(mesh(2)):
        jax.vmap(note, axis_name="data")(jnp.arange(2.0))
    over_replicas(note, Placement.of("", mesh(2)), [ROWS], [ROWS])(jnp.arange(2.0))
    assert seen == [True, False]


def test_replicas_on_one_device_reduce_no_rows(rng):
    """XLA on CPU takes forty times longer for that than for adding the rows."""
    params = {"w": jnp.asarray(rng.normal(size=(3, 5)))}
    batch = jnp.asarray(rng.normal(size=(6, 3)))

    def losses(params, batch):
        return jnp.tanh(batch @ params["w"]).sum(axis=1)

    fn = value_and_grad(losses, replicas=2)
    program = str(jax.make_jaxpr(fn)(params, batch, None))
    assert "add" in program
    # What a `psum` over the rows of a `vmap` is written as, and lowered to a reduction.
    assert "psum" not in program


@pytest.mark.parametrize("place", ["rows", "mesh"])
def test_entries_without_elements_are_divided_by_rows(place, mesh):
    """A batch's leaf of shape (n, 0), also in micro-batches and auxiliary outputs."""
    where = 3 if place == "rows" else mesh(3)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(11, 2)).astype(np.float32)
    batch = {"x": x, "none": np.zeros((11, 0, 5), np.float32)}
    w = jnp.array([0.3, -0.7], jnp.float32)

    def losses(w, batch):
        return (batch["x"] @ w) ** 2 + batch["none"].sum((1, 2))

    expected, gradient = jax.value_and_grad(lambda w: losses(w, batch).mean())(w)
    given = data_parallel.shard_batch(batch, **over(where), sizes=(5, 4, 2), rows=6)
    found = data_parallel.value_and_grad(losses, **over(where))(w, *given)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-5)
    step = data_parallel.train_step(
        lambda w, batch: (losses(w, batch), batch["none"]),
        optim.sgd(lr=1.0),
        **over(where),
        accumulate=2,
        has_aux=True,
    )
    state, metrics = step(step.init(w), *given)
    np.testing.assert_allclose(state.params, w - gradient, rtol=1e-5)
    assert metrics.aux.shape == (6, 3, 0, 5)

"""Sums over replicas: on the devices of a mesh, and of those that share a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist.data_parallel import value_and_grad
from jdist.data_parallel.replicas.mapping import (
    EACH,
    over_replicas,
    share_a_device,
    summed,
    summed_in_order,
)

ROWS = PartitionSpec("data")


@pytest.mark.parametrize("of", [summed, summed_in_order])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_sum_is_in_rank_order(mesh, rng, of, count):
    """On one device to the bit; on a mesh, where XLA chooses the order, to rounding."""
    x = jnp.asarray(rng.normal(size=(count, 7)) * 10.0 ** rng.uniform(-3, 3, 7))
    by_hand = sum(x[1:], x[0])
    for place in (count, mesh(count)):
        both = over_replicas(
            lambda a: (of(a[0], "data"),), place, "data", [ROWS], [EACH]
        )
        (found,) = jax.jit(both)(x)
        if place == count:
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
    over_replicas(note, mesh(2), "data", [ROWS], [ROWS])(jnp.arange(2.0))
    assert seen == [True, False]


def test_replicas_on_one_device_reduce_no_rows(rng):
    """XLA on CPU takes forty times longer for that than for adding the rows."""
    params = {"w": jnp.asarray(rng.normal(size=(3, 5)))}
    batch = jnp.asarray(rng.normal(size=(6, 3)))

    def losses(params, batch):
        return jnp.tanh(batch @ params["w"]).sum(axis=1)

    fn = value_and_grad(losses, 2)
    program = str(jax.make_jaxpr(fn)(params, batch, None))
    assert "add" in program
    # What a `psum` over the rows of a `vmap` is written as, and lowered to a reduction.
    assert "psum" not in program

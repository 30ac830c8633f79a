"""Clipping by the global norm, also of gradients divided over an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist.optim import clip_by_global_norm

# A sum of at most 40 squares, a root, a quotient and a product.
ROUNDINGS = 60 * 2.0**-53


def tree(rng):
    return {
        "w": jnp.asarray(rng.standard_normal((4, 3)) * 100),
        "z": jnp.asarray(rng.standard_normal(4) + 1j * rng.standard_normal(4)),
        "none": None,
        "h": jnp.asarray(rng.standard_normal((4, 5)), jnp.bfloat16),
    }


def norm_of(grads):
    squares = [
        np.sum(np.abs(np.asarray(g).astype(np.complex128)) ** 2)
        for g in jax.tree.leaves(grads)
    ]
    return np.sqrt(sum(squares))


@pytest.mark.parametrize("max_norm", [0.0, 1.5, jnp.float32(20), 1e9])
def test_the_norm_is_of_all_leaves_and_dtypes_stay(max_norm, rng):
    grads = tree(rng)
    clipped, norm = clip_by_global_norm(grads, max_norm)
    assert norm.dtype == jnp.float64
    np.testing.assert_allclose(norm, norm_of(grads), rtol=1e-7)  # "h" sums in float32
    factor = min(1, float(max_norm) / (float(norm) + 1e-6))
    for name in ("w", "z", "h"):
        assert clipped[name].dtype == grads[name].dtype
    assert clipped["none"] is None
    for name in ("w", "z"):
        np.testing.assert_allclose(clipped[name], grads[name] * factor, rtol=ROUNDINGS)
    expected = (np.float32(grads["h"]) * np.float32(factor)).astype(jnp.bfloat16)
    assert np.asarray(clipped["h"]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("axis", ["shard_map", "vmap"])
def test_over_an_axis_the_norm_is_of_all_parts(axis, mesh, rng):
    """Each member holds other rows; all clip by the same factor."""
    grads = jnp.asarray(rng.standard_normal((8, 3)) * 10)
    expected, norm = clip_by_global_norm(grads, 1.0)

    def part(g):
        return clip_by_global_norm(g, 1.0, "data")

    if axis == "vmap":
        found, norms = jax.vmap(part, axis_name="data")(grads)
    else:
        rows = PartitionSpec("data")
        found, norms = jax.shard_map(
            part, mesh=mesh(4), in_specs=rows, out_specs=(rows, PartitionSpec())
        )(grads)
    np.testing.assert_allclose(found, expected, rtol=ROUNDINGS)
    np.testing.assert_allclose(
        norms, np.broadcast_to(norm, norms.shape), rtol=ROUNDINGS
    )


def test_a_leaf_that_is_the_same_everywhere_is_refused_over_an_axis(mesh):
    rows = PartitionSpec("data")

    def part(g, same):
        return clip_by_global_norm({"g": g, "same": same}, 1.0, "data")[1]

    with pytest.raises(ValueError, match=r"over axis 'data'. Got a leaf at same"):
        jax.shard_map(
            part,
            mesh=mesh(2),
            in_specs=(rows, PartitionSpec()),
            out_specs=PartitionSpec(),
        )(jnp.ones((4, 2)), jnp.ones(3))


def test_what_is_not_finite_shows_in_the_norm():
    for bad in (np.inf, np.nan):
        clipped, norm = clip_by_global_norm(
            [jnp.array([1.0, bad]), jnp.array([2.0])], 1.0
        )
        assert not np.isfinite(norm)
        assert np.asarray(clipped[1])[0] == 0 or np.isnan(clipped[1][0])


def test_refusals():
    with pytest.raises(ValueError, match=r"max_norm=...\)` must be at least 0. Got -1"):
        clip_by_global_norm(jnp.ones(2), -1.0)
    with pytest.raises(ValueError, match=r"must be at least 0. Got nan"):
        clip_by_global_norm(jnp.ones(2), float("nan"))
    with pytest.raises(TypeError, match=r"must be a number or a scalar array. Got Tr"):
        clip_by_global_norm(jnp.ones(2), True)
    several = r"must be a scalar. Got an array of shape \(2,\)\.(\n|$)"
    with pytest.raises(ValueError, match=several):
        jax.jit(clip_by_global_norm)(jnp.ones(2), jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"grads=...\)` must have at least one grad"):
        clip_by_global_norm({"w": None}, 1.0)
    with pytest.raises(TypeError, match=r"floating leaves only. Got int32 at n"):
        clip_by_global_norm({"n": jnp.zeros(2, jnp.int32)}, 1.0)

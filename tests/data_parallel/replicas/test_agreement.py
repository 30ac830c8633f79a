"""Debug mode: replicas that part ways are noticed, and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import (
    ReplicasDiffer,
    hooks,
    shard_batch,
    train_step,
    value_and_grad,
)
from jdist.data_parallel.replicas.agreement import checksums
from tests.replicas import over

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def losses_of(params, batch):
    return (batch @ params["w"] + params["b"][None]).sum(axis=1) ** 2


@pytest.fixture
def problem(rng):
    params = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2), "n": np.arange(2)}
    return params, rng.normal(size=(9, 3)), rng.uniform(0.5, 2, size=9)


def silent(state, bucket):
    """A hook that forgets to communicate."""
    return state, bucket


def forgetful(state, bucket):
    """Sums the first bucket only."""
    if bucket.index:
        return state, bucket
    return state, bucket.replaced(jax.lax.psum(bucket.buffer, bucket.axis_name))


def lopsided(state, bucket):
    """The sum, but for the last bit of one number on replica 2."""
    total = jax.lax.psum(bucket.buffer, bucket.axis_name)
    bent = total.at[-1].set(jnp.nextafter(total[-1], jnp.inf))
    is_2 = jax.lax.axis_index(bucket.axis_name) == 2
    return state, bucket.replaced(jnp.where(is_2, bent, total))


def by_gradient(where, hook, problem, **options):
    params, batch, weights = problem
    fn = value_and_grad(losses_of, **over(where), hook=hook, debug=True, **options)
    return fn(
        params, *shard_batch(batch, **over(where), sizes=(4, 2, 3), weights=weights)
    )


def by_step(where, hook, problem, **options):
    params, batch, weights = problem
    options |= {"hook": hook, "debug": True}
    step = train_step(losses_of, optim.sgd(), **over(where), **options)
    shards = shard_batch(batch, **over(where), sizes=(4, 2, 3), weights=weights)
    return step(step.init(params), *shards)


@pytest.mark.parametrize("kind", ["devices", "vmap"])
@pytest.mark.parametrize(
    ("run", "call"), [(by_gradient, "value_and_grad"), (by_step, "train_step")]
)
def test_a_hook_that_does_not_communicate_is_caught(problem, mesh, kind, run, call):
    """Leaf and devices are in the message; all three hold something else."""
    where = mesh(3) if kind == "devices" else 3
    first = r" \(\w+:0\)" if kind == "devices" else ""
    message = (
        rf"`{call}`: the gradient at b is not the same on all replicas: checksum "
        rf"[0-9a-f]{{8}} on replica 0{first}; .*on replica 1.*on replica 2.*A hook must"
    )
    with pytest.raises(ReplicasDiffer, match=message):
        run(where, silent, problem)


def test_the_leaf_that_differs_is_named(problem, mesh):
    """And not the one that travels in an earlier bucket."""
    with pytest.raises(ReplicasDiffer, match="the gradient at w is not the same"):
        by_gradient(mesh(3), forgetful, problem, bucket_cap_mb=[["b"], ["w"]])


def test_a_single_bit_is_seen(problem, mesh):
    """On one replica of three; the two that agree are named together."""
    message = (
        r"on replica 0 \(\w+:0\), 1 \(\w+:1\); checksum \w+ on replica 2 \(\w+:2\)"
    )
    with pytest.raises(ReplicasDiffer, match=message):
        by_step(mesh(3), lopsided, problem)


@pytest.mark.parametrize(
    "hook", [None, hooks.power_sgd(start=0, min_compression_rate=0.1)]
)
def test_what_agrees_is_left_alone(problem, mesh, hook):
    """The same results as without the check, the hook's state among them."""
    params, batch, weights = problem
    shards = shard_batch(batch, mesh(3), (4, 2, 3), weights=weights)
    plain = value_and_grad(losses_of, mesh(3), hook=hook)(params, *shards)
    found = by_gradient(mesh(3), hook, problem)
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    by_step(mesh(3), hook, problem)


def test_inside_jit_it_is_refused(problem, mesh):
    """Nothing can be compared there, and a check that is not made must not be asked."""
    params, batch, _ = problem
    fn = value_and_grad(losses_of, mesh(3), debug=True)
    with pytest.raises(ValueError, match=r"value_and_grad\(debug=...\)` must be left"):
        jax.jit(fn)(params, batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_and_every_place_counts(dtype, rng):
    """Of each dtype: the last bit, the sign of zero, the order, and all signs at once.

    Sums of words times odd numbers would not see an even number of signs change.
    """
    base = np.asarray(rng.normal(size=6)).astype(jnp.dtype(dtype))
    rows = np.stack([base] * 6)
    rows[1, 4] *= 1 + jnp.finfo(dtype).eps
    rows[2] = base[::-1]
    rows[3, 2], rows[4, 2], rows[5] = 0.0, -0.0, -base
    if np.iscomplexobj(base):
        rows = np.stack([*rows, np.conj(base)])
    found = jax.vmap(lambda x: checksums({"x": x}, "r"), axis_name="r")(rows)["x"][0]
    assert found.dtype == jnp.uint32
    assert len(set(found.tolist())) == len(rows)

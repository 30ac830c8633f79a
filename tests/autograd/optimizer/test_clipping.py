"""Clipping by the norm over all owners, for any division among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, optim
from tests.autograd import optimizer_cases as cases

GRADIENTS = [
    cases.tree(1),
    cases.numbers(2, shape=(501,)),
    None,
    {"w": cases.numbers(3, dtype=np.float64), "b": None},
]
VALUES = [
    cases.tree(4),
    cases.numbers(5, shape=(501,)),
    cases.numbers(6),
    {"w": cases.numbers(7, dtype=np.float64), "b": cases.numbers(8, shape=(2,))},
]


def clipped(owners, max_norm):
    rrefs = cases.remote_variables(list(zip(owners, VALUES, strict=True)))
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=0.5)
    norm = cases.step(dist_opt, rrefs, GRADIENTS, max_norm=max_norm)
    return np.asarray(norm), cases.values_of(rrefs)


def locally(max_norm):
    """By `optim.clip_by_global_norm`, on one device."""
    grads, norm = jax.jit(lambda g: optim.clip_by_global_norm(g, max_norm))(GRADIENTS)
    grads = [None if g is None else g for g in grads]
    (found,) = cases.local_steps(optim.sgd(lr=0.5), VALUES, [grads])
    return np.asarray(norm), found


OWNERS = [
    ("worker1", "worker2", "worker0", "worker3"),
    ("worker3", "worker1", "worker1", "worker1"),
    ("worker0", "worker0", "worker0", "worker0"),
]


@pytest.mark.parametrize("max_norm", [1.5, 0.0, 1e6])
def test_it_is_the_norm_over_all(cluster, max_norm):
    """That of one device, to rounding; the same bits wherever the variables are."""
    expected, local = locally(max_norm)
    found = [cluster.run(0, clipped, owners, max_norm) for owners in OWNERS]
    for norm, values in found:
        assert norm.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(norm, expected, rtol=1e-6)
        cases.assert_same_bits(norm, found[0][0])
        cases.assert_same_bits(values, found[0][1])
        for one, other in zip(
            jax.tree.leaves(values), jax.tree.leaves(local), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    if max_norm == 0.0:
        cases.assert_same_bits(found[0][1], VALUES)
    if max_norm == 1e6:
        given = [GRADIENTS]
        (unclipped,) = cases.local_steps(optim.sgd(lr=0.5), VALUES, given)
        cases.assert_same_bits(found[0][1], unclipped)


def without_gradients():
    rrefs = cases.remote_variables([("worker1", VALUES[0]), ("worker2", VALUES[1])])
    dist_opt = autograd.DistributedOptimizer(optim.adam, rrefs, lr=0.5)
    norm = cases.step(dist_opt, rrefs, [None, None], max_norm=1.0)
    return np.asarray(norm), cases.values_of(rrefs)


def test_nothing_to_clip(cluster):
    """The norm of nothing is 0."""
    norm, found = cluster.run(0, without_gradients)
    assert norm == 0.0
    cases.assert_same_bits(found, VALUES[:2])


def in_16_bits():
    value = cases.numbers(1, shape=(300,), dtype=jnp.bfloat16)
    rrefs = cases.remote_variables([("worker1", value)])
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=1.0)
    gradient = cases.numbers(2, shape=(300,), dtype=jnp.bfloat16)
    norm = cases.step(dist_opt, rrefs, [gradient], max_norm=3.0)
    return np.asarray(norm), cases.values_of(rrefs)


def test_in_16_bits(cluster):
    """Squares are added in float32, and a gradient is rounded once."""
    norm, (found,) = cluster.run(0, in_16_bits)
    gradient = cases.numbers(2, shape=(300,), dtype=jnp.bfloat16)
    grads, expected = optim.clip_by_global_norm(gradient, 3.0)
    assert norm.dtype == np.float32
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    value = cases.numbers(1, shape=(300,), dtype=jnp.bfloat16)
    ((local,),) = cases.local_steps(optim.sgd(lr=1.0), [value], [[grads]])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, local)


def infinite():
    rrefs = cases.remote_variables([("worker1", VALUES[2]), ("worker2", VALUES[2])])
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=1.0)
    bad = np.full((3, 2), np.inf, np.float32)
    norm = cases.step(dist_opt, rrefs, [bad, cases.numbers(1)], max_norm=1.0)
    return float(norm), cases.values_of(rrefs)


def test_an_infinite_gradient(cluster):
    """As in torch: the infinite one becomes NaN, the others 0; the norm tells."""
    norm, (bad, good) = cluster.run(0, infinite)
    assert norm == np.inf
    assert np.isnan(bad).all()
    np.testing.assert_array_equal(good, VALUES[2])


def fails_in_the_norm():
    rrefs = cases.remote_variables([("worker1", VALUES[2]), ("worker2", VALUES[2])])
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=1.0)
    broken = np.ones((3, 2), np.int32)
    with pytest.raises(
        ExceptionGroup, match=r"Error running optimizer, in the norm.*'worker2'"
    ):
        cases.step(dist_opt, rrefs, [cases.numbers(1), broken], max_norm=1.0)
    return cases.values_of(rrefs)


def test_if_the_norm_fails_no_owner_steps(cluster):
    first, second = cluster.run(0, fails_in_the_norm)
    cases.assert_same_bits([first, second], [VALUES[2]] * 2)

"""Horovod's form: a known interface on the same core."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import optim
from jdist.data_parallel import averaged
from tests.data_parallel.recording import copies_differ


@pytest.mark.parametrize("weighted", [False, True])
def test_horovods_form_in_a_shard_map_of_ones_own(mesh, rng, weighted):
    """Fifty steps; with weights it is one device on all examples, without not."""
    w, x = rng.normal(size=3), rng.normal(size=(8, 3))
    # Three examples on the first replica, one on the second.
    masks = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    opt = optim.sgd(lr=0.05, momentum=0.9)
    wrapped = averaged(opt, "data")

    def losses(w, x):
        return (x @ w - 1) ** 2

    shard = PartitionSpec("data")

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh(2),
        in_specs=(PartitionSpec(), PartitionSpec(), shard, shard),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def step(w, state, x, mask):
        def mean(w):
            return (mask * losses(w, x)).sum() / mask.sum()

        given = {"weight": mask.sum()} if weighted else {}
        return wrapped.step(w, jax.grad(mean)(w), state, **given)

    found, state = w, wrapped.init(w)
    alone, own = jnp.asarray(w), opt.init(w)
    gradient = jax.jit(jax.grad(lambda w: (masks * losses(w, x)).sum() / masks.sum()))
    optimize = jax.jit(opt.step)
    for _ in range(50):
        found, state = step(found, state, x, masks)
        alone, own = optimize(alone, gradient(alone), own)
    assert copies_differ((found, state)) == 0
    assert (np.abs(found - alone).max() < 1e-10) == weighted


def test_gradients_that_are_summed_already_are_refused(mesh):
    """Under shard_map's own check they would count once per replica."""
    opt = averaged(optim.sgd(lr=0.1), "data")

    def step(w, x):
        gradient = jax.grad(lambda w: (w * x).sum())(w)
        return opt.step(w, gradient, opt.init(w))[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh(2),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match=r"already\s+summed"):
        mapped(jnp.float64(1), jnp.arange(4.0))


def test_masters_take_horovods_mean_unrounded():
    """Of 256 and 1 it is 128.5, which is no bfloat16; the copies are rounded."""
    inner = optim.with_master_weights(optim.sgd(lr=1.0), compute_dtype=jnp.bfloat16)
    opt = averaged(inner, "data")
    state = opt.init(jnp.zeros(()))

    def step(gradient):
        return opt.step(jnp.zeros((), jnp.bfloat16), gradient, state)

    gradients = jnp.array([256, 1], jnp.bfloat16)
    copies, moved = jax.vmap(step, axis_name="data")(gradients)
    assert moved.masters.tolist() == [-128.5, -128.5]
    assert copies.tolist() == [-128, -128]

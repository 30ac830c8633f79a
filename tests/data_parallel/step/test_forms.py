"""`parallel_apply` and Horovod's form: known interfaces on the same core."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jdist import optim
from jdist.data_parallel import averaged, parallel_apply
from tests.data_parallel.recording import copies_differ
from tests.replicas import over


def model(params, x):
    """Outputs as a tree, one with another dimension."""
    hidden = jnp.tanh(x @ params["w"])
    return {"scores": hidden @ params["v"], "norm": (hidden**2).sum(axis=1)}


@pytest.fixture
def params(rng):
    """All sizes different."""
    return {"w": rng.normal(size=(3, 4)), "v": rng.normal(size=(4, 2))}


@pytest.mark.parametrize("count", [2, 6])
def test_outputs_and_gradients_of_the_whole_batch(params, mesh, rng, count):
    """In order, for any number of examples, on devices and on one."""
    x = rng.normal(size=(count, 3))
    weights = rng.normal(size=count)

    def loss(params, apply):
        found = apply(params, x)
        return (weights * found["norm"]).sum() + (found["scores"] ** 3).sum()

    expected, wanted = model(params, x), jax.grad(loss)(params, model)
    for where in (mesh(3), 3):
        apply = parallel_apply(model, **over(where))
        found, gradient = apply(params, x), jax.grad(loss)(params, apply)
        for name, leaf in expected.items():
            np.testing.assert_allclose(found[name], leaf, rtol=1e-12, atol=1e-13)
        for name, leaf in wanted.items():
            np.testing.assert_allclose(gradient[name], leaf, rtol=1e-11)


@pytest.mark.parametrize("count", [2, 6, 7])
def test_an_explicit_mesh_takes_any_number_of_examples(params, mesh, rng, count):
    """As an automatic one, where it is set and where not."""
    x, where = rng.normal(size=(count, 3)), mesh(3, AxisType.Explicit)
    apply, expected = parallel_apply(model, **over(where)), model(params, x)
    for name, leaf in apply(params, x).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-12, atol=1e-13)

    def loss(params, apply):
        return (apply(params, x)["scores"] ** 3).sum()

    gradients = [jax.grad(loss)(params, apply)]
    with jax.set_mesh(where):
        gradients.append(jax.grad(loss)(params, apply))
    for gradient in gradients:
        for name, leaf in jax.grad(loss)(params, model).items():
            np.testing.assert_allclose(gradient[name], leaf, rtol=1e-11)


def test_what_data_parallel_refuses(params):
    """Nothing to apply to; a mesh without the axis."""
    with pytest.raises(ValueError, match="at least one example"):
        parallel_apply(model, replicas=2)(params, np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"at least 1. Got 0"):
        parallel_apply(model, replicas=0)


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


def test_the_models_gradient_is_added_up_in_float32(mesh):
    """2048 and seven times 1: float16 stays at 2048 if it is rounded on the way."""
    model = parallel_apply(lambda w, x: x * w, mesh(8))
    x = jnp.array([2048] + [1] * 7, jnp.float16)

    def total(w):
        return model(w, x).astype(jnp.float32).sum()

    gradient = jax.grad(total)(jnp.array(1, jnp.float16))
    assert gradient.dtype == jnp.float16
    assert gradient == 2056

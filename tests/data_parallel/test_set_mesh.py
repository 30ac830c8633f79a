"""`jax.set_mesh` around a public call changes no bit of what it returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jdist import data_parallel, optim
from jdist.segment import segment
from tests.replicas import over

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def line(first, count, axis, kind):
    devices = jax.devices()[first : first + count]
    return jax.make_mesh((count,), (axis,), devices=devices, axis_types=(kind,))


MESHES = {
    "automatic axes": lambda: line(0, 3, "data", AUTO),
    "explicit axes": lambda: line(0, 3, "data", EXPLICIT),
    "other devices": lambda: line(4, 2, "other", EXPLICIT),
}


def losses(params, x):
    return jnp.sin(jnp.tanh(x @ params["a"]) @ params["b"])


@pytest.fixture
def given(rng):
    """Parameters, and batches of 7 rows and of 6."""

    def drawn(*shape):
        return np.float32(rng.normal(size=shape))

    return {"a": drawn(5, 3), "b": drawn(3)}, drawn(7, 5), drawn(6, 5)


def value_and_grad(mesh, params, x, _):
    found = data_parallel.value_and_grad(losses, **over(mesh))
    return found(params, *data_parallel.shard_batch(x, **over(mesh)))


def steps(mesh, params, x, _, optimizer=None):
    step = data_parallel.train_step(
        losses, optimizer or optim.adam(lr=0.1), **over(mesh)
    )
    state = step.init(params)
    for _ in range(2):
        batch, weights = data_parallel.shard_batch(x, **over(mesh))
        state, metrics = step(state, batch, weights=weights)
    return state.params, metrics.loss, step.evaluate(state, batch, weights).loss


def steps_of_zero(mesh, *arguments):
    optimizer = data_parallel.zero(optim.adam(lr=0.1), mesh)
    return steps(mesh, *arguments, optimizer=optimizer)


def fit_and_evaluate(mesh, params, _, x):
    step = data_parallel.train_step(losses, optim.sgd(lr=0.1), **over(mesh))
    state, _ = data_parallel.fit(step, step.init(params), [x, x])
    return state.params, data_parallel.evaluate(step, state, [x]).loss


def local_sgd(mesh, params, x, _):
    local = data_parallel.LocalSGD(losses, optim.sgd(lr=0.1), **over(mesh), period=2)
    state, _ = local.step(
        local.init(params), *data_parallel.shard_batch(x, **over(mesh))
    )
    return local.average(state)


def replicate(mesh, params, *_):
    return data_parallel.replicate(params, **over(mesh))


CALLS = (
    value_and_grad, steps, steps_of_zero, fit_and_evaluate, local_sgd, replicate,
)  # fmt: skip


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("own", ["automatic axes", "explicit axes"])
@pytest.mark.parametrize("call", CALLS)
def test_a_mesh_that_is_set_changes_nothing(call, own, given):
    """Its own, one with axes of another type, and one over other devices."""
    mesh = MESHES[own]()
    expected = bits(call(mesh, *given))
    for other in MESHES.values():
        with jax.set_mesh(other()):
            assert bits(call(mesh, *given)) == expected
    # Neither do axes that are explicit.
    assert bits(call(MESHES["automatic axes"](), *given)) == expected


@pytest.mark.parametrize("call", [value_and_grad, steps])
def test_replicas_on_one_device_under_a_mesh(call, given):
    expected = bits(call(3, *given))
    for other in MESHES.values():
        with jax.set_mesh(other()):
            assert bits(call(3, *given)) == expected


def test_optimizers_and_segments_under_a_mesh(given):
    """They compute where their arguments are, as `jax.jit` does."""
    params, x, _ = given

    def called():
        opt, seg = optim.adam(lr=0.1), segment(losses)
        y, residuals = seg.forward(params, x)
        gradient, _ = seg.backward(params, residuals, jnp.ones_like(y))
        return opt.step(params, gradient, opt.init(params)), y

    expected = bits(called())
    for other in MESHES.values():
        with jax.set_mesh(other()):
            assert bits(called()) == expected

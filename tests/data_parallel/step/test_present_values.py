"""Whatever a user's function reads has its present value, for all shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import data_parallel, optim, rpc
from jdist.data_parallel import LocalSGD, hooks, train_step, value_and_grad
from jdist.segment import RecompilationWarning
from tests.replicas import over

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
MESHES = pytest.mark.parametrize("mesh", [MESH, 2], ids=["mesh", "one device"])
SCALE = None


@dataclasses.dataclass
class Other:
    """Another network, which another trainer changes."""

    k: jax.Array


@pytest.fixture
def x(rng):
    return rng.standard_normal((10, 3)).astype(np.float32)


@pytest.fixture
def w(rng):
    return rng.standard_normal(3).astype(np.float32)


def value_of_gradient(fn):
    return lambda w, x: fn(w, x)[0]


def losses_by_name(loss, mesh):
    """Of each part of the package that compiles a loss, its loss of a batch."""
    step = train_step(loss, optim.sgd(lr=0.0), **over(mesh))
    alone = train_step(
        lambda w, x: loss(w, x) + 100,
        optim.sgd(lr=0.0),
        **over(mesh),
        in_evaluation=loss,
    )
    summed = train_step(loss, optim.sgd(lr=0.0), **over(mesh), hook=hooks.bf16())
    local = LocalSGD(loss, optim.sgd(lr=0.0), **over(mesh), period=3)
    return {
        "value_and_grad": value_of_gradient(value_and_grad(loss, **over(mesh))),
        "train_step": lambda w, x: step(step.init(w), x)[1].loss,
        "evaluate": lambda w, x: step.evaluate(step.init(w), x).loss,
        "in_evaluation": lambda w, x: alone.evaluate(alone.init(w), x).loss,
        "hook": lambda w, x: summed(summed.init(w), x)[1].loss,
        "local_sgd": lambda w, x: local.step(local.init(w), x)[1],
    }


@pytest.mark.filterwarnings("ignore::jdist.segment.RecompilationWarning")
@MESHES
def test_of_a_closure(mesh, x, w):
    """The network that a loss reads changes between two steps, then with the batch."""
    other = Other(jnp.float32(2))

    def loss(w, x):
        return other.k * (x @ w) ** 2

    for name, losses in losses_by_name(loss, mesh).items():
        for k, rows in ((2, 10), (3, 10), (3, 6), (5, 10)):
            other.k = jnp.float32(k)
            expected = k * ((x[:rows] @ w) ** 2).mean()
            got = losses(w, x[:rows])
            np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=name)


@MESHES
def test_of_an_optimizer_and_a_hook(mesh, x, w):
    """A schedule, and a hook, that read a global variable."""
    global SCALE

    def hook(state, bucket):
        return hooks.all_reduce().reduce(state, bucket.replaced(bucket.buffer * SCALE))

    step = train_step(
        lambda w, x: x @ w, optim.sgd(lr=lambda t: SCALE), **over(mesh), hook=hook
    )
    gradient = x.mean(0)
    for SCALE in (0.5, 3.0, 0.5):
        state, _ = step(step.init(w), x)
        expected = w - SCALE**2 * gradient
        np.testing.assert_allclose(state.params, expected, rtol=1e-5, atol=1e-6)


def test_of_a_module(x):
    """Its class reads a global variable where it is called."""
    global SCALE

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return SCALE * self.dense(x)[:, 0]

    made = data_parallel.from_nnx(Net(nnx.Rngs(3)), lambda net, x: net(x))
    step = train_step(
        made.loss_fn, optim.sgd(lr=0.0), replicas=2, in_evaluation=made.in_evaluation
    )
    kernel = np.asarray(made.params["dense"]["kernel"][...])[:, 0]
    for SCALE in (2.0, -3.0):
        expected = SCALE * (x @ kernel).mean()
        _, metrics = step(step.init(made.params), x)
        np.testing.assert_allclose(metrics.loss, expected, rtol=1e-4)
        found = step.evaluate(step.init(made.params), x)
        np.testing.assert_allclose(found.loss, expected, rtol=1e-4)


def test_of_an_elastic_run(x, w):
    """Two runs of one object, with another value in the second."""
    other = {"k": jnp.float32(2)}
    run = data_parallel.Elastic(
        lambda w, x: other["k"] * (x @ w) ** 2,
        optim.sgd(lr=0.0),
        data_parallel.Sampler(len(x), 10),
    )
    for number, k in enumerate((2, 3)):
        other["k"] = jnp.float32(k)
        with rpc.elastic_cluster():
            _, losses = run.run(w, x, name=f"run {number}")
        np.testing.assert_allclose(losses[0], k * ((x @ w) ** 2).mean(), rtol=1e-5)


def test_what_does_not_change_is_compiled_once_and_what_does_is_said(x, w):
    """Counters beside what the loss reads change; a third program is said."""

    class Trainer:
        def __init__(self):
            self.steps, self.k = 0, 2.0

        def loss(self, w, x):
            return self.k * (x @ w) ** 2

    trainer = Trainer()
    step = train_step(trainer.loss, optim.adam(), MESH)
    state = step.init(w)
    for trainer.steps in range(4):
        state, _ = step(state, x)
    assert step.compiled._cache_size() == 1
    trainer.k = 3.0
    state, _ = step(state, x)
    trainer.k = 5.0
    told = r"train_step compiles .*Trainer\.loss .* for the 3rd time.*self\.k` from 3"
    with pytest.warns(RecompilationWarning, match=told):
        step(state, x)

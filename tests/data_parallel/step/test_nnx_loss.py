"""Flax NNX modules with batch norm and dropout in a training step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import data_parallel, optim
from tests.replicas import over

MESHES = pytest.mark.parametrize(
    "mesh",
    [Mesh(np.array(jax.devices()[:2]), ("data",)), 2],
    ids=["mesh", "one device"],
)


@pytest.fixture(autouse=True)
def _mixed_dtypes():
    """Flax itself mixes dtypes, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def spread(key, shape, dtype, **_):
    """Weights that can tell; to draw some compiles a second's worth of programs."""
    return np.cos(np.arange(1, 1 + np.prod(shape))).astype(dtype).reshape(shape)


class Net(nnx.Module):
    """Batch norm, and dropout if that is asked for."""

    def __init__(self, rate=0.0):
        rngs = nnx.Rngs(5)
        self.first = nnx.Linear(3, 4, use_bias=False, kernel_init=spread, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.last = nnx.Linear(4, 1, kernel_init=spread, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.norm(self.first(x)))
        x = x if self.dropout is None else self.dropout(x)
        return self.last(x)[:, 0]


def losses(model, batch):
    return (model(batch[0]) - batch[1]) ** 2


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(20261121)
    x, y = rng.standard_normal((8, 3)), rng.standard_normal(8)
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def by_hand(batch):
    """Two steps of plain NNX on one device: statistics are the mean of both halves'."""
    with jax.numpy_dtype_promotion("standard"):
        return trained_by_hand(Net(), batch, steps=2)


def trained_by_hand(model, batch, steps):
    halves = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in (0, 1)]
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(params, rest):
        states, found = [], []
        for half in halves:
            own = nnx.merge(graph, params, rest, copy=True)
            found.append(losses(own, half))
            states.append(nnx.state(own, nnx.BatchStat))
        return jnp.mean(jnp.concatenate(found)), states

    for _ in range(steps):
        grads, states = gradient(params, rest)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        rest = jax.tree.map(lambda a, b: (a + b) / 2, *states)
    return nnx.merge(graph, params, rest)


def same(found, expected):
    pairs = zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (found, expected)), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@MESHES
def test_batch_norm_trains_as_by_hand(mesh, batch, by_hand):
    made = data_parallel.from_nnx(Net(), losses)
    step = data_parallel.train_step(made.loss_fn, optim.sgd(lr=0.1), **over(mesh))
    state = step.init(made.params, states=made.states)
    for _ in range(2):
        state, _ = step(state, batch)
    same(made.module(state.params, state.states), by_hand)


def test_a_module_taken_apart_trains_as_by_hand(batch, by_hand):
    """As NNX users do it themselves."""
    model = Net()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def own_losses(params, batch, states):
        model = nnx.merge(graph, params, states)
        return losses(model, batch), nnx.state(model, nnx.BatchStat)

    step = data_parallel.train_step(own_losses, optim.sgd(lr=0.1), replicas=2)
    state = step.init(params, states=rest)
    for _ in range(2):
        state, _ = step(state, batch)
    nnx.update(model, state.params, state.states)
    same(model, by_hand)


@MESHES
def test_dropout_draws_from_the_steps_key(mesh, batch):
    """Other masks on each replica and at each step; aux and accumulation beside it."""

    def masks(model, batch):
        found = model.dropout(jnp.ones((len(batch[0]), 4)))
        return losses(model, batch), found > 0

    made = data_parallel.from_nnx(Net(0.5), masks)
    step = data_parallel.train_step(
        made.loss_fn, optim.sgd(lr=0.1), **over(mesh), has_aux=True, accumulate=2
    )
    key = jax.random.key(3)
    state = step.init(made.params, states=made.states, key=key)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found += [x.tobytes() for x in np.asarray(metrics.aux)]
    assert len(set(found)) == 8
    step = data_parallel.train_step(
        made.loss_fn, optim.sgd(), **over(mesh), has_aux=True
    )
    expected = r"`init\(key=...\)` must be given where the model draws random numbers"
    with pytest.raises(ValueError, match=expected):
        step(step.init(made.params, states=made.states), batch)


def test_modules_without_state_need_none(batch):
    made = data_parallel.from_nnx(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda m, b: (
        m(b[0])[:, 0] - b[1]) ** 2)  # fmt: skip
    assert made.states is None
    step = data_parallel.train_step(made.loss_fn, optim.sgd(lr=0.1), replicas=2)
    state, metrics = step(step.init(made.params), batch)
    assert float(step(state, batch)[1].loss) < float(metrics.loss)


def test_a_module_with_statistics_is_no_parameters():
    """They would be differentiated, and what the forward pass leaves would be lost."""
    expected = r"`init\(params=...\)` must hold parameters alone. Got BatchStat at .*"
    for step in (
        data_parallel.train_step(losses, optim.sgd(), replicas=2),
        data_parallel.LocalSGD(losses, optim.sgd(), replicas=2, period=2),
    ):
        for given in (Net(), nnx.state(Net()), {"deep": [Net()]}):
            with pytest.raises(ValueError, match=expected + "norm/mean.*from_nnx"):
                step.init(given)
        step.init(nnx.state(Net(), nnx.Param))
        step.init(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"must be a Flax NNX module. Got a dict"):
        data_parallel.from_nnx({}, losses)

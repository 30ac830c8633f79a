"""Stages without parameters, such as an activation: they train with the others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import optim, pipeline
from tests.pipeline.epochs import asynchronous

PLACES = pipeline.Workers([f"worker{rank}" for rank in range(3)])
NOTHING = {"dict": {}, "tuple": (), "None": None}


def stages():
    return [
        pipeline.Stage(lambda w, x: x.astype(w.dtype) @ w, ("x",), ("h",)),
        pipeline.Stage(lambda _, h: jnp.tanh(h), ("h",), ("g",)),
        pipeline.Stage(lambda w, g: g @ w, ("g",), ("y",)),
    ]


def losses(y, batch):
    return ((y.astype(batch["t"].dtype) - batch["t"]) ** 2).sum(-1)


def problem(dtype=np.float64, examples=7):
    rng = np.random.default_rng(5)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    batch = {"x": normal(examples, 3), "t": normal(examples, 2)}
    return normal(3, 5), normal(5, 2), batch, rng.uniform(0.1, 2, examples)


def whole(params, batch, weights):
    first, second = params
    found = losses(jnp.tanh(batch["x"] @ first) @ second, batch)
    return (found * weights).sum() / weights.sum()


def reference(opt, steps, max_norm=None):
    """The losses and the parameters of one device."""
    first, second, batch, weights = problem()
    params, found = (jnp.asarray(first), jnp.asarray(second)), []
    kept = opt.init(params)
    for _ in range(steps):
        loss, grads = jax.value_and_grad(whole)(params, batch, weights)
        if max_norm is not None:
            grads, _ = optim.clip_by_global_norm(grads, max_norm)
        params, kept = opt.step(params, grads, kept)
        found.append(loss)
    return found, params


OPTIMIZERS = {
    "momentum": lambda: optim.sgd(lr=0.1, momentum=0.9),
    "by label": lambda: optim.by_label(
        {"a": optim.adam(lr=0.05)}, lambda tree: jax.tree.map(lambda _: "a", tree)
    ),
    "optax": lambda: optim.from_optax(optax.sgd(0.1, momentum=0.9)),
    "masters": lambda: optim.with_master_weights(
        optim.adam(lr=0.05), compute_dtype=jnp.float32, loss_scale=8.0
    ),
}


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_one_device(name, nothing):
    first, second, batch, weights = problem()
    opt = OPTIMIZERS[name]()
    pipe = pipeline.Pipeline(
        stages(), losses, pipeline.zero_bubble(3, 3), optimizer=opt, max_norm=0.7
    )
    state = pipe.init([first, NOTHING[nothing], second])
    plain = optim.adam(lr=0.05)
    if name in ("momentum", "optax"):
        plain = optim.sgd(lr=0.1, momentum=0.9)
    expected, params = reference(plain, 3, 0.7)
    # Masters compute in float32: three passes of six products each, and Adam's root.
    bound = 1e-4 if name == "masters" else 1e-10
    for loss in expected:
        state, found = pipe.train_step(state, batch, weights)
        np.testing.assert_allclose(found.loss, loss, rtol=bound)
    assert state.params[1] == NOTHING[nothing]
    for own, wanted in zip((state.params[0], state.params[2]), params, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("policy", ["stashing", "vertical_sync", "2bw", "flush"])
def test_pipedream(policy):
    """An epoch of one batch is a step of one device on it, whatever the policy."""
    first, second, batch, _ = problem()
    opt = optim.adam(lr=0.05)
    pipe = asynchronous(stages(), losses, optimizer=opt, policy=policy)
    state, metrics = pipe.train_epoch(pipe.init([first, {}, second]), [batch])
    params = jnp.asarray(first), jnp.asarray(second)
    loss, grads = jax.value_and_grad(whole)(params, batch, np.ones(7))
    params, _ = opt.step(params, grads, opt.init(params))
    np.testing.assert_allclose(metrics.losses, [loss], rtol=1e-12)
    for own, wanted in zip((state.params[0], state.params[2]), params, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-9)


def test_weight_stashing_of_nothing():
    stash = pipeline.with_weight_stashing(optim.adam(), versions=2)
    state = stash.step({}, stash.init({}))
    assert (state.version, stash.load_new_params(state)) == (1, {})


@pytest.mark.parametrize("pipedream", [False, True])
def test_checkpoints(pipedream, tmp_path):
    """A stage without arrays is saved with the others, and restored."""
    first, second, batch, _ = problem()
    opt, params = optim.adam(lr=0.05), [first, {}, second]
    if pipedream:
        pipe = asynchronous(stages(), losses, optimizer=opt)
        state, _ = pipe.train_epoch(pipe.init(params), [batch] * 2)
    else:
        pipe = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 2), optimizer=opt)
        state, _ = pipe.train_step(pipe.init(params), batch)
    with pipeline.PipelineCheckpoints(tmp_path, pipe) as saved:
        saved.save(state)
        again = saved.restore(pipe.init(params))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for one, two in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_one_program():
    """Equal stages that only compute, between ends with parameters."""
    first, second, batch, weights = problem()
    opt, mesh = optim.adam(lr=0.05), Mesh(np.array(jax.devices()[:2]), ("stage",))

    def wave(_, h):
        return jnp.sin(h)

    pipe = pipeline.Pipeline(
        pipeline.with_ends(
            [pipeline.Stage(wave, (f"h{j}",), (f"h{j + 1}",)) for j in range(2)],
            first=pipeline.Stage(lambda w, x: x @ w, ("x",), ("h0",)),
            last=pipeline.Stage(lambda w, h: h @ w, ("h2",), ("y",)),
        ),
        losses,
        pipeline.one_f_one_b(2, 3),
        pipeline.OneProgram(mesh),
        optimizer=opt,
        max_norm=0.7,
    )
    state = pipe.init(pipe.place([(first, {}), ({}, second)]))
    params = jnp.asarray(first), jnp.asarray(second)
    kept = opt.init(params)

    def mean(params):
        found = jnp.sin(jnp.sin(batch["x"] @ params[0])) @ params[1]
        return (losses(found, batch) * weights).sum() / weights.sum()

    for _ in range(2):
        state, found = pipe.train_step(state, batch, weights)
        loss, grads = jax.value_and_grad(mean)(params)
        grads, norm = optim.clip_by_global_norm(grads, 0.7)
        params, kept = opt.step(params, grads, kept)
        np.testing.assert_allclose(found.loss, loss, rtol=1e-10)
        np.testing.assert_allclose(found.grad_norm, norm, rtol=1e-10)


class Act(nnx.Module):
    def __call__(self, x):
        return nnx.tanh(x)


def trained_modules(places=None):
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(3, 5, rngs=rngs), Act(), nnx.Linear(5, 2, rngs=rngs)]
    made = pipeline.stages_from_nnx(layers)
    _, _, batch, weights = problem(np.float32)
    batch = {made.stages[0].inputs[0]: batch["x"], "t": batch["t"]}
    pipe = pipeline.Pipeline(
        made.stages,
        losses,
        pipeline.one_f_one_b(3, 2),
        places,
        optimizer=optim.adam(lr=0.05),
        max_norm=0.7,
    )
    state = pipe.init(made.params, made.states)
    found = []
    for _ in range(3):
        state, metrics = pipe.train_step(state, batch, weights)
        found.append(float(metrics.loss))
    return found


def test_modules_and_workers(cluster):
    """An activation of Flax, on workers with the bits of one process."""
    alone = trained_modules()
    assert alone[2] < alone[1] < alone[0]
    tasks = [cluster.start(rank, trained_modules, PLACES) for rank in range(3)]
    assert [task.result() for task in tasks] == [alone] * 3

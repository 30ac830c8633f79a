"""Meshes with explicit axes, and `jax.set_mesh`: the same bits as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline
from tests.pipeline.epochs import asynchronous

EXAMPLES = 8


def mesh(start=0, kind=AxisType.Explicit, names=("data", "model")):
    devices = np.array(jax.devices()[start : start + 4]).reshape(2, 2)
    return Mesh(devices, names, axis_types=(kind,) * 2)


@pytest.fixture
def params(rng):
    return [rng.normal(size=(4, 6)), rng.normal(size=(6, 4))]


@pytest.fixture
def batch(rng):
    return {"x": rng.normal(size=(EXAMPLES, 4)), "y": rng.normal(size=(EXAMPLES, 4))}


def block(w, x):
    return jnp.tanh(x @ w)


def losses(out, batch):
    return ((out - batch["y"]) ** 2).sum(-1)


def trained(places, params, batch, context=None):
    """A pipeline's public calls, with two training steps, on the host."""
    stages = [
        pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
        pipeline.Stage(lambda w, h: h @ w, ("h",), ("out",)),
    ]
    schedule = pipeline.one_f_one_b(2, 2)
    weights = np.arange(EXAMPLES)
    with jax.set_mesh(context):
        pipe = pipeline.Pipeline(
            stages, losses, schedule, places, optimizer=optim.adam(lr=0.1), max_norm=1.0
        )
        found = [pipe.value_and_grad(pipe.place(params), batch, weights)]
        state = pipe.init(params)
        assert "stage 0: forward" in pipe.lower(state, batch, weights)
        for _ in range(2):
            state, metrics = pipe.train_step(state, batch, weights)
            own = jax.tree.map(np.asarray, state.params)  # The next step donates them.
            found.append((metrics.loss, metrics.grad_norm, own))
        found.append(pipe.evaluate(state, batch, outputs=True).outputs)
    return jax.tree.map(np.asarray, found)


def streamed(params, batch, context=None):
    """An epoch of an asynchronous schedule."""
    stages = [
        pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
        pipeline.Stage(lambda w, h: h @ w, ("h",), ("out",)),
    ]
    with jax.set_mesh(context):
        pipe = asynchronous(
            stages, losses, jax.devices()[:2], optimizer=optim.sgd(lr=0.1)
        )
        state, metrics = pipe.train_epoch(pipe.init(params), [batch] * 3)
    return jax.tree.map(np.asarray, (state.params, metrics.loss))


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("context", [None, mesh(), mesh(4), mesh(kind=AxisType.Auto)])
def test_places_with_explicit_axes(params, batch, context):
    """As with automatic ones; under any mesh."""
    expected = trained([mesh(0, AxisType.Auto), mesh(4, AxisType.Auto)], params, batch)
    equal(trained([mesh(), mesh(4)], params, batch, context), expected)


@pytest.mark.parametrize("under", [False, True])
def test_arguments_on_a_mesh_with_explicit_axes(params, batch, under):
    """Batches on the meshes that take them, parameters on any."""
    places = [mesh(), mesh(4)]
    rows = {
        name: jax.device_put(leaf, NamedSharding(where, P(("data", "model"))))
        for (name, leaf), where in zip(batch.items(), places, strict=True)
    }
    own = jax.device_put(params, NamedSharding(mesh(), P(None, "model")))
    context = mesh() if under else None
    automatic = [mesh(0, AxisType.Auto), mesh(4, AxisType.Auto)]
    laid = jax.device_put(params, NamedSharding(automatic[0], P(None, "model")))
    equal(trained(places, own, rows, context), trained(automatic, laid, batch))
    expected = streamed(params, batch)
    equal(streamed(own, batch, context), expected)
    # Elsewhere it is refused, as a batch on a mesh with automatic axes.
    message = "must have 'x' on cpu:0, where stage 0 takes it"
    with pytest.raises(ValueError, match=message):
        trained(jax.devices()[:2], params, rows, context)


def test_one_program_over_explicit_axes(params, batch):
    """A mesh by stage and data."""

    def run(kind, context=None):
        places = pipeline.OneProgram(mesh(kind=kind, names=("stage", "data")))
        names = ("x", "h", "out")
        stages = [
            pipeline.Stage(block, names[j : j + 1], names[j + 1 : j + 2])
            for j in range(2)
        ]
        square = [own @ other for own, other in zip(params, params[::-1], strict=True)]
        square[1] = square[1][:4, :4]
        with jax.set_mesh(context):
            pipe = pipeline.Pipeline(
                stages, losses, pipeline.gpipe(2, 2), places,
                optimizer=optim.sgd(lr=0.1),
            )  # fmt: skip
            state, metrics = pipe.train_step(pipe.init(square), batch)
        return jax.tree.map(np.asarray, (state.params, metrics.loss))

    expected = run(AxisType.Auto)
    for context in (None, mesh(), mesh(4)):
        equal(run(AxisType.Explicit, context), expected)

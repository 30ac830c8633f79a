"""Flax modules in one program: equal blocks, between an embedding and a head."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from examples import language_model as llama
from jdist import optim, pipeline

SIZES = llama.Sizes(blocks=4)
NAMES = ["tokens", "x", "h1", "y", "scores"]


@pytest.fixture(autouse=True)
def as_users_have_it():
    """The model is written for JAX's defaults."""
    ranks = jax.numpy_rank_promotion("allow")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), ranks:
        yield


def made(sizes=SIZES):
    """Embedding, two stages of two blocks each, and the head with its table."""
    modules = llama.layers(sizes)
    groups = [modules[:1], modules[1:3], modules[3:5], modules[5:]]
    return pipeline.stages_from_nnx(groups, NAMES)


def trained(found, places, schedule, specs=None, key=None):
    """Losses of three steps, and the parameters by module."""
    first, *stages, last = found.stages
    one = pipeline.Pipeline(
        pipeline.with_ends(stages, first=first, last=last),
        llama.losses_of,
        schedule,
        places,
        optimizer=optim.adam(lr=3e-3),
        max_norm=1.0,
    )

    def joined(trees):
        return [(trees[0], trees[1]), (trees[2], trees[3])]

    specs = None if specs is None else joined(specs)
    state = one.init(one.place(joined(found.params), specs), key=key)
    losses = []
    for batch in llama.batches(3):
        state, metrics = one.train_step(state, batch, batch["mask"].sum(1))
        losses.append(float(metrics.loss))
    (embed, one_half), (other, head) = state.params
    return losses, [embed, one_half, other, head]


@functools.cache
def on_one_device(dropout):
    """The model's stages, and what `trained` finds where they share a device."""
    found = made(llama.Sizes(blocks=4, dropout=dropout))
    schedule = pipeline.gpipe(2, llama.MICRO_BATCHES)
    key = jax.random.key(0) if dropout else None
    return found, trained(found, [jax.devices()[0]] * 2, schedule, key=key)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["stages", "stages, data and model"])
def test_one_program_of_modules_is_the_other_executors(layout, dropout):
    """Modules keep their names, and the model can be made of them again."""
    found, (expected, others) = on_one_device(dropout)
    key = jax.random.key(0) if dropout else None
    schedule, specs = pipeline.gpipe(2, llama.MICRO_BATCHES), None
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    if layout != "stages":
        devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
        mesh = Mesh(devices, ("stage", "data", "model"))
        specs = jax.tree_util.tree_map_with_path(llama.spec, found.params)
    losses, params = trained(found, pipeline.OneProgram(mesh), schedule, specs, key)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert jax.tree.structure(params) == jax.tree.structure(others)
    assert list(params[2]) == ["layer3", "layer4"]
    for own, other in zip(*map(jax.tree.leaves, (params, others)), strict=True):
        np.testing.assert_allclose(own, np.asarray(other), rtol=2e-3, atol=2e-4)
    embed, *_ = found.modules(jax.tree.map(np.asarray, params), found.states)
    table = np.asarray(embed.embedding[...])
    np.testing.assert_array_equal(table, np.asarray(params[0]["layer0"]["embedding"]))


def test_modules_that_differ_are_refused():
    """A block with other settings is another function, also with the same weights."""
    modules = llama.layers(SIZES)
    modules[3].theta = 1e5
    groups = [modules[:1], modules[1:3], modules[3:5], modules[5:]]
    first, *stages, last = pipeline.stages_from_nnx(groups, NAMES).stages
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    schedule = pipeline.gpipe(2, 4)
    with pytest.raises(
        ValueError, match=r"same function .* Got another one in stage 1"
    ):
        pipeline.Pipeline(
            pipeline.with_ends(stages, first=first, last=last),
            llama.losses_of,
            schedule,
            pipeline.OneProgram(mesh),
        )

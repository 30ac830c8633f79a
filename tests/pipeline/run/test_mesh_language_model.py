"""The language model that users see, over meshes: dropout and bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import language_model as llama
from experiments import language_model as trained
from jdist import optim, pipeline

STEPS = 3


@pytest.fixture(autouse=True)
def as_users_have_it():
    """The model is written for JAX's defaults."""
    ranks = jax.numpy_rank_promotion("allow")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), ranks:
        yield


def losses(places, schedule, sizes, optimizer, **options):
    """Of some steps, and the modules that come back."""
    made = llama.layers(sizes)
    options["optimizer"] = optimizer
    pipe, made = llama.pipelined(made, schedule, places, **options)
    specs = [None] * schedule.stages
    if not isinstance(places[0], jax.Device):
        specs = jax.tree_util.tree_map_with_path(llama.spec, made.params)
    params = made.params if specs[0] is None else pipe.place(made.params, specs)
    state = pipe.init(params, made.states, jax.random.key(1))
    found = []
    for batch in llama.batches(STEPS):
        state, metrics = pipe.train_step(state, batch, batch["mask"].sum(1))
        found.append(float(metrics.loss))
    return found, made.modules(state.params, state.states)


@functools.cache
def first_loss_without_dropout():
    schedule = pipeline.one_f_one_b(2, llama.MICRO_BATCHES)
    places, adam = jax.devices()[:1] * 2, optim.adam(lr=llama.LR)
    return losses(places, schedule, llama.Sizes(), adam)[0][0]


@pytest.mark.parametrize("make", [pipeline.one_f_one_b, pipeline.zero_bubble])
def test_dropout_draws_what_one_device_draws(make):
    """Without the same masks the losses would differ in the second digit."""
    sizes, schedule = llama.Sizes(dropout=0.2), make(2, llama.MICRO_BATCHES)
    adam, device = optim.adam(lr=llama.LR), jax.devices()[0]
    wide = llama.meshes(jax.devices(), (2, 2, 2))
    found, modules = losses(wide, schedule, sizes, adam)
    expected, _ = losses([device, device], schedule, sizes, adam)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert abs(first_loss_without_dropout() - expected[0]) > 1e-3
    assert modules[1].drop.rate == sizes.dropout


def test_gradients_in_bfloat16_are_within_the_bound():
    """Parameters and activations; the scores are float32 before the loss."""
    model = trained.model_of(llama.Sizes(blocks=1), 0)
    pipe = model.pipe(
        trained.SCHEDULES["ZB-H1"], llama.meshes(jax.devices(), (2, 2, 2))
    )
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.placed(pipe))
    (batch,) = llama.batches(1)
    model.judged(pipe, params, batch, "bfloat16").raise_if_failed()


def test_training_in_bfloat16_with_masters():
    """As on one device, as far as rounding to 8 bits goes; the loss falls."""
    master = optim.with_master_weights(
        optim.adam(lr=llama.LR), compute_dtype=jnp.bfloat16
    )
    schedule, device = pipeline.one_f_one_b(2, llama.MICRO_BATCHES), jax.devices()[0]
    wide = llama.meshes(jax.devices(), (2, 2, 2))
    found, modules = losses(wide, schedule, llama.Sizes(), master)
    expected, _ = losses([device, device], schedule, llama.Sizes(), master)
    np.testing.assert_allclose(found, expected, rtol=2**-8)
    assert found[-1] < found[0]
    assert modules[0].embedding[...].dtype == jnp.bfloat16

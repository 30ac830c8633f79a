"""Fifty steps of training by every hook and bucket limit: replicas stay one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import hooks, shard_batch, train_step
from tests.data_parallel.recording import copies_differ
from tests.replicas import over

pytestmark = pytest.mark.compiled

SIZES = (5, 0, 3, 1)
LIMITS = {
    "default": {},
    "each leaf alone": {"bucket_cap_mb": 0},
    "gathered": {"method": "all_gather", "bucket_cap_mb": (1e-4, 25)},
}
EXACT = {
    "all_reduce": hooks.all_reduce(),
    "feedback": hooks.error_feedback(hooks.all_reduce()),
}
LOSSY = {
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "int8": hooks.int8_per_tensor(),
    "int8 by channel": hooks.error_feedback(hooks.int8_per_channel(8)),
    "power_sgd": hooks.power_sgd(start=3, min_compression_rate=1),
}
LIMITS |= {name: {"hook": hook} for name, hook in EXACT.items()}


def losses_of(params, batch):
    """A regression in two layers."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return ((hidden @ params["w2"] + params["b2"][None] - y) ** 2).sum(axis=1)


def trained(mesh, rng, options):
    """Fifty steps whose shards change hands; the state, the losses, and those of one
    device on the same batches."""
    params = {
        "w1": jnp.asarray(rng.normal(size=(6, 8)) / 3),
        "b1": jnp.asarray(rng.normal(size=8) / 3),
        "w2": jnp.asarray(rng.normal(size=(8, 4)) / 3),
        "b2": jnp.asarray(rng.normal(size=4) / 3),
    }
    x, y = rng.normal(size=(50, 9, 6)), rng.normal(size=(50, 9, 4)) / 2
    opt = optim.sgd(lr=0.02, momentum=0.9)
    step = train_step(losses_of, opt, **over(mesh), **options)
    state, losses = step.init(params), []
    alone, opt_state, wanted = params, opt.init(params), []
    one = jax.jit(jax.value_and_grad(lambda p, b: losses_of(p, b).mean()))
    for t, batch in enumerate(zip(x, y, strict=True)):
        sizes = tuple(np.roll(SIZES, t).tolist())
        state, metrics = step(state, *shard_batch(batch, **over(mesh), sizes=sizes))
        losses.append(float(metrics.loss))
        loss, grads = one(alone, batch)
        alone, opt_state = opt.step(alone, grads, opt_state)
        wanted.append(float(loss))
    return state, np.array(losses), alone, np.array(wanted)


@pytest.mark.parametrize("name", LIMITS)
def test_exactly_as_one_device(mesh, rng, name):
    """The same curve to rounding, which grows a little with each step; the same bits
    on all devices."""
    state, losses, alone, wanted = trained(mesh(4), rng, LIMITS[name])
    assert copies_differ((state.params, state.opt_state)) == 0
    np.testing.assert_allclose(losses, wanted, rtol=1e-11)
    for key, value in alone.items():
        np.testing.assert_allclose(state.params[key], value, atol=1e-11)


@pytest.mark.parametrize("name", LOSSY)
def test_compressed_yet_one(mesh, rng, name):
    """The same bits on all devices; near one device's curve, and not on it."""
    state, losses, _, wanted = trained(mesh(4), rng, {"hook": LOSSY[name]})
    assert copies_differ((state.params, state.opt_state)) == 0
    tail = slice(-10, None)
    assert losses[tail].mean() < 1.1 * wanted[tail].mean()
    assert np.abs(losses - wanted).max() > 1e-7

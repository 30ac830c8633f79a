"""What the pipeline's claims rest on: micro-batches, and that a difference is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pipeline_over_rpc as job
from experiments._digits import data


@pytest.fixture(autouse=True)
def _as_experiments_run():
    """With JAX's own defaults."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_micro_batches_make_up_the_batch():
    (batch,) = data(3, 1, job.BATCH).batches
    images, labels = zip(*job.parts(batch), strict=True)
    assert len(images) == job.PARTS
    np.testing.assert_array_equal(np.concatenate(labels), batch[1])
    flat = batch[0].reshape(job.BATCH, -1)
    np.testing.assert_array_equal(np.concatenate(images), flat)


def test_shares_add_up_to_the_mean_loss():
    (batch,) = data(3, 1, job.BATCH).batches
    params = job.initial(3)
    flat = batch[0].reshape(job.BATCH, -1), batch[1]
    shares = []
    for images, labels in job.parts(batch):
        x = images
        for each in params[:-1]:
            x = job.hidden(each, x)
        shares.append(float(job.share_of_loss(params[-1], x, labels)))
    expected = float(job.losses_of(params, flat).mean())
    np.testing.assert_allclose(sum(shares), expected, rtol=1e-6)


def run_that_holds():
    (batch,) = data(3, 1, job.BATCH).batches
    flat = batch[0].reshape(job.BATCH, -1), batch[1]
    params = jax.tree.map(jnp.asarray, job.initial(3))
    loss, grads = jax.value_and_grad(lambda p: job.losses_of(p, flat).mean())(params)
    first = jax.tree.map(np.asarray, grads)
    losses = [float(loss), 1.0, 0.5, 0.1, 0.1, 0.1]
    return job.Trained(losses, first, job.initial(3)), batch


def failing(found, alone, report):
    told = job.claims(found, alone, report, (0.1, 0.9))
    return [claim.text.split(" are ")[0] for claim in told if not claim.holds]


def test_differences_are_seen():
    """One bit against one worker; more than rounding against `jax.grad`."""
    found, batch = run_that_holds()
    right = job.judged(found, batch, 3)
    assert failing(found, found, right) == []
    off = jax.tree.map(np.copy, found.first)
    off[1]["w"][3, 4] = np.nextafter(off[1]["w"][3, 4], np.float32(9))
    one_bit = found._replace(first=off)
    assert failing(one_bit, found, right) == ["gradients of the first step"]
    off[1]["w"][3, 4] += np.float32(1e-3)
    assert failing(one_bit, one_bit, job.judged(one_bit, batch, 3)) == ["gradients"]
    params = jax.tree.map(lambda x: x + np.float32(1), found.params)
    moved = found._replace(params=params)
    assert failing(moved, found, right) == ["parameters after the last step"]

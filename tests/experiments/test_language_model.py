"""The claims of `language_model` are false where a run is not one device's."""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments import language_model as job
from jdist import verify

LOSSES = [6.0, 5.0, 4.5, 4.0]


@functools.cache
def report(factor, name="table/embedding"):
    """The verdict about a gradient that is a multiple of the right one."""
    params, batch = {name: jnp.array([0.3, -0.7])}, jnp.array([[1.0, 2], [3, 5]])

    def losses(params, x):
        return jnp.square(x @ params[name])

    def candidate(params, x):
        loss, found = jax.value_and_grad(lambda p: losses(p, x).mean())(params)
        return loss, {name: factor * found[name]}

    return verify.gradients(
        losses, params, batch, {"candidate": candidate}, finite_differences=False
    )


def failed(scale=1.0, factor=1.0, mistake=2.0, same_bits=True, apart=6.0):
    """Texts of claims that do not hold, about one run and a restart."""
    alone = [job.Run("one device", LOSSES), job.Run("another order", LOSSES)]
    losses = [scale * loss for loss in LOSSES]
    whole = job.Run("1F1B", losses, reports={0: report(factor)})
    resumed = job.Run("restored", LOSSES[2:], 2, {2: report(1.0)})
    two = job.Run("two processes", [scale * apart, *losses[1:2]])
    checked = same_bits, report(mistake), "2 x 2 x 2"
    found = job.claims(alone, [whole], resumed, two, *checked)
    return [claim.text for claim in found if not claim.holds]


def test_what_is_right_holds():
    assert failed() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scale": 1.001}, "1F1B: losses drift from one device's"),
        ({"factor": 1.01}, "1F1B over 2 x 2 x 2 devices: gradients are those"),
        ({"mistake": 1.0}, "the table's gradient from one of its ends alone is caught"),
        ({"apart": 6.0000001}, "1F1B by two processes"),
        ({"same_bits": False}, "what was saved comes back bit for bit"),
    ],
)
def test_what_is_wrong_does_not(changes, text):
    (found,) = failed(**changes)
    assert found.startswith(text)


def test_a_restored_run_stands_beside_the_steps_that_it_took():
    resumed, one = job.Run("restored", [4.5, 4.0], 2), job.Run("one device", LOSSES)
    assert resumed.drift(one).tolist() == [0, 0]
    joined = job.Run("a", [6.0, 5.0]).followed_by(job.Run("a", [4.5, 4.0], 2))
    assert joined.losses == LOSSES

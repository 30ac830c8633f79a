"""The rows of the equivalence matrix: right in every reduction and dtype."""

import jax.numpy as jnp
import numpy as np

from jdist import verify
from jdist.matrix.autograd import rows
from jdist.verify.matrix import judge


def test_every_row_is_right():
    """For an extreme; a test of `python -m jdist.verify` judges the mean."""
    cells = [cell for (cell,) in judge(rows(), ["max"], ["float64"])]
    assert len(cells) == 5
    for cell in cells:
        assert cell.skipped == ""
        cell.report.raise_if_failed()


def loss(params, batch):
    """Does not use all parameters."""
    return jnp.sin(batch @ params["w"])


def test_parameters_that_nothing_reaches_have_zeros():
    rng = np.random.default_rng(3)
    params = {"w": rng.normal(size=4), "unused": rng.normal(size=3), "step": 3}
    params = {name: jnp.asarray(x) for name, x in params.items()}
    batch = jnp.asarray(rng.normal(size=(7, 4)))
    candidates = {
        name: _unweighted(build(loss, "mean")) for name, build in rows().items()
    }
    verify.gradients(loss, params, batch, candidates).raise_if_failed()


def _unweighted(candidate):
    return lambda params, batch: candidate(params, batch, None)

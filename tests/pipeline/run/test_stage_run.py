"""One stage in a step: what its gradient may share with others, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline.run.stage_run import StageRun
from jdist.reduction import Partial


def run_of(fn, params, kind="mean"):
    stage = pipeline.Stage(fn, ("x",), ("y",))
    compiled = stage.compiled(frozenset(), 0)
    return StageRun(stage, compiled, params, None, None, kind)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_gradient_that_is_the_cotangent_itself(split, rng):
    """Of x + w it is: sums are donated, and must not take the cotangent with them."""

    def normal():
        return jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)

    run, cotangents = run_of(lambda w, x: x + w, normal()), []
    for micro in range(3):
        run.forward(micro, {"x": normal()})
        cotangents.append(normal())
        share = Partial(np.float32(0), None, 2.0)
        found = run.backward(micro, {"y": cotangents[-1]}, share, split)
        if split:
            run.backward_params(micro)
        cotangents.append(found["x"])
    gradient = run.finished(run.partial())
    assert not any(x.is_deleted() for x in cotangents)
    np.testing.assert_allclose(gradient, sum(cotangents[::2]) / 3, rtol=1e-6)
    assert not any(run._kept)


def test_the_sum_takes_no_more_memory_with_every_micro_batch(rng):
    """The sum so far is donated to the next one."""
    w = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    run = run_of(lambda w, x: jnp.tanh(x @ w), w)
    x = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)
    sums = []
    for micro in range(4):
        y = run.forward(micro, {"x": x})["y"]
        run.backward(micro, {"y": y}, Partial(np.float32(0), None, 2.0), False)
        sums.append(run.partial().gradient)
    jax.block_until_ready(sums[-1])
    assert [one.is_deleted() for one in sums] == [True, True, True, False]

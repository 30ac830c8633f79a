"""Stages of one factory: compiled apart on purpose, and without a warning."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import pipeline


def losses(y, batch):
    return (y**2).sum(-1)


def dense(activation, scale):
    """An ordinary factory: what varies is in the closure."""

    def stage(w, x):
        return activation(x @ w) * scale

    return stage


def gradient_of(stages, params):
    pipe = pipeline.Pipeline(stages, losses, pipeline.gpipe(len(stages), 2))
    return pipe.value_and_grad(params, {"x": jnp.ones((4, 3), jnp.float32)})


def test_pipelines_of_one_factory_do_not_warn(recwarn):
    """As a sweep over models makes them: three with another closure each."""
    params = [jnp.full((3, 3), 0.1), jnp.full((3, 2), 0.2)]
    found = []
    for number, activation in enumerate([jnp.tanh, jnp.sin, jnp.cos]):
        stages = [
            pipeline.Stage(dense(activation, float(number)), ("x",), ("h",)),
            pipeline.Stage(dense(jnp.tanh, 2.0 + number), ("h",), ("y",)),
        ]
        found.append(float(gradient_of(stages, params)[0]))
    assert len(set(found)) == 3
    assert not recwarn.list


def test_flax_stages_do_not_warn(recwarn):
    """Nor models of other widths, nor layers that are profiled one by one."""
    for width in (2, 3, 4):
        layers = [
            nnx.Linear(a, b, rngs=nnx.Rngs(0)) for a, b in ((3, width), (width, 2))
        ]
        made = pipeline.stages_from_nnx(layers)
        loss, _ = gradient_of(made.stages, made.params)
        assert np.isfinite(loss)
    named = {f"block{n}": nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in range(3)}
    modules = pipeline.modules_from_nnx(named)
    pipeline.profile(modules, {"x": jnp.ones((4, 3), jnp.float32)}, repeats=1)
    assert not recwarn.list

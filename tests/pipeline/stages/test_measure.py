"""Profiles of layers that were compiled for a chip, and not run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline, targets
from jdist.segment import segment

CHIP = targets.Chip("here", "cpu", 2**20, 1e9, {"float32": 1e10})
HERE = targets.Hardware(CHIP, (1,))


def dense(w, x):
    return jnp.tanh(x @ w)


def counted(w, state, x, key):
    kept = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    return (x * kept) @ w, state + x.mean(0)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.float32)


LAYERS = [
    pipeline.Module("wide", dense, shape(16, 64)),
    pipeline.Module("narrow", dense, shape(64, 8)),
    pipeline.Module("last", counted, shape(8, 8), state=shape(8), keyed=True),
]


@pytest.fixture(scope="module")
def found():
    return pipeline.profile(LAYERS, {"x": shape(32, 16)}, target=HERE)


def test_seconds_are_those_of_the_compiled_halves(found):
    """By the report of each half; the wide layer works more than the narrow one."""
    lowered = segment(dense).lower(shape(64, 8), shape(32, 64))
    for half in ("forward", "backward"):
        expected = targets.compile(getattr(lowered, half), target=HERE).seconds
        assert getattr(found["narrow"], half) == pytest.approx(expected, rel=0.1)
    flops = 2 * 32 * 64 * 8
    assert found["narrow"].forward >= flops / 1e10
    assert found["wide"].backward > found["wide"].forward > found["narrow"].forward


def test_sizes_and_edges_are_those_of_a_profile_that_was_run(found, rng):
    def drawn(tree):
        return jax.tree.map(
            lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree
        )

    modules = [replace(m, params=drawn(m.params), state=drawn(m.state)) for m in LAYERS]
    run = pipeline.profile(modules, {"x": drawn(shape(32, 16))}, repeats=1)
    assert found.edges == run.edges
    for one, other in zip(found.layers, run.layers, strict=True):
        assert one.name == other.name
        assert one.activation_bytes == other.activation_bytes
        assert one.parameter_bytes == other.parameter_bytes


def test_a_plan_and_a_simulation_go_on_from_there(found):
    """Nothing of the model was ever on a device."""
    plan = pipeline.partition(found, 2, CHIP.bandwidth, replicate=False)
    timeline = pipeline.simulate(pipeline.one_f_one_b(2, 4), plan.costs())
    assert plan.bottleneck_time * 4 < timeline.makespan < plan.bottleneck_time * 8


def test_a_layer_that_alone_is_too_large():
    big = [pipeline.Module("big", dense, shape(1024, 1024))]
    with pytest.raises(ValueError, match="fit a chip of here:1, also 'big' alone"):
        pipeline.profile(big, {"x": shape(4, 1024)}, target=HERE)

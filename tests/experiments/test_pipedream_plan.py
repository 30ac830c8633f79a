"""The claims of `pipedream_plan` are false where the figures are; the networks are
those of the papers."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

from experiments import _vgg
from experiments import pipedream_plan as job
from jdist import pipeline


@pytest.fixture(scope="module")
def cases():
    return [
        job.planned(
            model, "published", pipeline.load_profile(job.PROFILES / file), machine
        )
        for model, file in job.PUBLISHED.items()
        for machine in (job.CLUSTER[4], job.CLUSTER[16])
    ]


def failing(cases):
    return [claim.text for claim in job.claims(cases) if not claim.holds]


def test_what_is_computed_holds(cases):
    assert failing(cases) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"alone": 1.001 * c.alone}, "simulated data parallelism"),
        (lambda c: {"free_pace": 0.999 * c.free_pace}, "no simulated plan is faster"),
        (lambda c: {"free_pace": 1.001 * c.free_pace}, "plans of the published"),
        (
            lambda c: {"plan": replace(c.plan, data_parallel_time=1e-3)},
            "no plan's bottleneck is slower",
        ),
        (
            lambda c: {"free": replace(c.free, bottleneck_time=1.0)},
            "the slowest stage's passes",
        ),
    ],
)
def test_a_deviation_is_seen(cases, change, text):
    """One case out of four."""
    changed = [*cases[:2], cases[2]._replace(**change(cases[2])), cases[3]]
    assert any(found.startswith(text) for found in failing(changed))


def test_another_planner_is_seen(cases):
    """A plan that is as good to seven digits is not the published one."""
    last = cases[-1].plan
    worse = replace(last, bottleneck_time=last.bottleneck_time * (1 + 1e-7))
    assert failing([*cases[:-1], cases[-1]._replace(plan=worse)]) == [
        "ResNet-50's published profile: the published planner's bottleneck"
    ]


def test_links_are_those_of_the_outermost_level_crossed(cases):
    """VGG-16 on 4 x 4: three servers, and the fourth one's four workers."""
    (plan,) = [c.plan for c in cases if c.model == "VGG-16" and c.workers == 16]
    assert plan.configuration == "12-1-1-1-1"
    assert job.links(plan) == [job.ETHERNET, job.PCIE, job.PCIE, job.PCIE]


def test_vgg_has_the_published_size():
    """138 million parameters in 16 layers; images of 32 pixels end as 1 x 1."""
    layers = nnx.eval_shape(lambda: _vgg.Network().layers(nnx.Rngs(0)))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(list(layers.values())))]
    assert (len(layers), sum(sizes)) == (16, 138_357_544)
    small = _vgg.Network(width=2, image=32, classes=3)
    shape = jax.ShapeDtypeStruct((4, 32, 32, 3), "float32")

    def whole(x):
        for layer in small.layers(nnx.Rngs(0)).values():
            x = layer(x)
        return x

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert jax.eval_shape(whole, shape).shape == (4, 3)
    assert str(small) == "VGG-16 of width 2, 32 pixels"
    assert str(_vgg.Network()) == "VGG-16"

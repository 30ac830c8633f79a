"""Errors of meshes that are planted in stages: each is caught, and named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jdist import pipeline, verify
from tests.pipeline import mesh_models as models

WIDE = "PP x DP x TP"


def candidate(layers, weights, tied=True):
    """The pipeline with other layers in the place of some."""
    made = []
    for plain, part in zip(models.stages(2), models.split(2), strict=True):
        fn = plain.fn
        if not layers.keys().isdisjoint(part):
            fn = Chain([layers.get(name, models.LAYERS[name]) for name in part], part)
        shared = plain.tied if tied else {}
        made.append(pipeline.Stage(fn, plain.inputs, plain.outputs, tied=shared))
    pipe = pipeline.Pipeline(
        made, models.losses, models.SCHEDULES["1F1B"], models.meshes(WIDE)
    )

    def run(own, batch):
        placed = models.placed(pipe, WIDE, own)
        loss, grads = pipe.value_and_grad(placed, batch, weights)
        found = {name: tree for stage in grads for name, tree in stage.items()}
        head = {k: v for k, v in found["head"].items() if k != "table"}
        return loss, found | {"head": head}

    return run


def judged(layers, **options):
    own, batch, weights = models.problem()
    planted = {"planted": candidate(layers, weights, **options)}
    return models.judge()(
        own, batch, planted, weights=weights, finite_differences=False
    )


class Chain:
    """Layers one after another."""

    def __init__(self, layers, names):
        self.layers, self.names = layers, names

    def __call__(self, params, value):
        for name, layer in zip(self.names, self.layers, strict=True):
            value = layer(params[name], value)
        return value


def with_cotangent(change):
    """The identity, whose cotangent is changed on its way back."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return identity


def summed_over(axis, mean=False):
    """A collective in the stage's own hands, over what is the same on all devices."""
    mesh = models.meshes(WIDE)[1]
    reduce = lax.pmean if mean else lax.psum
    return jax.shard_map(
        lambda g: reduce(g, axis), mesh=mesh, in_specs=P(), out_specs=P()
    )


def named(report):
    """The problems of the leaves that fail."""
    assert not report.ok
    return {leaf.path: leaf.problem for leaf in report.failures}


BEFORE_EXPAND = {"attend/out", "attend/qkv", "embed/table"}


def test_a_psum_too_many_over_the_model_axis():
    """A cotangent that is whole on every device is summed over them."""
    again = with_cotangent(summed_over("model"))
    found = named(judged({"expand": lambda w, h: models.expand(w, again(h))}))
    assert found.keys() == BEFORE_EXPAND
    assert "it is 2 times the reference" in found["attend/qkv"]


def half_passed_on(w, h):
    """Of a matrix that is divided by columns one half alone passes a cotangent on."""
    half = models.INNER // 2
    other = jax.lax.stop_gradient(h) @ w["up"][:, half:]
    inner = jnp.concatenate([h @ w["up"][:, :half], other], -1)
    h = h + jnp.tanh(inner) @ w["down"]
    return h + jnp.tanh(h @ w["mix"]) @ w["mix"]


def test_a_psum_too_few_over_the_model_axis():
    found = named(judged({"expand": half_passed_on}))
    assert found.keys() == BEFORE_EXPAND
    assert all("bound at" in problem for problem in found.values())


@pytest.mark.parametrize("psums", ["too many", "too few"])
def test_the_trace_names_the_place(psums):
    """The first wrong value is the cotangent that the wrong layer passes on."""
    own, batch, weights = models.problem()

    def tapped(name, layer=None):
        made = models.LAYERS[name] if layer is None else layer
        return lambda w, h: verify.tap(made(w, h), name)

    right = {name: tapped(name) for name in models.LAYERS}

    def whole(own, batch):
        params = models.cut(own, 1)[0]
        run = Chain(list(right.values()), list(right))
        return models.losses(run(params, batch["tokens"]), batch)

    again = with_cotangent(summed_over("model"))
    planted = {
        "too many": lambda w, h: models.expand(w, again(h)),
        "too few": half_passed_on,
    }
    judge = verify.trace_judge(whole, own, batch, weights=weights)
    judge(candidate(right, weights)).raise_if_failed()
    wrong = {"expand": tapped("expand", planted[psums])}
    found = judge(candidate(right | wrong, weights)).difference
    assert (found.direction, found.tap) == ("backward", "attend")
    assert ("it is 2 times the reference" in found.words) == (psums == "too many")


def test_a_data_axis_that_is_averaged_twice():
    """XLA has summed over it already; the stage divides by its size once more."""
    mean = with_cotangent(lambda g: summed_over("data", mean=True)(g) / 2)
    found = named(
        judged({"expand": lambda w, h: models.expand(jax.tree.map(mean, w), h)})
    )
    assert found.keys() == {"expand/up", "expand/down", "expand/mix"}
    for problem in found.values():
        factor = re.search("it is (.*) times the reference", problem)
        assert float(factor[1]) == pytest.approx(0.5, abs=1e-4)


def test_the_contribution_of_one_end_of_a_tied_table():
    report = judged({}, tied=False)
    assert named(report).keys() == {"embed/table"}
    counts = "gather once, dot_general 0 times"
    assert f"planted: embed/table: the uses that it counts: {counts}" in report.notes


def test_a_stage_that_is_run_on_zeros():
    """It gets no value of the stage before, and passes no cotangent on."""
    zeros = {"expand": lambda w, h: models.expand(w, jnp.zeros_like(h))}
    found = named(judged(zeros))
    assert {"(loss)", "attend/qkv"} <= found.keys()
    assert "it is 0 times the reference" in found["attend/qkv"]


def masked(params, x, key, parts):
    """Dropout; with two parts, the examples of both have the same mask."""
    h = x @ params
    rows = len(h) // parts
    kept = jax.random.bernoulli(key, 0.5, (rows, h.shape[1]))
    return jnp.where(jnp.concatenate([kept] * parts), h, 0.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_key_that_both_halves_of_the_data_axis_share(parts):
    """The masks of the oracle are drawn by the rule that is documented.

    The tracer names the layer that draws, and the second half of each micro-batch.
    """
    rng = np.random.default_rng(2)
    params = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 6), (6, 2))]
    batch = {"x": np.float32(rng.normal(size=(8, 4)))}
    key = jax.random.key(3)

    def drawn(w, x, key):
        return verify.tap(masked(w, x, key, parts), "dropout")

    made = [
        pipeline.Stage(drawn, ("x",), ("h",), keyed=True),
        pipeline.Stage(lambda w, h: jnp.tanh(h) @ w, ("h",), ("y",)),
    ]
    pipe = pipeline.Pipeline(
        made,
        lambda y, batch: (y**2).sum(-1),
        pipeline.one_f_one_b(2, 2),
        models.meshes(WIDE),
    )
    own = jax.random.fold_in(key, 0)
    keys = [jax.random.fold_in(own, micro) for micro in range(2)]
    kept = jnp.concatenate([jax.random.bernoulli(k, 0.5, (4, 6)) for k in keys])

    def losses(params, batch):
        first, second = params
        h = verify.tap(jnp.where(batch["kept"], batch["x"] @ first, 0.0), "dropout")
        return ((jnp.tanh(h) @ second) ** 2).sum(-1)

    def dropout(params, batch):
        placed = pipe.place(params, [P(None, "model"), P("model")])
        return pipe.value_and_grad(placed, {"x": batch["x"]}, key=key)

    whole = {**batch, "kept": kept}
    report = verify.gradients(losses, params, whole, {"dropout": dropout})
    found = verify.trace_judge(losses, params, whole)(dropout).difference
    if parts == 1:
        report.raise_if_failed()
        assert found is None
    else:
        assert {"(loss)", "0"} <= named(report).keys()
        assert str(found).startswith("forward, dropout, examples 2-3, 6-7: ")

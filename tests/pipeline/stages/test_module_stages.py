"""Modules, a map and a plan, put together into stages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline
from jdist.pipeline import Module, stages_from_modules
from tests.pipeline.epochs import asynchronous


def dense(w, x):
    return jnp.tanh(x @ w)


def split(w, x):
    return x @ w, x


def joined(w, h, skip):
    return jnp.tanh(h + skip) @ w


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def modules():
    """A fork over two stages, a name that is written again, one written once."""
    rng = np.random.default_rng(3)

    def w(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return [
        Module("encode", dense, w(3, 4)),
        Module("fork", split, w(4, 4), ("x",), ("h", "skip")),
        Module("inner", dense, w(4, 4), ("h",), ("h",)),
        Module("join", joined, w(4, 5), ("h", "skip"), ("x",)),
        Module("decode", dense, w(5, 2)),
    ]


def whole(params, batch):
    encode, fork, inner, join, decode = params
    x = dense(encode, batch["x"])
    h, skip = split(fork, x)
    return losses(dense(decode, joined(join, dense(inner, h), skip)), batch)


@pytest.mark.parametrize("given", [[0, 1, 2, 3, 3], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]])
def test_the_gradient_is_that_of_the_modules(given, rng):
    if given == [0, 0, 1, 0, 1]:
        with pytest.raises(
            ValueError, match="must not put 'join' before what it reads"
        ):
            stages_from_modules(modules(), given)
        return
    made = stages_from_modules(modules(), given)
    n = len(made.stages)
    pipe = pipeline.Pipeline(made.stages, losses, pipeline.one_f_one_b(n, 2))
    batch = {
        "x": rng.normal(size=(6, 3)).astype(np.float32),
        "target": rng.normal(size=(6, 2)).astype(np.float32),
    }
    params = [module.params for module in modules()]
    loss, grads = pipe.value_and_grad(made.params, batch)
    expected, wanted = jax.value_and_grad(lambda p: whole(p, batch).mean())(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    found = {name: g for stage in grads for name, g in stage.items()}
    for module, w in zip(modules(), wanted, strict=True):
        np.testing.assert_allclose(found.pop(module.name), w, rtol=3e-5, atol=1e-6)
    assert not found


def test_names_between_stages():
    made = stages_from_modules(modules(), [0, 1, 2, 3, 3])
    assert [(stage.inputs, stage.outputs) for stage in made.stages] == [
        (("x",), ("encode.x",)),
        (("encode.x",), ("fork.h", "skip")),
        (("fork.h",), ("inner.h",)),
        (("inner.h", "skip"), ("decode.x",)),
    ]
    again = stages_from_modules(modules(), [0, 1, 2, 3, 3])
    assert [a.fn == b.fn for a, b in zip(made.stages, again.stages, strict=True)]


def test_a_plan_that_was_written_is_run(tmp_path, rng):
    """From a profile to a plan, to a file, to stages and replicas, to an epoch."""
    own = modules()
    layers = [pipeline.Layer(m.name, "Dense", 1e-3, 2e-3, (4e3,), 4e2) for m in own]
    plan = pipeline.partition(
        pipeline.Profile.chain(layers), workers=3, bandwidths=1e6, replicate=False
    )
    plan.write(tmp_path / "plan.json")
    read = pipeline.load_plan(tmp_path / "plan.json")
    made = stages_from_modules(own, read)
    assert len(made.stages) == len(plan.stages) > 1
    assert [tuple(p) for p in made.params] == [stage.layers for stage in plan.stages]
    numbers = [i for i, stage in enumerate(plan.stages) for _ in stage.layers]
    by_hand = stages_from_modules(own, numbers)
    batches = [
        {"x": rng.normal(size=(4, 3)), "target": rng.normal(size=(4, 2))}
        for _ in range(5)
    ]
    found = []
    for stages, replicas in ((made, read.replicas), (by_hand, None)):
        runtime = asynchronous(
            stages.stages, losses, optimizer=optim.sgd(lr=0.01), replicas=replicas
        )
        params = jax.tree.map(lambda x: x.astype(np.float64), stages.params)
        state, _ = runtime.train_epoch(runtime.init(params), batches)
        found.append(jax.tree.leaves(state.params))
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


def test_an_error_names_its_module():
    own = modules()
    own[2] = dataclasses.replace(own[2], params=jnp.ones((3, 3)))
    made = stages_from_modules(own, [0, 0, 1, 1, 1])
    with pytest.raises(TypeError, match="dot_general") as caught:
        made.stages[1].fn(made.params[1], jnp.ones((2, 4)), jnp.ones((2, 4)))
    assert "It was raised by the module 'inner'." in caught.value.__notes__


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (lambda m: [], [0], "must not be empty"),
        (lambda m: [*m, m[0]], [0] * 6, "different names. Got 'encode' more than once"),
        (lambda m: m, [0, 1], "a number for each of the 5 modules"),
        (lambda m: m, [0, 0, 2, 2, 2], "stages from 0 on, and a module in each"),
    ],
)
def test_maps_that_are_refused(change, given, message):
    with pytest.raises(ValueError, match=message):
        stages_from_modules(change(modules()), given)


def test_a_plan_of_another_model():
    layers = [pipeline.Layer(n, "Dense", 1.0, 2.0, (4.0,), 1.0) for n in ("a", "b")]
    chain = pipeline.Profile.chain(layers)
    plan = pipeline.partition(chain, workers=1, bandwidths=1.0)
    with pytest.raises(ValueError, match=r"plan for the modules .* Got \['a', 'b'\]"):
        stages_from_modules(modules(), plan)

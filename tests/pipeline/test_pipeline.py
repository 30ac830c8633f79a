"""The gradient of a pipeline: its segments' to the bit, and the whole batch's."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import optim, pipeline
from jdist.pipeline.run.stage_channels import InProcessChannels
from jdist.pipeline.run.stage_run import StageRun
from tests.pipeline.models import (
    judge,
    losses,
    problem,
    stages,
    step_by_step,
    whole_losses,
)

FAMILIES = {
    "gpipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    "looped": lambda n, m: pipeline.looped_bfs(n, m, 1),
    "zero bubble": pipeline.zero_bubble,
    "split drain": lambda n, m: pipeline.split_drain(pipeline.one_f_one_b(n, m)),
}
REDUCTIONS = ["mean", "sum", "max", "min"]


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(np.asarray(a), np.asarray(b))


def apart():
    """A device for each stage; none is the default one."""
    return jax.devices()[2:5]


def made(schedule, places=None, reduction="mean", **options):
    return pipeline.Pipeline(
        stages(**options), losses, schedule, places, reduction=reduction
    )


@pytest.mark.parametrize("places", [lambda: None, apart], ids=["default", "apart"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("family", ["gpipe", "1F1B"])
def test_bits_are_those_of_the_stages_one_by_one(family, reduction, places):
    params, batch, weights = problem(7)
    pipe = made(FAMILIES[family](3, 3), places(), reduction)
    _, grads = pipe.value_and_grad(pipe.place(params), batch, weights)
    same(grads, step_by_step(pipe, params, batch, weights, reduction))


def test_numpys_own_dtypes_without_x64():
    """Of entries, also of those that the loss does not read: narrowed in silence."""
    params, batch, weights = problem(7)
    wide = {k: x.astype(x.dtype.str.replace("f4", "f8")) for k, x in batch.items()}
    assert {str(x.dtype) for x in wide.values()} == {"float64", "int64"}
    with jax.enable_x64(False):
        pipe = made(pipeline.gpipe(3, 2))
        params = pipe.place(params)
        loss, grads = pipe.value_and_grad(params, wide, weights)
        same(pipe.evaluate(params, wide, weights).loss, loss)
        same((loss, grads), pipe.value_and_grad(params, batch, weights))


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("family", ["zero bubble", "split drain"])
def test_bits_of_split_backward_passes(family, reduction):
    """In the drain, backward passes of one stage are whole and split in turn."""
    params, batch, weights = problem(7)
    pipe = made(FAMILIES[family](3, 4), apart(), reduction)
    _, grads = pipe.value_and_grad(pipe.place(params), batch, weights)
    same(grads, step_by_step(pipe, params, batch, weights, reduction))


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [*((kind, np.float32) for kind in REDUCTIONS), ("mean", np.float64)],
)
def test_gradient_of_the_whole_batch(reduction, dtype):
    params, batch, weights = problem(7, dtype=dtype)
    candidates = {
        name: pipe_of(made(family(3, 3), reduction=reduction), weights)
        for name, family in FAMILIES.items()
    }
    # The oracle itself is held against finite differences once.
    options = {"weights": weights, "finite_differences": dtype == np.float64}
    judge(reduction)(params, batch, candidates, **options).raise_if_failed()


def pipe_of(pipe, weights):
    return lambda params, batch: pipe.value_and_grad(params, batch, weights)


@jax.jit
@jax.value_and_grad
def weighted_mean(floating, steps, batch, weights):
    merged = [*floating[:2], {**floating[2], "steps": steps}]
    return (whole_losses(merged, batch) * weights).sum() / weights.sum()


@settings(max_examples=6, deadline=None)
@given(micro_batches=st.integers(1, 5), seed=st.integers(0, 1000), data=st.data())
def test_any_weights_and_numbers_of_micro_batches(micro_batches, seed, data):
    params, batch, _ = problem(5, seed, np.float64)
    some = st.floats(0, 4).filter(lambda w: w == 0 or w > 1e-3)
    weights = np.array(data.draw(st.lists(some, min_size=5, max_size=5)))
    weights[seed % 5] = 1.5
    pipe = made(pipeline.one_f_one_b(3, micro_batches))
    floating = jax.tree.map(lambda x: x if x.dtype == np.float64 else None, params)
    expected = weighted_mean(floating, params[2]["steps"], batch, weights)
    found = pipe.value_and_grad(params, batch, weights)
    assert jax.tree.structure(found) == jax.tree.structure(tuple(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_mean_of_means_is_caught():
    """Were micro-batches weighed alike, the judge would say so."""
    params, batch, weights = problem(7)
    pipe = made(pipeline.gpipe(3, 2))

    def wrong(params, batch):
        parts = [
            pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 1)).value_and_grad(
                params, {k: v[a:b] for k, v in batch.items()}, weights[a:b]
            )
            for a, b in ((0, 4), (4, 7))
        ]
        return jax.tree.map(lambda a, b: (a + b) / 2, *parts)

    candidates = {"pipeline": pipe_of(pipe, weights), "mean of means": wrong}
    report = judge()(
        params, batch, candidates, weights=weights, finite_differences=False
    )
    failed = {leaf.candidate for leaf in report.failures}
    assert failed == {"mean of means"}


@pytest.mark.parametrize("policy", [True, "dots"])
def test_recomputation_changes_no_gradient(policy):
    params, batch, weights = problem(6)
    plain = made(pipeline.one_f_one_b(3, 3))
    again = made(pipeline.one_f_one_b(3, 3), recompute=policy)
    expected = plain.value_and_grad(params, batch, weights)
    found = again.value_and_grad(params, batch, weights)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=3e-6)


def test_one_worker_may_have_all_stages():
    params, batch, weights = problem(5)
    schedule = pipeline.interleaved(1, 2, chunks=3)
    pipe = made(schedule)
    _, grads = pipe.value_and_grad(params, batch, weights)
    same(grads, step_by_step(pipe, params, batch, weights, "mean"))


def test_gradients_lie_where_their_parameters_are():
    params, batch, weights = problem(6)
    pipe = made(pipeline.one_f_one_b(3, 2), apart())
    placed = pipe.place(params)
    _, grads = pipe.value_and_grad(placed, batch, weights)
    for device, own, gradient in zip(apart(), placed, grads, strict=True):
        assert {leaf.device for leaf in jax.tree.leaves(own)} == {device}
        assert {leaf.device for leaf in jax.tree.leaves(gradient)} == {device}
    assert grads[2]["steps"] is None
    assert not grads[0]["unused"].any()


def test_what_is_sent_and_what_is_not(monkeypatch):
    """Cotangents go back along each way that a value went."""
    sent, put = [], InProcessChannels.put

    def noting(channels, tag, worker, value):
        sent.append((channels, tag, worker))
        put(channels, tag, worker, value)

    monkeypatch.setattr(InProcessChannels, "put", noting)
    params, batch, weights = problem(6)
    pipe = made(pipeline.one_f_one_b(3, 3))
    pipe.value_and_grad(params, batch, weights)
    assert len({channels for channels, *_ in sent}) == 1
    first = [(tag, worker) for _, tag, worker in sent if tag.micro_batch == 1]
    there = {(t.name, t.sender, w) for t, w in first if t.kind == "F"}
    back = {(t.name, t.sender, w) for t, w in first if t.kind == "B"}
    # The loss is on the worker of the last stage.
    ways = [("h", 0, 1), ("h", 0, 2), ("skip", 0, 2), ("m", 1, 2), ("y", 2, 2)]
    assert there == {*ways}
    assert back == {(name, b, a) for name, a, b in ways}
    assert len(first) == len(there) + len(back)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_is_kept_than_the_schedule_says(family, monkeypatch):
    """Of micro-batches between F and the last of B and W, on each worker."""
    schedule = FAMILIES[family](3, 5)
    most = {}
    forward = StageRun.forward

    def counted(run, micro, inputs):
        outputs = forward(run, micro, inputs)
        key = id(run.compiled)
        most[key] = max(most.get(key, 0), len(set().union(*run._kept)))
        return outputs

    params, batch, weights = problem(7)
    # Called already, it compiles nothing ahead: a rehearsal keeps shapes.
    pipe = made(schedule)
    pipe.value_and_grad(params, batch, weights)
    monkeypatch.setattr(StageRun, "forward", counted)
    pipe.value_and_grad(params, batch, weights)
    each_once = pipeline.Costs(activation_bytes=1, pending_bytes=1)
    simulated = pipeline.simulate(schedule, each_once)
    assert tuple(most.values()) == simulated.activation_bytes


def test_nothing_compiles_twice(caplog):
    params, batch, weights = problem(7)
    pipe = made(pipeline.one_f_one_b(3, 3))
    pipe.value_and_grad(params, batch, weights)
    again = made(pipeline.gpipe(3, 3))
    with jax.log_compiles():
        again.value_and_grad(params, batch, weights)
        pipe.value_and_grad(params, batch, weights)
    assert not [r for r in caplog.records if "Compiling" in r.message]


def dropout(params, h, key):
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.where(keep, h, 0) @ params


def test_a_key_for_each_stage_and_micro_batch():
    rng = np.random.default_rng(3)
    params = [jnp.asarray(rng.normal(size=s)) for s in ((3, 4), (4, 2))]
    batch = {"x": rng.normal(size=(5, 3)), "target": rng.normal(size=(5, 2))}
    made = [
        pipeline.Stage(dropout, ("x",), ("h",), keyed=True),
        pipeline.Stage(dropout, ("h",), ("y",), keyed=True),
    ]
    pipe = pipeline.Pipeline(made, losses, pipeline.one_f_one_b(2, 2))
    key = jax.random.key(11)

    def whole(params):
        total = 0.0
        for i, rows in enumerate((slice(0, 3), slice(3, 5))):
            h = batch["x"][rows]
            for j in range(2):
                own = jax.random.fold_in(jax.random.fold_in(key, j), i)
                h = dropout(params[j], h, own)
            total += losses(h, {"target": batch["target"][rows]}).sum() / 5
        return total

    loss, grads = pipe.value_and_grad(params, batch, key=key)
    expected, wanted = jax.jit(jax.value_and_grad(whole))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-14)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)
    with pytest.raises(ValueError, match="stage 0 takes a PRNG key"):
        pipe.value_and_grad(params, batch)


def counting(params, state, x):
    centre = 0.5 * state["mean"] + 0.5 * x.mean(0)
    after = {"mean": jax.lax.stop_gradient(centre), "seen": state["seen"] + len(x)}
    return (x - centre[None]) @ params, after


def test_state_goes_from_micro_batch_to_micro_batch():
    rng = np.random.default_rng(4)
    params = [jnp.asarray(rng.normal(size=s)) for s in ((3, 4), (4, 2))]
    states = [
        {"mean": jnp.asarray(rng.normal(size=n)), "seen": jnp.int32(0)} for n in (3, 4)
    ]
    batch = {"x": rng.normal(size=(5, 3)), "target": rng.normal(size=(5, 2))}
    made = [
        pipeline.Stage(counting, ("x",), ("h",), stateful=True),
        pipeline.Stage(counting, ("h",), ("y",), stateful=True),
    ]
    pipe = pipeline.Pipeline(made, losses, pipeline.gpipe(2, 2))

    def whole(params):
        now, total = list(states), 0.0
        for rows in (slice(0, 3), slice(3, 5)):
            h = batch["x"][rows]
            for j in range(2):
                h, now[j] = counting(params[j], now[j], h)
            total += losses(h, {"target": batch["target"][rows]}).sum() / 5
        return total, now

    loss, grads, after = pipe.value_and_grad(params, batch, states=states)
    oracle = jax.jit(jax.value_and_grad(whole, has_aux=True))
    (expected, left), wanted = oracle(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert [int(s["seen"]) for s in after] == [5, 5]
    for a, b in zip(after, left, strict=True):
        np.testing.assert_allclose(a["mean"], b["mean"], rtol=1e-13)


def test_training_is_that_of_one_device():
    """Each stage has its own optimizer; the norm is over all of them."""
    params, batch, weights = problem(7, dtype=np.float64)
    optimizers = [
        optim.adam(lr=1e-2),
        optim.sgd(lr=0.1, momentum=0.9),
        optim.sgd(lr=0.2),
    ]
    pipe = pipeline.Pipeline(
        stages(),
        losses,
        pipeline.one_f_one_b(3, 3),
        apart(),
        optimizer=optimizers,
        max_norm=0.5,
    )
    state = pipe.init(params)
    oracle = pipeline.Pipeline(stages(), losses, pipeline.gpipe(3, 1))
    expected = jax.tree.map(jnp.copy, params)
    kept = [o.init(p) for o, p in zip(optimizers, expected, strict=True)]

    @jax.jit
    def stepped(expected, grads, kept):
        clipped, norm = optim.clip_by_global_norm(grads, 0.5)
        each = zip(optimizers, expected, clipped, kept, strict=True)
        found = [o.step(p, g, k) for o, p, g, k in each]
        return [p for p, _ in found], [k for _, k in found], norm

    for _ in range(4):
        loss, grads = oracle.value_and_grad(expected, batch, weights)
        expected, kept, norm = stepped(expected, grads, kept)
        state, metrics = pipe.train_step(state, batch, weights)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-12)
        assert norm > 0.5
    assert state.step == 4
    leaves = zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    assert jnp.isfinite(params[0]["w"]).all()  # not donated


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (None, ValueError, "must be given for training"),
        ([optim.sgd(lr=0.1)] * 2, ValueError, "one for each of the 3 stages. Got 2"),
        ([0.1] * 3, TypeError, r"must be an optimizer of jdist.optim. Got a float."),
        (optax.adam(0.1), TypeError, r"Got a Grad.* transformation, `optim.from_o"),
        (
            [optax.adam(0.1)] * 3,
            TypeError,
            r"`optim.from_optax\(...\)`",
        ),
        (optim.adam, TypeError, r"Got a function. Call a constructor"),
    ],
)
def test_optimizers_that_do_not_fit(optimizer, kind, message):
    params, _, _ = problem(5)
    schedule = pipeline.gpipe(3, 1)
    pipe = pipeline.Pipeline(stages(), losses, schedule, optimizer=optimizer)
    with pytest.raises(kind, match=message):
        pipe.init(params)


def test_a_warm_step_passes_through_few_files():
    """What a reader has to open to follow one training step."""
    stages = [
        pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
        pipeline.Stage(lambda w, h: h @ w, ("h",), ("y",)),
    ]
    pipe = pipeline.Pipeline(
        stages,
        lambda y, batch: ((y - batch["target"]) ** 2).sum(-1),
        pipeline.one_f_one_b(2, 3),
        optimizer=optim.sgd(lr=0.1),
    )
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, 2), (2, 1))]
    batch = {
        "x": np.float32(rng.normal(size=(6, 1))),
        "target": np.ones((6, 1), np.float32),
    }
    state, files = pipe.init(params), set()
    for _ in range(2):
        state, _ = pipe.train_step(state, batch)

    def note(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        pipe.train_step(state, batch)
    finally:
        sys.setprofile(None)
    home = str(Path(pipeline.__file__).parents[1])
    own = sorted(file for file in files if file.startswith(home))
    assert len(own) <= 16, own

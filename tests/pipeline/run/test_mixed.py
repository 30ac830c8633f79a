"""Stages in 16 bits with masters in 32: one loss scale, one decision to skip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline, verify
from jdist.optim._loss_scale import LossScaleState
from jdist.optim.master_weights import MasterState
from jdist.pipeline.run.micro_batch import split_batch
from jdist.pipeline.run.stage_run import StageRun
from jdist.reduction import Partial
from tests.pipeline import mixed
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.mixed import batch_of, made, start
from tests.pipeline.places import workers

BOOMING = [None, 1, None, None, 0, None, None, 2, None]
"""The stage that is made to overflow, for each step."""


def same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def masters_of(state):
    return [opt_state.masters for opt_state in state.opt_states]


def scales_of(state):
    return [jax.tree.map(float, each.loss_scale) for each in state.opt_states]


class OneDevice:
    """The same model on one device, by `with_master_weights` as its docs say."""

    def __init__(self, opt, kind="mean"):
        self.opt = opt
        self.grads = jax.jit(jax.grad(self.scaled_loss))
        self.step = jax.jit(opt.step)
        self.kind = kind

    def scaled_loss(self, params, state, batch, weights):
        found = mixed.whole_losses(params, batch)
        if self.kind == "mean":
            return self.opt.scale_loss((weights * found).sum() / weights.sum(), state)
        reduced = jnp.max(found) if self.kind == "max" else (weights * found).sum()
        return self.opt.scale_loss(reduced, state)


def floating(params):
    return [{k: v for k, v in p.items() if k != "count"} for p in params]


def returning(loss, grads):
    return lambda *_: (loss, grads)


def together(state):
    """A pipeline's state as that of one optimizer over all stages."""
    states = state.opt_states
    inner = [jax.tree.map(jnp.copy, floating([s.inner])[0]) for s in states]
    scale = jax.tree.map(jnp.copy, states[0].loss_scale)
    masters = jax.tree.map(jnp.copy, floating(masters_of(state)))
    return MasterState(masters, inner, scale)


def test_every_step_is_that_of_one_device():
    """The same steps are skipped and the scale moves alike, in all stages; each step
    that is made follows a gradient that the judge accepts."""
    judge = verify.gradients_judge(mixed.whole_losses)
    pipe = made(pipeline.one_f_one_b(3, 4), scale=mixed.DYNAMIC)
    alone = OneDevice(mixed.optimizer(mixed.DYNAMIC))
    state, skipped = pipe.init(start()), []
    assert {str(x.dtype) for x in jax.tree.leaves(floating(state.params))} == {
        "float16"
    }
    for step, booming in enumerate(BOOMING):
        batch, weights = batch_of(step, booming)
        copies = jax.device_get(floating(state.params))
        before, own = jax.device_get(masters_of(state)), jax.device_get(together(state))
        grads = alone.grads(copies, own, batch, weights)
        finite = [
            all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(g)) for g in grads
        ]
        assert finite == [j != booming for j in range(3)]
        _, expected = alone.step(copies, grads, own)
        state, metrics = pipe.train_step(state, batch, weights)
        for found in scales_of(state):
            assert found == jax.tree.map(float, expected.loss_scale)
        skipped.append(not all(finite))
        if skipped[-1]:
            same_bits(masters_of(state), before)
            continue
        after = jax.device_get(masters_of(state))
        moved = jax.tree.map(
            lambda a, b: jnp.asarray((a - b) / mixed.RATE, jnp.float16),
            floating(before),
            floating(after),
        )
        made_step = {"step": returning(metrics.loss, moved)}
        judge(copies, batch, made_step, weights=weights).raise_if_failed()
        same_bits(
            floating(state.params),
            jax.tree.map(lambda m: m.astype(jnp.float16), floating(after)),
        )
    assert skipped == [stage is not None for stage in BOOMING]


def by_hand(pipe, params, opt_states, batch, weights, opt):
    """The same compiled functions one after the other, and each stage's own step."""
    runs = [
        StageRun(s, s.compiled(pipe.wiring.from_batch(j), j), p, None, None, "sum")
        for j, (s, p) in enumerate(zip(pipe.stages, params, strict=True))
    ]
    parts = split_batch(batch, weights, pipe.schedule.micro_batches, "mean")
    scale = opt_states[2].loss_scale.scale
    for part in parts:
        rows = {name: jnp.asarray(x) for name, x in part.batch.items()}
        first = runs[0].forward(part.number, {"x": rows["x"], "boom0": rows["boom0"]})
        given = {"h": first["h"], "boom1": rows["boom1"]}
        second = runs[1].forward(part.number, given)
        given = {**second, "skip": first["skip"], "boom2": rows["boom2"]}
        third = runs[2].forward(part.number, given)
        passes = pipe._loss.passes(part.batch, ("target",))
        read = {"target": rows["target"]}
        _, d_y, _ = passes.both(third, read, part.weights, scale)
        share = Partial(np.float32(0), None, part.total)
        d_third = runs[2].backward(part.number, d_y, share, False)
        d_second = runs[1].backward(part.number, {"m": d_third["m"]}, share, False)
        d_first = {"h": d_second["h"], "skip": d_third["skip"]}
        runs[0].backward(part.number, d_first, share, False)
    grads = [run.finished(run.partial(), unrounded=True) for run in runs]
    finite = np.all([np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)])
    step = jax.jit(opt.step)
    found = [
        step(p, g, s, finite=finite)
        for p, g, s in zip(params, grads, opt_states, strict=True)
    ]
    return [p for p, _ in found], [s for _, s in found]


def test_bits_are_those_of_the_same_steps_by_hand():
    opt = mixed.optimizer(mixed.DYNAMIC)
    pipe = made(pipeline.one_f_one_b(3, 4), optimizer=opt)
    state = pipe.init(start())
    params = jax.device_get(state.params)
    opt_states = jax.device_get(state.opt_states)
    for step, booming in enumerate(BOOMING[:4]):
        batch, weights = batch_of(step, booming)
        params, opt_states = by_hand(pipe, params, opt_states, batch, weights, opt)
        state, _ = pipe.train_step(state, batch, weights)
        same_bits((state.params, state.opt_states), (params, opt_states))


@pytest.mark.parametrize("kind", ["mean", "sum", "max"])
def test_reductions_and_replicas(kind):
    """Two workers for the last stage, on devices of their own, halves of a backward
    pass, and a scale that divides nothing exactly. The gradient is that without a
    scale, to rounding in float64; all skip when one overflows."""
    programs = [
        [f"0F{i}" for i in range(4)] + [f"0B{i}" for i in range(4)],
        [f"1F{i}" for i in range(4)] + [f"1{x}{i}" for x in "BW" for i in range(4)],
        ["2F0", "2B0", "2F2", "2B2"],
        ["2F1", "2B1", "2F3", "2B3"],
    ]
    schedule = pipeline.Schedule.of(programs, placement=((0,), (1,), (2, 3)))
    opt = mixed.optimizer(300.0, jnp.float64)
    options = {"optimizer": opt, "reduction": kind}
    pipe = made(schedule, jax.devices()[:4], **options)
    params = jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, start()
    )
    batch, weights = batch_of(0, examples=11)
    weights = weights.astype(np.float64)
    state = pipe.init(params)
    before = jax.device_get(state.params)
    alone = OneDevice(optim.sgd(), kind)
    expected = alone.grads(floating(before), None, batch, weights)
    after, _ = pipe.train_step(state, batch, weights)
    for old, new, grads in zip(
        floating(before), floating(after.params), expected, strict=True
    ):
        for name, grad in grads.items():
            found = (old[name] - np.asarray(new[name])) / mixed.RATE
            np.testing.assert_allclose(found, grad, rtol=1e-12, atol=1e-13)
    batch["boom1"] = np.full(11, 1e308)
    before = jax.device_get((masters_of(after), after.params))
    after, _ = pipe.train_step(after, batch, weights)
    assert scales_of(after) == [LossScaleState(300.0, 0.0, 1.0)] * 3
    same_bits((masters_of(after), after.params), before)


def test_the_norm_is_without_the_scale():
    """Clipped as on one device, where `max_norm` is multiplied by the scale."""
    pipe = made(pipeline.gpipe(3, 4), max_norm=0.5)
    alone = OneDevice(mixed.optimizer(mixed.START))
    state = pipe.init(start())
    batch, weights = batch_of(3)
    copies, own = jax.device_get((floating(state.params), together(state)))
    grads = alone.grads(copies, own, batch, weights)
    grads, norm = optim.clip_by_global_norm(grads, 0.5 * mixed.START)
    _, expected = alone.step(copies, grads, own)
    state, metrics = pipe.train_step(state, batch, weights)
    unit = 2.0**-10  # of float16, for sums of 12 examples that are of one sign
    np.testing.assert_allclose(metrics.grad_norm, norm / mixed.START, rtol=4 * unit)
    assert metrics.grad_norm > 0.5
    for found, other in zip(
        jax.tree.leaves(floating(masters_of(state))),
        jax.tree.leaves(expected.masters),
        strict=True,
    ):
        np.testing.assert_allclose(found, other, atol=4 * unit * mixed.RATE * 0.5)
    batch, weights = batch_of(4, 1)
    before = jax.device_get(masters_of(state))
    state, metrics = pipe.train_step(state, batch, weights)
    assert not np.isfinite(metrics.grad_norm)
    same_bits(masters_of(state), before)


def test_workers_skip_together(cluster):
    """Over both transports: bits, decisions and scales of one process."""
    pairs, norms = mixed.steps(BOOMING)
    assert pairs[0][1].loss_scale.skipped == 3
    tasks = [cluster.start(r, mixed.steps, BOOMING, workers(3)) for r in range(3)]
    for rank, task in enumerate(tasks):
        same_bits(task.result(), ([pairs[rank]], norms))


def test_bfloat16_needs_no_scale():
    """Masters gather what the copies cannot show; nobody looks for overflows."""
    opt = optim.with_master_weights(optim.sgd(lr=1e-4))
    pipe = made(pipeline.gpipe(3, 1), optimizer=opt)
    state = pipe.init(start())
    first = jax.device_get((masters_of(state), state.params))
    assert [s.loss_scale for s in state.opt_states] == [None] * 3
    state, metrics = pipe.train_step(state, *batch_of(0))
    copies = [p["w"] for p in state.params]
    assert metrics.grad_norm is None
    assert {str(w.dtype) for w in copies} == {"bfloat16"}
    moved = [
        (np.asarray(new["w"]) != old["w"]).mean()
        for new, old in zip(masters_of(state), first[0], strict=True)
    ]
    assert min(moved) == 1
    shown = [
        (np.asarray(new) != old["w"]).mean()
        for new, old in zip(copies, first[1], strict=True)
    ]
    assert max(shown) < 0.5


def test_masters_where_stages_update_alone():
    """With a flush after each batch, PipeDream's steps are those of a pipeline."""
    opt = optim.with_master_weights(optim.sgd(lr=mixed.RATE, momentum=0.5))
    pipe = made(pipeline.gpipe(3, 1), optimizer=opt)
    options = {"optimizer": opt, "policy": "flush"}
    runtime = asynchronous(pipe.stages, mixed.losses, **options)
    batches, weights = zip(*map(batch_of, range(3)), strict=True)
    state, _ = runtime.train_epoch(runtime.init(start()), paired(batches, weights))
    expected = pipe.init(start())
    for batch, own in zip(batches, weights, strict=True):
        expected, _ = pipe.train_step(expected, batch, own)
    same_bits((state.params, state.opt_states), (expected.params, expected.opt_states))


def test_stages_may_differ_in_their_dtype():
    """A stage in float32 takes part in the scale; what is sent to it is cast there."""
    optimizers = [
        mixed.optimizer(mixed.DYNAMIC, dtype)
        for dtype in (jnp.float16, jnp.float16, jnp.float32)
    ]
    schedule = pipeline.gpipe(3, 4)
    stages = [*made(schedule).stages]

    def decode(params, m, skip, boom):
        return mixed.decode(params, *(x.astype(jnp.float32) for x in (m, skip, boom)))

    stages[2] = pipeline.Stage(decode, stages[2].inputs, stages[2].outputs)
    pipe = pipeline.Pipeline(stages, mixed.losses, schedule, optimizer=optimizers)
    state = pipe.init(start())
    for step, booming in enumerate([0, None]):
        state, _ = pipe.train_step(state, *batch_of(step, booming))
    assert [str(p["w"].dtype) for p in state.params] == ["float16"] * 2 + ["float32"]
    expected = LossScaleState(mixed.START / 2, 1.0, 1.0)
    assert scales_of(state) == [expected] * 3


@pytest.mark.parametrize(
    ("others", "match"),
    [
        (mixed.optimizer(None), "in all stages alike.*None"),
        (optim.sgd(), "in all stages alike.*compute_dtype may differ"),
        (mixed.optimizer(mixed.START * 2), "in all stages alike.*8192"),
    ],
)
def test_scales_that_differ_are_refused(others, match):
    opt = mixed.optimizer(mixed.START)
    pipe = made(pipeline.gpipe(3, 2), optimizer=[opt, opt, others])
    with pytest.raises(ValueError, match=match):
        pipe.init(start())


# --- sums that reach the masters ---

PARTS = 8


def times(w, x):
    """Its gradient for one micro-batch is one product."""
    return x @ w


def plus(w, z, a):
    return z @ w + a


def products(y, batch):
    return (y.astype(jnp.float32) * batch["t"]).sum(-1)


def in_pieces(rng):
    """A batch whose sum over micro-batches is exact in float32 and not in bfloat16.

    Small integers, in each micro-batch four times as large as in the one before: its
    own gradient, x^T t, has no more than bfloat16's eight bits.
    """
    size = np.repeat(4.0 ** np.arange(PARTS), 4)[:, None]
    shape = (4 * PARTS, 5)
    drawn = {name: rng.integers(-3, 4, shape) * size for name in "xz"}
    batch = {name: jnp.asarray(x, jnp.bfloat16) for name, x in drawn.items()}
    t = rng.integers(-3, 4, shape).astype(np.float32)
    return batch | {"t": t}, {name: x.T @ t for name, x in drawn.items()}


def masters_after(pipe, batch):
    """By stage; they begin at 0, and the rate is 1."""
    state = pipe.init([np.zeros((5, 5), np.float32)] * len(pipe.stages))
    state, _ = pipe.train_step(state, batch)
    return [np.asarray(opt.masters) for opt in state.opt_states]


def same_and_unrounded(masters, gradient):
    assert np.array_equal(-masters, gradient)
    assert not np.array_equal(gradient.astype(jnp.bfloat16), gradient)


ONE = [pipeline.Stage(times, ("x",), ("y",))]
TWICE = pipeline.Schedule.of(
    [[f"0{k}{i}" for k in "FB" for i in range(w, PARTS, 2)] for w in range(2)],
    placement=((0, 1),),
)
SPLIT = pipeline.Schedule.of([[f"0{k}{i}" for k in "FBW" for i in range(PARTS)]])
SUMS = {
    "whole": lambda **o: pipeline.Pipeline(
        ONE, products, pipeline.gpipe(1, PARTS), **o
    ),
    "halves": lambda **o: pipeline.Pipeline(ONE, products, SPLIT, **o),
    "clipped": lambda **o: pipeline.Pipeline(
        ONE, products, pipeline.gpipe(1, PARTS), max_norm=1e9, **o
    ),
    "recomputed": lambda **o: pipeline.Pipeline(
        [pipeline.Stage(times, ("x",), ("y",), recompute=True)],
        products,
        pipeline.gpipe(1, PARTS),
        **o,
    ),
    "replicas": lambda **o: pipeline.Pipeline(
        ONE, products, TWICE, jax.devices()[:2], **o
    ),
    "one program": lambda **o: pipeline.Pipeline(
        ONE,
        products,
        pipeline.gpipe(1, PARTS),
        pipeline.OneProgram(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))),
        **o,
    ),
}


@pytest.mark.parametrize("how", SUMS)
def test_masters_get_the_sum_as_it_was_added_up(how, rng):
    """Of eight micro-batches in bfloat16, in float32 and not rounded again."""
    opt = optim.with_master_weights(optim.sgd(lr=1.0))
    pipe = SUMS[how](optimizer=opt, reduction="sum")
    batch, expected = in_pieces(rng)
    (found,) = masters_after(pipe, batch)
    same_and_unrounded(found, expected["x"])
    params = pipe.place([jnp.zeros((5, 5), jnp.bfloat16)])
    _, (grad,) = pipe.value_and_grad(params, batch)
    assert grad.dtype == jnp.bfloat16
    assert np.array_equal(grad, expected["x"].astype(jnp.bfloat16))


def test_masters_of_tied_copies_get_the_sum_over_the_stages(rng):
    opt = optim.with_master_weights(optim.sgd(lr=1.0))
    tied = {"(root)": "w"}
    stages = [
        pipeline.Stage(times, ("x",), ("a",), tied=tied),
        pipeline.Stage(plus, ("z", "a"), ("y",), tied=tied),
    ]
    schedule = pipeline.one_f_one_b(2, PARTS)
    options = {"optimizer": opt, "reduction": "sum"}
    pipe = pipeline.Pipeline(stages, products, schedule, **options)
    batch, expected = in_pieces(rng)
    for found in masters_after(pipe, batch):
        same_and_unrounded(found, expected["x"] + expected["z"])


@pytest.mark.parametrize("scale", [None, 4.0])
def test_masters_of_pipedream_get_the_sum_of_a_macro_batch(scale, rng):
    """One update for eight batches, with a loss scale and without."""
    opt = optim.with_master_weights(optim.sgd(lr=1.0), loss_scale=scale)
    runtime = asynchronous(ONE, products, optimizer=opt, update_every=PARTS)
    batch, expected = in_pieces(rng)
    cut = {name: np.split(x, PARTS) for name, x in batch.items()}
    batches = [{name: parts[i] for name, parts in cut.items()} for i in range(PARTS)]
    state = runtime.init([np.zeros((5, 5), np.float32)])
    state, _ = runtime.train_epoch(state, batches)
    masters = np.asarray(state.opt_states[0].masters) * len(batch["t"])  # of the mean
    same_and_unrounded(masters, expected["x"])


def test_a_sum_beyond_sixteen_bits_is_a_step():
    """float16 holds each micro-batch's gradient, and float32 their sum."""
    opt = optim.with_master_weights(
        optim.sgd(lr=2.0**-20), compute_dtype=jnp.float16, loss_scale=1.0
    )
    stage = pipeline.Stage(lambda w, x: (x * w).astype(jnp.float32), ("x",), ("y",))
    options = {"optimizer": opt, "reduction": "sum"}
    schedule = pipeline.gpipe(1, 4)
    pipe = pipeline.Pipeline([stage], lambda y, batch: y, schedule, **options)
    batch = {"x": np.array([60000, 48000, 40000, 30000], np.float16)}
    state, _ = pipe.train_step(pipe.init([np.float32(1)]), batch)
    assert int(state.opt_states[0].loss_scale.skipped) == 0
    assert float(state.opt_states[0].masters) == 1 - 178000 * 2.0**-20

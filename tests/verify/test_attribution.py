"""Which part of a wrong step is named: gradient, optimizer update or model state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import data_parallel, optim, verify
from jdist.pipeline import Pipeline, Stage, gpipe


@pytest.fixture(scope="module", autouse=True)
def _as_a_user_has_it():
    """Optax and Flax promote dtypes and ranks."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


SHAPES = {"bias": (3,), "out": (5, 3)}
RATE = optax.piecewise_constant_schedule(0.05, {1: 0.5, 2: 0.5})


def losses(p, b):
    return ((b["x"] @ p["out"] + p["bias"][None, :] - b["y"]) ** 2).sum(-1)


def problem(steps=1, examples=7):
    rng = np.random.default_rng(4)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {name: array(*shape) for name, shape in SHAPES.items()}
    batches = [{"x": array(examples, 5), "y": array(examples, 3)} for _ in range(steps)]
    return params, batches


def updates(tx):
    """An optax optimizer as the judge takes it."""

    def update(params, gradient, state):
        moves, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, moves), state

    return update


MEAN = jax.jit(jax.grad(lambda p, b: losses(p, b).mean()))


def trainer(tx, gradient=MEAN, shown=True):
    """The optimizer on a gradient, shown to the judge or not."""
    update = jax.jit(updates(tx))

    def train(params, state, batch):
        found = gradient(params, batch)
        params, state = update(params, found, state)
        if shown:
            return verify.Trained(params, state, gradient=found)
        return params, state

    return train


def adamw(eps_root=0.0, rate=RATE, mask=True, max_norm=0.5):
    """With a schedule, clipping, and no decay on the bias."""
    return optax.chain(
        optax.clip_by_global_norm(max_norm),
        optax.scale_by_adam(eps_root=eps_root, eps=1e-8 if not eps_root else 0.0),
        optax.add_decayed_weights(0.1, {"bias": not mask, "out": True}),
        optax.scale_by_learning_rate(rate),
    )


def counted(tx):
    """Counts from 1 where it should from 0."""

    def init(params):
        state = tx.init(params)
        return jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, state)

    return init


def scaled(gradient, factor, leaf="out"):
    def wrong(params, batch):
        found = gradient(params, batch)
        return {**found, leaf: found[leaf] * jnp.float32(factor)}

    return wrong


def clipped_before_the_mean(params, batch):
    """Each micro-batch's gradient clipped, then their mean."""
    pieces = [jax.tree.map(lambda x, i=i: x[i : i + 2], batch) for i in (0, 2, 4)]
    clip = optax.clip_by_global_norm(0.5)
    found = [clip.update(MEAN(params, piece), clip.init(params))[0] for piece in pieces]
    return jax.tree.map(lambda *g: sum(g) / jnp.float32(len(g)), *found)


WRONG_UPDATES = {
    "decay on the bias": trainer(adamw(mask=False)),
    "decay on the bias, hidden": trainer(adamw(mask=False), shown=False),
    "eps inside the root": trainer(adamw(eps_root=1e-3), shown=False),
    "no clipping": trainer(adamw(max_norm=1e9)),
    "a rate of its own": trainer(adamw(rate=0.04), shown=False),
}
WRONG_GRADIENTS = {
    "doubled": trainer(adamw(), scaled(MEAN, 2)),
    "negated": trainer(adamw(), scaled(MEAN, -1), shown=False),
    "a thousandth": trainer(adamw(), scaled(MEAN, 1.01, "bias"), shown=False),
    "clipped too early": trainer(adamw(), clipped_before_the_mean),
}


@pytest.fixture(scope="module")
def judged():
    """All at once, so that the reference is compiled once."""
    params, batches = problem()
    tx = adamw()
    right = {"right": trainer(tx), "right, hidden": trainer(tx, shown=False)}
    return verify.step(
        losses, updates(tx), (params, tx.init(params)), batches,
        {**right, **WRONG_UPDATES, **WRONG_GRADIENTS},
    )  # fmt: skip


def parts(report, name):
    return [(cause.step, cause.part) for cause in report.of(name).attributions]


def test_right_trainers_are_attributed_nothing(judged):
    """With clipping, a schedule and a decay by label."""
    for name in ("right", "right, hidden"):
        assert judged.of(name).ok, str(judged.of(name))
        assert parts(judged, name) == []
    assert "gradient/out" in {row.path for row in judged.of("right").leaves}
    assert "gradient/out" not in {r.path for r in judged.of("right, hidden").leaves}


@pytest.mark.parametrize("name", WRONG_UPDATES)
def test_a_wrong_update_is_named(judged, name):
    """Also where the gradient is read off the optimizer's state."""
    assert parts(judged, name) == [(1, "optimizer update")], str(judged.of(name))
    with pytest.raises(AssertionError, match=f"{name}: step 1, wrong optimizer update"):
        judged.of(name).raise_if_failed()


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_a_wrong_gradient_is_named(judged, name):
    """Clipping keeps a gradient's direction; its state is that of another one."""
    assert parts(judged, name) == [(1, "gradient")], str(judged.of(name))
    (cause,) = judged.of(name).attributions
    if name == "negated":
        assert "another gradient, of out" in cause.why


def clipped_in(parts, max_norm=0.5):
    """The gradient of each part of the batch clipped, then their mean."""
    clip = optax.clip_by_global_norm(max_norm)

    def gradient(params, batch):
        size = len(batch["x"]) // parts
        found = []
        for i in range(parts):
            piece = jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
            found.append(clip.update(MEAN(params, piece), clip.init(params))[0])
        return jax.tree.map(lambda *g: sum(g) / jnp.float32(parts), *found)

    return gradient


def clipped_by_leaf(params, batch):
    """Each leaf by its own norm."""
    return jax.tree.map(
        lambda g: g * jnp.minimum(1, 0.5 / jnp.linalg.norm(g)), MEAN(params, batch)
    )


def shows_the_raw_one(gradient):
    """The right gradient is shown, and the optimizer is given another."""
    hidden = trainer(adamw(), gradient, shown=False)

    def train(params, state, batch):
        shown = MEAN(params, batch)
        return verify.Trained(*hidden(params, state, batch), gradient=shown)

    return train


CLIPS = {
    "3 parts, shown": (trainer(adamw(), clipped_in(3)), "each of 3 equal parts"),
    "2 parts, hidden": (
        trainer(adamw(), clipped_in(2), shown=False),
        "each of 2 equal parts",
    ),
    "each example": (shows_the_raw_one(clipped_in(6)), "each of 6 equal parts"),
    "by leaf, shown": (trainer(adamw(), clipped_by_leaf), "each leaf"),
    "by leaf": (shows_the_raw_one(clipped_by_leaf), "each leaf"),
}


def test_a_clip_of_parts_is_named_with_its_norm():
    """Whatever is shown of it; a lost part or another factor is no clip."""
    params, batches = problem(examples=6)
    tx = adamw()

    def lost(params, batch):
        return MEAN(params, jax.tree.map(lambda x: x[:4], batch))

    others = {
        "lost": trainer(adamw(max_norm=1e9), lost),
        "scaled": trainer(adamw(max_norm=1e9), clipped_in(1, 0.25)),
        "not clipped": trainer(adamw(max_norm=1e9)),
    }
    report = verify.step(
        losses, updates(tx), (params, tx.init(params)), batches,
        {**{name: train for name, (train, _) in CLIPS.items()}, **others},
    )  # fmt: skip
    for name, (_, words) in CLIPS.items():
        (cause,) = report.of(name).attributions
        assert (cause.step, cause.part) == (1, "gradient clipping"), str(cause)
        assert f"{words} " in cause.why
        # Two leaves of norm 0.5 are clipped once more as a whole, by the optimizer.
        norm = 0.3536 if name == "by leaf" else 0.5
        assert f"clipped to norm {norm} " in cause.why
    for name in others:
        assert "clipping" not in str(report.of(name).attributions), name
        assert not report.of(name).ok


def test_the_worst_leaf_is_quoted():
    """Not the first in the tree's order."""
    params, batches = problem()
    tx = adamw(max_norm=1e9)
    slightly = scaled(scaled(MEAN, 1.001, "bias"), 3, "out")
    report = verify.step(
        losses, updates(tx), (params, tx.init(params)), batches,
        {"mine": trainer(tx, slightly)},
    )  # fmt: skip
    assert [row.path for row in report.failures][:2] == [
        "gradient/bias",
        "gradient/out",
    ]
    (cause,) = report.attributions
    assert cause.why.startswith("gradient/out: off by ")


def test_the_first_wrong_step_is_named():
    """A schedule that comes a step late; a count that begins at 1; no momentum."""
    params, batches = problem(steps=3)
    rate = lambda n: RATE(n)  # noqa: E731
    late = lambda n: RATE(jnp.maximum(n - 1, 0))  # noqa: E731
    tx = lambda rate: optax.chain(  # noqa: E731
        optax.scale_by_adam(), optax.scale_by_learning_rate(rate)
    )
    right, state = tx(rate), tx(rate).init(params)

    def early(params, own, batch):
        """Begins with a count of its own, and shows it."""
        if int(own[0].count) == 0:
            own = counted(right)(params)
        return trainer(right, shown=False)(params, own, batch)

    report = verify.step(
        losses, updates(right), (params, state), batches,
        {
            "right": trainer(right, shown=False),
            "late": trainer(tx(late), shown=False),
            "early": early,
        },
    )  # fmt: skip
    assert report.of("right").ok, str(report)
    assert parts(report, "late") == [(2, "optimizer update")], str(report)
    assert "after step 2 of 3: " in report.of("late").failures[0].problem
    assert parts(report, "early") == [(1, "optimizer update")]


def test_stale_parameters_are_recognised():
    """By the gradient that is shown or kept, and by the step that it makes."""
    params, batches = problem(steps=2)
    momentum, plain = optax.sgd(0.05, momentum=0.9), optax.sgd(0.05)
    old = lambda _, batch: MEAN(params, batch)  # noqa: E731
    for tx, shown, part in (
        (momentum, True, "gradient"),
        (momentum, False, "gradient"),
        (plain, False, "gradient or optimizer update"),
    ):
        report = verify.step(
            losses, updates(tx), (params, tx.init(params)), batches,
            {"right": trainer(tx, shown=shown), "old": trainer(tx, old, shown=shown)},
        )  # fmt: skip
        assert report.of("right").ok
        (cause,) = report.of("old").attributions
        assert (cause.step, cause.part) == (2, part)
        assert "at the parameters of the step before: they are stale" in cause.why


def test_what_cannot_be_told_apart_is_not_guessed():
    """Twice the rate of plain SGD and twice the gradient are one step."""
    params, batches = problem()
    tx = optax.sgd(0.05)
    report = verify.step(
        losses, updates(tx), (params, tx.init(params)), batches,
        {
            "rate": trainer(optax.sgd(0.1), shown=False),
            "gradient": trainer(tx, scaled(MEAN, 2), shown=False),
            "rate, shown": trainer(optax.sgd(0.1)),
            "gradient, shown": trainer(tx, scaled(MEAN, 2)),
        },
    )  # fmt: skip
    for name in ("rate", "gradient"):
        assert parts(report, name) == [(1, "gradient or optimizer update")]
        assert "verify.Trained" in report.of(name).attributions[0].why
    assert parts(report, "rate, shown") == [(1, "optimizer update")]
    assert parts(report, "gradient, shown") == [(1, "gradient")]


# --- models with a state ---


def batch_norm(p, b, states):
    """A batch's own statistics, and their running averages."""
    x = b["x"]
    mean, variance = x.mean(0), x.var(0)
    scaled = (x - mean[None]) * jax.lax.rsqrt(variance + jnp.float32(1e-3))[None]
    found = ((scaled @ p["out"] + p["bias"][None] - b["y"]) ** 2).sum(-1)
    keep = jnp.float32(0.9)
    new = {
        "mean": keep * states["mean"] + (1 - keep) * mean,
        "var": keep * states["var"] + (1 - keep) * variance,
        "count": states["count"] + 1,
    }
    return found, new


def test_stale_statistics_are_named():
    """Right parameters and old statistics; and the reverse; on two steps."""
    params, batches = problem(steps=2)
    opt = optim.sgd(lr=0.05, momentum=0.9)
    states = {
        "mean": jnp.zeros(5, jnp.float32),
        "var": jnp.ones(5, jnp.float32),
        "count": jnp.int32(0),
    }

    @jax.jit
    def whole(p, s, m, b):
        mean = lambda p: (lambda x: (x[0].mean(), x[1]))(batch_norm(p, b, m))  # noqa: E731
        gradient, new = jax.grad(mean, has_aux=True)(p)
        return *opt.step(p, gradient, s), new

    def stale(p, s, m, b):
        p, s, _ = whole(p, s, m, b)
        return p, s, {**m, "count": m["count"] + 1}

    def evaluated(p, s, m, b):
        """Normalises by the running averages, as in evaluation."""

        def mean(p):
            x = (b["x"] - m["mean"][None]) * jax.lax.rsqrt(m["var"])[None]
            return ((x @ p["out"] + p["bias"][None] - b["y"]) ** 2).sum(-1).mean()

        return *opt.step(p, jax.grad(mean)(p), s), whole(p, s, m, b)[2]

    report = verify.step(
        batch_norm, opt.step, (params, opt.init(params), states), batches,
        {"right": whole, "stale": stale, "evaluated": evaluated},
    )  # fmt: skip
    assert report.of("right").ok, str(report.of("right"))
    assert {"states/mean", "states/count"} <= {
        r.path for r in report.of("right").leaves
    }
    assert parts(report, "stale") == [(1, "model state")]
    failed = {row.path for row in report.of("stale").failures}
    assert failed == {"states/mean", "states/var"}
    assert parts(report, "evaluated") == [(1, "gradient")], str(report.of("evaluated"))


# --- trainers as users have them ---


def test_a_loop_of_flax_and_optax():
    """`nnx.Optimizer` on a module, as its documentation shows it."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(5, 4, rngs=rngs)
            self.second = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.tanh(self.first(x)))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    tx = optax.adam(1e-2)

    def per_example(params, batch):
        return ((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2).sum(-1)

    def loop(reduce):
        model = nnx.merge(graph, jax.tree.map(jnp.copy, params))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def train(_, __, batch):
            loss = lambda m: reduce(((m(batch["x"]) - batch["y"]) ** 2).sum(-1))  # noqa: E731
            gradient = nnx.grad(loss)(model)
            optimizer.update(model, gradient)
            shown = nnx.state(model, nnx.Param)
            return verify.Trained(shown, gradient=gradient)

        return train

    _, batches = problem(steps=2)
    report = verify.step(
        per_example, updates(tx), (params, tx.init(params)), batches,
        {"right": loop(jnp.mean), "summed": loop(jnp.sum)},
    )  # fmt: skip
    assert report.of("right").ok, str(report)
    assert parts(report, "summed") == [(1, "gradient")]


def test_the_steps_of_this_library():
    """Replicas with clipping, and a pipeline of two stages; a wrong rate in each."""
    params, batches = problem(steps=2, examples=6)
    opt = optim.sgd(lr=0.05, momentum=0.9)

    def update(p, g, s):
        clipped, _ = optim.clip_by_global_norm(g, max_norm=0.5)
        return opt.step(p, clipped, s)

    def replicas(**rate):
        step = data_parallel.train_step(
            losses, opt, replicas=2, max_norm=0.5, accumulate=2
        )

        def train(p, s, batch):
            state = step.init(p, opt_state=s)
            rows = data_parallel.shard_batch(batch, replicas=2, rows=4)
            state, _ = step(state, *rows, **rate)
            return state.params, state.opt_state

        return train

    stages = [
        Stage(lambda p, x: x @ p["out"], inputs=("x",), outputs=("h",)),
        Stage(lambda p, h: h + p["bias"][None], inputs=("h",), outputs=("z",)),
    ]
    pipe = Pipeline(
        stages,
        lambda z, b: ((z - b["y"]) ** 2).sum(-1),
        gpipe(2, 3),
        jax.devices()[:2],
        optimizer=opt,
        max_norm=0.5,
    )

    decayed = optim.sgd(lr=0.05, momentum=0.9, weight_decay=1e-2)

    @jax.jit
    def penalized(p, s, batch):
        clipped, _ = optim.clip_by_global_norm(MEAN(p, batch), max_norm=0.5)
        return decayed.step(p, clipped, s)

    kept = [pipe.init([{"out": params["out"]}, {"bias": params["bias"]}])]

    def pipeline(_, __, batch):
        state, _ = pipe.train_step(kept.pop(), batch)
        kept.append(state)
        first, second = jax.tree.map(jnp.copy, state.params)
        return {**first, **second}, None

    report = verify.step(
        losses, update, (params, opt.init(params)), batches,
        {
            "replicas": replicas(),
            "other": replicas(lr=0.06),
            "pipeline": pipeline,
            "penalized": penalized,
        },
    )  # fmt: skip
    assert report.of("replicas").ok, str(report.of("replicas"))
    assert report.of("pipeline").ok, str(report.of("pipeline"))
    assert parts(report, "other") == [(1, "optimizer update")]
    assert parts(report, "penalized") == [(1, "optimizer update")]
    (cause,) = report.of("penalized").attributions
    rule = "as if a weight decay of 0.01 were added to the gradient of bias, out"
    assert cause.why == rule


def averaging(tx, decay):
    """An optimizer that keeps an average of the parameters beside its state."""

    def init(params):
        return {"inner": tx.init(params), "average": params}

    def update(params, gradient, state):
        moves, inner = tx.update(gradient, state["inner"], params)
        params = optax.apply_updates(params, moves)
        average = jax.tree.map(
            lambda a, p: decay * a + (1 - decay) * p, state["average"], params
        )
        return params, {"inner": inner, "average": average}

    return init, update


@pytest.mark.parametrize("name", ["opt", "state"])
def test_a_step_that_is_one_function_does_not_tell_gradient_from_update(name):
    """A state that is right may be of squares, which do not show a wrong sign."""
    params, batches = problem()

    def step(rate, sign=1.0):
        update = updates(optax.rmsprop(rate))

        def one(state, batch):
            gradient = jax.tree.map(lambda g: sign * g, MEAN(state["params"], batch))
            params, own = update(state["params"], gradient, state[name])
            return {"params": params, name: own}

        return one

    start = {"params": params, name: optax.rmsprop(0.05).init(params)}
    judge = verify.step_judge(step(0.05), start, batches)
    for wrong in (step(0.06), step(0.05, -1.0)):
        (cause,) = judge(wrong).attributions
        assert cause.part == "gradient or optimizer update"
        assert cause.why.startswith("params/")


def test_an_average_is_no_accumulator_of_the_gradient():
    """With a loss and an update: the momentum tells that the rate is wrong."""
    params, batches = problem()
    init, update = averaging(optax.sgd(0.05, momentum=0.9), 0.9)
    _, faster = averaging(optax.sgd(0.06, momentum=0.9), 0.9)
    gradient = jax.grad(lambda p, b: losses(p, b).mean())
    wrong = {
        "rate": lambda p, s, b: faster(p, gradient(p, b), s),
        "gradient": lambda p, s, b: update(
            p, jax.tree.map(lambda g: 1.2 * g, gradient(p, b)), s
        ),
    }
    report = verify.step(losses, update, (params, init(params)), batches[:1], wrong)
    parts = {x.candidate: x.part for x in report.attributions}
    assert parts == {"rate": "optimizer update", "gradient": "gradient"}


def momentum(rate=0.05, decay=0.9):
    """SGD with momentum, as the judge takes it."""

    def update(p, g, m):
        m = jax.tree.map(lambda m, g: decay * m + g, m, g)
        return jax.tree.map(lambda w, m: w - rate * m, p, m), m

    return update


def plain(p, g, s):
    return jax.tree.map(lambda w, g: w - 0.05 * g, p, g), s


def adam(p, g, s):
    own = optax.adam(0.01)
    moves, s = own.update(g, s, p)
    return optax.apply_updates(p, moves), s


def shares_of(batch, parts, share):
    """The gradient of each micro-batch, at the same parameters."""
    size = len(batch["x"]) // parts
    pieces = [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
        for i in range(parts)
    ]
    factor = 1 / parts if share else 1.0
    return lambda p: [
        jax.tree.map(lambda g: factor * g, MEAN(p, piece)) for piece in pieces
    ]


def in_turn(update, parts, share=True, mean_of_moves=False, shown=False):
    """Updates by each micro-batch, where it should be by their sum."""

    def train(params, state, batch):
        gradients = shares_of(batch, parts, share)(params)
        moved, all_moved = params, []
        for gradient in gradients:
            start = params if mean_of_moves else moved
            moved, state = update(start, gradient, state)
            all_moved.append(moved)
        if mean_of_moves:
            moved = jax.tree.map(lambda *x: sum(x) / len(x), *all_moved)
        if shown:
            whole = jax.tree.map(lambda *g: sum(g), *gradients)
            return verify.Trained(moved, state, gradient=whole)
        return moved, state

    return train


def test_an_update_for_each_micro_batch_is_recognized():
    """By the momentum, or by the parameters where the optimizer keeps nothing."""
    params, batches = problem(examples=10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    start = {"momentum": zeros, "plain": (), "adam": optax.adam(0.01).init(params)}
    of = {"momentum": momentum(), "plain": plain, "adam": adam}
    told = "as if it ran once for each of 5 micro-batches"
    cases = {
        ("momentum", "in turn"): in_turn(momentum(), 5),
        ("momentum", "own means"): in_turn(momentum(), 5, share=False),
        ("momentum", "mean of moves"): in_turn(momentum(), 5, mean_of_moves=True),
        ("momentum", "shown"): in_turn(momentum(), 5, shown=True),
        ("plain", "own means"): in_turn(plain, 5, share=False),
        ("adam", "in turn"): in_turn(adam, 5),
    }
    for (name, case), trainer_of in cases.items():
        judge = verify.step_judge(losses, of[name], (params, start[name]), batches)
        report = judge({case: trainer_of})
        (cause,) = report.attributions
        assert (cause.part, told in cause.why) == ("optimizer update", True), (
            name, case, cause,
        )  # fmt: skip
        if name == "momentum":
            assert "its momentum state/" in cause.why


def test_what_is_no_update_for_each_micro_batch_is_not_said_to_be():
    """Micro-batches whose sum is updated by; other mistakes; parts of other sizes."""
    params, batches = problem(steps=2, examples=10)
    start = params, jax.tree.map(jnp.zeros_like, params)
    judge = verify.step_judge(losses, momentum(), start, batches)

    def accumulated(update, factor=1.0):
        def train(params, state, batch):
            own = shares_of(batch, 5, share=True)(params)
            whole = jax.tree.map(lambda *g: factor * sum(g), *own)
            return update(params, whole, state)

        return train

    report = judge({
        "right": accumulated(momentum()),
        "decay": accumulated(momentum(decay=0.8)),
        "rate": accumulated(momentum(rate=0.1)),
        "doubled": accumulated(momentum(), 2.0),
        "twice": lambda p, m, b: momentum()(*momentum()(p, MEAN(p, b), m)[:1],
                                            MEAN(p, b), m),
    })  # fmt: skip
    assert report.of("right").ok
    assert not any("micro-batches" in cause.why for cause in report.attributions)
    assert {cause.candidate for cause in report.attributions} == {
        "decay", "rate", "doubled", "twice"
    }  # fmt: skip

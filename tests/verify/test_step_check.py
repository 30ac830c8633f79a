"""The judge of whole optimizer steps: by new parameters, not by what they imply."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, verify

SHAPES = {"bias": (3,), "out": (5, 3)}


def losses(p, b):
    """Of a linear model, so that little is compiled."""
    return ((b["x"] @ p["out"] + p["bias"][None, :] - b["y"]) ** 2).sum(-1)


def problem(seed=0, dtype=jnp.float32, steps=1, examples=13):
    """Parameters and a batch for each step."""
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, dtype)  # noqa: E731
    params = {name: array(*shape) for name, shape in SHAPES.items()}
    batches = [{"x": array(examples, 5), "y": array(examples, 3)} for _ in range(steps)]
    return params, batches


def trainer(opt, change=lambda g: g, size=4):
    """Micro-batches of a size, in float64 sums, then the optimizer's own step."""

    @jax.jit
    def part(p, b):
        return jax.grad(lambda p: losses(p, b).sum())(p)

    def train(params, state, batch):
        count = len(batch["x"])
        parts = [
            part(params, jax.tree.map(lambda x, i=i: x[i : i + size], batch))
            for i in range(0, count, size)
        ]
        mean = jax.tree.map(
            lambda *leaves: jnp.asarray(
                sum(np.asarray(leaf, np.float64) for leaf in leaves) / count,
                leaves[0].dtype,
            ),
            *parts,
        )
        return opt.step(params, change(mean), state)

    return train


def scaled(name, factor):
    """One leaf of the gradient by a factor."""
    return lambda g: {**g, name: (g[name] * factor).astype(g[name].dtype)}


OPTIMIZERS = {
    "momentum": optim.sgd(lr=0.05, momentum=0.9),
    "adam": optim.adam(lr=0.01),
}


@pytest.mark.parametrize(("name", "steps"), [("momentum", 3), ("adam", 1)])
def test_right_trainers_pass_and_wrong_ones_fail(name, steps):
    """After several steps and after one, with the optimizer's state."""
    opt = OPTIMIZERS[name]
    params, batches = problem(steps=steps)
    negated = {leaf: scaled(leaf, -1) for leaf in SHAPES}
    candidates = {"right": trainer(opt)}
    candidates |= {leaf: trainer(opt, change) for leaf, change in negated.items()}
    if name == "momentum":
        candidates["a thousandth"] = trainer(opt, scaled("out", 1.001))
    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches, candidates
    )
    right = report.of("right")
    assert right.ok, str(right)
    assert right.worst < 0.5
    assert {row.path for row in right.leaves} > {f"params/{leaf}" for leaf in SHAPES}
    assert any(row.path.startswith("state/") for row in right.leaves)
    for leaf in SHAPES:
        failed = {row.path for row in report.of(leaf).failures}
        assert f"params/{leaf}" in failed
        if steps == 1:
            assert {p for p in failed if p.startswith("params")} == {f"params/{leaf}"}
    if name == "momentum":
        assert report.of("a thousandth").failures


def test_the_words_are_about_the_step():
    """Its factor, not that of the parameters, whose change is small beside them."""
    opt = optim.sgd(lr=1e-3)
    params, batches = problem()
    doubled = trainer(opt, scaled("bias", 2))
    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches, {"doubled": doubled}
    )
    (row,) = [row for row in report.failures if row.path == "params/bias"]
    assert row.problem.startswith("its step: off by ")
    assert "it is 2" in row.problem or "it is 1.99" in row.problem


def test_a_small_learning_rate_condemns_no_right_trainer():
    """(p - q) / lr would be off by u |p| / lr, more than the gradient."""
    opt = optim.sgd(lr=1e-6)
    params, batches = problem()
    start = params, opt.init(params)
    train = trainer(opt)

    def implied(p, b):
        q, _ = train(p, opt.init(p), b)
        return losses(p, b).mean(), jax.tree.map(lambda p, q: (p - q) / 1e-6, p, q)

    by_gradient = verify.gradients(
        losses, params, batches[0], {"implied": implied}, finite_differences=False
    )
    assert by_gradient.failures
    by_step = verify.step(losses, opt.step, start, batches, {"mine": train})
    assert not by_step.failures, str(by_step)


def test_a_step_below_rounding_is_not_judged():
    """No step at all would pass as well; bit-equal parameters are said to be so."""
    opt = optim.sgd(lr=1e-9)
    params, batches = problem()
    start = params, opt.init(params)

    def nudged(p, s, b):
        return jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), p), None

    candidates = {"none": lambda p, s, b: (p, None), "up": nudged}
    report = verify.step(losses, opt.step, start, batches, candidates)
    assert not report.ok
    assert not report.failures
    assert "no step at all would pass too" in report.of("up").unjudged[0].unjudged
    none = report.of("none").leaves
    assert all(row.bit_equal or row.unjudged for row in none)


def test_bit_equal_parameters_are_named():
    """The reference's own programs give the reference's own bits."""
    opt = optim.sgd(lr=0.1, momentum=0.9)
    params, batches = problem(steps=2)
    gradient = jax.jit(jax.grad(lambda p, b: losses(p, b).mean()))

    def same(p, s, b):
        w = jnp.ones(len(b["x"]), jnp.float32)
        mean = lambda p: jnp.sum(w * losses(p, b)) / jnp.sum(w)  # noqa: E731
        return jax.jit(opt.step)(p, jax.jit(jax.grad(mean))(p), s)

    hidden = [opt.init(params)]

    def secretive(p, state, b):
        p, own = trainer(opt)(p, hidden[-1], b)
        hidden.append(own)
        return p, None

    candidates = {
        "same": same,
        "stale": lambda p, s, b: opt.step(p, gradient(params, b), s),
        "secretive": secretive,
    }
    start = params, opt.init(params)
    report = verify.step(losses, opt.step, start, batches, candidates)
    assert report.of("same").ok
    # A state of None: the parameters alone are judged, and nothing is called missing.
    assert report.of("secretive").ok
    shown = {row.path for row in report.of("secretive").leaves}
    assert shown == {f"params/{name}" for name in SHAPES}
    own = [row for row in report.of("same").leaves if row.path.startswith("params")]
    assert {row.verdict for row in own} == {"bit-equal"}
    assert report.of("stale").failures


def test_bfloat16_parameters():
    """What rounding hides is not judged, and a wrong sign is not hidden."""
    opt = optim.sgd(lr=0.5)
    params, batches = problem(dtype=jnp.bfloat16)
    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches,
        {"right": trainer(opt), "out": trainer(opt, scaled("out", -1))},
    )  # fmt: skip
    assert not report.of("right").failures, str(report.of("right"))
    assert [row.path for row in report.of("out").failures] == ["params/out"]


def scalar(p, b):
    """A loss that has been reduced."""
    return losses(p, b).mean()


THREE = problem(steps=2, examples=3)


@pytest.mark.parametrize(
    ("argument", "options", "message"),
    [
        ("batches", {"batches": []}, "must be .*, one for each step. Got none"),
        (
            "batches", {"batches": {"x": np.ones(3)}},
            r"must be .*, one for each step\. Got a dict\. Wrap a single batch in a l",
        ),
        (
            "batches", {"batches": np.ones((5, 3))},
            r"must be .* Got a numpy\.ndarray\. Wrap a single batch in a list\.$",
        ),
        (
            "batches", {"batches": iter(THREE[1])},
            r"must be .* Got a list_iterator\. `list` makes one of an iterable\.$",
        ),
        (
            "batches", {"batches": [{**THREE[1][0], "mask": np.ones(2)}]},
            "needs a batch whose leaves all .* Got mask: 2, x: 3, y: 3",
        ),
        (
            "batches", {"batches": [jax.tree.map(lambda x: x[:0], THREE[1][0])]},
            "must have at least one example",
        ),
        ("weights", {"weights": [None] * 2}, "must be one array for each of 1 batches"),
        ("weights", {"weights": [np.ones(4)]}, r"must be one per .*, shape \(3,\)"),
        (
            # The second batch's, before any step of the first is taken.
            "weights",
            {
                "batches": THREE[1],
                "weights": [np.ones(3), -np.ones(3)],
                "candidates": {"any": lambda *_: pytest.fail("a step")},
            },
            "must be finite, at least 0",
        ),
        (
            "weights=..., reduction", {"loss_fn": scalar, "reduction": "sum"},
            "need one loss per example. Got a scalar loss",
        ),
        ("reduction", {"reduction": "median"}, "must be one of 'mean', 'sum'"),
        ("accumulation", {"accumulation": "int32"}, "must be a floating dtype or None"),
        ("candidates", {"candidates": {}}, "must name at least one function"),
        ("state", {"params": {"n": np.int32(3)}}, "must have a floating leaf"),
    ],
)  # fmt: skip
def test_refusals(argument, options, message):
    """Each names the function that was called, its argument, and the rule."""
    given = {
        "loss_fn": losses, "params": THREE[0], "batches": THREE[1][:1],
        "candidates": {"any": lambda p, s, b: (p, s)}, **options,
    }  # fmt: skip
    loss, params = given.pop("loss_fn"), given.pop("params")
    with pytest.raises(ValueError, match=rf"^`step\({argument}=...\)` {message}"):
        verify.step(loss, lambda p, g, s: (p, s), (params, ()), **given)


STATEFUL = lambda p, b, states: (losses(p, b), states)  # noqa: E731


@pytest.mark.parametrize(
    ("loss", "state", "result", "message"),
    [
        (losses, ((),), {}, "(params, opt_state)`. Got a dict"),
        (losses, ((),), ((), (), ()), "(params, opt_state)`. Got a tuple"),
        (STATEFUL, ((), ()), ((), ()), "(params, opt_state, states)`. Got a tuple"),
    ],
)
def test_a_candidate_that_returns_something_else_is_named(loss, state, result, message):
    parts, _, got = message.partition("`")
    call = f"`candidates['mine']({parts[1:-1]}, batch)` must return {parts}{got}"
    with pytest.raises(TypeError, match="^" + re.escape(call)):
        verify.step(
            loss, lambda p, g, s: (p, s), (THREE[0], *state), THREE[1][:1],
            {"mine": lambda *given: result},
        )  # fmt: skip


def test_what_a_candidate_raises_is_raised_with_its_name():
    def broken(*given):
        raise KeyError("lost")

    def check(*arguments):
        with pytest.raises(KeyError, match="lost") as caught:
            verify.step(*arguments)
        note = "raised by the candidate 'mine' of verify.step"
        assert caught.value.__notes__ == [note]

    check(
        losses, lambda p, g, s: (p, s), (THREE[0], ()), THREE[1][:1], {"mine": broken}
    )
    plain = lambda s, b: {"w": s["w"] + b["x"].sum(0)}  # noqa: E731
    check({"mine": broken}, plain, {"w": jnp.ones(5, jnp.float32)}, THREE[1][:1])


def pair_losses(w, batch):
    x, y = batch
    return (x @ w - y) ** 2


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("rows", [3, 5])
def test_one_batch_in_place_of_a_list_of_batches(kind, rows, rng):
    """With 3 rows its first array alone can be taken for a batch."""
    single = kind((rng.normal(size=(rows, 3)), rng.normal(size=rows)))
    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    single = jax.tree.map(np.float32, single)
    note = r"^`step\(batches=...\)` must be a list .*Got 2, each of which .* Wrap a s"
    update = lambda w, g, s: (w - g, s)  # noqa: E731

    def train(w, s, batch):
        return update(w, jax.grad(lambda w: pair_losses(w, batch).mean())(w), s)

    def whole(w, batch):
        return train(w, (), batch)[0]

    refused = []
    for batches in (single, kind(reversed(single))):
        turn = 1 if batches is single else -1
        taken = lambda w, b, turn=turn: pair_losses(w, b[::turn])  # noqa: E731
        with pytest.raises((TypeError, ValueError)) as raised:
            verify.step(taken, update, (w, ()), batches, {"mine": train})
        refused.append(raised.value)
    with pytest.raises((TypeError, ValueError)) as raised:
        verify.step(whole, whole, w, single)
    for error in (*refused, raised.value):
        assert re.search(note, error.__notes__[-1])
    assert verify.step(pair_losses, update, (w, ()), [single], {"mine": train}).ok
    assert verify.step(whole, whole, w, [single]).ok
    # An error of the reference has no such note, if its batches are no arrays.
    broken = lambda w, batch: w.astype(jnp.bfloat16)  # noqa: E731
    with pytest.raises(TypeError, match="must return a state like the one") as raised:
        verify.step(whole, broken, w, [single])
    assert not hasattr(raised.value, "__notes__")


def test_what_is_no_function_is_named():
    state, batches = (THREE[0], ()), THREE[1]
    keeps = lambda p, g, s: (p, s)  # noqa: E731
    for loss, update, candidate, argument, more in [
        (3, keeps, keeps, "loss_fn", ""),
        (losses, "sgd", keeps, "update", ""),
        (losses, keeps, 5, r"candidates={'mine': \.\.\.}", ", and not what it returns"),
    ]:
        match = rf"^`step\({argument}(=\.\.\.)?\)` must be a function{more}\. Got "
        with pytest.raises(TypeError, match=match):
            verify.step(loss, update, state, batches, {"mine": candidate})


def test_a_loss_that_wants_a_key_is_refused():
    opt = optim.sgd(lr=0.1)
    params, batches = problem(examples=3)
    wants = lambda p, b, key: losses(p, b)  # noqa: E731
    with pytest.raises(TypeError, match=r"^`step\(loss_fn=...\)` .*verify\.keyed"):
        verify.step(
            wants, opt.step, (params, opt.init(params)), batches, {"any": losses}
        )


OPTIMIZER_DEFECTS = {
    "no momentum": optim.sgd(lr=0.05),
    "twice the rate": optim.sgd(lr=0.1, momentum=0.9),
    "dampened": optim.sgd(lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": optim.sgd(lr=0.05, momentum=0.9, nesterov=True),
    "weight decay": optim.sgd(lr=0.05, momentum=0.9, weight_decay=1e-3),
    "ascending": optim.sgd(lr=0.05, momentum=0.9, maximize=True),
}


def test_another_optimizer_is_found_by_its_parameters():
    """Each hides its state; after two steps no other rule gives these parameters."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem(steps=2)

    def hiding(other):
        states = []

        def train(p, state, b):
            own = other.init(params) if not states else states[-1]
            p, own = trainer(other)(p, own, b)
            states.append(own)
            return p, None

        return train

    candidates = {name: hiding(other) for name, other in OPTIMIZER_DEFECTS.items()}
    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches,
        {"right": hiding(opt), **candidates},
    )  # fmt: skip
    assert report.of("right").ok, str(report.of("right"))
    for name in OPTIMIZER_DEFECTS:
        failed = {row.path for row in report.of(name).failures}
        assert failed == {f"params/{leaf}" for leaf in SHAPES}, name


def test_weights_and_sums_are_the_references_too():
    """A trainer that forgets the weights, or divides, is wrong."""
    opt = optim.sgd(lr=0.01)
    params, batches = problem(steps=2, examples=5)
    weights = [np.float32([1, 2, 0, 1, 3]), np.float32([2, 1, 1, 0, 0.5])]
    of_batch = {float(b["x"][0, 0]): w for b, w in zip(batches, weights, strict=True)}

    def summed(weigh, divide):
        def train(p, s, b):
            w = weigh(jnp.asarray(of_batch[float(b["x"][0, 0])]))
            gradient = jax.grad(lambda p: jnp.sum(w * losses(p, b)) / divide(w))(p)
            return opt.step(p, gradient, s)

        return train

    one = lambda w: jnp.float32(1)  # noqa: E731
    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches,
        {
            "right": summed(lambda w: w, one),
            "forgotten": summed(jnp.ones_like, one),
            "divided": summed(lambda w: w, jnp.sum),
        },
        weights=weights, reduction="sum",
    )  # fmt: skip
    assert report.of("right").ok, str(report.of("right"))
    assert report.of("forgotten").failures
    assert report.of("divided").failures


def test_a_state_that_is_wrong_fails_where_the_parameters_hold():
    """The buffer of the next step, which no parameter shows yet."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem()
    right = trainer(opt)

    def forgetful(p, s, b):
        moved, state = right(p, s, b)
        return moved, jax.tree.map(lambda x: jnp.zeros_like(x) if x.ndim else x, state)

    report = verify.step(
        losses, opt.step, (params, opt.init(params)), batches, {"mine": forgetful}
    )
    failed = {row.path for row in report.failures}
    assert failed == {f"state/{leaf}/momentum_buffer" for leaf in SHAPES}


def dropped(key):
    """A right trainer with dropout, from one key or from another at each call."""
    opt = OPTIMIZERS["momentum"]

    def train(params, state, batch):
        own = next(key) if hasattr(key, "__next__") else key
        kept = jax.random.bernoulli(own, 0.8, batch["x"].shape)
        thinned = {**batch, "x": jnp.where(kept, batch["x"] / np.float32(0.8), 0)}
        slope = jax.grad(lambda p: losses(p, thinned).mean())(params)
        return opt.step(params, slope, state)

    return train


def test_a_right_trainer_with_dropout_is_never_called_wrong():
    """Its numbers are not the reference's: it is not judged, and the report says so."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem(steps=2)
    candidates = {
        "jitted": jax.jit(dropped(jax.random.key(3))),
        "eager": dropped(jax.random.key(3)),
        "anew": dropped(iter(jax.random.split(jax.random.key(4), 9))),
        "wrong": trainer(opt, scaled("out", 2)),
    }
    state = params, opt.init(params)
    report = verify.step(losses, opt.step, state, batches, candidates)
    for name, words in (
        ("jitted", "it draws random numbers and the loss draws none"),
        ("eager", "it draws random numbers and the loss draws none"),
        ("anew", "three calls with the same arguments gave three answers"),
    ):
        own = report.of(name)
        assert not own.failures, name
        assert not own.attributions
        assert {words in row.unjudged for row in own.unjudged} == {True}
    assert report.of("wrong").failures
    assert [one.candidate for one in report.attributions] == ["wrong"]


def test_gradients_that_are_not_set_to_zero_are_no_random_numbers():
    """Further calls of a trainer that accumulates add the same gradient each."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem(steps=3)

    def accumulating(zeroed):
        kept = []

        def train(params, state, batch):
            kept.append(jax.grad(lambda p: losses(p, batch).mean())(params))
            total = jax.tree.map(lambda *leaves: sum(leaves), *kept)
            if zeroed:
                kept.clear()
            return opt.step(params, total, state)

        return train

    candidates = {"right": accumulating(True), "wrong": accumulating(False)}
    state = params, opt.init(params)
    report = verify.step(losses, opt.step, state, batches, candidates)
    assert report.of("right").ok, str(report)
    assert report.of("wrong").failures, str(report)
    (cause,) = report.attributions
    assert (cause.candidate, cause.step, cause.part) == ("wrong", 2, "gradient")
    assert any("it keeps something from call to call" in x for x in report.notes)


def test_trainers_may_donate_what_they_are_given():
    """Each gets arrays of its own, also when it is called again."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem(steps=2)
    state = params, opt.init(params)

    def step(params, state, batch, factor):
        slope = jax.grad(lambda p: factor * losses(p, batch).mean())(params)
        return opt.step(params, slope, state)

    donating = jax.jit(step, static_argnums=3, donate_argnums=(0, 1))
    candidates = {
        f"times {factor}": functools.partial(donating, factor=factor)
        for factor in (1, 2)
    }
    report = verify.step(losses, opt.step, state, batches, candidates)
    assert report.of("times 1").ok, str(report)
    assert report.of("times 2").failures
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batches)))


@pytest.mark.parametrize("shown", [(None, ()), (None, None), verify.Trained(None)])
def test_nothing_shown_is_nothing_right(shown):
    """There was no row then, and no row was wrong."""
    opt = OPTIMIZERS["momentum"]
    params, batches = problem()
    message = (
        r"`candidates\['quiet'\]\(params, opt_state, batch\)` must return the new "
        r"parameters: a step is judged by them. Got None in their place"
    )
    with pytest.raises(TypeError, match=message):
        verify.step(
            losses,
            opt.step,
            (params, opt.init(params)),
            batches,
            {"quiet": lambda *given: shown},
        )


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ((1.0,), "a tuple of 1"),
        ([1.0, (), (), ()], "a list of 4"),
        ({"params": 1.0, "state": ()}, "a dict"),
    ],
)
def test_a_state_of_another_length_is_refused(state, got):
    """With the two forms."""
    rule = (
        r"^`step\(state=...\)` must be \(params, opt_state\), or \(params, opt_state, "
    )
    remedy = r"An optimizer that keeps nothing has the state \(\)\."
    with pytest.raises(ValueError, match=rf"{rule}.*Got {got}\. {remedy}"):
        verify.step(losses, None, state, [{}], {"any": losses})


def test_a_state_may_be_a_list_and_batches_a_tuple():
    params, batches = problem(examples=3)
    update = lambda p, g, s: (jax.tree.map(lambda p, g: p - g, p, g), s)  # noqa: E731

    def train(p, s, b):
        return update(p, jax.grad(lambda p: losses(p, b).mean())(p), s)

    state = [params, {"n": np.int32(3)}]
    report = verify.step(losses, update, state, tuple(batches), {"mine": train})
    assert report.ok, str(report)
    paths = {"state/n", *(f"params/{name}" for name in SHAPES)}
    assert {row.path for row in report.leaves} == paths
    with pytest.raises(ValueError, match=r"^`step\(batches=...\)` .*Got none"):
        verify.step(losses, update, state, (), {"mine": train})


@pytest.mark.parametrize("whole", [False, True])
def test_numpy_batches_are_what_jax_makes_of_them(whole):
    """Labels of 64 bits, as of scikit-learn's data, and numbers in float64."""
    rng = np.random.default_rng(5)
    params = {"w": rng.normal(size=(5, 3)).astype(np.float32)}
    batch = rng.normal(size=(7, 5)), rng.integers(0, 3, 7)
    opt = optim.sgd(lr=0.1)

    def loss(p, b):
        x, y = b
        scores = jax.nn.log_softmax(x @ p["w"])
        return -jnp.take_along_axis(scores, y[:, None], 1)[:, 0]

    def train(params, state, b, factor=1.0):
        slope = jax.grad(lambda p: loss(p, b).mean())(params)
        slope = jax.tree.map(lambda x: factor * x, slope)
        return opt.step(params, slope, state)

    wrong = functools.partial(train, factor=1.01)
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        state = params, opt.init(params)
        if whole:
            judge = verify.step_judge(lambda s, b: train(*s, b), state, [batch] * 2)
            right = judge(lambda s, b: train(*s, b)).ok
            found = judge(lambda s, b: wrong(*s, b)).ok
        else:
            judge = verify.step_judge(loss, opt.step, state, [batch] * 2)
            right, found = judge({"own": train}).ok, judge({"own": wrong}).ok
    assert (right, found) == (True, False)

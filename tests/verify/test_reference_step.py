"""Steps that are one function, judged by another: no loss and no gradient is known."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist import verify
from jdist.verify.bound import EXTRA, confidence
from jdist.verify.steps.reference_step import ReferenceStep

RATE = optax.linear_schedule(0.02, 0.2, 4)
LARGEST = 1.5


def optimizer(rate=RATE, largest=LARGEST, keep=0.9):
    return optax.chain(
        optax.clip_by_global_norm(largest),
        optax.trace(keep),
        optax.scale_by_learning_rate(rate),
    )


def losses(params, batch, mean):
    x = (batch["x"] - mean[None]) @ params["w"] + params["b"][None]
    return ((jnp.tanh(x) - batch["y"]) ** 2).sum(-1)


def train(
    state, batch, tx=None, change=lambda g: g, at=lambda p: p, size=None, center=True
):
    """One step, in micro-batches of a size; the rest is where defects are planted."""
    tx, count = tx or optimizer(), len(batch["x"])
    mean = state["batch_stats"]["mean"]
    parts = range(0, count, size or count)
    each = [
        jax.grad(lambda p, b: losses(p, b, mean).sum() / count)(
            at(state["params"]),
            jax.tree.map(lambda x, i=i: x[i : i + (size or count)], batch),
        )
        for i in parts
    ]
    gradient = change(jax.tree.map(lambda *x: sum(x[1:], x[0]), *each))
    moves, own = tx.update(gradient, state["opt_state"])
    new = 0.9 * mean + 0.1 * batch["x"].mean(0)
    return {
        "params": optax.apply_updates(state["params"], moves),
        "opt_state": own,
        "batch_stats": {"mean": new if center else mean},
        "step": state["step"] + 1,
    }


def problem(dtype=jnp.float32, steps=2, examples=11):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    params = {"w": array(5, 3), "b": array(3)}
    state = {
        "params": params,
        "opt_state": optimizer().init(params),
        "batch_stats": {"mean": array(5) / 8},
        "step": 0,
    }
    batches = [{"x": array(examples, 5), "y": array(examples, 3)} for _ in range(steps)]
    return state, batches


def scaled(name, factor):
    return lambda g: {**g, name: g[name] * factor}


FIRST = problem()[0]["params"]
UNKNOWN = "gradient or optimizer update"
WRONG = {
    "negated": ({"change": scaled("b", -1)}, [(1, UNKNOWN)]),
    "a thousandth": ({"change": scaled("w", 1.001)}, [(1, UNKNOWN)]),
    "not clipped": ({"tx": optimizer(largest=1e9)}, [(1, UNKNOWN)]),
    "late schedule": (
        {"tx": optimizer(lambda n: RATE(jnp.maximum(n - 1, 0)))},
        [(2, UNKNOWN)],
    ),
    "twice the rate": ({"tx": optimizer(lambda n: 2 * RATE(n))}, [(1, UNKNOWN)]),
    "no momentum": ({"tx": optimizer(keep=0.0)}, [(2, UNKNOWN)]),
    "old statistics": ({"center": False}, [(1, "model state")]),
    "old parameters": ({"at": lambda _: FIRST}, [(2, UNKNOWN)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def report():
    """Of a right trainer in micro-batches, and of wrong ones, over two steps."""
    state, batches = problem()
    candidates = {"right": partial(train, size=4)}
    candidates |= {name: partial(train, **how) for name, (how, _) in WRONG.items()}
    return verify.step(candidates, jax.jit(train), state, batches)


def test_a_right_step_passes_after_several(report):
    right = report.of("right")
    assert right.ok, str(right)
    assert 0 < right.worst < 0.5
    assert {row.path.partition("/")[0] for row in right.leaves} == {
        "params", "opt_state", "batch_stats", "step"
    }  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_fails_and_its_part_is_named(report, name):
    own = report.of(name)
    assert own.failures
    assert [(a.step, a.part) for a in own.attributions] == WRONG[name][1], str(own)
    if name == "twice the rate":
        row = next(row for row in own.failures if row.path == "params/b")
        assert row.problem.startswith("after step 1 of 2: its step: off by ")
        assert row.problem.endswith("it is 2 times the reference")
    if name == "negated":
        assert "step(loss_fn, update, state, batches" in own.attributions[0].why


def test_a_count_that_is_wrong_is_the_update_s():
    """It does not depend on the batch, so that no gradient can have made it."""
    state, batches = problem(steps=1)

    def counted(state, batch):
        new = train(state, batch)
        first, kept, scale = new["opt_state"]
        return new | {"opt_state": (first, kept, scale._replace(count=scale.count + 1))}

    own = verify.step(counted, train, state, batches)
    (cause,) = own.attributions
    assert cause.part == "optimizer update"
    assert "opt_state/2/count, which does not depend on the batch" in cause.why


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions(dtype):
    """Parts that are rounded to bfloat16 are right; so are those of float64."""
    state, batches = problem(jnp.dtype(dtype), steps=3, examples=24)
    factor = 3.0 if dtype == "bfloat16" else 1 + 1e-9
    report = verify.step(
        {
            "one by one": partial(train, size=1),
            "halves": partial(train, size=12),
            "wrong": partial(train, change=scaled("b", factor)),
        },
        train, state, batches,
    )  # fmt: skip
    for name in ("one by one", "halves"):
        assert not report.of(name).failures, str(report.of(name))
    failed = {row.path for row in report.of("wrong").failures}
    assert "opt_state/1/trace/b" in failed


def test_a_sum_in_parts_is_allowed_a_rounding_of_each_part():
    """Parts that cancel are rounded more coarsely than their sum."""
    size = jnp.asarray(np.random.default_rng(1).uniform(1, 2, 12), jnp.bfloat16)
    batch = jnp.concatenate([size, -size])

    def step(state, batch):
        return {"params": state["params"] + batch.sum()}

    def by_parts(state, batch):
        halves = batch.reshape(2, -1).sum(axis=1)
        return {"params": state["params"] + halves[0] + halves[1] + 2.0**-5}

    start = {"params": jnp.bfloat16(0)}
    (row,) = verify.step(by_parts, step, start, [batch]).leaves
    assert not row.problem


def drawn(state, batch, size=None):
    """Dropout from one key of the state, by the shape of each part."""
    key, own = jax.random.split(state["key"])
    count = len(batch)

    def loss(w, x):
        kept = jax.random.bernoulli(own, 0.8, x.shape)
        return ((jnp.where(kept, x, 0) @ w) ** 2).sum() / count

    parts = [batch[i : i + (size or count)] for i in range(0, count, size or count)]
    gradient = sum(jax.grad(loss)(state["params"], x) for x in parts)
    return {"params": state["params"] - 0.1 * gradient, "key": key}


def test_draws_that_depend_on_the_split_are_not_judged():
    """With the same split the same numbers are drawn: then it is judged."""
    rng = np.random.default_rng(0)
    state = {
        "params": jnp.asarray(rng.normal(size=3), jnp.float32),
        "key": jax.random.key(1),
    }
    batch = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    candidates = {"whole": jax.jit(drawn), "split": partial(drawn, size=4)}
    report = verify.step(candidates, drawn, state, [batch])
    assert report.of("whole").ok, str(report)
    assert not report.of("split").failures
    assert (
        "a split of the batch draws others" in report.of("split").unjudged[0].unjudged
    )


def test_what_a_trainer_keeps_to_itself_is_not_judged():
    """And it is not called again for the same step, which would be another one."""
    state, batches = problem()
    kept, calls = [state], []

    def keeping(_, batch, factor):
        calls.append(1)
        kept.append(train(kept[-1], batch, change=scaled("w", factor)))
        return kept[-1] | {"opt_state": None}

    right = verify.step(partial(keeping, factor=1.0), train, state, batches)
    assert right.ok, str(right)
    assert not any(row.path.startswith("opt_state") for row in right.leaves)
    kept[1:], calls[:] = [], []
    wrong = verify.step(partial(keeping, factor=2.0), train, state, batches)
    assert {row.path for row in wrong.failures} == {"params/w", "params/b"}
    assert len(calls) == 1


def test_arrays_over_several_devices_are_compared_where_they_lie():
    """A trainer that returns sharded parameters, and reports beside them."""
    state, batches = problem(examples=12)
    mesh = Mesh(np.array(jax.devices("cpu")[:3]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    beside = lambda state, batch, **how: (train(state, batch, **how), 0.5)  # noqa: E731

    def sharded(state, batch, **how):
        return jax.jit(partial(beside, **how))(state, jax.device_put(batch, rows))

    candidates = {
        "right": sharded, "wrong": partial(sharded, change=scaled("w", 1.01))
    }  # fmt: skip
    report = verify.step(candidates, beside, state, batches)
    assert report.of("right").ok, str(report)
    assert report.of("wrong").failures


BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


def test_code_that_cannot_be_seen_has_a_note():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)

    def step(state, batch):
        return jax.pure_callback(lambda w: np.asarray(w), shape, state - batch.mean(0))

    report = verify.step(step, step, jnp.ones(3, jnp.float32), [BATCH])
    missed = "the rounding of pure_callback was not measured: there the bound is too na"
    assert report.notes[-1].startswith(missed)
    assert {row.candidate for row in report.leaves} == {"step_fn"}
    # A step that can be seen has no note.
    assert verify.step({"mine": jax.jit(plain)}, plain, STATE, [BATCH]).notes == ()


STATE = {"params": jnp.ones(3, jnp.float32), "count": jnp.int32(0)}
ALIKE = "must return a state like the one that it is given. Got "
OF_BATCH = "must return a state with numbers that depend on the batch. Got none that "


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (
            lambda s, b: s["params"] - b.mean(0), TypeError,
            ALIKE + "no such leaf at count for int32 of shape ()",
        ),
        (
            lambda s, b: s | {"params": s["params"].astype("bfloat16")}, TypeError,
            ALIKE + "bfloat16 of shape (3,) at params for float32",
        ),
        (
            lambda s, b: {**s, "count": s["count"] + 1}, ValueError,
            OF_BATCH + "does. If it keeps parameters of its own, return them",
        ),
        (
            lambda s, b: {"count": s["count"], "weights": s["params"] - b.mean(0)},
            TypeError, ALIKE + "no such leaf at params for float32 of shape (3,)",
        ),
        (
            lambda s, b: ({**s, "params": s["params"] - b.mean(0)}, 0.0, 0.0),
            TypeError, ALIKE + "no such leaf at count for int32 of shape ()",
        ),
        (
            lambda s, b: (b.mean(0), 0.0), TypeError,
            ALIKE + "no such leaf at count for int32 of shape ()",
        ),
        (
            lambda s, b: {**s, "count": s["count"] + (b > 0).sum(dtype="int32")},
            ValueError, OF_BATCH,
        ),
    ],
)  # fmt: skip
def test_references_that_cannot_be_judged_by(reference, error, message):
    refusal = "^" + re.escape(f"`step(reference_step=...)` {message}")
    with pytest.raises(error, match=refusal):
        verify.step(lambda s, b: s, reference, STATE, [BATCH])


def test_another_state_is_refused_by_its_path_or_its_containers():
    state = {"a": (STATE["params"], STATE["params"]), "b": ()}
    for new, got in (
        ({**state, "a": (STATE["count"], BATCH[0])}, "int32 of shape () at a/0 for fl"),
        ({**state, "a": list(state["a"])}, "a dict of other containers"),
    ):
        message = re.escape(f"`step(reference_step=...)` {ALIKE}{got}")
        with pytest.raises(TypeError, match=f"^{message}"):
            verify.step(plain, lambda s, b, new=new: new, state, [BATCH])


def test_a_reference_that_cannot_be_traced_is_named():
    concrete = lambda s, b: {**s, "params": s["params"] * float(b.mean())}  # noqa: E731
    with pytest.raises(jax.errors.ConcretizationTypeError, match="float") as raised:
        verify.step(plain, concrete, STATE, [BATCH])
    notes = " ".join(raised.value.__notes__)
    assert "a function of the state and the batch that JAX can trace" in notes


@pytest.mark.parametrize("options", [{"weights": [jnp.ones(4)]}, {"reduction": "sum"}])
def test_a_reference_step_has_its_own_weights_and_reduction(options):
    message = (
        r"^`step\(weights=..., reduction=...\)` need a loss and candidates. Got two "
    )
    message += r"steps. The reference step has its own\."
    with pytest.raises(ValueError, match=message):
        verify.step(plain, plain, STATE, [BATCH], **options)


def plain(state, batch):
    return {**state, "params": state["params"] - batch.mean(0)}


@pytest.mark.parametrize(
    ("step_fn", "batches", "error", "message"),
    [
        (
            plain, {"x": 1}, ValueError,
            r"^`step\(batches=...\)` must be .*, one for each step. Got a dict",
        ),
        (
            {}, [BATCH], ValueError,
            r"^`step\(candidates=...\)` must name at least one function. Got {}",
        ),
        (
            lambda s, b: {"params": None, "count": s["count"]}, [BATCH],
            None, "is missing",
        ),
        (
            lambda s, b: None, [BATCH], TypeError,
            r"^`step_fn\(state, batch\)` must return a part of its state that depends ",
        ),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_judged(step_fn, batches, error, message):
    if error is None:
        report = verify.step(step_fn, plain, STATE, batches)
        assert [row.path for row in report.failures] == ["params"]
        return
    with pytest.raises(error, match=message):
        verify.step(step_fn, plain, STATE, batches)


def test_a_leaf_that_the_reference_has_not_is_wrong():
    more = lambda s, b: {**plain(s, b), "more": s["params"]}  # noqa: E731
    (row,) = verify.step(more, plain, STATE, [BATCH]).failures
    assert (row.path, row.problem) == ("more", "not in the reference")


def test_parameters_cannot_be_kept_to_themselves():
    """Neither all of them nor a part; what the reference has as None may be None."""
    state = {
        "params": {"a": {"w": STATE["params"]}, "b": None},
        "seen": STATE["params"],
    }

    def reference(state, x):
        new = {"a": {"w": state["params"]["a"]["w"] - x.mean(0)}, "b": None}
        return {"params": new, "seen": state["seen"] + x.mean(0)}

    def hidden(params):
        return lambda state, x: {**reference(state, x), "params": params}

    assert verify.step(reference, reference, state, [BATCH]).ok
    for params, path in ((None, "params"), ({"a": None, "b": None}, "params/a")):
        with pytest.raises(TypeError, match=rf"all new parameters.*None at {path}\."):
            verify.step(hidden(params), reference, state, [BATCH])


def test_a_step_without_its_metrics_is_refused():
    beside = lambda s, b: (plain(s, b), 0.0)  # noqa: E731
    more = lambda s, b: (plain(s, b), 0.0, 0.0)  # noqa: E731
    message = (
        r"^`step_fn\(state, batch\)` must return \(state, anything else\), as the "
    )
    for step_fn, got in ((plain, "dict"), (more, "tuple")):
        with pytest.raises(
            TypeError, match=rf"{message}reference step does. Got a {got}"
        ):
            verify.step(step_fn, beside, STATE, [BATCH])


class Pair(NamedTuple):
    """A state with names of its own."""

    first: jax.Array
    second: jax.Array


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        (lambda *x: x[:1], ["0/w"]),
        (lambda *x: x[:2], ["params/w", "state/m"]),
        (lambda *x: list(x[:3]), ["params/w", "state/m", "states/n"]),
        (lambda *x: x, ["0/w", "1/m", "2/n", "3/k"]),
        (lambda *x: Pair(*x[:2]), ["first/w", "second/m"]),
    ],
)
def test_parts_of_a_state_have_their_names(kind, paths):
    """Those of parameters, optimizer and model, if it is a tuple of as many parts."""
    state = kind(*({name: jnp.ones(3, jnp.float32)} for name in "wmnk"))

    def step(state, batch):
        return jax.tree.map(lambda x: x - batch.mean(0), state)

    report = verify.step(jax.jit(step), step, state, [BATCH])
    assert [row.path for row in report.leaves] == paths
    assert report.bit_equal
    assert not report.notes


def test_bounds_are_in_proportion_to_the_precision():
    """Also where the parts of a step cancel; its perturbations are magnified then."""
    bounds = {}
    for dtype in ("float32", "float64"):
        batch = jnp.asarray(np.random.default_rng(0).integers(-999, 999, 64), dtype)
        state = {"params": jnp.ones((), dtype)}
        step = lambda s, b: {"params": s["params"] + (b - b.mean()).sum()}  # noqa: E731
        (found,) = ReferenceStep(step, state, batch).moments(state, [batch], None)
        bounds[dtype] = float(found.limits["params"].bound)
    assert 0.2 < bounds["float64"] / bounds["float32"] * 2**29 < 5


def centered(state, batch, rate=0.1, late=False, factor=1.0):
    """A bias that the batch's mean takes away again, and averages of parameters."""

    def loss(p):
        hidden = batch["x"] @ p["w"] + p["b"][None]
        hidden = hidden - hidden.mean(0)[None]
        return ((hidden - batch["y"]) ** 2).mean()

    gradient = jax.grad(loss)(state["params"])
    gradient = {**gradient, "b": gradient["b"] * factor}
    new = jax.tree.map(lambda p, g: p - rate * g, state["params"], gradient)
    seen = state["params"] if late else new
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], seen)
    return {"params": new, "average": average}


def test_terms_that_cancel_make_a_step_that_is_judged():
    """A bias before batch statistics, which begins with zeros; and not one that is lost
    in the rounding of its parameters, be it as small."""
    batches = problem()[1]
    shapes = {"w": (5, 3), "b": (3,)}
    params = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    state = {"params": params, "average": params}
    moved = jax.jit(centered)(state, batches[0])
    assert 0 < np.abs(moved["params"]["b"]).max() < 1e-6

    def otherwise(state, batch):
        """The bias moves by rounding alone, which is another's in another program."""
        new = centered(state, batch)
        return {name: {**x, "b": x["b"] / 2} for name, x in new.items()}

    candidates = {
        "right": jax.jit(centered),
        "rounded": otherwise,
        "late": partial(centered, late=True),
    }
    report = verify.step(candidates, centered, state, batches)
    assert report.of("right").ok, str(report)
    assert report.of("rounded").ok, str(report)
    verdicts = {row.path: row.verdict for row in report.of("rounded").leaves}
    assert (verdicts["params/b"], verdicts["average/b"]) == ("equal", "equal")
    assert [a.part for a in report.of("late").attributions] == ["average"]
    ones = jax.tree.map(jnp.ones_like, state)
    slow = partial(centered, rate=1e-12)
    hidden = verify.step(jax.jit(slow), slow, ones, batches)
    assert {row.path for row in hidden.leaves if row.bit_equal or row.unjudged} == {
        "params/w", "params/b", "average/w", "average/b"
    }  # fmt: skip


def moments(step, state, batches, accumulation=None):
    """The steps of a reference, with the limits that are derived for others."""
    return list(
        ReferenceStep(step, state, batches[0]).moments(state, batches, accumulation)
    )


def test_a_step_without_arithmetic_is_bounded_by_roundings_of_its_way():
    """Those of the parameters, and of the way from the start if no step is longer."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(4, 300)), jnp.float32)
    found = moments(lambda s, b: {"params": b}, {"params": values[0]}, values[1:])
    wide = np.asarray(values, np.float64)
    for t, moment in enumerate(found, 1):
        before, after = wide[t - 1], wide[t]
        way = np.maximum(np.abs(after - wide[0]), np.abs(after - before))
        own = np.abs(after) + np.sqrt(2 * EXTRA) * way
        expected = confidence(300) * np.sqrt(t) * 2.0**-24 * own + EXTRA * 2.0**-126
        np.testing.assert_allclose(moment.limits["params"].bound, expected, rtol=1e-12)
        np.testing.assert_array_equal(moment.moves["params"], after - before)
        np.testing.assert_array_equal(moment.before["params"], before)


def test_each_rounding_of_each_step_is_one_of_its_own():
    """Up to lambda deviations; the steps themselves are those in float64."""
    rng = np.random.default_rng(0)
    factors = jnp.asarray(rng.uniform(1, 2, (3, 4000)), jnp.float32)
    step = lambda s, b: {"params": s["params"] * b}  # noqa: E731
    found = moments(step, {"params": factors[0]}, factors[1:])
    start, *rest = np.asarray(factors, np.float64)
    wide, apart = start, []
    for t, (moment, factor) in enumerate(zip(found, rest, strict=True), 1):
        before, wide = wide, wide * factor
        np.testing.assert_array_equal(moment.moves["params"], wide - before)
        own = np.asarray(moment.wanted["params"], np.float64)
        way = np.maximum(np.abs(wide - start), np.abs(wide - before))
        width = confidence(4000) * 2.0**-24
        others = moment.limits["params"].bound - 2 * np.abs(own - wide)
        others -= width * np.sqrt(t) * (np.abs(own) + np.sqrt(2 * EXTRA) * way)
        apart.append(others / np.sqrt(2) / width / np.abs(own))
    # Of 16 draws from -1 to 1 the largest: if they were one draw, some would be near 0.
    assert apart[0].min() > 0.5
    assert 0.999 < apart[0].max() < 1.001
    # The same draws in the second step would give twice those of the first.
    assert 1.4 < np.median(apart[1] / apart[0]) < 1.9


@pytest.mark.parametrize(
    "total", [lambda x: jnp.ones(len(x), x.dtype) @ x, lambda x: x.sum(0)]
)
def test_sixteen_bit_sums_are_accumulated_as_it_is_said(total):
    """One by one in bfloat16 is right only for who accumulates so."""
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.uniform(1, 2, (600, 3)), jnp.bfloat16)
    state = {"params": jnp.zeros(3, jnp.bfloat16)}

    def one_by_one(state, batch):
        add = lambda total, row: (total + row, None)  # noqa: E731
        return {"params": jax.lax.scan(add, state["params"], batch)[0]}

    def step(state, batch):
        return {"params": state["params"] + total(batch)}

    for accumulation, right in ((None, False), (jnp.bfloat16, True)):
        report = verify.step(
            one_by_one, step, state, [batch], accumulation=accumulation
        )
        assert report.ok == right, accumulation
        assert bool(report.failures) != right


def test_draws_excuse_any_difference_beyond_the_bound():
    """Also one that is hardly larger than the bound; and none that repeats itself."""
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)
    state, step = {"params": batch[0]}, lambda s, b: {"params": b}
    (moment,) = moments(step, state, [batch[1]])
    apart = jnp.asarray(1.5 * moment.limits["params"].bound, jnp.float32)
    sign = lambda key: jax.random.rademacher(key, (5,), jnp.float32)  # noqa: E731
    keys = iter(jax.random.split(jax.random.key(0), 3))
    candidates = {
        "fixed": lambda s, b: {"params": b + apart},
        "drawn": lambda s, b: {"params": b + apart * sign(jax.random.key(1))},
        "anew": lambda s, b: {"params": b + apart * sign(next(keys))},
    }
    report = verify.step(candidates, step, state, [batch[1]])
    assert all(1 < row.ratio < 2 for row in report.leaves)
    assert {row.candidate for row in report.failures} == {"fixed"}
    words = {row.candidate: row.unjudged for row in report.unjudged}
    assert words["drawn"].startswith("it draws random numbers and the loss draws none")
    assert words["anew"].startswith("three calls with the same arguments gave three")


class Hidden:
    """A trainer that cannot be traced; counts its calls."""

    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    def __call__(self, state, batch):
        self.calls += 1
        new = state["params"] - self.factor * batch.mean(0)
        return {**state, "params": jnp.nextafter(new, jnp.float32(9))}


def test_a_wrong_trainer_whose_draws_cannot_be_seen_has_a_note():
    """It is called again to see whether it repeats itself, and a right one is not."""
    right, wrong = Hidden(1), Hidden(2)
    report = verify.step({"right": right, "wrong": wrong}, plain, STATE, [BATCH] * 2)
    assert {row.candidate for row in report.failures} == {"wrong"}
    assert 0 < report.of("right").worst < 1
    assert (right.calls, wrong.calls) == (2, 1 + 1)
    (note,) = [note for note in report.notes if "cannot be seen" in note]
    assert note.startswith("wrong: whether it draws random numbers of its own")
    assert report.notes == (note,)


def test_a_step_that_rounding_hides_is_not_judged():
    """Beside large parameters; the size of a step is that of what is added to them."""
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
    state = {"params": jnp.full(3, 1e8, jnp.float32)}
    step = lambda s, b: {"params": s["params"] - b.sum(0)}  # noqa: E731
    (moment,) = moments(step, state, [batch])
    size = np.sqrt((np.asarray(batch, np.float64) ** 2).sum(0))
    np.testing.assert_allclose(moment.sizes["params"], size, rtol=1e-12)

    candidates = {
        "same": jax.jit(step),
        "nudged": lambda s, _: {"params": jnp.nextafter(s["params"], jnp.float32(0))},
        "far": lambda s, _: {"params": s["params"] + 1e4},
    }
    # Behind a maximum the size of a step is not known.
    limited = lambda s, b: {"params": jnp.maximum(step(s, b)["params"], 0)}  # noqa: E731
    (moment,) = moments(limited, state, [batch])
    assert not moment.sizes["params"].any()
    (row,) = verify.step(candidates["nudged"], limited, state, [batch]).leaves
    assert row.verdict == "not judged"
    same, nudged, far = verify.step(candidates, step, state, [batch]).leaves
    # The bits of the reference, and what is wrong by more than rounding, are judged.
    assert (same.verdict, same.unjudged) == ("bit-equal", "")
    assert not nudged.problem
    assert nudged.unjudged.startswith("its largest step is ")
    assert nudged.unjudged.endswith("no step at all would pass too")
    assert (far.verdict, far.unjudged) == ("FAILS", "")


def test_a_leaf_that_does_not_move_is_judged():
    """No step at all is then what is right."""
    state = {"params": STATE["params"], "fixed": jnp.full(3, 0.7, jnp.float32)}
    near = jnp.nextafter(state["fixed"], jnp.float32(0))
    for fixed, verdict in ((near, "equal"), (0.999 * near, "FAILS")):
        step_fn = lambda s, b, fixed=fixed: {**plain(s, b), "fixed": fixed}  # noqa: E731
        rows = verify.step(step_fn, plain, state, [BATCH]).leaves
        assert {row.path: row.verdict for row in rows}["fixed"] == verdict

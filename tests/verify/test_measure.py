"""The measured bound: right programs pass, wrong ones do not, and blindness is said.

Each case is one on which a judge that evaluates the loss again in float64 fails: noise
that float64 draws differently, casts, entries of unequal size, gradients that cancel.
"""

import ctypes
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import VerificationError, verify
from jdist.verify.bound import measured_bound
from jdist.verify.measure import (
    HEAVY,
    MAGNIFIED,
    Counted,
    LossPrograms,
    ReducedLoss,
    _coupling,
    _leading,
    _shares,
    magnified,
    trim,
)
from jdist.verify.oracle import differentiated

BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def as_a_user():
    """JAX's own defaults: float32, standard promotion."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def mean_of(losses):
    """`jax.value_and_grad` of the mean, compiled."""
    return jax.jit(jax.value_and_grad(lambda p, b: losses(p, b).mean()))


def one_by_one(losses):
    """The mean of the examples' gradients, one at a time, last first."""
    fn = mean_of(losses)

    def candidate(params, batch):
        count = len(jax.tree.leaves(batch)[0])
        rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(count)]
        parts = [fn(params, row) for row in reversed(rows)]
        return jax.tree.map(lambda *x: sum(x) / count, *parts)

    return candidate


def wrong_ones(losses, params, batch):
    """Gradients that no judge may take for the right one."""
    value, gradient = mean_of(losses)(params, batch)
    half = jax.tree.map(lambda x: x[: len(x) // 2], batch)
    scaled = {"zero": 0, "negated": -1, "doubled": 2}
    made = {
        name: jax.tree.map(lambda g, k=k: (k * g).astype(g.dtype), gradient)
        for name, k in scaled.items()
    }
    made["half of the batch"] = mean_of(losses)(params, half)[1]
    return {name: lambda p, b, g=g: (value, g) for name, g in made.items()}


def normal(rng, *shape, dtype=np.float32, scale=1.0):
    """Random numbers of a dtype."""
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def noisy(p, b):
    """Noise in the value's own dtype."""

    def one(x, k):
        return ((x + jax.random.normal(k, x.shape, x.dtype)) @ p) ** 2

    return jax.vmap(one)(b["x"], b["key"])


def sampled(p, b):
    """A sampled action, as in policy gradients."""

    def one(x, k):
        scores = p.reshape(4, 2).T @ x[:4]
        action = jax.random.categorical(k, jax.lax.stop_gradient(scores))
        return -jax.nn.log_softmax(scores)[action] * x.sum()

    return jax.vmap(one)(b["x"], b["key"])


def dropped(p, b):
    """A mask that keeps few, which float64 would draw differently."""

    def one(x, k):
        return (jnp.where(jax.random.bernoulli(k, 0.2, x.shape), x, 0) @ p) ** 2

    return jax.vmap(one)(b["x"], b["key"])


def cast(p, b):
    """Parameters in float32, bfloat16 inside, losses in float32 again."""
    h = jnp.tanh(b["x"].astype(BF16) @ jnp.outer(p, p).astype(BF16))
    return (h.astype(b["x"].dtype) ** 2).sum(-1).astype(jnp.float32)


def recurrent(p, b):
    """A scan with casts and constants of the default dtype."""

    def step(h, x):
        return jnp.tanh(h * p[None] + x.astype(jnp.float32) * jnp.ones(())), None

    rows = jnp.stack([b["x"], b["x"] * 0.5, b["x"][:, ::-1]])
    return (jax.lax.scan(step, jnp.zeros(b["x"].shape), rows)[0] ** 2).mean(-1)


@pytest.mark.parametrize("losses", [noisy, sampled, dropped, cast, recurrent])
def test_right_and_wrong_are_told_apart(losses, rng):
    """Where there is noise, sampling, dropout, a cast, a loop."""
    params = normal(rng, 8)
    batch = {"x": normal(rng, 6, 8), "key": jax.random.split(jax.random.key(1), 6)}
    wrong = wrong_ones(losses, params, batch)
    report = verify.gradients_judge(losses)(
        params, batch, {"right": one_by_one(losses), **wrong}, finite_differences=False
    )
    assert report.of("right").ok, str(report)
    assert not report.unjudged
    for name in wrong:
        assert report.of(name).failures, name
    assert not any("influence" in note for note in report.notes)


def test_small_entries_are_not_hidden_by_large_ones(rng):
    """Flattened parameters, or features without a scale: 1e3 beside 1e-3."""
    sizes = np.array([1e3, 1e3, 1e3, 1e-3, 1e-3, 1e-3])
    batch = {"x": normal(rng, 40, 6, scale=sizes), "y": normal(rng, 40, scale=1e3)}
    losses = lambda w, b: (b["x"] @ w - b["y"]) ** 2  # noqa: E731
    w = normal(rng, 6)
    value, gradient = mean_of(losses)(w, batch)
    candidates = {
        "right": one_by_one(losses),
        "signs": lambda w, b: (value, gradient.at[3:].multiply(-1)),
        "zeros": lambda w, b: (value, gradient.at[3:].set(0)),
        "one in a thousand": lambda w, b: (value, gradient.at[5].multiply(1.001)),
    }
    report = verify.gradients_judge(losses)(
        w, batch, candidates, finite_differences=False
    )
    assert report.of("right").ok
    for name in list(candidates)[1:]:
        assert report.of(name).failures, name


@pytest.mark.parametrize("scalar", [True, False])
def test_one_entry_at_the_optimum_is_judged_right(rng, scalar):
    """The terms cancel; only their rounding is left, and no draw is small by luck."""

    def losses(p, x):
        squares = (p - x) ** 2
        return squares.mean() if scalar else squares

    fn = jax.jit(jax.value_and_grad(lambda p, x: losses(p, x).mean()))

    def exact(p, x):
        wide = np.asarray(x, np.float64)
        value, slope = ((float(p) - wide) ** 2).mean(), 2 * (float(p) - wide).mean()
        return jnp.float32(value), jnp.float32(slope)

    def parts(p, x):
        pairs = [fn(p, part) for part in x.reshape(4, -1)]
        return jax.tree.map(lambda *a: sum(a) / 4, *pairs)

    candidates = {"reversed": lambda p, x: fn(p, x[::-1]), "parts": parts, "f64": exact}
    judged = verify.gradients_judge(losses)
    for _ in range(40):
        x = normal(rng, 256) + 1
        p = jnp.asarray(np.asarray(x).mean(), jnp.float32)
        report = judged(p, x, candidates, finite_differences=False)
        assert report.ok, str(report)
    wrong = {"off": lambda p, x: (fn(p, x)[0], jnp.float32(1e-3))}
    assert judged(p, x, wrong, finite_differences=False).failures


def test_a_gradient_that_cancels_inside_an_example_is_judged(rng):
    """A bias before a softmax has the gradient 0, and its terms have not."""
    losses = lambda b, x: (jax.nn.softmax(x + b) ** 2).sum(-1)  # noqa: E731
    x = normal(rng, 6, 30)
    loss = jax.jit(jax.value_and_grad(lambda b, x: losses(b, x).mean()))
    report = verify.gradients_judge(losses)(
        jnp.float32(0.3),
        x,
        {
            "other order": lambda b, x: loss(b, x[::-1, ::-1]),
            "wrong": lambda b, x: (loss(b, x)[0], jnp.float32(1e-3)),
        },
        finite_differences=False,
    )
    assert report.of("other order").ok, str(report)
    assert report.of("wrong").failures


def test_bfloat16_is_seen_through(rng):
    """Of a thousand terms, whose sum is made in float32."""
    losses = lambda p, b: ((jnp.tanh(b["x"] @ p) - b["y"]) ** 2).sum(-1)  # noqa: E731
    params = normal(rng, 6, 3, dtype=BF16)
    batch = {
        "x": normal(rng, 1000, 6, dtype=BF16),
        "y": normal(rng, 1000, 3, dtype=BF16),
    }
    fn = mean_of(losses)

    def parts(p, b):
        pairs = [fn(p, jax.tree.map(lambda x, i=i: x[i::4], b)) for i in range(4)]
        return jax.tree.map(lambda *a: sum(a) / 4, *pairs)

    wrong = wrong_ones(losses, params, batch)
    report = verify.gradients_judge(losses)(
        params, batch, {"parts": parts, **wrong}, finite_differences=False
    )
    assert report.of("parts").ok, str(report)
    assert all(report.of(name).failures for name in wrong)
    assert "sums of bfloat16 are taken to be accumulated in float32" in report.notes


def test_what_a_maximum_takes_is_computed_once(rng):
    """XLA may round it otherwise where the derivative compares: nothing is equal.

    Then the derivative is 0 / 0 in a draw, and the leaf without a bound.
    """
    numbers = ("NHWC", "HWIO", "NHWC")

    def losses(p, x):
        h = jax.lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "SAME", dimension_numbers=numbers
        )
        h = jax.nn.relu(h + p["bias"][None, None, None])
        pooled = h.reshape(len(h), 3, 2, 3, 2, -1).max((2, 4)).reshape(len(h), -1)
        return ((pooled @ p["readout"]) ** 2).sum(-1)

    shapes = {"kernel": (3, 3, 2, 4), "bias": (4,), "readout": (36, 3)}
    params = {k: jnp.asarray(rng.normal(size=s) / 4, BF16) for k, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(19, 6, 6, 2)), BF16)
    report = verify.gradients(losses, params, x, {"alone": one_by_one(losses)})
    assert report.ok, str(report)
    wrong = verify.gradients(losses, params, x, wrong_ones(losses, params, x))
    assert len({row.candidate for row in wrong.failures}) == 4


def test_accumulation_in_sixteen_bits_has_to_be_said(rng):
    """A running sum of 400 bfloat16 numbers loses several per cent."""
    losses = lambda w, x: w * x  # noqa: E731
    w, x = jnp.asarray(1, BF16), jnp.asarray(rng.uniform(0.5, 1, size=400), BF16)

    def running(w, x):
        total = np.zeros((), BF16)
        for each in np.asarray(x):
            total = total + each
        mean = jnp.asarray(total / np.asarray(400, BF16))
        return mean, mean

    for accumulation, right in ((None, False), (BF16, True), ("float32", False)):
        report = verify.gradients_judge(losses, accumulation=accumulation)(
            w, x, {"running": running}, finite_differences=False
        )
        assert report.ok == right, accumulation
        assert bool(report.failures) != right
    assert "accumulated in float32" in report.notes[0]
    for wrong in ("int32", "sixteen"):
        with pytest.raises(ValueError, match=rf"floating dtype or None. Got '{wrong}'"):
            verify.gradients_judge(losses, accumulation=wrong)


def test_what_rounding_drowns_is_not_judged(rng):
    """A chaotic loss: zero would pass, so nothing passes and nothing fails."""

    def losses(w, x):
        return jax.lax.fori_loop(0, 40, lambda i, h: jnp.sin(3 * h + 0.1) * 1.5, x @ w)

    w, x = normal(rng, 4), normal(rng, 5, 4)
    fn = jax.value_and_grad(lambda w, x: losses(w, x).mean())
    same = jax.jit(fn)(w, x)
    near = jax.tree.map(lambda a: a * (1 + 2**-20), same)
    candidates = {"near": lambda w, x: near, "same": lambda w, x: same}
    report = verify.gradients_judge(losses)(w, x, candidates, finite_differences=False)
    assert not report.ok
    assert not report.failures
    assert [(row.candidate, row.path) for row in report.unjudged] == [
        ("near", "(loss)"), ("near", "(root)"),
    ]  # fmt: skip
    # What is equal bit by bit needs no bound.
    assert report.of("same").bit_equal
    assert report.of("same").ok
    with pytest.raises(
        VerificationError, match=r"^not judged:\n  near: \(loss\): round"
    ):
        report.raise_if_failed()
    assert "not judged" in str(report)
    assert "zero would pass too" in " ".join(str(report).split())
    record = json.loads(report.to_json())
    assert not record["ok"]
    assert [leaf["verdict"] for leaf in record["leaves"]].count("not judged") == 2


def test_losses_near_the_smallest_normal_number(rng):
    """What may be flushed to zero is not judged; a hundred times more is."""
    losses = lambda w, x: (x @ w) ** 2  # noqa: E731
    x = normal(rng, 12, 3)
    for scale, judged in ((1e-19, False), (1e-15, True)):
        w = normal(rng, 3, scale=scale)
        report = verify.gradients_judge(lambda w, x, s=scale: losses(w, x) * s)(
            w,
            x,
            {"right": one_by_one(lambda w, x, s=scale: losses(w, x) * s)},
            finite_differences=False,
        )
        assert not report.failures
        assert bool(report.unjudged) != judged, scale


def test_default_dtypes_mean_what_they_meant(rng):
    """Constants of the default dtype leave the bound as it is."""
    w, x = normal(rng, 4), normal(rng, 5, 4)
    plain = lambda w, x: jnp.sin(x @ w) ** 2  # noqa: E731
    constant = lambda w, x: jnp.sin(x @ w * jnp.ones(())) ** 2 + jnp.zeros(())  # noqa: E731
    ratios = [
        verify.gradients_judge(losses)(
            w, x, {"one by one": one_by_one(plain)}, finite_differences=False
        ).worst
        for losses in (plain, constant)
    ]
    assert 0.5 < ratios[0] / ratios[1] < 2


def test_foreign_code_is_named():
    """Its rounding is not seen, and the report says so."""

    def losses(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return w * x * jax.pure_callback(np.sin, shape, x, vmap_method="sequential")

    w, x = jnp.float32(0.3), jnp.arange(1.0, 5.0)
    report = verify.gradients_judge(losses)(
        w, x, {"jax": mean_of(losses)}, finite_differences=False
    )
    assert report.ok
    assert any("rounding of pure_callback was not" in note for note in report.notes)


# --- what is measured, beside the same sums written in NumPy ---


def measured(losses, params, batch, weights=None, reduction="mean", more=1):
    """What is known of a problem before anything is judged."""
    loss = ReducedLoss(losses, reduction, None)
    reference = jax.jit(differentiated(loss.scalar))(params, batch, weights)
    return loss.measure(params, Counted(batch, weights), reference, more=more)


def test_the_sums_are_those_of_the_examples(rng):
    """Of a linear loss, whose gradients are the inputs: total, magnitude, square."""
    x = normal(rng, 9, 4)
    weights = np.float32([1, 2, 0, 0.5, 1, 1, 3, 1, 1])
    programs = LossPrograms(lambda w, x: x @ w, None)
    shares = weights.astype(float) / weights.sum()
    found = programs.gradients(jnp.ones(4), x, shares, 4)
    terms = shares[:, None] * np.asarray(x, np.float64)
    of_loss, sums = found.leaves
    np.testing.assert_allclose(sums.total, terms.sum(0), rtol=1e-12)
    np.testing.assert_allclose(sums.magnitude, np.abs(terms).sum(0), rtol=1e-12)
    np.testing.assert_allclose(sums.square, (terms**2).sum(0), rtol=1e-12)
    losses = np.asarray(x, np.float64).sum(1)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-12)
    np.testing.assert_allclose(of_loss.total, shares @ losses, rtol=1e-12)


def test_drift_is_the_references_own_error(rng):
    """Parameters that are cast to bfloat16 err the same way for all examples."""
    w, x = normal(rng, 3), normal(rng, 6, 3)
    programs = LossPrograms(
        lambda w, x: (x @ w.astype(BF16).astype(w.dtype)) ** 2, None
    )
    _, found = programs.gradients(w, x, np.full(6, 1 / 6), 2).leaves
    wide = np.asarray(x, np.float64)
    cast = np.asarray(w.astype(BF16), np.float64)
    exact = 2 * (wide @ np.asarray(w, np.float64))[:, None] * wide / 6
    rounded = 2 * (wide @ cast)[:, None] * wide / 6
    # A cast backwards rounds the gradient to bfloat16 too: half a per cent.
    np.testing.assert_allclose(
        found.drift,
        (rounded - exact).sum(0),
        atol=0.01 * np.abs(rounded).sum(0).max(),
    )
    assert np.abs(found.drift).max() > 1e-4 * np.abs(exact.sum(0)).max()


def test_errors_of_opposite_signs_cancel_in_the_drift(rng):
    """Of an odd gradient at x and -x; their squares do not."""
    w, x = normal(rng, 3), normal(rng, 4, 3)
    programs = LossPrograms(lambda w, x: (x @ w) ** 3, None)
    both = jnp.concatenate([x, -x])
    given = w, both, np.full(8, 1 / 8), 2
    _, sums = programs.gradients(*given, as_it_rounds=True).leaves
    assert not sums.drift.any()
    assert sums.variance.all()


@pytest.fixture
def rounded_runs(monkeypatch):
    """The runs as the device rounds: whether each measurement had one."""
    found, gradients = [], LossPrograms.gradients

    def noted(self, *given, as_it_rounds=False):
        made = gradients(self, *given, as_it_rounds=as_it_rounds)
        found.append(as_it_rounds)
        return made

    monkeypatch.setattr(LossPrograms, "gradients", noted)
    return found


def test_the_references_error_is_its_drift(rng, rounded_runs):
    """Where perturbations explain it, so that no program runs as the device rounds."""
    w, x = normal(rng, 3), normal(rng, 7, 3)
    losses = lambda w, x: (x @ w) ** 3  # noqa: E731
    reduced = ReducedLoss(losses, "mean", None)
    counted, (value, gradient) = reduced.reference(w, x, None)
    (limit,) = reduced.measure(w, counted, (value, gradient)).limits.values()
    assert rounded_runs == [False]
    _, sums = reduced.programs.gradients(w, x, np.full(7, 1 / 7), 19).leaves
    assert sums.drift is None
    off = np.asarray(gradient, np.float64) - sums.total
    assert off.any()
    with_own = sums._replace(drift=off)
    wanted = measured_bound("float32", with_own, 7, (19, 133), "float32")
    np.testing.assert_allclose(limit.bound, wanted.bound, rtol=1e-12)


def test_what_is_rounded_once_for_all_examples_is_measured(rng, rounded_runs):
    """An angle of many turns, whose error adds up: more than perturbations explain."""
    some = rng.uniform(0.6, 0.8, 99).astype(np.float32)
    # The angle that is rounded by most.
    angles = np.float32(3e4) * some
    w = jnp.float32(some[np.argmax(np.abs(angles - 3e4 * some.astype(float)))])
    x = jnp.asarray(rng.uniform(1, 2, 511), jnp.float32)
    losses = lambda w, x: x * jnp.exp(jnp.sin(3e4 * w))  # noqa: E731
    parts = [(x[:300], 300 / 511), (x[300:], 211 / 511)]

    def candidate(factor):
        def fn(w, _):
            each = [(mean_of(losses)(w, own), share) for own, share in parts]
            value, gradient = (sum(a[i] * b for a, b in each) for i in range(2))
            return value, factor * gradient

        return fn

    asked = {"right": candidate(1), "wrong": candidate(1.5)}
    report = verify.gradients_judge(losses)(w, x, asked)
    assert {row.candidate for row in report.failures} == {"wrong"}
    assert rounded_runs[:2] == [False, True]


@pytest.mark.parametrize("wrong", [False, True])
def test_an_error_of_the_reference_itself_widens_no_bound(wrong, rng, rounded_runs):
    """A gradient that only the whole batch has, and that no loss shows, is found."""
    w, x = normal(rng, 3), normal(rng, 7, 3)

    def losses(w, x):
        own = (x @ w) ** 2
        coupled = (own - jax.lax.stop_gradient(own)) * own.mean()
        return own + coupled if wrong else own

    report = verify.gradients_judge(losses)(w, x, {"jax": mean_of(losses)})
    assert rounded_runs == ([False, True, True] if wrong else [False])
    assert any("influence each other" in note for note in report.notes) == wrong


def test_an_example_that_does_not_count_may_have_no_gradient():
    """Beside the largest loss: a root at 0, whose slope is infinite."""
    losses = lambda w, x: jnp.sqrt(w * x)  # noqa: E731
    w, x = jnp.float32(2), jnp.float32([3, 0, 1])
    limit = measured(losses, w, x, reduction="max").limits["(root)"]
    assert np.isfinite(limit.bound).all()


def test_only_programs_all_in_float64_are_perturbed_by_more():
    """Among others, rounding of the narrowest dtype is far above float64's."""
    with jax.enable_x64(True):
        wide, narrow = jnp.ones(2), jnp.ones(2, jnp.float32)
        for given, factor in (((wide, wide), MAGNIFIED), ((wide, narrow), 1)):
            program = jax.make_jaxpr(lambda a, b: jnp.sin(a).sum() + b)(*given)
            assert magnified(program) == factor


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_variance_is_that_of_rounding(dtype, rng):
    """In either precision: float64 is perturbed by more, and divided by as much."""
    with jax.enable_x64(True):
        x = jnp.asarray(rng.uniform(1, 2, size=(64, 5)), dtype)
        w = jnp.asarray(rng.uniform(1, 2, size=5), dtype)
        programs = LossPrograms(lambda w, x: (x * w[None, :]).sum(1) ** 2, None)
        _, sums = programs.gradients(w, x, np.ones(64), 16).leaves
        _, quarter = programs.gradients(w, x, np.full(64, 0.25), 16).leaves
    # Of errors a share is taken before they are squared.
    np.testing.assert_allclose(quarter.variance, sums.variance / 16, rtol=1e-12)
    unit = np.finfo(dtype).eps / 2
    relative = np.sqrt(sums.variance) / np.sqrt(sums.square) / unit
    assert (relative > 0.4).all()
    assert (relative < 4).all()


def test_more_draws_are_taken_of_fewer_examples(monkeypatch):
    """Some 128 in all, and not more than 32 of one; sixteen times as many on demand."""
    gradients, taken = LossPrograms.gradients, []

    def noted(self, params, batch, shares, draws, **options):
        taken.append(draws)
        return gradients(self, params, batch, shares, draws, **options)

    monkeypatch.setattr(LossPrograms, "gradients", noted)
    losses = lambda w, x: w * x  # noqa: E731
    w = jnp.float32(2)
    for examples, draws in ((1, 32), (4, 32), (16, 8), (200, 1)):
        x = jnp.ones(examples, jnp.float32)
        measured(losses, w, x)
        assert taken.pop() == draws
    measured(losses, w, jnp.ones(16), more=16)
    assert taken.pop() == 128
    # Examples of weight 0 are none.
    weights = np.zeros(16)
    weights[:4] = 1
    measured(losses, w, jnp.ones(16), weights)
    assert taken.pop() == 32


def known(losses, blur):
    """A batch whose losses are these, with such a rounding error."""
    return SimpleNamespace(shape=losses.shape, exact=losses, blur=lambda: blur)


@pytest.mark.parametrize(
    ("reduction", "shares"),
    [
        ("mean", [0.25, 0, 0.5, 0.25]),
        ("sum", [1, 0, 2, 1]),
        ("max", [0, 0, 0, 1]),
        ("min", [0.5, 0, 0.5, 0]),
    ],
)
def test_what_each_gradient_is_multiplied_by(reduction, shares):
    """By weight, or the extreme alone; ties share it, a weight of 0 never counts."""
    losses = np.array([1.0, -9.0, 1.0, 4.0])
    weights = np.array([1.0, 0, 2, 1])
    found, notes = _shares(known(losses, 1e-7), weights, reduction)
    np.testing.assert_allclose(found, shares)
    assert notes == ()


def test_an_extreme_that_leads_by_rounding_is_told():
    """How far it leads, beside how far a loss may be off."""
    losses = np.array([1.0, 1.0 + 1e-6, 0.5])
    for blur, told in ((1e-9, False), (1e-6, True)):
        shares, notes = _shares(known(losses, blur), None, "max")
        assert shares.tolist() == [0, 1, 0]
        assert bool(notes) == told
    assert "the max leads by 1.0e-06 only" in notes[0]
    # Of equal losses none leads, and they move together.
    _, notes = _shares(known(np.array([2.0, 2.0]), 0.0), None, "min")
    assert notes == ()


def test_a_scalar_loss_has_as_many_terms_as_examples():
    """Where that is plain: a batch without a common first axis is one term."""
    assert _leading({"x": np.ones((7, 2)), "y": np.ones(7)}) == 7
    assert _leading({"x": np.ones((7, 2)), "y": np.ones(3)}) == 1
    assert _leading(np.float32(2)) == 1
    w, x = jnp.float32(2), jnp.ones((9, 3), jnp.float32)
    as_one = measured(lambda w, x: (w * x).mean(), w, x).limits["(root)"]
    as_many = measured(lambda w, x: (w * x).mean(1), w, x).limits["(root)"]
    assert 0.3 < float(as_one.bound / as_many.bound) < 30


def test_examples_that_influence_each_other_are_named():
    """The one that differs most, with both losses."""
    together, alone = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.5, 3.1])
    (note,) = _coupling(together, alone)
    assert "example 1 has a loss of 2 in the batch and of 2.5 alone" in note
    assert _coupling(together, together * (1 + 1e-12)) == ()
    (note,) = _coupling(together, alone, np.array([0, 4, 6]))
    assert "example 4 has a loss of 2 in the batch" in note
    # NaN is like NaN, and hides no other example.
    broken = np.array([np.nan, 1.0, np.inf])
    assert _coupling(broken, broken) == ()
    (note,) = _coupling(broken, np.array([np.nan, 1.5, np.inf]))
    assert "examples influence each other" in note


def test_the_loss_has_a_limit_of_its_own(rng):
    """In the dtype that the user sees, which may be wider than the parameters'."""
    w, x = normal(rng, 4, dtype=BF16), normal(rng, 6, 4, dtype=BF16)
    narrow = measured(lambda w, x: (x @ w) ** 2, w, x)
    wide = measured(lambda w, x: ((x @ w) ** 2).astype(jnp.float32), w, x)
    assert float(wide.loss_limit.bound) < float(narrow.loss_limit.bound)
    assert narrow.limits["(root)"].bound.shape == (4,)
    assert any("accumulated in float32" in note for note in wide.notes)
    integer = measured(
        lambda p, x: (x @ p["w"]) ** 2, {"n": jnp.arange(2), "w": w}, x
    ).limits
    assert integer["n"] is None
    assert set(integer) == {"n", "w"}


def test_what_float64_cannot_evaluate_is_not_judged():
    """A root that rounding keeps real: its exact gradient, and so its bound, is NaN."""
    below = jnp.float32([0.10005, 0.1, 0.1])

    def losses(p, x):
        # 0.1 becomes 0.10009765625 in bfloat16, which is above; in float64 it stays.
        rounded = p.astype(BF16).astype(jnp.float32)
        return jnp.sqrt(rounded - below).sum() * x

    params, batch = jnp.float32([0.1, 0.2, 0.3]), jnp.float32([1, 2, 5])
    loss, gradient = mean_of(losses)(params, batch)
    candidates = {
        "right": (loss, gradient),
        "entry": (loss, gradient.at[0].multiply(-3)),
        "loss": (3 * loss, gradient),
        "others": (loss, gradient.at[2].multiply(-3)),
    }
    given = {name: lambda *_, own=own: own for name, own in candidates.items()}
    report = verify.gradients(losses, params, batch, given, finite_differences=False)
    told = {name: [x.verdict for x in report.of(name).leaves] for name in given}
    assert told == {
        "right": ["bit-equal", "bit-equal"],
        "entry": ["bit-equal", "not judged"],
        "loss": ["not judged", "bit-equal"],
        "others": ["bit-equal", "FAILS"],
    }


# --- what a measurement leaves out, and gives back ---


def test_the_batch_runs_alone_only_where_influence_could_hide(monkeypatch, rng):
    """Bounds of some thousandths of a leaf hide no large part of it."""
    runs = []
    own = LossPrograms.exact_gradient
    monkeypatch.setattr(
        LossPrograms, "exact_gradient", lambda *x: runs.append(None) or own(*x)
    )
    x = jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)
    w = jnp.asarray(rng.normal(size=7), jnp.float32)

    def lossy(size):
        """Digits are lost as in a difference of large numbers."""
        return lambda w, x: ((x @ w + size) - size) ** 2 + 0 * size

    def judged(losses):
        runs.clear()
        report = verify.gradients(losses, w, x, {"right": mean_of(losses)})
        return report, len(runs)

    report, count = judged(lossy(2.0**13))
    assert report.ok
    assert count == 0
    # A rule may add a small part, in which influence would hide.
    passed = jax.custom_jvp(lambda x: x)
    passed.defjvp(lambda x, t: (passed(*x), t[0]))
    losses = lossy(2.0**13)
    report, count = judged(lambda w, x: losses(passed(w), x))
    assert report.ok
    assert count == 2


def test_freed_memory_is_given_back(monkeypatch):
    """glibc keeps blocks that were freed below one that is in use."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library has no malloc_trim")

    def resident():
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    np.ones(2**22 - 2**10)  # As large blocks are kept from now on.
    blocks = [np.ones(2**17) for _ in range(301)]  # 1 MiB each.
    kept = blocks[-1]
    del blocks
    before = resident()
    trim({"w": jax.ShapeDtypeStruct((HEAVY,), jnp.float32)})
    assert before - resident() < 2**26  # Small parameters: nothing is done.
    trim({"w": jax.ShapeDtypeStruct((HEAVY + 1,), jnp.float32)})
    assert before - resident() > 2**27
    assert kept.sum() == 2**17

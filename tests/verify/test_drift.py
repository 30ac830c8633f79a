"""What rounding does to an optimizer over many steps, on given gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import optim, verify
from jdist.verify import defects


@pytest.fixture(autouse=True)
def _settings_of_jax():
    """JAX's defaults, which optax needs."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def problem(steps, dtype=jnp.float32, fade=0.98):
    """Parameters, and gradients that become smaller."""
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 7), "b": (7,)}
    draw = lambda: {k: rng.normal(size=s) for k, s in shapes.items()}  # noqa: E731
    params = cast(draw(), dtype)
    return jax.tree.map(jnp.asarray, params), [
        jax.tree.map(lambda g, t=t: jnp.asarray(fade**t * g, dtype), draw())
        for t in range(steps)
    ]


def of_optax(tx, moments=None):
    """An update of optax, with gradients in the dtype of the moments."""

    def update(p, g, s):
        moves, s = tx.update(cast(g, moments) if moments else g, s, p)
        add = lambda w, u: (w.astype(jnp.float32) + u).astype(w.dtype)  # noqa: E731
        return jax.tree.map(add, p, moves), s

    return update


RIGHT = {
    "adam": optax.adam(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "rmsprop": optax.rmsprop(0.01),
    "adagrad": optax.adagrad(0.1),
    "lion": optax.lion(0.01),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_optimizers_pass(name):
    """Also on gradients that are always the same, which are rounded always alike."""
    tx = RIGHT[name]
    params, gradients = problem(60)
    start = params, tx.init(params)
    for given in (gradients, gradients[:1] * 120):
        report = verify.drift(of_optax(tx), start, given)
        assert report.ok, str(report)
        assert report.worst < 0.5


def test_another_right_program_passes():
    """Adam with the bias corrections in the rate, as in its paper's remark."""
    params, gradients = problem(60)
    start = params, RIGHT["adam"].init(params)

    def other(p, g, s):
        own, empty = s
        t = own.count + 1
        rate = 0.05 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        mu = jax.tree.map(lambda m, g: m + (g - m) * 0.1, own.mu, g)
        nu = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, own.nu, g)
        # The epsilon of optax is beside the corrected root.
        small = 1e-8 * jnp.sqrt(1 - 0.999**t)
        step = lambda w, m, v: w - rate * m / (jnp.sqrt(v) + small)  # noqa: E731
        new = optax.ScaleByAdamState(t, mu, nu), empty
        return jax.tree.map(step, p, mu, nu), new

    report = verify.drift(
        of_optax(RIGHT["adam"]), start, gradients, {"other": (other, start)}
    )
    assert report.ok, str(report)
    opt = optim.adam(lr=0.05)
    assert verify.drift(opt.step, (params, opt.init(params)), gradients).ok


def test_moments_in_bfloat16_are_told_from_those_in_float32():
    """Both over bfloat16 parameters, where a single step cannot tell them apart."""
    tx = RIGHT["adam"]
    params, gradients = problem(40, jnp.bfloat16)
    wide = params, tx.init(cast(params, jnp.float32))
    claim = of_optax(tx, jnp.float32)
    narrow = params, tx.init(params)
    others = {"float32": (claim, wide), "bfloat16": (of_optax(tx), narrow)}
    report = verify.drift(claim, wide, gradients, others)
    assert report.of("update").ok, str(report)
    assert report.of("float32").ok
    failed = {row.path: row.problem for row in report.of("bfloat16").failures}
    assert set(failed) == {f"state/0/{m}/{p}" for m in ("mu", "nu") for p in "wb"}
    assert all("it is kept in bfloat16" in words for words in failed.values())


def test_a_second_moment_that_stands_still_is_named():
    """Less than half of bfloat16's spacing is lost in every step."""

    def average(w, g, m):
        # In float32, so that the decay itself is not rounded to 1.
        wide = 0.998 * m.astype(jnp.float32) + 0.002 * g**2
        return w - 0.1 * g, wide.astype(m.dtype)

    w, fading = jnp.ones(7), [jnp.full(7, 0.9**t, jnp.float32) for t in range(500)]
    start = w, jnp.zeros(7, jnp.bfloat16)
    (row,) = verify.drift(average, start, fading).failures
    assert row.path == "state"
    assert "7 of 7 entries did not move in the second half" in row.problem
    wide = w, jnp.zeros(7, jnp.float32)
    assert verify.drift(average, wide, fading[:100]).ok


RATE = 1e-3
SHAPES = {"w": (30, 40), "scale": (300,)}


def narrow(p, g, s):
    """Gradient descent on bfloat16 parameters, rounded to nearest in every step."""
    own = lambda w, d: (w.astype(jnp.float32) - RATE * d).astype(w.dtype)  # noqa: E731
    return jax.tree.map(own, p, g), s


def at_random(times):
    """The same, rounded up or down at random, at another rate."""

    def update(p, g, s):
        bits = p["scale"].view(jnp.uint16).astype(jnp.uint32).sum()
        key = jax.random.fold_in(jax.random.key(3), bits)

        def rounded(w, d, k):
            exact = (w.astype(jnp.float32) - times * RATE * d).view(jnp.uint32)
            exact += jax.random.bits(k, w.shape) >> 16
            return (exact >> 16 << 16).view(jnp.float32).astype(w.dtype)

        keys = dict(zip(p, jax.random.split(key), strict=True))
        return {name: rounded(p[name], g[name], keys[name]) for name in p}, s

    return update


def leaning(steps):
    """bfloat16 parameters, and gradients whose means are not 0."""
    rng = np.random.default_rng(1)
    draw = lambda: {k: rng.normal(size=s) for k, s in SHAPES.items()}  # noqa: E731
    signs = jax.tree.map(np.sign, draw())
    params = {"w": 2 * draw()["w"], "scale": np.ones(SHAPES["scale"])}
    sized = lambda sign: sign * rng.uniform(0.5, 1.5, sign.shape)  # noqa: E731
    each = (jax.tree.map(sized, signs) for _ in range(steps))
    return jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), params), [
        jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), g) for g in each
    ]


def test_bfloat16_parameters_that_lose_small_steps_are_named():
    """Rounding explains the way of each entry, and not that of the leaf."""
    params, gradients = leaning(120)
    start = params, ()
    given = {"right": 1.0, "nearly": 1.2, "ascent": -1.0, "twice": 2.0, "none": 0.0}
    others = {name: (at_random(times), start) for name, times in given.items()}
    report = verify.drift(narrow, start, gradients, others)
    words = {row.path: row.problem for row in report.of("update").failures}
    assert set(words) == {"params/scale"}, str(report)
    assert "it has gone 0 of the reference's way" in words["params/scale"]
    assert "300 of 300 entries did not move" in words["params/scale"]
    for name, times in given.items():
        own = report.of(name)
        assert own.ok == (name in ("right", "nearly")), str(own)
        for row in own.failures:
            share = float(row.problem.partition("gone ")[2].partition(" ")[0])
            assert abs(share - times) < 0.2, row.problem


def test_bfloat16_parameters_with_steps_above_their_spacing_pass():
    """Rounded to nearest, also where all entries are alike."""
    for name in ("adam", "momentum", "lion"):
        tx = optax.lion(0.05) if name == "lion" else RIGHT[name]
        params, gradients = leaning(60)
        start = params, tx.init(cast(params, jnp.float32))
        report = verify.drift(of_optax(tx, jnp.float32), start, gradients)
        assert not report.failures, str(report)
        assert not [row for row in report.unjudged if row.path.startswith("params")]


def test_parameters_that_rounding_hides_are_not_judged():
    update = lambda w, g, s: ((w - 1e-4 * g).astype(w.dtype), s)  # noqa: E731
    w = jnp.ones(5, jnp.bfloat16)
    report = verify.drift(update, (w, ()), [jnp.ones(5, jnp.bfloat16)] * 3)
    assert not report.ok
    words = report.unjudged[0].unjudged
    assert "no step at all would pass too. Take more steps" in words


def test_each_planted_defect_of_an_optimizer_is_found():
    opt = optim.adam(lr=0.05)
    params, gradients = problem(5)
    start = params, opt.init(params)

    def planted(defect):
        traits = defects.Traits(kind="training")
        step = lambda p, s, g: opt.step(p, g, s)  # noqa: E731
        # Planted steps run on the host: the judge's compiled call returns to them.
        wrong = defect.plant(step, traits)
        shapes = jax.eval_shape(step, *start, gradients[0])

        def update(p, g, s):
            return jax.pure_callback(wrong, shapes, p, s, g)

        return update, start

    own = [d for d in defects.TRAINING if d not in defects.GRADIENT]
    names = {d.name: planted(d) for d in own if "example" not in d.name}
    chosen = ("learning rate times 1.001", "state in bfloat16", "state not kept",
              "count off by one", "leaf left behind")  # fmt: skip
    report = verify.drift(opt.step, start, gradients, {n: names[n] for n in chosen})
    assert report.of("update").ok
    assert {row.candidate for row in report.failures} == set(chosen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradients": []}, r"gradients=...\)` must be a list .* Got none"),
        (
            {"gradients": iter([1.0])},
            r"gradients=...\)` must be a list .*list_iterator",
        ),
        ({"candidates": {"update": None}}, "must have other names than .*'update'"),
        (
            {"candidates": {"x": None}},
            r"candidates\['x'\]\)` must be \(update, state\)",
        ),
        (
            {"candidates": {"x": (abs, 1)}},
            r"must have a state of \(params, opt_state\)",
        ),
    ],
)
def test_refusals(given, message):
    update = lambda w, g, s: (w - g, s)  # noqa: E731
    own = {"gradients": [jnp.ones(3)], **given}
    with pytest.raises(ValueError, match=message):
        verify.drift(update, (jnp.ones(3), ()), **own)


def test_numpy_gradients_are_what_jax_makes_of_them():
    rng = np.random.default_rng(3)
    params, gradients = rng.normal(size=5), list(rng.normal(size=(7, 5)))

    def update(w, g, m):
        m = 0.9 * m + 0.1 * g**2
        return w - g / (1 + m), m

    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        assert verify.drift(update, (params, np.zeros(5)), gradients).ok

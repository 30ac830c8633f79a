"""The check of the reference: right references are pinned, wrong ones are found."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify import oracle
from jdist.verify.oracle import (
    REDUCERS,
    SHIFTS,
    differentiated,
    finite_differences,
    pinned,
    reduced,
)
from jdist.verify.report import OracleCheck

POINTS = 4


def arrays(seed, *shapes, dtype=jnp.float32):
    """Normal arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def checks(loss, given, reduction="mean"):
    """The outcomes at several points, of parameters and batches `given(seed)`."""
    check = finite_differences(loss, reduction)
    return [check(*given(seed), None, seed) for seed in range(POINTS)]


def zeros_and_inputs(seed):
    """A linear model at its start."""
    return jnp.zeros(5, jnp.float32), *arrays(seed, (21, 5))


def weights_and_inputs(seed):
    """A linear model somewhere."""
    return arrays(seed, 5, (21, 5))


def perfect_fit(seed):
    """Labels that the parameters explain to the last bit."""
    w, x = arrays(seed, 5, (21, 5))
    return w, (x, x @ w)


def zero_head(seed):
    """A last layer that starts at 0."""
    a, x = arrays(seed, (5, 4), (21, 5))
    return {"a": a, "b": jnp.zeros((4, 3), jnp.float32)}, x


AT_ZERO = {
    "absolute": (lambda w, x: jnp.abs(x @ w), zeros_and_inputs),
    "square": (lambda w, x: (x @ w) ** 2, zeros_and_inputs),
    "perfect fit": (lambda w, b: (b[0] @ w - b[1]) ** 2, perfect_fit),
    "zero head": (
        lambda p, x: ((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2).sum(-1),
        zero_head,
    ),
    "near the smallest number": (
        lambda w, x: (x @ w) ** 2 * jnp.asarray(1e-37, w.dtype),
        weights_and_inputs,
    ),
}


@pytest.mark.parametrize("name", AT_ZERO)
def test_a_loss_near_zero_is_pinned(name):
    """Rounding is that of where the differences are taken, not of the loss's zero."""
    found = checks(*AT_ZERO[name])
    assert all(check.ok and not check.skipped for check in found), found


def test_losses_below_the_smallest_number_are_not_condemned():
    """In float64 too: digits that do not exist are no mistake of the gradient's."""
    found = checks(
        lambda w, x: (x @ w) ** 2 * 1e-307,
        lambda seed: arrays(seed, 5, (21, 5), dtype=jnp.float64),
    )
    assert all(check.ok for check in found)
    assert all("rounding next to the parameters" in check.skipped for check in found)


def straight_through(w, x):
    """Rounded forwards, the identity backwards."""
    rounded = w + jax.lax.stop_gradient(jnp.round(w) - w)
    return (rounded[None, :] * x).sum(-1) ** 2


def detached_target(w, x):
    """A bootstrapped target."""
    return (x @ w - jax.lax.stop_gradient(x @ w * 9 / 10)) ** 2


def detached_in_a_loop(w, x):
    """A carry that is detached in every iteration of a scan."""

    def step(h, x):
        return jnp.tanh(h * w[0] + jax.lax.stop_gradient(h) * x * w[1]), None

    start = jnp.asarray(0.3, x.dtype)
    return jax.vmap(lambda row: jax.lax.scan(step, start, row)[0])(x)


@pytest.mark.parametrize(
    "loss", [straight_through, detached_target, detached_in_a_loop]
)
def test_what_is_detached_is_held(loss):
    """The derivative holds it, and so do the differences: the reference is pinned."""
    found = checks(loss, weights_and_inputs)
    assert all(check.ok and not check.skipped for check in found), found
    # Not because nothing moves.
    assert any(abs(check.slope) > 1e-3 for check in found)


def test_a_derivative_is_compared_at_several_points():
    """One hundred kinks within reach of the first point are not in reach of all."""
    found = checks(
        lambda w, x: jax.nn.relu(x @ w),
        lambda seed: (jnp.zeros(5, jnp.float32), *arrays(seed, (1000, 5))),
    )
    assert all(check.ok and not check.skipped for check in found), found


def test_a_disagreement_outweighs_points_that_say_nothing(monkeypatch):
    """Wherever it is met, and one point that agrees outweighs both."""
    skipped, wrong, right = (
        OracleCheck(skipped="no"), OracleCheck(1, 2, 0), OracleCheck(1, 1, 0),
    )  # fmt: skip
    check = finite_differences(lambda w, x: x * w, "mean")
    w, x = jnp.ones(2, jnp.float32)
    for points, ok in (
        ([skipped, skipped, wrong], False),
        ([skipped, wrong, right], True),
    ):
        for outcomes in map(iter, itertools.permutations(points)):
            monkeypatch.setattr(oracle, "pinned", lambda *_, own=outcomes: next(own))
            assert check(w, x, None, 0).ok == ok


@jax.custom_vjp
def tripled(x):
    """A square with a derivative that is half as large again."""
    return x**2


tripled.defvjp(lambda x: (x**2, x), lambda x, c: (3 * c * x,))


@jax.custom_jvp
def through(x):
    """A straight-through estimator by a rule."""
    return jnp.round(x)


through.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda w, x: tripled(x @ w), "custom_vjp of tripled"),
        (lambda w, x: (through(w)[None, :] * x).sum(1), "custom_jvp of through"),
    ],
)
def test_a_derivative_of_its_own_is_not_judged(loss, name):
    """Whether it is meant cannot be known: both slopes are told, and the way out."""
    for check in checks(loss, weights_and_inputs):
        assert not check.ok
        assert not check.wrong
        assert f"not judged: the loss has a derivative of its own ({name}): slope" in (
            str(check)
        )
        assert str(check).endswith("finite_differences=False, --no-finite-differences")


def test_a_rule_that_is_the_derivative_is_pinned():
    """JAX's own rules, and a user's that is right, are held to the difference."""

    @jax.custom_vjp
    def squared(x):
        return x**2

    squared.defvjp(lambda x: (x**2, x), lambda x, c: (2 * c * x,))

    def loss(w, x):
        return squared(x @ w) + jax.nn.relu(x @ w) + jax.nn.logsumexp(x * w[None, :], 1)

    found = checks(loss, weights_and_inputs)
    assert all(check.ok and not check.skipped for check in found), found


def test_a_wrong_derivative_is_found():
    """By a factor that no curvature, rounding or kink explains."""
    losses = np.sin(0.3 + 4e-6 * SHIFTS)
    assert pinned(np.cos(0.3), losses).ok
    for factor in (1 + 1e-4, 0.5, -1):
        check = pinned(np.cos(0.3) * factor, losses)
        assert not check.ok
        assert "oracle WRONG: slope" in str(check)


def test_a_chaotic_loss_is_not_condemned():
    """No difference can resolve it; where rounding alone scatters, a slope is wrong."""
    scatter = np.random.default_rng(0).normal(size=SHIFTS.size)
    assert pinned(1e9, 1 + scatter / 9).skipped.startswith("the loss is chaotic")
    assert not pinned(1.0, 1 + scatter * 1e-16).ok


def test_what_cannot_run_in_float64_is_named():
    """A callback's value does not move with the parameters' wide side."""

    @jax.custom_jvp
    def called(y):
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    called.defjvp(lambda y, d: (called(*y), d[0] * (1 - called(*y) ** 2)))
    loss = lambda w, x: called(x @ w)  # noqa: E731
    for check in checks(loss, weights_and_inputs):
        assert check.skipped == "pure_callback cannot be evaluated in float64"


def test_the_check_can_be_left_out():
    """With `finite_differences=False`, of a call and of a problem."""
    w, x = weights_and_inputs(0)
    loss = lambda w, x: tripled(x @ w)  # noqa: E731
    same = jax.value_and_grad(lambda w, x: loss(w, x).mean())
    given = (w, x, {"same": same})
    assert verify.gradients(loss, *given, finite_differences=False).oracle is None
    assert verify.Problem(loss, *given, finite_differences=False).judge().oracle is None


# --- the reference's own parts ---


@pytest.mark.parametrize("name", REDUCERS)
def test_the_reductions_are_what_their_names_say(name, rng):
    """Beside NumPy's, with a weight of 0 and others of no meaning to an extreme."""
    losses = rng.normal(size=7)
    w = np.array([0.0, 2.0, 1.0, 0.5, 0.0, 3.0, 1.0])
    losses[0], losses[4] = 99.0, -99.0  # Of weight 0: no extreme, and in no sum.
    expected = {
        "mean": np.average(losses, weights=w),
        "sum": losses @ w,
        "max": losses[w > 0].max(),
        "min": losses[w > 0].min(),
    }[name]
    found = REDUCERS[name](jnp.asarray(losses), jnp.asarray(w))
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_ties_of_an_extreme_share_the_gradient():
    """Equally, over all that tie and count."""
    losses, w = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([1.0, 1.0, 0.0, 2.0])
    for name, sign in (("max", 1), ("min", -1)):
        gradient = jax.grad(lambda x, n=name: REDUCERS[n](x, w))(sign * losses)
        np.testing.assert_allclose(gradient, [0, 0.5, 0, 0.5])


def test_scalar_losses_are_taken_as_they_are():
    """Others are one per weight, or refused with their shape."""
    scalar = reduced(lambda p, b: p * b.sum(), "mean")
    assert float(scalar(jnp.float32(2), jnp.ones(3, jnp.float32), None)) == 6
    doubled, ones = reduced(lambda p, b: p * b, "sum"), jnp.ones(3, jnp.float32)
    assert float(doubled(jnp.float32(2), ones, np.array([1, 0, 2]))) == 6
    with pytest.raises(ValueError, match=r"example, shape \(3,\)\. Got shape \(3, 1\)"):
        reduced(lambda p, b: (p * b)[:, None], "mean")(1.0, ones, None)
    with pytest.raises(ValueError, match=r"shape \(2,\)\. Got shape \(3,\)"):
        doubled(1.0, ones, np.ones(2))


def test_what_is_not_floating_has_no_gradient():
    """None in its place; the others are differentiated beside it."""
    params = {"n": jnp.arange(2), "w": jnp.array([1.0, 2.0]), "flag": jnp.array(True)}
    fn = differentiated(lambda p, x: jnp.sum(p["w"] * p["n"].astype(x.dtype)) * x)
    value, gradient = fn(params, jnp.array(3.0))
    assert float(value) == 6
    assert gradient["n"] is None
    assert gradient["flag"] is None
    assert gradient["w"].tolist() == [0, 3]


@pytest.mark.parametrize("scale", [1e-250, 1e-30, 1.0, 1e30, 1e250])
def test_the_pin_does_not_depend_on_the_scale_of_the_loss(scale):
    """Neither do its verdicts on wrong derivatives."""
    losses = scale * (2 + np.sin(1.1 + 4e-6 * SHIFTS))
    slope = scale * np.cos(1.1)
    right = pinned(slope, losses)
    assert right.ok
    assert not right.skipped
    assert right.tolerance < 1e-3 * abs(slope)
    for factor in (1.01, -1, 0):
        assert pinned(slope * factor, losses).wrong


def test_curvature_is_no_mistake():
    """A cubic's own terms are fitted, not blamed on the derivative."""
    x = 4e-6 * SHIFTS
    losses = 1 + 3 * x - 2e4 * x**2 + 1e9 * x**3
    check = pinned(3.0, losses)
    assert check.ok
    np.testing.assert_allclose(check.difference, 3.0, rtol=1e-6)
    assert pinned(3.5, losses).wrong


def test_a_kink_within_reach_is_explained():
    """The two sides differ by what it adds to the tolerance."""
    kinked = 1 + 4e-6 * np.maximum(SHIFTS, 0)
    for exact in (0.0, 0.5, 1.0):
        assert not pinned(exact, kinked).wrong
    # A slope of twice the tolerance and more is not explained by it.
    assert pinned(50.0, kinked).wrong


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_compared(bad):
    """Of the derivative, or of one of the losses."""
    losses = np.sin(0.3 + 4e-6 * SHIFTS)
    assert "not finite" in pinned(bad, losses).skipped
    losses[3] = bad
    assert "not finite" in pinned(np.cos(0.3), losses).skipped


def test_a_constant_loss_has_the_slope_zero():
    """And no other one."""
    constant = np.full(SHIFTS.size, 0.75)
    assert pinned(0.0, constant).ok
    assert pinned(1e-3, constant).wrong


def test_rules_are_those_of_users():
    """Each way to write a derivative in which a rule may add a gradient of its own."""

    @jax.custom_jvp
    def first(x):
        return 2 * x

    first.defjvp(lambda x, t: (2 * x[0], 3 * t[0]))

    @jax.custom_vjp
    def second(x):
        return x

    second.defvjp(lambda x: (x, None), lambda _, g: (g + 1,))

    def third(_, x):
        return x

    def losses(x):
        x = jax.custom_derivatives.linear_call(third, lambda _, g: g + 1, (), x)
        # JAX's own have rules, too, which are right.
        return jax.nn.relu(second(first(x)))

    program = jax.make_jaxpr(losses)(jnp.arange(5.0))
    wanted = ["custom_jvp of first", "custom_vjp of second", "linear_call of third"]
    assert oracle.own_rules(program) == wanted
    assert oracle.own_rules(jax.make_jaxpr(jax.nn.relu)(jnp.arange(5.0))) == []

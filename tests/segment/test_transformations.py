"""Segments inside JAX's own transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from tests.segment.cases import (
    CASES,
    assert_close,
    assert_same_bits,
    cotangents,
    normal,
)


def _mlp(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


@pytest.fixture
def arguments(rng):
    params = {
        "w": normal(rng, 5, 7, dtype=np.float64),
        "v": normal(rng, 7, 3, dtype=np.float64),
    }
    return params, normal(rng, 4, 5, dtype=np.float64)


def _loss(fn):
    return lambda p, x: jnp.sum(fn(p, x) ** 2)


def _through(seg):
    """The gradient of a loss, made of a segment's halves."""

    def gradient(p, x):
        outputs, residuals = seg.forward(p, x)
        return seg.backward(p, residuals, 2 * outputs)

    return gradient


def _split(seg):
    def gradient(p, x):
        outputs, residuals = seg.forward(p, x)
        d_inputs, rest = seg.backward_inputs(p, residuals, 2 * outputs)
        return seg.backward_params(rest), d_inputs

    return gradient


ROUTES = pytest.mark.parametrize("route", [_through, _split])
DOUBLE = {"roundings": 300, "unit": 2.0**-53}


def test_grad_of_the_outputs(arguments):
    """`jax.grad` sees through the forward half."""
    seg = segment(_mlp)
    found = jax.grad(_loss(lambda p, x: seg.forward(p, x)[0]), argnums=(0, 1))(
        *arguments
    )
    assert_close(found, jax.grad(_loss(_mlp), argnums=(0, 1))(*arguments), **DOUBLE)


@ROUTES
@pytest.mark.parametrize("recompute", [False, True])
def test_gradient_of_a_gradient(arguments, route, recompute):
    """`jax.grad` of what the halves return is the second derivative."""

    def penalty(gradient):
        def value(p, x):
            d_p, d_x = gradient(p, x)
            squares = [jnp.sum(jnp.sin(g) ** 2) for g in jax.tree.leaves((d_p, d_x))]
            return sum(squares)

        return value

    def plain(p, x):
        d_p, d_x = jax.grad(_loss(_mlp), argnums=(0, 1))(p, x)
        return d_p, (d_x,)

    seg = segment(_mlp, recompute=recompute)
    expected = jax.jit(jax.grad(penalty(plain), argnums=(0, 1)))(*arguments)
    eager = jax.grad(penalty(route(seg)), argnums=(0, 1))(*arguments)
    compiled = jax.jit(jax.grad(penalty(route(seg)), argnums=(0, 1)))(*arguments)
    assert_close(eager, expected, **DOUBLE)
    assert_close(compiled, expected, **DOUBLE)


@ROUTES
def test_under_jit_and_vmap(arguments, route, rng):
    """The halves inside one jitted function, and over a batch of inputs."""
    params, x = arguments
    gradient = route(segment(_mlp))
    d_p, d_x = jax.grad(_loss(_mlp), argnums=(0, 1))(params, x)
    assert_close(jax.jit(gradient)(params, x), (d_p, (d_x,)), **DOUBLE)
    many = normal(rng, 3, 4, 5, dtype=np.float64)
    found = jax.vmap(gradient, in_axes=(None, 0))(params, many)
    plain = jax.vmap(jax.grad(_loss(_mlp), argnums=(0, 1)), in_axes=(None, 0))
    d_p, d_x = plain(params, many)
    assert_close(found, (d_p, (d_x,)), **DOUBLE)


def test_halves_in_separate_jits(arguments):
    """Residuals and rest pass through the boundary of a caller's `jax.jit`."""
    params, x = arguments
    seg = segment(_mlp)
    outputs, residuals = jax.jit(seg.forward)(params, x)
    d_inputs, rest = jax.jit(seg.backward_inputs)(params, residuals, 2 * outputs)
    d_params = jax.jit(seg.backward_params)(rest)
    d_p, d_x = jax.grad(_loss(_mlp), argnums=(0, 1))(params, x)
    assert_close((d_params, d_inputs), (d_p, (d_x,)), **DOUBLE)
    # The residuals of a call outside may enter a jit too, beside traced parameters.
    _, outside = seg.forward(params, x)
    found = jax.jit(seg.backward)(params, outside, 2 * outputs)
    assert_close(found, (d_p, (d_x,)), **DOUBLE)
    captured = jax.jit(lambda p: seg.backward(p, outside, 2 * outputs))(params)
    assert_close(captured, (d_p, (d_x,)), **DOUBLE)


def test_without_jit(arguments):
    """With jit disabled, for debugging, the halves run step by step."""
    with jax.disable_jit():
        d_p, d_x = jax.grad(_loss(_mlp), argnums=(0, 1))(*arguments)
        assert_close(_through(segment(_mlp))(*arguments), (d_p, (d_x,)), **DOUBLE)


# --- functions with rules of their own ---


@jax.custom_vjp
def _rounded(x):
    return jnp.round(x)


# Straight through: the derivative of a rounding would be 0.
_rounded.defvjp(lambda x: (jnp.round(x), x), lambda x, d: (d * jnp.cos(x),))


@jax.custom_jvp
def _clipped(x):
    return jnp.clip(x, -1.0, 1.0)


_clipped.defjvps(lambda dx, _, x: dx * jnp.exp(-(x**2)))


@pytest.mark.parametrize("rule", [_rounded, _clipped])
def test_custom_rules_hold(rule, arguments):
    """A function's own derivative is used by the backward half and by `jax.grad`."""

    def fn(p, x):
        return rule(x @ p["w"]) @ p["v"]

    seg = segment(fn)
    d_p, d_x = jax.grad(_loss(fn), argnums=(0, 1))(*arguments)
    assert_close(_through(seg)(*arguments), (d_p, (d_x,)), **DOUBLE)
    outputs_of = _loss(lambda p, x: seg.forward(p, x)[0])
    assert_close(jax.grad(outputs_of, argnums=(0, 1))(*arguments), (d_p, d_x), **DOUBLE)
    compiled = jax.jit(jax.grad(outputs_of, argnums=(0, 1)))
    assert_close(compiled(*arguments), (d_p, d_x), **DOUBLE)


def test_a_rule_that_adds_a_gradient(arguments):
    """A rule whose cotangent does not depend on the one that comes is not lost."""

    @jax.custom_vjp
    def with_penalty(x, penalty):
        return x

    with_penalty.defvjp(
        lambda x, penalty: (x, jnp.shape(penalty)),
        lambda shape, d: (d, jnp.ones(shape)),
    )

    def fn(p, x):
        return with_penalty(x, jnp.sum(p["w"] ** 2))

    params, x = arguments
    seg = segment(fn)
    _, residuals = seg.forward(params, x)
    d_params, (d_x,) = seg.backward(params, residuals, x)
    assert_close(d_params["w"], 2 * params["w"], **DOUBLE)
    assert_same_bits(d_x, x)


@pytest.mark.parametrize("policy", [False, "dots", True])
def test_checkpoint_inside(arguments, policy):
    """`jax.checkpoint` in the function still keeps nothing but its arguments."""

    def fn(p, x):
        inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ p["w"]) @ p["w"].T))
        return inner(inner(x)) @ p["w"] @ p["v"]

    seg = segment(fn, recompute=policy)
    d_p, d_x = jax.grad(_loss(fn), argnums=(0, 1))(*arguments)
    assert_close(_through(seg)(*arguments), (d_p, (d_x,)), **DOUBLE)
    _, residuals = seg.forward(*arguments)
    shapes = [x.shape for x in residuals.arrays if x is not arguments[1]]
    # Without recomputation: what lies between the two, and before the last products.
    assert sorted(shapes) == {False: [(4, 5), (4, 5), (4, 7)]}.get(
        policy, sorted(shapes)
    )
    assert (policy is True) == (not shapes)


def test_branches_and_loops(arguments, rng):
    """`cond` on an input, `fori_loop` and nested scans keep parameters out."""

    def fn(p, x, flag):
        def step(h, w):
            return jnp.tanh(h @ (w * 2.0).T), jnp.sum(h)

        h, sums = jax.lax.scan(step, x, p["stack"])
        h = jax.lax.cond(
            flag, lambda h: jnp.sin(h) @ p["w"], lambda h: h @ p["w"] ** 2, h
        )
        return jax.lax.fori_loop(0, 2, lambda i, h: jnp.cos(h) * (1.0 + i), h), sums

    params, x = arguments
    params = {"stack": normal(rng, 3, 5, 5, dtype=np.float64), "w": params["w"]}
    seg = segment(fn)
    for flag in (True, False):
        flag = jnp.asarray(flag)
        outputs, residuals = seg.forward(params, x, flag)
        d_outputs = cotangents(rng, outputs)
        _, pull_back = jax.vjp(lambda p, x, flag=flag: fn(p, x, flag), params, x)
        d_params, d_x = pull_back(d_outputs)
        found = seg.backward(params, residuals, d_outputs)
        assert_close(found, (d_params, (d_x, None)), **DOUBLE)
        d_inputs, rest = seg.backward_inputs(params, residuals, d_outputs)
        assert_close((seg.backward_params(rest), d_inputs), found, **DOUBLE)
        assert not any(x.shape == (3, 5, 5) for x in residuals.arrays)


def test_forward_mode(arguments):
    """`jax.jvp` and `jax.hessian` see through the forward half."""
    params, x = arguments
    seg = segment(_mlp)
    tangents = jax.tree.map(jnp.cos, arguments)
    found = jax.jvp(lambda p, x: seg.forward(p, x)[0], arguments, tangents)
    assert_close(found, jax.jvp(_mlp, arguments, tangents), **DOUBLE)
    found = jax.hessian(lambda x: _loss(lambda p, x: seg.forward(p, x)[0])(params, x))(
        x
    )
    assert_close(found, jax.hessian(lambda x: _loss(_mlp)(params, x))(x), **DOUBLE)


def test_outputs_of_every_kind_differentiate(rng):
    """Integer and key outputs beside floating ones do not disturb `jax.grad`."""

    def fn(p, x, key):
        return jnp.sin(p * x), jnp.argmax(x), key, 2.0

    x, key = normal(rng, 4), jax.random.key(1)
    seg = segment(fn)

    def loss(run):
        return lambda p, x: jnp.sum(run(p, x, key)[0] ** 2)

    found = jax.grad(loss(lambda *a: seg.forward(*a)[0]), argnums=(0, 1))(x, x)
    assert_close(found, jax.grad(loss(fn), argnums=(0, 1))(x, x))


def test_segments_inside_segments(arguments):
    """A segment may call another one."""
    inner = segment(_mlp)
    outer = segment(lambda p, x: jnp.sin(inner.forward(p, x)[0]))
    d_p, d_x = jax.grad(_loss(lambda p, x: jnp.sin(_mlp(p, x))), argnums=(0, 1))(
        *arguments
    )
    assert_close(_through(outer)(*arguments), (d_p, (d_x,)), **DOUBLE)


def test_decisions_are_not_taken_twice(rng):
    """The gradient of a maximum finds its element, whose source is made again."""

    def fn(p, x):
        scores = jnp.exp(x * p["a"] + p["b"]) / 3.0  # Element-wise: not kept by itself.
        return jnp.max(scores, axis=1), jnp.sort(scores, axis=1)

    case = CASES["linear"]
    params = {"a": normal(rng, 1, 5), "b": normal(rng, 1, 5)}
    (x,) = case.inputs(rng)
    seg = segment(fn)
    outputs, residuals = seg.forward(params, x)
    d_outputs = cotangents(rng, outputs)
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)
    _, pull_back = jax.vjp(fn, params, x)
    d_p, d_x = pull_back(d_outputs)
    assert_close((d_params, d_inputs), (d_p, (d_x,)))

"""Losses with derivative rules that are not linear in their cotangent.

Such a rule sees at which scale the backward pass began: in `jax.grad` of the batch's
mean with the example's share of it, w / sum w.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from tests.cotangents import rule

PARTS = 3


@jax.custom_vjp
def inject(x, extra):
    """An identity that adds the gradient of another loss, at its own scale."""
    del extra
    return x


inject.defvjp(lambda x, _: (x, None), lambda _, g: (g, jnp.ones((), g.dtype)))

RULES = {
    "clipped": lambda g: jnp.clip(g, *jnp.array([-0.02, 0.02], g.dtype)),
    "sign": lambda g: 0.03 * jnp.sign(g),
    "rounded": lambda g: jnp.round(g * 64) / 64,
    "normalized": lambda g: g / (0.01 + jnp.linalg.norm(g, axis=-1, keepdims=True)),
    "constant": lambda g: g + 0.1,
}


def losses_with(changed):
    """A matrix before the rule and one behind it."""

    def losses(params, batch):
        hidden = changed(batch["x"] @ params["first"])
        return ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).sum(-1)

    return losses


def given(examples, dtype=jnp.float32):
    """Parameters, a batch, and weights that differ."""
    rng = np.random.default_rng(examples)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, dtype)

    params = {"first": normal(4, 5), "second": normal(5, 2)}
    batch = {"x": normal(examples, 4), "y": normal(examples, 2)}
    return params, batch, rng.uniform(0.3, 3, examples).astype(np.float32)


def in_parts(losses, weights, scale, divide):
    """Micro-batches, whose losses are divided by `scale` and results by `divide`."""
    total = weights.sum()

    def candidate(params, batch):
        fn = jax.jit(
            jax.value_and_grad(lambda p, b, w: (w * losses(p, b)).sum() / scale(w))
        )
        cuts = [slice(0, PARTS), slice(PARTS, len(weights))]
        found = [
            (fn(params, jax.tree.map(lambda x, c=c: x[c], batch), weights[c]), c)
            for c in cuts
        ]
        scaled = [
            jax.tree.map(lambda x, c=c: x * divide(weights[c], total), part)
            for part, c in found
        ]
        return jax.tree.map(jnp.add, *scaled)

    return candidate


def trainers(losses, weights):
    """Right ones, and ones whose backward pass begins at another scale."""
    total = weights.sum()

    def mean(params, batch):
        return (weights * losses(params, batch)).sum() / total

    right = {
        "whole": jax.value_and_grad(mean),
        "shares": in_parts(losses, weights, lambda _: total, lambda *_: 1),
    }
    wrong = {
        "divided at the end": in_parts(
            losses, weights, lambda _: 1, lambda _, all_of_it: 1 / all_of_it
        ),
        "means of parts": in_parts(
            losses, weights, lambda w: w.sum(), lambda w, all_of_it: w.sum() / all_of_it
        ),
    }
    return right, wrong


@pytest.mark.parametrize("examples", [5, 6, 7, 11])
@pytest.mark.parametrize("name", RULES)
def test_the_scale_of_the_whole_batch_is_the_right_one(name, examples):
    """A sum that is divided afterwards, and means of unequal parts, are wrong."""
    params, batch, weights = given(examples)
    losses = losses_with(rule(RULES[name]))
    right, wrong = trainers(losses, weights)
    report = verify.gradients(
        losses, params, batch, right | wrong, weights=weights, finite_differences=False
    )
    for each in right:
        assert report.of(each).ok, str(report)
    for each in wrong:
        assert {row.path for row in report.of(each).failures} == {"first"}
    assert not any("influence" in note for note in report.notes)


@jax.custom_vjp
def stochastic(x, key):
    """An identity whose cotangent is rounded up or down at random."""
    del key
    return x


stochastic.defvjp(
    lambda x, key: (x, key),
    lambda key, g: (
        jnp.floor(64 * g + jax.random.uniform(key, g.shape, g.dtype)) / 64,
        None,
    ),
)


@pytest.mark.parametrize("keyed", [True, False])
def test_noise_in_the_backward_pass_alone(keyed):
    """With a key for each example it is judged; else it depends on the split."""
    params, batch, weights = given(7)
    batch = batch | {"key": jax.random.split(jax.random.key(5), 7)}

    def losses(params, batch):
        hidden = batch["x"] @ params["first"]
        if keyed:
            hidden = jax.vmap(stochastic)(hidden, batch["key"])
        else:
            hidden = stochastic(hidden, jax.random.key(5))
        return ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).sum(-1)

    right, wrong = trainers(losses, weights)
    report = verify.gradients(
        losses, params, batch, right | wrong, weights=weights, finite_differences=False
    )
    assert report.of("whole").ok
    if keyed:
        assert report.of("shares").ok, str(report)
        assert all(report.of(name).failures for name in wrong)
    else:
        unjudged = report.of("shares").unjudged
        assert [row.path for row in unjudged] == ["first"]
        assert "whose keys are not one for each example" in unjudged[0].unjudged


def test_linear_rules_know_no_scale():
    """A rule may be the derivative, at whatever scale."""
    params, batch, weights = given(7)
    losses = losses_with(rule(lambda g: -0.5 * g))
    right, other = trainers(losses, weights)
    report = verify.gradients(
        losses, params, batch, right | other, weights=weights, finite_differences=False
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_other_reductions_begin_as_they_do_on_one_device(reduction):
    """With the weights, or with 1 for the extreme."""
    params, batch, weights = given(7)
    losses = losses_with(rule(RULES["clipped"]))
    reduce = {
        "sum": lambda x: (weights * x).sum(),
        "max": jnp.max,
        "min": jnp.min,
    }[reduction]
    scaled = {
        f"{factor:g}": lambda p, b, factor=factor: jax.tree.map(
            lambda x: x / factor,
            jax.value_and_grad(lambda p: factor * reduce(losses(p, b)))(p),
        )
        for factor in (1.0, 0.01)
    }
    report = verify.gradients(
        losses,
        params,
        batch,
        scaled,
        weights=weights,
        reduction=reduction,
        finite_differences=False,
    )
    assert report.of("1").ok, str(report)
    assert report.of("0.01").failures


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_sixteen_bit_loss_begins_with_a_rounded_share(dtype):
    """As in `jax.grad` of its mean, in the losses' own dtype."""
    params, batch, weights = given(11, dtype)
    losses = losses_with(rule(RULES["clipped"]))

    w = jnp.asarray(weights, dtype)

    def mean(params, batch):
        return (w * losses(params, batch)).sum() / w.sum()

    def divided(params, batch):
        found = jax.value_and_grad(lambda p: (w * losses(p, batch)).sum())(params)
        return jax.tree.map(lambda x: x / w.sum(), found)

    report = verify.gradients(
        losses,
        params,
        batch,
        {"mean": jax.value_and_grad(mean), "divided": divided},
        weights=weights,
        finite_differences=False,
    )
    assert report.of("mean").ok, str(report)
    assert {row.path for row in report.of("divided").failures} == {"first"}


@pytest.mark.parametrize("of_batch", [True, False])
def test_what_a_rule_adds_for_the_whole_batch_depends_on_the_split(of_batch):
    """The auxiliary loss of a mixture of experts; of single examples it does not."""

    def balanced(params, batch):
        scores = jax.nn.softmax(batch["x"] @ params["first"])
        use = scores.mean(0) if of_batch else scores
        extra = 0.1 * (use**2).sum()
        hidden = inject(batch["x"] @ params["first"], extra)
        return ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).sum(-1)

    params, batch, weights = given(7)
    right, _ = trainers(balanced, weights)
    report = verify.gradients(
        balanced, params, batch, right, weights=weights, finite_differences=False
    )
    assert report.of("whole").ok
    assert bool(report.of("shares").failures) == of_batch
    told = [note for note in report.notes if "influence" in note]
    assert len(told) == of_batch
    if of_batch:
        adds = "influence each other through what a rule adds (custom_vjp of inject)"
        assert adds in told[0]


@pytest.mark.parametrize("name", ["clipped", "constant"])
def test_the_trace_names_the_rule_that_sees_another_scale(name):
    """Cotangents keep their factor to the tap behind the rule, and not beyond."""
    params, batch, weights = given(6)

    def losses(params, batch):
        hidden = verify.tap(batch["x"] @ params["first"], "before")
        hidden = verify.tap(rule(RULES[name])(hidden), "behind")
        return ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).sum(-1)

    judged = verify.trace_judge(
        losses, params, batch, weights=weights, finite_differences=False
    )
    right, wrong = trainers(losses, weights)
    for each in right.values():
        assert judged(each).difference is None
    for each in wrong.values():
        found = judged(each).difference
        assert (found.direction, found.tap) == ("backward", "before")


def test_examples_that_count_wrongly_are_found_behind_a_rule():
    """Each example's part of the gradient begins with its share as well."""
    params, batch, weights = given(11)

    def losses(params, batch):
        hidden = verify.tap(batch["x"], "inputs") @ params["first"]
        hidden = rule(RULES["clipped"])(hidden)
        return ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).sum(-1)

    def lost(params, batch):
        def mean(params):
            own = losses(params, batch)
            share = weights / weights.sum()
            return (share * own).sum(), own

        (value, _), whole = jax.value_and_grad(mean, has_aux=True)(params)
        one = jax.grad(
            lambda p: weights[4] / weights.sum() * losses(p, batch)[4],
        )(params)
        return value, jax.tree.map(jnp.subtract, whole, one)

    found = verify.trace(
        losses, params, batch, lost, weights=weights, finite_differences=False
    )
    assert found.difference.examples == (4,)
    assert "count 0 times" in found.difference.words


def test_training_steps_are_judged_by_the_same_gradient():
    """A step that begins with 1 and divides afterwards is wrong."""
    params, batch, weights = given(5)
    losses = losses_with(rule(RULES["clipped"]))

    def update(params, gradient, state):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), state

    right, wrong = trainers(losses, weights)
    steps = {
        name: lambda p, s, b, fn=fn: update(p, fn(p, b)[1], s)
        for name, fn in (right | wrong).items()
    }
    report = verify.step(
        losses, update, (params, ()), [batch] * 2, steps, weights=[weights] * 2
    )
    assert all(report.of(name).ok for name in right), str(report)
    assert all(report.of(name).failures for name in wrong)

"""An example of weight 0 is excluded: what is not finite there reaches nothing.

0 / 0 for a sequence without tokens, a root whose slope is infinite: multiplied by a
weight of 0 either is NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify

EXAMPLES = 7
LOST = 3


def per_token(params, batch):
    """The mean over an example's tokens, of which one example has none."""
    errors = ((batch["x"] @ params["w"]) ** 2).sum(-1) + params["b"]
    return (errors * batch["mask"]).sum(1) / batch["mask"].sum(1)


def rooted(params, batch):
    """A norm, whose gradient is NaN where the example is 0; the loss is finite."""
    x = batch["x"] * batch["mask"][..., None]
    return jnp.sqrt(((x @ params["w"]) ** 2).sum((1, 2))) + params["b"]


LOSSES = [per_token, rooted]


@pytest.fixture
def given(rng):
    """Parameters, a batch with an example of padding alone, and weights."""
    params = {
        "w": jnp.asarray(rng.normal(size=(3, 6)), jnp.float32),
        "b": jnp.asarray(rng.normal(), jnp.float32),
    }
    mask = rng.integers(0, 2, size=(EXAMPLES, 4)).astype(np.float32)
    mask[:, 0] = 1
    mask[LOST] = 0
    x = jnp.asarray(rng.normal(size=(EXAMPLES, 4, 3)), jnp.float32)
    return params, {"x": x, "mask": jnp.asarray(mask)}, mask.sum(1)


def reduced(reduction, losses, weights):
    """A reduction of the losses of examples that count."""
    own = {"max": jnp.max, "min": jnp.min}.get(reduction)
    if own is not None:
        return own(losses)
    total = (weights * losses).sum()
    return total / weights.sum() if reduction == "mean" else total


def trainers(losses, weights, reduction):
    """Two that leave the example out, and two that multiply it by 0."""
    rest = np.flatnonzero(weights)

    def left_out(params, batch):
        few = jax.tree.map(lambda x: x[rest], batch)
        return jax.value_and_grad(
            lambda p: reduced(reduction, losses(p, few), weights[rest])
        )(params)

    def replaced(params, batch):
        # As padding does: by a copy of a real example, of weight 0.
        rows = np.where(weights > 0, np.arange(EXAMPLES), rest[0])
        other = jax.tree.map(lambda x: x[rows], batch)
        return jax.value_and_grad(
            lambda p: reduced(reduction, losses(p, other), weights)
        )(params)

    def multiplied(params, batch):
        return jax.value_and_grad(
            lambda p: reduced(reduction, losses(p, batch), weights)
        )(params)

    def counted(params, batch):
        # Left out of the loss, and not of the backward pass.
        return left_out(params, batch)[0], multiplied(params, batch)[1]

    right = {"left out": left_out, "replaced": replaced}
    return right, {"multiplied": multiplied, "counted": counted}


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_an_excluded_example_makes_nothing_nan(losses, reduction, given):
    """The reference's loss and gradient are those of the others."""
    params, batch, weights = given
    right, wrong = trainers(losses, weights, reduction)
    report = verify.gradients(
        losses, params, batch, right | wrong, weights=weights, reduction=reduction
    )
    for name in right:
        assert report.of(name).ok, str(report)
    for name in wrong:
        # Beside an extreme the root's slope is not multiplied.
        assert any("not finite" in x.problem for x in report.of(name).failures)
        assert not any("the reference" in x.problem for x in report.of(name).failures)
    assert report.oracle.ok
    assert report.notes == ()


@pytest.mark.parametrize("losses", LOSSES)
def test_a_wrong_trainer_is_found_beside_an_excluded_example(losses, given):
    """One that divides by the number of examples, and one that loses another."""
    params, batch, weights = given
    right, _ = trainers(losses, weights, "mean")[0].values()
    lost = np.where(np.arange(EXAMPLES) == 5, 0, weights)
    fewer, _ = trainers(losses, lost, "mean")[0].values()

    def divided(params, batch):
        value, gradient = right(params, batch)
        return value, jax.tree.map(lambda g: g * (weights.sum() / EXAMPLES), gradient)

    report = verify.gradients(
        losses, params, batch, {"divided": divided, "fewer": fewer}, weights=weights
    )
    assert all(row.problem for row in report.leaves if row.path == "w")


@pytest.mark.parametrize("losses", LOSSES)
def test_steps_and_traces_leave_it_out_too(losses, given):
    """Where values and cotangents are compared example by example, and in training."""
    params, batch, weights = given

    def tapped(params, batch):
        own = {k: verify.tap(x, k) for k, x in params.items()}
        inputs = verify.tap(batch["x"], "inputs")
        return verify.tap(losses(own, batch | {"x": inputs}), "losses")

    right, wrong = trainers(tapped, weights, "mean")
    judged = verify.trace_judge(
        tapped, params, batch, weights=weights, finite_differences=False
    )
    for candidate in right.values():
        assert judged(candidate).difference is None, str(judged(candidate))
    for candidate in wrong.values():
        assert judged(candidate).difference is not None
    # Which example counts wrongly is told, although the excluded one's part is NaN.
    doubled = np.where(np.arange(EXAMPLES) == 5, 2 * weights, weights)

    def twice(params, batch):
        few = jax.tree.map(lambda x: x[weights > 0], batch)
        share = (doubled / weights.sum())[weights > 0]
        return jax.value_and_grad(lambda p: (share * tapped(p, few)).sum())(params)

    found = judged(twice).difference
    assert found.examples == (5,)
    assert "count 2 times" in found.words

    def update(params, gradient, state):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), state

    steps = {
        name: lambda p, s, b, fn=fn: update(p, fn(p, b)[1], s)
        for name, fn in trainers(losses, weights, "mean")[0].items()
    }
    batches, own = [batch] * 2, [weights] * 2
    report = verify.step(losses, update, (params, ()), batches, steps, weights=own)
    assert report.ok, str(report)


def test_what_a_rule_adds_is_as_on_one_device(given):
    """For an example of weight 0 too, and then the notes name the rule."""

    @jax.custom_vjp
    def constant(x):
        return x

    constant.defvjp(lambda x: (x, None), lambda _, g: (g + 0.1,))

    def losses(params, batch):
        return (constant(batch["x"].sum(1) @ params["w"]) ** 2).sum(-1) + params["b"]

    params, batch, weights = given
    right, wrong = trainers(losses, weights, "mean")
    candidates = {"left out": right["left out"], "multiplied": wrong["multiplied"]}
    report = verify.gradients(
        losses, params, batch, candidates, weights=weights, finite_differences=False
    )
    assert report.of("multiplied").ok, str(report)
    assert {row.path for row in report.of("left out").failures} == {"w"}
    assert any("what a rule adds (custom_vjp of constant)" in x for x in report.notes)


@pytest.mark.parametrize("masked", [True, False])
def test_examples_that_influence_each_other(given, masked):
    """Statistics of all examples keep those of weight 0; masked ones do without.

    The note names an example by its number in the whole batch.
    """
    params, batch, weights = given
    x = batch["x"].sum(1).at[5].multiply(3)
    own = jnp.asarray(weights > 0)
    if masked:
        x = x.at[LOST].set(jnp.nan)

    def losses(params, batch):
        h = batch["x"] @ params["w"]
        keep = batch["own"][:, None] | (not masked)
        mean = jnp.where(keep, h, 0).sum(0, keepdims=True) / keep.sum(dtype=h.dtype)
        return (jnp.tanh(h - mean) ** 2).sum(-1) + params["b"]

    right, wrong = trainers(losses, weights, "mean")
    candidate = right["left out"] if masked else wrong["multiplied"]
    report = verify.gradients(
        losses, params, {"x": x, "own": own}, {"one": candidate}, weights=weights
    )
    assert report.ok, str(report)
    (note,) = (x for x in report.notes if "influence each other" in x)
    number = int(note.partition("example ")[2].partition(" has")[0])
    assert number > LOST or not masked
    told = float(note.partition("has a loss of ")[2].split()[0])
    together = losses(params, {"x": x, "own": own})[number]
    np.testing.assert_allclose(told, together, rtol=1e-5)

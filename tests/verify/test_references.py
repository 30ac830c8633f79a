"""`jax.new_ref`: refused in what the judge runs itself, welcome everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import data_parallel, optim, pipeline, segment, verify


def plain(w, x):
    return jnp.tanh(x @ w) ** 2


def accumulating(w, x):
    """`plain`, written row by row into a reference, as JAX's documentation teaches."""
    found = jax.new_ref(jnp.zeros(x.shape[0], x.dtype))

    def body(i, carry):
        found[i] = jnp.tanh(x[i] @ w) ** 2
        return carry

    jax.lax.fori_loop(0, x.shape[0], body, None)
    return found[...]


def value_and_grad(w, x):
    """Examples one by one, added up in references."""
    loss, gradient = jax.new_ref(jnp.zeros((), w.dtype)), jax.new_ref(jnp.zeros_like(w))
    for i in range(len(x)):
        value, grad = jax.value_and_grad(lambda w, i=i: plain(w, x[i]))(w)
        loss[...] += value / len(x)
        gradient[...] += grad / len(x)
    return loss[...], gradient[...]


@pytest.fixture
def problem(rng):
    return jnp.asarray(rng.standard_normal(5)), jnp.asarray(rng.standard_normal((7, 5)))


REFUSED = (
    r"must be without `jax.new_ref`: .* Got a mutable reference\. Return the array"
)


def test_a_loss_with_references_is_refused(problem):
    w, x = problem
    outer = jax.new_ref(jnp.zeros(()))

    def closing(w, x):
        outer[...] += 1.0
        return plain(w, x)

    for loss in (accumulating, jax.jit(accumulating), closing):
        with pytest.raises(ValueError, match=rf"gradients\(loss_fn=...\)` {REFUSED}"):
            verify.gradients(loss, w, x, {"mine": value_and_grad})
    with pytest.raises(ValueError, match=rf"trace\(loss_fn=...\)` {REFUSED}"):
        verify.trace(accumulating, w, x, value_and_grad)
    sgd = optim.sgd(lr=0.1)
    state = (w, sgd.init(w))
    step = {"mine": lambda w, s, x: sgd.step(w, value_and_grad(w, x)[1], s)}
    with pytest.raises(ValueError, match=rf"step\(loss_fn=...\)` {REFUSED}"):
        verify.step(accumulating, sgd.step, state, [x], step)


def test_an_update_or_a_reference_step_with_references_is_refused(problem):
    w, x = problem

    def update(w, gradient, state):
        new = jax.new_ref(w)
        new[...] -= 0.1 * gradient
        return new[...], state

    step = {"mine": lambda w, s, x: update(w, value_and_grad(w, x)[1], s)}
    with pytest.raises(ValueError, match=rf"step\(update=...\)` {REFUSED}"):
        verify.step(plain, update, (w, ()), [x], step)

    def whole(w, x):
        return update(w, jax.grad(lambda w: plain(w, x).mean())(w), ())[0]

    with pytest.raises(ValueError, match=rf"step\(reference_step=...\)` {REFUSED}"):
        verify.step(whole, whole, w, [x])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_candidate_may_use_references(compiled, problem):
    w, x = problem
    mine = jax.jit(value_and_grad) if compiled else value_and_grad
    verify.gradients(plain, w, x, {"mine": mine}).raise_if_failed()


def test_segments_steps_and_pipelines_take_references(problem):
    """Their gradients are those of the pure function."""
    w, x = problem
    expected = jax.grad(lambda w: plain(w, x).sum())(w)
    half = segment.segment(accumulating)
    losses, kept = half.forward(w, x)
    gradient, _ = half.backward(w, kept, jnp.ones_like(losses))
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    opt = optim.sgd(lr=1.0)
    step = data_parallel.train_step(accumulating, opt, replicas=2, accumulate=3)
    state, _ = step(step.init(w), x[:6])
    moved = w - jax.grad(lambda w: plain(w, x[:6]).mean())(w)
    np.testing.assert_allclose(state.params, moved, rtol=1e-12)
    stage = pipeline.Stage(accumulating, ("x",), ("y",))
    pipe = pipeline.Pipeline([stage], lambda y, batch: y, pipeline.zero_bubble(1, 2))
    _, (gradient,) = pipe.value_and_grad([w], {"x": x})
    np.testing.assert_allclose(gradient, expected / len(x), rtol=1e-12)


def test_functions_among_the_parameters_are_refused(problem):
    """As in a whole module of Equinox."""
    w, x = problem
    params = {"w": w, "act": jnp.tanh}
    loss = lambda p, x: p["act"](x @ p["w"]) ** 2  # noqa: E731
    rule = r"gradients\(params=...\)` must be .* at act\. Split functions off, `arrays,"
    with pytest.raises(TypeError, match=rule):
        verify.gradients(loss, params, x, {"mine": lambda p, x: None})

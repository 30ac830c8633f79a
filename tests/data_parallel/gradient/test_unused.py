"""Parameters that no loss depends on stay as they are; others get a zero or a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import shard_batch, train_step
from tests.data_parallel.recording import gradient_of


@pytest.fixture
def params(rng):
    """One used, one never read, one read but cut off, one behind a nested jit."""
    sizes = {"used": 3, "never": 4, "cut": 3, "nested": 2, "chosen": 3}
    return {name: rng.normal(size=n) for name, n in sizes.items()}


@jax.jit
def both(params, x):
    """Of two results only the first is used outside."""
    return x * params["used"][None], x * params["nested"].sum()


def losses_of(params, x):
    """`chosen` counts only where x is large: decided by values, not by the program."""
    first, _ = both(params, x)
    branch = jax.lax.cond(
        x[0, 0] > 100, lambda c: c.sum(), lambda c: jnp.zeros(()), params["chosen"]
    )
    return (first + jax.lax.stop_gradient(params["cut"])[None]).sum(
        axis=1
    ) ** 2 + branch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_unused_parameters_do_not_change(params, mesh, rng, accumulate):
    """Parameter, state and count, bit for bit, under weight decay and momentum."""
    opt = optim.adamw(lr=0.1, weight_decay=0.5)
    step = train_step(losses_of, opt, mesh(2), accumulate=accumulate)
    state = step.init(params)
    x = rng.normal(size=(8, 3))
    for _ in range(3):
        state, _ = step(state, x)
    for name in ("never", "cut", "nested"):
        np.testing.assert_array_equal(state.params[name], params[name])
        own = state.opt_state[name]
        assert int(own.step) == 0
        assert not np.any(own.exp_avg)
        assert not np.any(own.exp_avg_sq)
    assert int(state.opt_state["used"].step) == 3
    assert not np.any(np.asarray(state.params["used"]) == params["used"])
    # A zero gradient is a gradient: it counts, and the weight decays.
    assert int(state.opt_state["chosen"].step) == 3
    np.testing.assert_allclose(state.params["chosen"], params["chosen"] * 0.95**3)


def test_they_are_not_sent(params, mesh, rng):
    """The compiled program reduces no array of an unused parameter's size."""
    step = train_step(losses_of, optim.sgd(lr=0.1), mesh(2))
    lowered = step.lower(step.init(params), rng.normal(size=(8, 3)))
    collectives = [
        line
        for line in lowered.compile().as_text().splitlines()
        if "all-reduce(" in line
    ]
    # used and chosen, three each, loss and total: in one flat array or apart.
    assert collectives
    assert not any("f64[4]" in line or "f64[2]" in line for line in collectives)


def test_unused_here_but_not_there_is_a_zero(mesh, rng):
    """Each replica's examples reach other rows of a table; the sum is the whole's."""
    table = rng.normal(size=(6, 2))
    rows = np.array([0, 0, 1, 1, 1, 5, 5])

    def losses(table, rows):
        return (table[rows] ** 3).sum(axis=1)

    fn = gradient_of(losses, mesh(3))
    _, gradient = fn(table, *shard_batch(rows, mesh(3), (2, 3, 2)))
    counts = np.bincount(rows, minlength=6)[:, None]
    np.testing.assert_allclose(gradient, counts * 3 * table**2 / 7, rtol=1e-14)
    assert not np.any(gradient[2:5])


def test_a_parameter_of_a_loop(mesh, rng):
    """Used inside a scan; its neighbour only feeds a carry that nobody reads."""

    def losses(params, x):
        def body(carry, _):
            kept, lost = carry
            return (kept * params["used"], lost + params["lost"]), None

        (kept, _), _ = jax.lax.scan(body, (x, x), length=2)
        return kept

    values = {"used": jnp.float64(1.5), "lost": jnp.float64(0.7)}
    x = rng.normal(size=4)
    _, gradient = gradient_of(losses, 2)(values, x)
    np.testing.assert_allclose(gradient["used"], (2 * 1.5 * x).mean(), rtol=1e-13)
    assert np.isnan(gradient["lost"])


def test_a_loss_without_parameters(mesh, rng):
    """Nothing to train: the loss is still the whole batch's."""
    x = rng.normal(size=6)
    step = train_step(lambda params, x: x**2, optim.adamw(lr=0.1), mesh(2))
    state, metrics = step(step.init({"w": jnp.ones(3)}), x)
    np.testing.assert_allclose(metrics.loss, (x**2).mean(), rtol=1e-14)
    np.testing.assert_array_equal(state.params["w"], np.ones(3))

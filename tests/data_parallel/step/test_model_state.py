"""Batch-norm statistics, auxiliary outputs and random keys, by their stated rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import shard_batch, train_step
from tests.replicas import over

MOMENTUM = 0.75


def losses_of(params, x, states):
    """Normalises by the batch it sees, and keeps a moving average and a count."""
    mean = x.mean(axis=0)
    new = {
        "mean": MOMENTUM * states["mean"] + (1 - MOMENTUM) * mean,
        "seen": states["seen"] + 1,
        "warm": jnp.array(True),
    }
    return ((x - mean[None]) @ params) ** 2, new


@pytest.fixture
def problem(rng):
    """Seven examples; a state with a float, an integer and a flag."""
    state = {"mean": rng.normal(size=3), "seen": np.int32(4), "warm": np.array(False)}
    return rng.normal(size=3), rng.normal(size=(7, 3)), state


def stepped(where, problem, sizes, rows=None, weights=None, **options):
    """The model state after one step."""
    params, x, states = problem
    step = train_step(losses_of, optim.sgd(lr=0.1), **over(where), **options)
    state = step.init(params, states=states)
    shards = shard_batch(x, **over(where), sizes=sizes, weights=weights, rows=rows)
    return step(state, *shards)[0].states


@pytest.mark.parametrize("kind", ["devices", "vmap"])
def test_the_mean_is_by_examples(problem, mesh, kind):
    """A replica of five examples counts five times one of one; none counts nothing."""
    where = mesh(3) if kind == "devices" else 3
    _, x, old = problem
    # Rows: the second replica has none, the third its single example five times.
    found = stepped(where, problem, (6, 0, 1))
    means = [x[:6].mean(axis=0), x[6]]
    new = [MOMENTUM * old["mean"] + (1 - MOMENTUM) * m for m in means]
    np.testing.assert_allclose(found["mean"], (6 * new[0] + new[1]) / 7, rtol=1e-13)
    assert int(found["seen"]) == 5
    assert found["seen"].dtype == np.int32
    assert found["warm"].dtype == bool
    assert bool(found["warm"])


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"max_norm": 1.0}])
def test_a_step_of_nothing_keeps_parameters_and_state(problem, mesh, options):
    """Weights on a device, all 0, which are not looked at: the loss alone is NaN."""
    params, x, states = problem
    step = train_step(losses_of, optim.sgd(lr=0.1, momentum=0.9), mesh(2), **options)
    before = step.init(params, states=states)
    kept = jax.tree.map(np.asarray, (before.params, before.states, before.opt_state))
    after, metrics = step(before, jnp.asarray(x[:4]), jnp.zeros(4))
    assert np.isnan(metrics.loss)
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.states, after.opt_state),
        kept,
    )


def test_first_is_the_first_replica_that_has_examples(problem, mesh):
    """As DDP broadcasts rank 0's; bit for bit that replica's own."""
    _, x, old = problem
    found = stepped(mesh(3), problem, (0, 6, 1), states="first")
    one = stepped(1, (problem[0], x[:6], old), (6,))
    np.testing.assert_array_equal(found["mean"], one["mean"])
    assert int(found["seen"]) == 5


def test_micro_batches_hand_it_on(problem):
    """In order; one without examples leaves it alone."""
    _, x, old = problem
    found = stepped(2, problem, (5, 2), rows=6, accumulate=3)
    mean = old["mean"]
    for rows in (x[:2], x[2:4], x[[4, 4]]):
        mean = MOMENTUM * mean + (1 - MOMENTUM) * rows.mean(axis=0)
    other = MOMENTUM * old["mean"] + (1 - MOMENTUM) * x[5:].mean(axis=0)
    np.testing.assert_allclose(found["mean"], (5 * mean + 2 * other) / 7, rtol=1e-13)
    # The first replica ran three micro-batches, the second one.
    assert int(found["seen"]) == 7


def test_a_key_may_be_model_state(mesh):
    """Whatever has no mean comes from the first replica."""

    def losses(params, x, states):
        return params * x, jax.random.fold_in(states, jax.lax.axis_index("data"))

    key = jax.random.key(7)
    step = train_step(losses, optim.sgd(lr=0.1), mesh(2))
    state = step.init(np.float64(2), states=key)
    state, _ = step(state, *shard_batch(np.ones(3), mesh(2), (0, 3)))
    assert state.states == jax.random.fold_in(key, 1)


def test_statistics_synchronised_by_the_model(problem, mesh):
    """A model that averages over the axis: then all replicas had the same state."""
    params, x, old = problem

    def losses(params, x, states):
        mean = jax.lax.pmean(x.mean(axis=0), "data")
        new = {"mean": MOMENTUM * states["mean"] + (1 - MOMENTUM) * mean}
        return ((x - mean[None]) @ params) ** 2, new

    step = train_step(losses, optim.sgd(lr=0.1), mesh(3))
    state = step.init(params, states={"mean": old["mean"]})
    state, metrics = step(state, x[:6])
    mean = x[:6].mean(axis=0)
    np.testing.assert_allclose(
        state.states["mean"],
        MOMENTUM * old["mean"] + (1 - MOMENTUM) * mean,
        rtol=1e-13,
    )
    whole = jnp.mean(((x[:6] - mean) @ params) ** 2)
    np.testing.assert_allclose(metrics.loss, whole, rtol=1e-13)


# --- auxiliary outputs and keys ---


@pytest.mark.parametrize("kind", ["devices", "vmap"])
def test_aux_has_an_entry_for_every_call(mesh, kind):
    """Replicas and micro-batches along a new first axis, in the order of the rows."""
    where = mesh(2) if kind == "devices" else 2

    def losses(params, x):
        return params * x, {
            "own": x,
            "sum": x.sum(),
            "rank": jax.lax.axis_index("data"),
        }

    step = train_step(
        losses, optim.sgd(lr=0.1), **over(where), accumulate=3, has_aux=True
    )
    _, metrics = step(step.init(np.float64(2)), np.arange(12.0))
    assert metrics.aux["own"].reshape(-1).tolist() == list(range(12))
    assert metrics.aux["own"].shape == (6, 2)
    assert metrics.aux["sum"].tolist() == [1, 5, 9, 13, 17, 21]
    assert metrics.aux["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    step = train_step(losses, optim.sgd(lr=0.1), **over(where), has_aux=True)
    _, metrics = step(step.init(np.float64(2)), np.arange(4.0))
    assert metrics.aux["sum"].tolist() == [1, 5]


def test_keys_follow_from_step_replica_and_micro_batch(mesh):
    """The formula of the module, so that a run can be repeated from any step."""

    def losses(params, x, key):
        return params * x, jax.random.key_data(key)

    key = jax.random.key(3)
    step = train_step(losses, optim.sgd(lr=0.1), mesh(2), accumulate=2, has_aux=True)
    state = step.init(np.float64(2), key=key)
    seen = []
    for _ in range(2):
        state, metrics = step(state, np.arange(4.0))
        seen += np.asarray(metrics.aux).tolist()
    fold = jax.random.fold_in
    assert seen == [
        jax.random.key_data(fold(fold(fold(key, t), r), j)).tolist()
        for t in range(2)
        for r in range(2)
        for j in range(2)
    ]
    assert len({tuple(words) for words in seen}) == 8
    assert state.key == key


def test_key_state_and_aux_together(problem):
    """Third argument, keyword, and three results."""
    params, x, states = problem

    def losses(params, x, key, states):
        noise = jax.random.normal(key, (len(x),), params.dtype)
        return noise * (x @ params), states, noise

    step = train_step(losses, optim.sgd(lr=0.1), replicas=1, has_aux=True)
    state = step.init(params, states=states, key=jax.random.key(1))
    state, metrics = step(state, x)
    np.testing.assert_allclose(metrics.loss, np.mean(metrics.aux[0] * (x @ params)))


# --- what is refused ---


@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        (lambda x, s: x, False, r"the tuple \(losses, new_states\).*Got an array"),
        (lambda x, s: (x, s), True, r"\(losses, new_states, aux\).*Got a tuple of 2"),
        (lambda x, s: (x, s | {"n": x}), False, r"no leaf at n. Got float64"),
        (lambda x, s: (x, {}), False, r"float64 of shape \(3,\) at mean. Got no leaf"),
        (
            lambda x, s: (x, s | {"mean": s["mean"][:2]}),
            False,
            r"float64 of shape \(3,\) at mean. Got float64 of shape \(2,\)",
        ),
        (
            lambda x, s: (x, s | {"seen": s["mean"]}),
            False,
            r"int32 of shape \(\) at seen. Got float64 of shape \(3,\)",
        ),
    ],
)
def test_what_a_loss_must_return(problem, returned, has_aux, message):
    """By the arguments that it was given."""
    params, x, states = problem
    step = train_step(
        lambda p, x, states: returned(x @ p, states),
        optim.sgd(lr=0.1), replicas=1, has_aux=has_aux,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        step(step.init(params, states=states), x)


def test_losses_must_be_one_per_example(problem):
    """The mean inside the loss function is the mistake that weights cannot mend."""
    params, x, _ = problem
    step = train_step(lambda p, x: jnp.mean(x @ p), optim.sgd(lr=0.1), replicas=1)
    with pytest.raises(ValueError, match=r"one real loss per example.*of shape \(\)"):
        step(step.init(params), x)
    step = train_step(lambda p, x: (x @ p, 3), optim.sgd(lr=0.1), replicas=1)
    with pytest.raises(ValueError, match=r"one real loss per example.*Got a tuple"):
        step(step.init(params), x)

"""An optimizer that keeps versions, without a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.pipeline import with_weight_stashing

OPTIMIZERS = {
    "sgd": optim.sgd(lr=0.1, momentum=0.5),
    "adam": optim.adam(lr=0.03),
    "masters": optim.with_master_weights(
        optim.adagrad(lr=0.1), compute_dtype=jnp.bfloat16
    ),
}


def first(name):
    dtype = jnp.bfloat16 if name == "masters" else jnp.float32
    return {"w": jnp.array([[0.5, -2.0, 3.0]], dtype), "b": jnp.array([0.25], dtype)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_versions_are_those_of_the_optimizer(name, rng):
    """Bit for bit, whatever the optimizer; below 0 there is w(0)."""
    optimizer, params = OPTIMIZERS[name], first(name)
    stash = with_weight_stashing(optimizer, versions=3)
    state = stash.init(params)
    plain, kept = jax.jit(optimizer.step), optimizer.init(params)
    history = [params]
    for t in range(5):
        grads = jax.tree.map(
            lambda p: jnp.asarray(rng.normal(size=p.shape)).astype(p.dtype), params
        )
        before = state
        state = stash.step(grads, state)
        after, kept = plain(history[-1], grads, kept)
        history.append(after)
        assert (state.version, len(state.kept)) == (t + 1, min(t + 2, 3))
        assert bits(stash.load_new_params(state)) == bits(after)
        assert bits(stash.load_old_params(state)) == bits(history[max(0, t - 1)])
        for version in range(max(0, t - 1), t + 2):
            found = stash.load_old_params(state, version)
            assert bits(found) == bits(history[version])
        # A version is a reference, and what was kept before is still there.
        assert before.kept[t] is state.kept[t]
    with pytest.raises(ValueError, match=r"one of \[3, 4, 5\], which are kept"):
        stash.load_old_params(state, 2)
    with pytest.raises(ValueError, match="Got 6"):
        stash.load_old_params(state, 6)


def test_init_takes_full_precision():
    """The versions are compute copies, and the masters keep what those round."""
    full = jnp.array([1.0001, 2.0003])
    stash = with_weight_stashing(OPTIMIZERS["masters"], versions=2)
    state = stash.init(full)
    assert stash.load_new_params(state).dtype == jnp.bfloat16
    assert state.opt_state.masters.tolist() == full.tolist()
    state = stash.step(jnp.array([0.5, 3.0]), state)
    assert (stash.load_old_params(state) == full.astype(jnp.bfloat16)).all()
    # Adagrad's first step is the rate, whatever the gradient.
    np.testing.assert_allclose(state.opt_state.masters, full - 0.1, rtol=1e-6)


def test_negative_versions_are_the_first():
    stash = with_weight_stashing(optim.sgd(lr=0.5), versions=4)
    state = stash.step(first("sgd"), stash.init(first("sgd")))
    for version in (-3, -1, 0):
        assert stash.load_old_params(state, version) is state.kept[0]
    assert stash.load_old_params(state) is state.kept[0]


def test_release_and_drain():
    stash = with_weight_stashing(optim.sgd(lr=0.5), versions=4)
    state = stash.init(first("sgd"))
    for _ in range(3):
        state = stash.step(first("sgd"), state)
    assert list(stash.release(state, {0, 2}).kept) == [0, 2, 3]
    assert list(stash.release(state, ()).kept) == [3]
    drained = stash.drain(state)
    assert (drained.version, list(drained.kept)) == (0, [0])
    assert stash.load_old_params(drained, -1) is state.kept[3]
    with pytest.raises(ValueError, match="less than the 4 versions that are kept"):
        stash.append(state, state.kept[3], state.opt_state, range(4))


def test_a_learning_rate_for_one_step():
    stash = with_weight_stashing(optim.sgd(lr=0.5), versions=2)
    state = stash.step(jnp.ones(2), stash.init(jnp.ones(2)), lr=0.25)
    np.testing.assert_array_equal(stash.load_new_params(state), [0.75, 0.75])


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"optimizer of jdist\.optim\. Got a float"):
        with_weight_stashing(0.1, versions=2)
    with pytest.raises(ValueError, match=r"versions=.*at least 1\. Got 0"):
        with_weight_stashing(optim.sgd(lr=0.1), versions=0)

"""An exponential moving average of the parameters, beside the optimizer's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import data_parallel, optim, pipeline
from tests.replicas import over

DECAY = 0.75


def problem(rng):
    params = {"w": jnp.asarray(rng.standard_normal((5, 7))), "b": jnp.ones(3), "n": 4}
    rows = [
        {"w": jnp.asarray(rng.standard_normal((5, 7))), "b": None, "n": None},
        *(
            {
                "w": jnp.asarray(rng.standard_normal((5, 7))),
                "b": jnp.asarray(rng.standard_normal(3)),
                "n": None,
            }
            for _ in range(3)
        ),
    ]
    return params, rows


def by_hand(path, decay=DECAY):
    """The average of the parameters after each step."""
    found = path[0]
    for params in path[1:]:
        found = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, found, params)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_the_average_follows_and_the_steps_are_the_optimizers(compiled, rng):
    """Of a parameter without a gradient too; what is not floating stays."""
    params, rows = problem(rng)
    inner = optim.adamw(lr=0.1)
    opt = optim.with_ema(inner, DECAY)
    state, alone, path = opt.init(params), inner.init(params), []
    own = params
    step = jax.jit(opt.step) if compiled else opt.step
    for grads in rows:
        params, state = step(params, grads, state)
        own, alone = inner.step(own, grads, alone)
        for name in ("w", "b"):
            np.testing.assert_allclose(params[name], own[name], rtol=1e-13)
        path.append({name: params[name] for name in ("w", "b")})
    expected = by_hand(path)
    found = state.params(params)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-13)
        assert np.abs(found[name] - params[name]).max() > 1e-3
    assert found["n"] == 4
    assert state.average["n"] is None
    assert state.n_averaged == len(rows)


def test_updates_average_what_a_step_averages(rng):
    params, rows = problem(rng)
    params["n"] = jax.random.key(3)  # to which nothing can be added
    opt = optim.with_ema(optim.sgd(lr=0.1), DECAY)
    state = opt.init(params)
    for grads in rows[1:]:
        moved, expected = opt.step(params, grads, state)
        _, found = opt.updates(params, grads, state)
        for name in ("w", "b"):
            np.testing.assert_allclose(
                found.average[name], expected.average[name], rtol=1e-13
            )
        params, state = moved, expected


def test_the_decay_is_a_hyperparameter(rng):
    """A schedule of the steps averaged, and an override; the others go on inside."""
    params, rows = problem(rng)
    ramp = optim.with_ema(optim.sgd(lr=0.1), lambda n: 1 - 1 / (n.astype(float) + 1))
    plain = optim.with_ema(optim.sgd(lr=0.5), 0.9)
    states, path, ends = [ramp.init(params), plain.init(params)], [], [params] * 2
    for n, grads in enumerate(rows[1:]):
        ends[0], states[0] = ramp.step(ends[0], grads, states[0])
        ends[1], states[1] = plain.step(
            ends[1], grads, states[1], lr=0.1, decay=n / (n + 1.0)
        )
        path.append(ends[0]["w"])
    for end, state in zip(ends, states, strict=True):
        np.testing.assert_allclose(end["w"], path[-1], rtol=1e-13)
        np.testing.assert_allclose(state.average["w"], sum(path) / 3, rtol=1e-13)


def test_sixteen_bits_are_averaged_in_float32():
    """In bfloat16 an average of decay 0.999 would stay where it is."""
    opt = optim.with_ema(optim.sgd(lr=1.0), 0.999)
    params = jnp.ones(3, jnp.bfloat16)
    state = opt.init(params)
    for _ in range(3):
        params, state = opt.step(params, jnp.ones(3, jnp.bfloat16), state)
    # After steps to 0, -1 and -2.
    expected = -0.001 * 0.999 - 0.002
    np.testing.assert_allclose(state.average, np.full(3, expected), rtol=1e-5)
    assert state.params(params).dtype == jnp.bfloat16


def test_masters_are_averaged_and_a_skipped_step_leaves_the_average():
    opt = optim.with_master_weights(
        optim.with_ema(optim.sgd(lr=2.0**-10), 0.5),
        compute_dtype=jnp.bfloat16,
        loss_scale=8.0,
    )
    full = jnp.ones(3, jnp.float32)
    params, state = optim.compute_copies(full, jnp.bfloat16), opt.init(full)
    grads = jnp.full(3, 8.0, jnp.bfloat16)
    for gradient in (grads, grads * jnp.inf, grads):
        params, state = opt.step(params, gradient, state)
    step = 2.0**-10
    np.testing.assert_array_equal(state.inner.average, np.float32(1 - 1.5 * step))
    assert state.inner.n_averaged == 2


# --- trainers ---


def losses(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2, axis=1) + jnp.sum(params["b"] ** 2)


@pytest.mark.parametrize("divided", [False, True])
def test_train_step_and_zero(divided, mesh, rng):
    """The average is that of one device, sharded with the state, and evaluated."""
    where = mesh(4)
    params = {"w": jnp.asarray(rng.standard_normal((5, 7))), "b": jnp.ones(3)}
    batches = [jnp.asarray(rng.standard_normal((8, 5))) for _ in range(3)]
    inner = optim.adam(lr=0.1)
    opt = optim.with_ema(inner, DECAY)
    own, alone, path = params, inner.init(params), []
    for x in batches:
        grads = jax.grad(lambda p, x=x: losses(p, x).mean())(own)
        own, alone = inner.step(own, grads, alone)
        path.append(own)
    expected = by_hand(path)
    used = data_parallel.zero(opt, where) if divided else opt
    step = data_parallel.train_step(losses, used, **over(where))
    state = step.init(params)
    for x in batches:
        state, _ = step(state, x)
    assert step.compiled._cache_size() == 1
    average = state.opt_state.average
    if divided:
        assert average["w"].array.shape == (5, 8)
        average = jax.tree.map(
            lambda x: x.whole(), average, is_leaf=lambda x: hasattr(x, "whole")
        )
    for name, leaf in expected.items():
        np.testing.assert_allclose(average[name], leaf, rtol=1e-10)
    if not divided:
        given = state._replace(params=state.opt_state.params(state.params))
        found = step.evaluate(given, batches[0]).loss
        wanted = losses(expected, batches[0]).mean()
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def layer(w, h):
    return jnp.tanh(h @ w)


def test_a_pipeline(rng):
    """Each stage averages its own parameters; evaluated as the documentation says."""
    stages = [
        pipeline.Stage(layer, ("x",), ("h",)),
        pipeline.Stage(layer, ("h",), ("y",)),
    ]
    inner = optim.sgd(lr=0.1, momentum=0.9)
    places = [Mesh(jax.devices()[i : i + 1], ("data",)) for i in range(2)]
    pipe = pipeline.Pipeline(
        stages,
        lambda y, batch: jnp.sum((y - batch["t"]) ** 2, axis=1),
        pipeline.gpipe(2, 2),
        places,
        optimizer=optim.with_ema(inner, DECAY),
    )
    params = [jnp.asarray(rng.standard_normal(s)) for s in ((5, 7), (7, 3))]
    batch = {k: rng.standard_normal((6, s)) for k, s in (("x", 5), ("t", 3))}

    def loss(params, batch):
        y = layer(params[1], layer(params[0], batch["x"]))
        return jnp.sum((y - batch["t"]) ** 2, axis=1).mean()

    own, alone, path = params, inner.init(params), []
    state = pipe.init(pipe.place(params))
    for _ in range(3):
        state, _ = pipe.train_step(state, batch)
        own, alone = inner.step(own, jax.grad(loss)(own, batch), alone)
        path.append(own)
    expected = by_hand(path)
    kept = zip(state.opt_states, state.params, strict=True)
    averaged = state._replace(params=[own.params(p) for own, p in kept])
    for found, leaf in zip(averaged.params, expected, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-10)
    found = pipe.evaluate(averaged, batch).loss
    np.testing.assert_allclose(found, loss(expected, batch), rtol=1e-10)


# --- what is refused ---


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r"with_ema\(decay=...\)` must be at least 0 a"
    ):
        optim.with_ema(optim.sgd(), 1.5)
    with pytest.raises(TypeError, match=r"with_ema\(decay=...\)` must be a number"):
        optim.with_ema(optim.sgd(), "0.9")
    with pytest.raises(
        TypeError, match=r"with_ema\(optimizer=...\)` must be an optimizer of"
    ):
        optim.with_ema(optim.sgd)
    masters = optim.with_master_weights(optim.sgd())
    with pytest.raises(
        ValueError, match=r"no masters, .* Put `with_master_weights` ar"
    ):
        optim.with_ema(masters)
    opt, params = optim.with_ema(optim.sgd()), jnp.ones(3)
    state = opt.init(params)
    with pytest.raises(
        ValueError, match=r"with_ema.step\(state=...\)` must be what `i"
    ):
        opt.step(params, params, state.inner)
    with pytest.raises(
        ValueError, match=r"with_ema.step\(decay=...\)` must be at leas"
    ):
        opt.step(params, params, state, decay=-0.1)
    with pytest.raises(TypeError, match="has no hyperparameter 'rate' to override"):
        opt.step(params, params, state, rate=0.1)

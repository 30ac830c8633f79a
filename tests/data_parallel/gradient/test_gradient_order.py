"""When a gradient is final: by the program, not by names or the order of leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import reduction
from jdist.data_parallel.gradient.gradient_order import with_gradient_order


def order_of(loss_fn, params, batch):
    """Paths of the parameters, first those whose gradient is ready first."""
    _, ready = with_gradient_order(jax.grad(loss_fn), params, batch)
    pairs = jax.tree.leaves_with_path(ready)
    names = [(when, jax.tree_util.keystr(k, simple=True)) for k, when in pairs]
    return [name for _, name in sorted(names)]


def chain(names):
    """A loss that uses the layers in this order."""

    def loss(params, x):
        for name in names:
            x = jax.nn.relu(x @ params[name])
        return jnp.sum(x**2)

    return loss


def test_the_last_layer_is_ready_first(rng):
    """Twelve layers, whose names sort as 1, 10, 11, 12, 2, .. ."""
    names = [f"layer{i}" for i in range(1, 13)]
    params = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in names}
    batch = rng.normal(size=(3, 4))
    assert order_of(chain(names), params, batch) == names[::-1]
    assert order_of(chain(names[::-1]), params, batch) == names


def test_a_shared_parameter_waits_for_its_last_use(rng):
    """Used by the last layer and by the first, it is ready last."""
    params = {k: jnp.asarray(rng.normal(size=(4, 4))) for k in ("a", "b", "tied")}
    batch = rng.normal(size=(3, 4))
    uses = chain(["tied", "a", "b", "tied"])
    assert order_of(uses, params, batch) == ["b", "a", "tied"]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_it_looks_into_nested_calls(rng, wrap):
    """Layers inside one jit, and under a checkpoint."""
    names = ["c", "a", "b"]
    params = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in names}
    batch = rng.normal(size=(3, 4))
    assert order_of(wrap(chain(names)), params, batch) == ["b", "a", "c"]


def test_a_loop_is_one_event(rng):
    """Its parameters are all ready when it ends: after what follows the loop."""
    params = {
        "before": jnp.asarray(rng.normal(size=(4, 4))),
        "loop": jnp.asarray(rng.normal(size=(5, 4, 4))),
        "after": jnp.asarray(rng.normal(size=(4, 4))),
    }

    def loss(params, x):
        x = jnp.tanh(x @ params["before"])
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["loop"])
        return jnp.sum((x @ params["after"]) ** 2)

    assert order_of(loss, params, rng.normal(size=(3, 4))) == [
        "after",
        "loop",
        "before",
    ]


def test_casts_at_the_end_do_not_count(rng):
    """Gradients of 16-bit parameters are widened last, in the order of leaves."""
    names = ["c", "a", "b"]
    params = {n: jnp.asarray(rng.normal(size=(4, 4)), jnp.bfloat16) for n in names}
    batch = jnp.asarray(rng.normal(size=(3, 4)), jnp.bfloat16)

    def losses(params, x):
        for name in names:
            x = jnp.tanh(x @ params[name])
        return jnp.sum(x, axis=1)

    def partial(params, batch):
        weights = jnp.ones(3, jnp.float32)
        return reduction.partial(losses, params, batch, weights, "mean")

    part, ready = with_gradient_order(partial, params, batch)
    assert {g.dtype for g in part.gradient.values()} == {jnp.dtype("float32")}
    assert ready.gradient["b"] < ready.gradient["a"] < ready.gradient["c"]


def test_what_is_not_used_is_ready_at_once(rng):
    """And a result that is a constant."""
    params = {"used": jnp.asarray(rng.normal(size=4)), "unused": jnp.zeros(3)}
    fn = jax.value_and_grad(lambda p, x: jnp.sum(x @ p["used"]))
    (_, gradient), (_, ready) = with_gradient_order(fn, params, rng.normal(size=(3, 4)))
    assert ready["unused"] == -1 < ready["used"]
    np.testing.assert_array_equal(gradient["unused"], 0)


def test_the_function_is_traced_once(rng):
    """And its result is that of the function, bit for bit."""
    traces = 0

    def fn(w, x):
        nonlocal traces
        traces += 1
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    w, x = jnp.asarray(rng.normal(size=(4, 2))), rng.normal(size=(3, 4))
    found = jax.jit(lambda w, x: with_gradient_order(fn, w, x)[0])(w, x)
    assert traces == 1
    assert found.tobytes() == jax.jit(fn)(w, x).tobytes()

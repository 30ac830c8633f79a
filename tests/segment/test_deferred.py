"""Weight gradients that are put off and computed for many calls at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import Fold, segment
from jdist.segment.internal import Deferred, backward_deferring, join_deferred


def collect(carry, d_params, given):
    """Keeps every tree that is handed over."""
    return [*(carry or []), d_params]


def dense(params, x):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return (h @ params["w"].T) * params["scale"]


def convolved(params, x):
    h = jax.lax.conv_general_dilated(
        x, params["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    grouped = jax.lax.conv_general_dilated(
        jnp.tanh(h), params["g"], (1, 1), "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2,
    )  # fmt: skip
    return grouped.sum((1, 2))


def many_headed(params, x):
    """A product with a batch dimension, which has more than one contracted axis."""
    h = jnp.einsum("nhi,hij->nhj", x, params["heads"])
    return jnp.einsum("nhj,hjo->no", jnp.sin(h), params["out"])


def looped(params, x):
    def body(h, w):
        return jnp.tanh(h @ w), None

    return jax.lax.scan(body, x, params["layers"])[0] @ params["last"]


def normal(rng, **shapes):
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


MODELS = {
    # The function, its parameters, an input's row, and which gradients are put off.
    "dense": (
        dense,
        {"w": (3, 5), "b": (1, 5), "scale": (1, 3), "unused": (2,)},
        (3,),
        {"w"},
    ),
    "convolved": (
        convolved,
        {"k": (3, 3, 2, 4), "g": (2, 2, 2, 6)},
        (5, 4, 2),
        {"k"},
    ),
    "many-headed": (
        many_headed,
        {"heads": (2, 3, 4), "out": (2, 4, 3)},
        (2, 3),
        {"heads", "out"},
    ),
    "looped": (looped, {"layers": (3, 4, 4), "last": (4, 2)}, (4,), {"last"}),
}


def run(name, rng, sizes):
    """The gradients that were ready and joined, and those of each call on its own."""
    fn, shapes, row, _ = MODELS[name]
    params, seg = normal(rng, **shapes), segment(fn)
    ready, deferred, alone, inputs = None, [], [], []
    for size in sizes:
        x = jnp.asarray(rng.normal(size=(size, *row)))
        y, residuals = seg.forward(params, x)
        given = params, residuals, jnp.asarray(rng.normal(size=y.shape))
        ready, (d_x,), later = backward_deferring(seg, *given, Fold(collect, ready))
        deferred.append(later)
        d_params, (expected,) = seg.backward(*given)
        alone.append(d_params)
        inputs.append((d_x, expected))
    joined = join_deferred(seg, deferred, Fold(collect, None))
    return ready, joined, alone, inputs


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_of_the_gradients_of_all_calls(name, rng):
    """Of unequal sizes; what is put off is what ends in a product."""
    ready, joined, alone, inputs = run(name, rng, (4, 3, 4))
    off = MODELS[name][3]
    for found in ready:
        assert {key for key, leaf in found.items() if leaf is None} == off
    assert len(joined) == 2  # One for each size.
    for found in joined:
        assert {key for key, leaf in found.items() if leaf is not None} == off
    for key in alone[0]:
        parts = joined if key in off else ready
        wanted = sum(each[key] for each in alone)
        np.testing.assert_allclose(
            sum(part[key] for part in parts), wanted, rtol=1e-12, atol=1e-12
        )
    for found, expected in inputs:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def products(program):
    names = [e.primitive.name for e in program.jaxpr.eqns]
    return sum(name in ("dot_general", "conv_general_dilated") for name in names)


@pytest.mark.parametrize(("name", "count"), [("dense", 2), ("convolved", 1)])
def test_one_product_for_each_use_of_a_weight(name, count, rng):
    """However many calls: counted in the joined program."""
    fn, shapes, row, _ = MODELS[name]
    params, seg = normal(rng, **shapes), segment(fn)
    deferred = []
    for _ in range(5):
        y, residuals = seg.forward(params, jnp.asarray(rng.normal(size=(3, *row))))
        given = params, residuals, jnp.ones_like(y)
        _, _, later = backward_deferring(seg, *given, Fold(collect, None))
        deferred.append(later)
    split = deferred[0].split
    joined = jax.make_jaxpr(lambda calls: split.joined(calls, None))(
        [each.arrays for each in deferred]
    )
    assert products(joined) == count
    left = jax.make_jaxpr(lambda a: split.first(a, None))(
        [jnp.zeros(x.aval.shape) for x in split.gradient.program.jaxpr.invars]
    )
    assert products(left) + count == products(split.gradient.program)


def test_nothing_put_off_is_nothing_joined(rng):
    seg = segment(lambda w, x: x * w)
    w, x = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=3))
    y, residuals = seg.forward(w, x)
    ready, _, later = backward_deferring(seg, w, residuals, y, Fold(collect, None))
    np.testing.assert_allclose(ready[0], x * y)
    assert join_deferred(seg, [later], Fold(collect, "as it was")) == "as it was"
    assert join_deferred(seg, [], Fold(collect, "as it was")) == "as it was"


def test_what_is_refused(rng):
    seg, other = segment(lambda w, x: x @ w), segment(lambda w, x: (x @ w) * 2)
    w, x = jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray(rng.normal(size=(4, 3)))
    y, residuals = seg.forward(w, x)
    _, _, later = backward_deferring(seg, w, residuals, y, Fold(collect, None))
    assert isinstance(later, Deferred)
    with pytest.raises(ValueError, match="of this very segment returned"):
        join_deferred(other, [later], Fold(collect, None))
    _, rest = seg.backward_inputs(w, residuals, y)
    with pytest.raises(TypeError, match="must be what `backward_deferring`"):
        join_deferred(seg, [rest], Fold(collect, None))
    with pytest.raises(TypeError, match="must be what `backward_inputs` returned"):
        seg.backward_params(later)
    x.delete()
    with pytest.raises(
        ValueError, match=r"join_deferred\(deferred=...\).*donated or del"
    ):
        join_deferred(seg, [later], Fold(collect, None))

"""A segment's halves lowered from shapes, and what they say of its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment


def layer(params, x, mask):
    h = jnp.tanh(x @ params["w"] @ params["w"])
    return {"y": h * params["b"][None], "count": mask.sum()}, h


@pytest.fixture
def given(rng):
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(5, 5), "b": normal(5), "unused": normal(2)}
    return jax.tree.map(jnp.asarray, (params, normal(3, 5), np.array([1, 0, 1])))


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("recompute", [False, True, "dots"])
def test_the_programs_are_those_that_are_called(given, recompute, compilations):
    """From shapes once; then neither half compiles again, and bits are the same."""
    seg = segment(layer, recompute=recompute)
    found = seg.lower(*shapes(given))
    forward, backward = found.forward.compile(), found.backward.compile()
    params, *inputs = given
    d_y = jnp.cos(inputs[0])
    compilations.clear()
    outputs, residuals = seg.forward(*given)
    d_outputs = {"y": d_y, "count": None}, 2 * d_y
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)
    assert len(compilations) <= 2  # Constants of `cos` and `2 *`, and no half.
    again, saved = forward(params, tuple(inputs))
    gradients = backward(None, None, params, residuals, d_outputs)
    pairs = ((again, outputs), (gradients, (d_params, d_inputs)))
    for one, other in pairs:
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert [x.shape for x in jax.tree.leaves(saved)] == [
        x.shape for x in found.computed
    ]


@pytest.mark.parametrize("recompute", [False, True, "dots"])
def test_what_is_kept_is_what_the_forward_pass_keeps(given, recompute):
    seg = segment(layer, recompute=recompute)
    found = seg.lower(*shapes(given))
    _, residuals = seg.forward(*given)
    kept = [(x.shape, x.dtype) for x in jax.tree.leaves(residuals)]
    assert [(x.shape, x.dtype) for x in found.kept] == kept
    # What is no input and no output of the segment.
    whole = {id(x) for x in jax.tree.leaves((given, _))}
    own = [x.shape for x in jax.tree.leaves(residuals) if id(x) not in whole]
    assert [x.shape for x in found.computed] == own


def test_shardings_of_shapes_are_those_of_gradients(given, mesh):
    x = given[1]
    place = jax.sharding.NamedSharding(mesh(4), jax.P(None, "data"))
    like = jax.ShapeDtypeStruct((5, 8), np.float32, sharding=place)
    seg = segment(lambda w, x: jnp.tanh(x @ w))
    whole = jax.sharding.NamedSharding(mesh(4), jax.P())
    found = seg.lower(like, shapes(x).update(sharding=whole))
    d_params, _ = found.backward.compile().output_shardings
    assert d_params.is_equivalent_to(place, 2)


def test_what_does_not_fit_is_refused(given):
    params, x, mask = shapes(given)
    with pytest.raises(TypeError, match="dot_general"):
        segment(layer).lower(params, x.update(shape=(3, 4)), mask)

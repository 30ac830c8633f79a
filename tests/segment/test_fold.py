"""A backward pass compiled with what is made of its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import Fold, segment
from tests.segment.cases import CASES, assert_close, cotangents


def scaled_sum(carry, d_params, scale):
    """The sum so far, with these gradients times a number."""
    scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), d_params)
    return scaled if carry is None else jax.tree.map(jnp.add, carry, scaled)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["tied", "tanh_mlp", "transformer", "scanned"])
def test_a_sum_over_calls(name, split, rng):
    """As large as that of the gradients one by one; the sum before it is donated."""
    case = CASES[name]
    params, seg = case.params(rng), segment(case.fn)
    carry, terms, before = None, [], []
    for scale in (0.75, -1.5):
        outputs, residuals = seg.forward(params, *case.inputs(rng))
        d_outputs, given = cotangents(rng, outputs), jnp.float32(scale)
        d_params, d_inputs = seg.backward(params, residuals, d_outputs)
        terms.append(scaled_sum(None, d_params, given))
        before = jax.tree.leaves(carry)
        if split:
            found, rest = seg.backward_inputs(params, residuals, d_outputs)
            carry = seg.backward_params(rest, fold=Fold(scaled_sum, carry, given))
        else:
            carry, found = seg.backward(
                params, residuals, d_outputs, fold=Fold(scaled_sum, carry, given)
            )
        assert_close(found, d_inputs, case)
        assert not any(x.is_deleted() for x in jax.tree.leaves((given, d_outputs)))
    assert before
    assert all(x.is_deleted() for x in before)
    assert_close(carry, jax.tree.map(jnp.add, *terms), case)


def test_the_same_function_is_compiled_once(rng):
    w, x = (jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(2))
    traced = []

    def add(carry, d_params, given):
        traced.append(carry is None)
        return scaled_sum(carry, d_params, given)

    seg, carry = segment(lambda w, x: jnp.sin(x @ w)), None
    for _ in range(4):
        y, residuals = seg.forward(w, x)
        fold = Fold(add, carry, jnp.float32(2))
        carry, _ = seg.backward(w, residuals, y, fold=fold)
    assert traced == [True, False]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_deleted_array_is_named(split, rng):
    seg = segment(lambda w, x: jnp.exp(x @ w))
    w, x = (jnp.asarray(rng.normal(size=(2, 2)), jnp.float32) for _ in range(2))
    y, residuals = seg.forward(w, x)
    one = jnp.float32(1)
    if split:
        _, rest = seg.backward_inputs(w, residuals, y)
        jax.tree.leaves(rest)[0].delete()
        with pytest.raises(ValueError, match=r"Segment.backward_params\(rest=\.\.\.\)"):
            seg.backward_params(rest, fold=Fold(scaled_sum, None, one))
    else:
        jax.tree.leaves(residuals)[0].delete()
        with pytest.raises(ValueError, match=r"Segment.backward\(residuals=\.\.\.\)"):
            seg.backward(w, residuals, y, fold=Fold(scaled_sum, None, one))


def test_the_rest_of_another_segment_is_refused(rng):
    w = jnp.asarray(rng.normal(size=(2, 2)), jnp.float32)
    first, second = (segment(f) for f in (lambda w, x: x @ w, lambda w, x: w @ x))
    y, residuals = first.forward(w, np.ones((2, 2), np.float32))
    _, rest = first.backward_inputs(w, residuals, y)
    with pytest.raises(ValueError, match="of this very segment"):
        second.backward_params(rest, fold=Fold(scaled_sum, None, jnp.float32(1)))

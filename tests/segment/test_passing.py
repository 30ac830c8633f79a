"""A backward pass that computes nothing passes cotangents on as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from jdist.segment._residuals import passed_on


def arrays(rng, *shapes):
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


PASSING = {
    "sum": (lambda _, a, b: a + b, [(2, 3), (2, 3)], [(2, 3)], [0, 0]),
    "one term is not differentiated": (
        lambda _, a, b: a + jax.lax.stop_gradient(b), [(3,), (3,)], [(3,)], [0, None]
    ),
    "exchanged": (lambda _, a, b: (b, a), [(2,), (5,)], [(5,), (2,)], [1, 0]),
    "not used": (lambda _, a, b: a, [(2,), (5,)], [(2,)], [0, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_what_is_passed_on_is_what_backward_computes(rng, name):
    fn, inputs, outputs, places = PASSING[name]
    seg = segment(fn)
    result, residuals = seg.forward((), *arrays(rng, *inputs))
    cotangents = arrays(rng, *outputs)
    found = passed_on(residuals, cotangents)
    assert found is not None
    assert [None if place is None else cotangents[place] for place in places] == found
    d_outputs = jax.tree.unflatten(jax.tree.structure(result), cotangents)
    _, expected = seg.backward((), residuals, d_outputs)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


COMPUTING = {
    "product": (lambda _, a, b: a * b, [(3,), (3,)]),
    "difference": (lambda _, a, b: a - b, [(3,), (3,)]),
    "broadcast": (lambda _, a, b: a + b[None], [(2, 3), (3,)]),
    "used twice": (lambda _, a: a + a, [(3,)]),
    "cast": (lambda _, a: a.astype(jnp.float32), [(3,)]),
    "beside an integer": (lambda _, a: (a, 7), [(3,)]),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_what_is_to_be_computed_is_left_to_backward(rng, name):
    fn, shapes = COMPUTING[name]
    result, residuals = segment(fn).forward((), *arrays(rng, *shapes))
    assert (
        passed_on(residuals, jax.tree.leaves(jax.tree.map(jnp.ones_like, result)))
        is None
    )


def test_a_cotangent_that_does_not_fit_is_left_to_backward_which_refuses_it(rng):
    seg = segment(lambda _, a, b: a + b)
    _, residuals = seg.forward((), *arrays(rng, (2, 3), (2, 3)))
    (wrong,) = arrays(rng, (3, 2))
    other = jnp.ones((2, 3), jnp.float32)
    for refused in (wrong, other):
        assert passed_on(residuals, [refused]) is None
        with pytest.raises(ValueError, match="must be like its output"):
            seg.backward((), residuals, refused)
    assert passed_on(residuals, [None]) is None


def test_numpy_arrays_are_passed_on_as_they_are(rng):
    """Those of a message are; a wrong dtype is left to `backward` too."""
    seg = segment(lambda _, a, b: a + b)
    _, residuals = seg.forward((), *arrays(rng, (2, 3), (2, 3)))
    came = np.ones((2, 3))
    found = passed_on(residuals, [came])
    assert found is not None
    assert all(one is came for one in found)
    assert passed_on(residuals, [np.ones((2, 3), np.float32)]) is None


def test_parameters_have_gradients_of_their_own(rng):
    """They may be donated, so no array of them is held elsewhere."""
    seg = segment(lambda w, x: w + x)
    w, x = arrays(rng, (3,), (3,))
    _, residuals = seg.forward(w, x)
    assert passed_on(residuals, arrays(rng, (3,))) is None

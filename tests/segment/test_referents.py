"""A compiled function is never stale, and never loses a derivative: kind by kind."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from tests.segment.referents import BY_IDENTITY, KINDS, NO_TRACER


@pytest.fixture
def values(rng):
    return jnp.float32(rng.normal()), jnp.asarray(rng.normal(size=3), jnp.float32)


@pytest.mark.parametrize("name", KINDS)
def test_a_change_is_seen(name, values):
    """A segment made after a change computes with the new value; and with the old."""
    p, x = values
    fn, change = KINDS[name](2.0)
    with warnings.catch_warnings():
        # Two programs are not three; of equal arrays each is a program of its own.
        warnings.simplefilter("ignore" if name in BY_IDENTITY else "error")
        for k in (2.0, 3.0, 2.0):
            change(k)
            y, _ = segment(fn).forward(p, x)
            np.testing.assert_allclose(y, p * x * k, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NO_TRACER])
@pytest.mark.parametrize("transform", [jax.grad, jax.jit])
def test_a_traced_value_is_refused(name, transform, values):
    """Wherever it hides: compiled as a constant it would have no derivative."""
    p, x = values

    def loss(k):
        fn, change = KINDS[name](k)
        try:
            return segment(fn).forward(p, x)[0].sum()
        finally:
            change(2.0)

    with pytest.raises(TypeError, match=r"must not refer to values .*being traced"):
        transform(loss)(jnp.float32(1.5))

"""A jitted function that is traced anew where what it reads has changed."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import RecompilationWarning
from jdist.segment._lookup.contents import Watched
from jdist.segment.internal import GuardedJit
from tests.segment.referents import KINDS


def made(fn, **options):
    return GuardedJit(fn, "f", {"fn": fn}, **options)


@pytest.fixture
def arguments(rng):
    return jnp.float32(rng.normal()), jnp.asarray(rng.normal(size=7), jnp.float32)


@pytest.mark.parametrize("name", KINDS)
def test_guards_notice_a_change(name):
    """Of all that can be read; and nothing where nothing has changed."""
    fn, change = KINDS[name](2.0)
    change(2.0)
    contents = Watched({"fn": fn}, "f").note()
    assert contents.hold()
    change(3.0)
    assert not (contents.hold() and contents.complete)


@pytest.mark.filterwarnings("ignore::jdist.segment.RecompilationWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_call_computes_with_the_present_value(name, arguments):
    """Of what cannot be read, from the next new shape on, for all shapes."""
    p, x = arguments
    fn, change = KINDS[name](2.0)
    change(2.0)
    contents = Watched({"fn": fn}, "f").note()
    call = made(fn)
    np.testing.assert_allclose(call(p, x), p * x * 2, rtol=1e-6)
    for k, rows in ((3.0, 5), (2.0, 6)):
        change(k)
        if contents.complete:
            np.testing.assert_allclose(call(p, x), p * x * k, rtol=1e-6)
        for given in (x[:rows], x, x[:rows]):
            np.testing.assert_allclose(call(p, given), p * given * k, rtol=1e-6)
            np.testing.assert_allclose(
                call.lower(p, given).compile()(p, given), p * given * k, rtol=1e-6
            )


def test_a_program_that_was_compiled_is_used_again(arguments):
    """Where a value comes back, and where none that matters has changed."""
    p, x = arguments
    scale, seen = {"k": 2.0}, []

    def fn(p, x):
        seen.append(scale["k"])
        return p * x * scale["k"]

    call = made(fn)
    for k in (2.0, 3.0, 2.0, 3.0):
        scale["k"] = k
        for given in (x, x[:5], x):
            np.testing.assert_allclose(call(p, given), p * given * k, rtol=1e-6)
    assert call._cache_size() == 4  # two values, two shapes
    traces = len(seen)
    scale["k"] = float("3")  # Another object of the same value: nothing is traced.
    call(p, x)
    assert len(seen) == traces
    seen.append("by others")  # Traced, and not compiled.
    call(p, x)
    assert len(seen) == traces + 2
    assert call._cache_size() == 4


def test_what_changes_in_each_step_is_compiled_in_each_and_said(arguments):
    """From the third on with a warning that names it."""
    p, x = arguments
    other = {"k": jnp.float32(2)}
    call = made(lambda p, x: p * x * other["k"])
    told = r"f compiles .*<lambda> .* for the 3rd time, .*closure variable `other`"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in (2, 3):
            other["k"] = jnp.float32(k)
            np.testing.assert_allclose(call(p, x), p * x * k, rtol=1e-6)
    other["k"] = jnp.float32(5)
    with pytest.warns(RecompilationWarning, match=told):
        np.testing.assert_allclose(call(p, x), p * x * 5, rtol=1e-6)


@pytest.mark.parametrize("retraces", [True, False])
def test_what_is_too_large_to_be_read_is_traced_anew_where_that_is_wanted(retraces):
    table, x = np.zeros(1 << 18), jnp.arange(3.0)

    def fn(x):
        return x + table[5]

    call = made(fn, retraces_unread=retraces)
    found = []
    for value in (1.0, 2.0, 1.0):
        table[5] = value
        found.append(call(x)[0].item())
    assert found == ([1.0, 2.0, 1.0] if retraces else [1.0, 1.0, 1.0])


def test_a_value_that_is_traced_outside_may_be_read(arguments):
    """As `jax.jit` allows; and the call after it does not find it again."""
    p, x = arguments
    scale = {"k": 2.0}
    call = made(lambda p, x: jnp.sum(p * x * scale["k"]))

    def outer(k):
        scale["k"] = k
        return call(p, x)

    value, slope = jax.jit(jax.value_and_grad(outer))(jnp.float32(3))
    np.testing.assert_allclose(slope, p * x.sum(), rtol=1e-5)
    np.testing.assert_allclose(value, 3 * p * x.sum(), rtol=1e-5)
    scale["k"] = 5.0
    np.testing.assert_allclose(call(p, x), 5 * p * x.sum(), rtol=1e-5)
    assert jax.eval_shape(call, p, x[:3]).shape == ()


def test_a_step_that_raises_while_it_is_traced_may_be_called_again(arguments):
    """Nothing is remembered of it."""
    p, x = arguments
    config = {}
    call = made(lambda p, x: p * x * config["k"])
    with pytest.raises(KeyError, match="k"):
        call(p, x)
    config["k"] = 3.0
    np.testing.assert_allclose(call(p, x), p * x * 3, rtol=1e-6)

"""Lifetimes of arrays: versions of parameters, donation, nothing left over."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from jdist.segment._lookup.cache import VERSIONS
from jdist.segment._segment import CACHE
from tests.segment.cases import assert_same_bits, normal


def _mlp(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


@pytest.fixture
def call(rng):
    params = {"w": normal(rng, 5, 7), "v": normal(rng, 7, 3)}
    seg = segment(_mlp)
    x, d_outputs = normal(rng, 4, 5), normal(rng, 4, 3)
    outputs, residuals = seg.forward(params, x)
    return seg, params, x, outputs, residuals, d_outputs


@jax.jit
def _step(params, d_params):
    return jax.tree.map(lambda p, d: p - d, params, d_params)


donating_step = jax.jit(_step, donate_argnums=0)


def test_another_version_is_refused(call):
    """A backward pass with the parameters of a later step is an error, not a number."""
    seg, params, _, _, residuals, d_outputs = call
    d_params, _ = seg.backward(params, residuals, d_outputs)
    stepped = _step(params, d_params)
    message = (
        r"`Segment.backward\(params=...\)` must be the very arrays that the forward "
        r"pass was given. Got another array at {}\. Keep each version"
    )
    with pytest.raises(ValueError, match=message.format("v")):
        seg.backward(stepped, residuals, d_outputs)
    message = message.replace("backward", "backward_inputs", 1)
    with pytest.raises(ValueError, match=message.format("w")):
        seg.backward_inputs({**params, "w": stepped["w"]}, residuals, d_outputs)
    with pytest.raises(ValueError, match=r"Got 1 leaves instead of 2\."):
        seg.backward({"w": params["w"]}, residuals, d_outputs)


def test_old_versions_serve_their_own_backward(call, rng):
    """With each pass its version, gradients are those of that version."""
    seg, params, x, _, residuals, d_outputs = call
    versions, passes = [params], [residuals]
    for _ in range(2):
        d_params, _ = seg.backward(versions[-1], passes[-1], d_outputs)
        versions.append(_step(versions[-1], d_params))
        passes.append(seg.forward(versions[-1], x)[1])
    later = [
        seg.backward(p, r, d_outputs) for p, r in zip(versions, passes, strict=True)
    ]
    for version, found in zip(versions, later, strict=True):
        _, fresh = seg.forward(version, x)
        assert_same_bits(seg.backward(version, fresh, d_outputs), found)


def test_donated_parameters_are_named(call):
    """Donating a version that a backward pass needs is our error, naming the leaf."""
    seg, params, _, _, residuals, d_outputs = call
    d_params, _ = seg.backward(params, residuals, d_outputs)
    _, rest = seg.backward_inputs(params, residuals, d_outputs)
    donating_step(params, d_params)
    for half in (seg.backward, seg.backward_inputs):
        message = (
            rf"`Segment.{half.__name__}\(params=...\)` must be alive: a backward pass "
            r"that is pending needs it. Got a buffer that was donated or .*, at v\."
        )
        with pytest.raises(ValueError, match=message) as caught:
            half(params, residuals, d_outputs)
        assert "deleted" in str(caught.value.__cause__)
    # The second half of this function reads no parameter: it still runs.
    assert_same_bits(seg.backward_params(rest), d_params)


def test_donation_between_the_halves_is_named(rng):
    """A second half that reads a parameter says that it was donated."""

    def fn(p, x):
        return x @ (p["v"] / jnp.linalg.norm(p["v"]))

    params, x, d_outputs = (
        {"v": normal(rng, 5, 3)},
        normal(rng, 4, 5),
        normal(rng, 4, 3),
    )
    seg = segment(fn)
    _, residuals = seg.forward(params, x)
    _, rest = seg.backward_inputs(params, residuals, d_outputs)
    donating_step(params, {"v": normal(rng, 5, 3)})
    message = (
        r"`Segment.backward_params\(rest=...\)` must be alive.*Got a buffer that was"
    )
    with pytest.raises(ValueError, match=message):
        seg.backward_params(rest)


def test_deleted_inputs_and_cotangents_are_named(call):
    """Inputs that are kept must live until the backward pass; so must cotangents."""
    seg, params, x, _, residuals, d_outputs = call
    d_outputs.delete()
    with pytest.raises(
        ValueError, match=r"`Segment.backward\(d_outputs=...\)` must be al"
    ):
        seg.backward(params, residuals, d_outputs)
    x.delete()
    with pytest.raises(
        ValueError, match=r"`Segment.backward\(residuals=...\)` must be al"
    ):
        seg.backward(params, residuals, jnp.zeros((4, 3), np.float32))


def test_other_errors_pass_unchanged(rng):
    """A failure that is not about deleted arrays keeps its type and text."""

    def fail(_):
        raise RuntimeError("the disk is full")

    @jax.custom_vjp
    def fn(p, x):
        return p * x

    fn.defvjp(lambda p, x: (p * x, None), lambda *_: fail(None))
    x = normal(rng, 3)
    with pytest.raises(RuntimeError, match="the disk is full"):
        segment(fn).forward(x, x)


def test_gradients_do_not_alias_the_callers_arrays(rng):
    """The caller may donate gradients and still use the cotangents it had passed in."""
    p, x, d_outputs = normal(rng, 4), normal(rng, 4), normal(rng, 4)
    seg = segment(lambda p, x: p + x)
    _, residuals = seg.forward(p, x)
    d_p, d_inputs = seg.backward(p, residuals, d_outputs)
    split_inputs, rest = seg.backward_inputs(p, residuals, d_outputs)
    for found in (d_p, *d_inputs, *split_inputs, seg.backward_params(rest)):
        found.delete()
    assert np.all(np.isfinite(d_outputs))


def test_residuals_keep_no_parameter_alive(call):
    """Residuals in flight know their parameters' version and do not hold it."""
    seg, params, _, _, residuals, d_outputs = call
    gone = [weakref.ref(x) for x in params.values()]
    params.clear()
    gc.collect()
    assert [x() for x in gone] == [None, None]
    same = {"w": jnp.zeros((5, 7), np.float32), "v": jnp.zeros((7, 3), np.float32)}
    with pytest.raises(ValueError, match="Got another array at v"):
        seg.backward(same, residuals, d_outputs)


def test_nothing_is_left(rng):
    """When the last segment and the cache entry go, function, plan and programs go."""

    class Marker:
        pass

    marker, x = Marker(), normal(rng, 4)
    seg = segment(lambda p, x, held=marker: jnp.sin(p * x))
    outputs, residuals = seg.forward(x, x)
    _, rest = seg.backward_inputs(x, residuals, outputs)
    seg.backward_params(rest)
    held = [weakref.ref(thing) for thing in (marker, residuals.plan, rest.split)]
    CACHE.clear()
    VERSIONS.clear()
    del marker, seg, residuals, rest
    jax.clear_caches()
    gc.collect()
    assert [thing() for thing in held] == [None] * 3


def test_a_segment_outlives_its_cache_entry(call):
    """A segment that was handed out works after the cache has forgotten it."""
    seg, params, x, _, residuals, d_outputs = call
    before = seg.backward(params, residuals, d_outputs)
    CACHE.clear()
    VERSIONS.clear()
    assert_same_bits(seg.backward(params, residuals, d_outputs), before)
    assert_same_bits(seg.backward(params, seg.forward(params, x)[1], d_outputs), before)


def test_threads_share_a_segment(call):
    """Eight threads get what one thread gets, and share its programs."""
    seg, params, x, outputs, residuals, d_outputs = call
    expected = seg.backward(params, residuals, d_outputs)
    found = [None] * 8

    def work(place):
        mine = segment(_mlp)
        _, own = mine.forward(params, x)
        found[place] = mine.backward(params, own, d_outputs)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for one in found:
        assert_same_bits(one, expected)
    assert np.all(np.isfinite(outputs))

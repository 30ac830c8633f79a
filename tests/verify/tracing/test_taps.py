"""Taps: nothing where nothing records, and every passage where something does."""

import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import segment, verify
from jdist.verify import tap


def squared(w, x):
    return jnp.sum(tap(jnp.tanh(x * jnp.broadcast_to(w, x.shape)), "hidden") ** 2)


W, X = jnp.array([0.3, -0.7, 1.1]), jnp.array([[1.0, 2.0, -1.0], [0.5, 3.0, 0.2]])


def recorded(fn, *arguments):
    """The result, and what the taps saw."""
    with verify.TapRecording() as recording:
        result = jax.block_until_ready(fn(*arguments))
    return result, recording.records


def equations(fn):
    return str(jax.make_jaxpr(fn)(W, X))


def test_no_equation_is_added_where_nothing_records():
    plain = equations(
        lambda w, x: jnp.sum(jnp.tanh(x * jnp.broadcast_to(w, x.shape)) ** 2)
    )
    assert equations(squared) == plain
    with verify.TapRecording():
        assert "tap[" in equations(squared)
    assert equations(squared) == plain


def test_compiled_programs_are_traced_again_and_serve_no_call_afterwards():
    gradient = jax.jit(jax.grad(squared))
    expected = gradient(W, X)
    for _ in range(2):
        found, records = recorded(gradient, W, X)
        assert np.array_equal(found, expected)
        assert [r.cotangent is None for r in records] == [True, False]
        np.testing.assert_allclose(records[0].value, np.tanh(X * W[None]), rtol=1e-6)
        np.testing.assert_allclose(records[1].cotangent, 2 * records[1].value)
    assert "tap" not in gradient.lower(W, X).as_text()
    with verify.TapRecording() as recording:
        pass
    gradient(W, X).block_until_ready()
    assert recording.records == ()


def test_segments_are_traced_again_and_serve_no_call_afterwards():
    halves = segment.segment(squared)

    def both(w, x):
        _, residuals = halves.forward(w, x)
        return halves.backward(w, residuals, jnp.ones((), w.dtype))

    expected = both(W, X)
    found, records = recorded(both, W, X)
    assert [r.cotangent is None for r in records] == [True, False]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)
    with verify.TapRecording() as recording:
        pass
    both(W, X)
    assert recording.records == ()


def test_all_threads_record():
    gradient = jax.jit(jax.grad(squared))
    gradient(W, X)
    with verify.TapRecording() as recording:
        thread = threading.Thread(target=lambda: gradient(W, X).block_until_ready())
        thread.start()
        thread.join(60)
    assert len(recording.records) == 2


def test_rows_of_vmap_come_in_one_record_with_their_cotangents():
    per_row = jax.jit(jax.vmap(jax.grad(squared), (None, 0)))
    _, records = recorded(per_row, W, X)
    assert [(r.axes, r.value.shape) for r in records] == [(1, (2, 3)), (1, (2, 3))]
    np.testing.assert_allclose(
        records[1].cotangent, 2 * np.tanh(X * W[None]), rtol=1e-6
    )


def test_checkpoints_show_a_value_again_and_a_cotangent_once():
    def layers(w, x):
        def layer(c, _):
            return tap(jnp.tanh(c * w[None]), "layer"), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, length=3)[0])

    _, records = recorded(jax.jit(jax.grad(layers)), W, X)
    assert sum(r.cotangent is not None for r in records) == 3
    assert {r.value.tobytes() for r in records if r.cotangent is None} == {
        r.value.tobytes() for r in records if r.cotangent is not None
    }


def test_derivatives_of_any_kind_pass():
    plain = lambda w: jnp.sum(jnp.tanh(X * w[None]) ** 2)  # noqa: E731 - beside the tapped
    marked = lambda w: squared(w, X)  # noqa: E731
    for of in (jax.hessian, jax.jacfwd, jax.jacrev):
        found, records = recorded(jax.jit(of(marked)), W)
        np.testing.assert_allclose(found, jax.jit(of(plain))(W), rtol=1e-5)
        assert records


def test_trees_are_marked_leaf_by_leaf_with_their_numbers_and_masks():
    def both(w):
        tree = tap({"a": w, "b": [w * 2, jnp.arange(3)], "c": w > 0, "d": "no"}, "x")
        return tree["a"] + jnp.where(
            tree["c"], tree["b"][0], tree["b"][1].astype(w.dtype)[0]
        )

    _, records = recorded(jax.jit(both), W)
    assert {r.name for r in records} == {"x/a", "x/b/0", "x/b/1", "x/c"}


def test_records_travel_as_plain_data():
    _, records = recorded(jax.jit(jax.grad(squared)), W, X)
    sent = [tuple(r) for r in pickle.loads(pickle.dumps(records))]
    with verify.TapRecording() as home:
        verify.replay(sent)
    assert [r.name for r in home.records] == ["hidden", "hidden"]
    assert np.array_equal(home.records[1].cotangent, records[1].cotangent)
    with pytest.raises(ValueError, match="must be records: name, axes, value, cotan"):
        verify.replay([("hidden", 0)])


@pytest.mark.parametrize("name", ["", 3, None])
def test_names_are_strings(name):
    with pytest.raises(ValueError, match="must be a string that is not empty"):
        tap(W, name)

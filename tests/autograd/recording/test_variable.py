"""Variables: valid values, assignment, and gradient hooks."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd
from jdist.autograd.recording.node import Edge
from jdist.autograd.recording.variable import LeafNode


def tree():
    rng = np.random.default_rng(3)
    return {
        "w": rng.normal(size=(3, 2)),
        "steps": np.arange(4),
        "b": (jnp.asarray(rng.normal(size=2), jnp.bfloat16), 1.5),
    }


def test_its_value_is_a_tree_of_jax_arrays():
    given = tree()
    w = autograd.variable(given)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(w.value))
    kinds = jax.tree.map(lambda leaf: (str(leaf.dtype), leaf.weak_type), w.value)
    assert kinds == {
        "w": ("float64", False),
        "steps": ("int64", False),
        "b": (("bfloat16", False), ("float64", False)),
    }
    np.testing.assert_array_equal(w.value["w"], given["w"])
    kept = np.asarray(w.value["w"]).copy()
    given["w"][:] = 0.0
    np.testing.assert_array_equal(w.value["w"], kept)
    assert str(w) == (
        "Variable({'b': (bfloat16[2], float64[]), 'steps': int64[4], "
        "'w': float64[3,2]})"
    )


@pytest.mark.parametrize("shape", [(), (1,), (2, 0)])
def test_any_floating_array_will_do(shape):
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.complex64):
        assert autograd.variable(jnp.zeros(shape, dtype)).value.dtype == dtype


def test_a_jax_array_is_kept_itself():
    array = jnp.arange(3.0)
    assert autograd.variable(array).value is array


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3, dtype=">f4"),
        np.ones((0, 2), np.complex128),
        np.array([True, False]),
        np.arange(3, dtype=np.uint64),
        np.ones(3, jnp.bfloat16),
        2.5,
        7,
    ],
    ids=lambda x: f"{np.asarray(x).dtype}{np.shape(x)}",
)
def test_other_arrays_become_what_jax_makes_of_them(array, x64):
    with jax.enable_x64(x64):
        native = np.asarray(array).dtype.newbyteorder("=")
        expected = jnp.array(np.asarray(array, native))
        found = autograd.variable([array, 1.0]).value[0]
        assert found.dtype == expected.dtype
        assert found.weak_type == expected.weak_type
        assert found.committed == expected.committed
        assert np.array_equal(found, expected)


def test_a_numpy_array_may_be_written_to_afterwards():
    for array in (np.arange(64.0), np.arange(64.0).reshape(8, 8).T):
        expected = array.copy()
        w = autograd.variable(array)
        array[...] = -1.0
        assert np.array_equal(w.value, expected)


@pytest.mark.parametrize(
    "leaf",
    ["text", None, object(), b"x", np.array("text"), np.array([None])],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_array_is_refused(leaf):
    found = [leaf] if leaf is not None else [autograd.variable(1.0)]
    with pytest.raises(TypeError, match=r"`variable\(tree\)` must be made of arrays"):
        autograd.variable({"a": found, "b": 1.0})


def test_so_is_what_is_traced():
    with pytest.raises(TypeError, match="must be made of arrays"):
        jax.jit(autograd.variable)(jnp.ones(3))


@pytest.mark.parametrize("nothing", [3, True, (), {"a": np.arange(3)}])
def test_something_must_be_floating(nothing):
    with pytest.raises(ValueError, match="must have at least one floating array"):
        autograd.variable(nothing)


def test_the_value_may_be_replaced_by_one_like_it():
    w = autograd.variable({"a": jnp.arange(3.0), "n": 2})
    w.value = {"a": np.full(3, 7.0), "n": 5}
    assert w.value["a"].tolist() == [7.0, 7.0, 7.0]
    for wrong, message in [
        ({"a": jnp.arange(3.0)}, "must be int[0-9]+.* at n, as before. Got no leaf"),
        ({"a": jnp.arange(4.0), "n": 2}, r"must be float64\[3\] at a, as before"),
        ({"a": jnp.zeros(3, jnp.float32), "n": 2}, r"Got float32\[3\]"),
        ({"a": jnp.arange(3.0), "n": 2.0}, r"must be int64\[\] at n"),
        ({"a": "text", "n": 2}, "must be made of arrays"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            w.value = wrong
    assert w.value["n"].item() == 5


def test_backward_uses_the_value_that_forward_used():
    w = autograd.variable(jnp.array([2.0, 3.0]))
    y = w * w
    w.value = jnp.array([100.0, 100.0])
    d_left, d_right = y.edge.node.pull([jnp.array([1.0, 10.0])])
    assert d_left.tolist() == d_right.tolist() == [2.0, 30.0]


def test_each_variable_has_one_node_while_a_history_leads_to_it():
    w = autograd.variable(jnp.arange(3.0))
    one, other = w * 2.0, w + 1.0
    node = one.edge.node.inputs[0].node
    assert isinstance(node, LeafNode)
    assert other.edge.node.inputs[0] == Edge(node, 0)
    assert node is w.node
    assert node.variable is w


def test_nothing_keeps_it_alive_but_its_histories():
    w = autograd.variable(jnp.arange(3.0))
    gone, node = weakref.ref(w), weakref.ref(w.node)
    y = w * 2.0
    del w
    assert gone() is y.edge.node.inputs[0].node.variable
    gc.disable()  # without a cycle there is nothing to collect
    try:
        del y
        assert gone() is None
        assert node() is None
    finally:
        gc.enable()


def test_recorded_is_its_tree():
    w = autograd.variable(tree())
    found = w.recorded()
    assert isinstance(found["steps"], jax.Array)
    leaves = [found["b"][0], found["b"][1], found["w"]]
    assert [leaf.edge for leaf in leaves] == [Edge(w.node, k) for k in (0, 1, 3)]
    assert [leaf.value for leaf in leaves] == [
        leaf for leaf in jax.tree.leaves(w.value) if leaf.dtype != np.int64
    ]


def test_hooks_are_kept_in_order_and_removed():
    w = autograd.variable(1.0)
    first, second = (lambda g: g), (lambda g: None)
    remove = w.register_hook(first)
    w.register_hook(second)
    w.register_hook(first)
    assert w.hooks == (first, second, first)
    remove()
    remove()
    assert w.hooks == (second, first)
    with pytest.raises(TypeError, match=r"`register_hook\(hook\)` must be a function"):
        w.register_hook(1)

"""Leaf paths, splitting by dtype, the count of examples, and PRNG keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import _tree
from tests.refilled import ALIGNED, UNALIGNED, buffer


def test_paths_name_each_leaf_and_keep_none():
    """Dicts, lists, tuples and None all have their place in the name."""
    tree = {"layer10": [1.0, (2.0,)], "layer2": None}
    assert _tree.named_leaves(tree) == {
        "layer10/0": 1.0,
        "layer10/1/0": 2.0,
        "layer2": None,
    }
    assert _tree.named_leaves(3.0) == {"(root)": 3.0}


def test_two_leaves_of_one_path_are_refused():
    """One of them would otherwise be looked at nowhere."""
    twins = {"a/b": np.ones(2), "a": {"b": np.zeros(3)}}
    with pytest.raises(ValueError, match=r"its keys joined by /\. Got a/b twice\.$"):
        _tree.named_leaves(twins)
    assert list(_tree.named_leaves({"a/b": 1, "a": {"c": 2}})) == ["a/c", "a/b"]


@pytest.mark.parametrize("offset", [ALIGNED, UNALIGNED])
def test_owned_arrays_are_copies(offset, rng):
    """Of any dtype, layout and size; arrays of JAX and a tree without others stay."""
    first = buffer((7, 3), offset)
    first[...] = rng.standard_normal((7, 3))
    given = {
        "x": first,
        "columns": np.asfortranarray(rng.standard_normal((5, 6)))[::2],
        "none": np.zeros((0, 3)),
        "scalar": np.array(7, np.int16),
        "jax": jnp.arange(3),
        "weights": [0.5, None],
    }
    expected = jax.tree.map(np.array, given)
    found = _tree.owned(given)
    for key in ("x", "columns", "none", "scalar"):
        assert found[key].flags.c_contiguous
        assert found[key].dtype == expected[key].dtype
    assert found["jax"] is given["jax"]
    first[...] = np.nan
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    plain = {"x": given["jax"]}
    assert _tree.owned(plain) is plain


def test_split_and_merge_are_inverse():
    """Integers, booleans, keys and None survive the round trip, bit for bit."""
    tree = {
        "w": jnp.arange(3.0),
        "half": jnp.ones(2, jnp.bfloat16),
        "z": jnp.array(1j),
        "n": jnp.arange(4),
        "flag": np.array(True),
        "key": jax.random.key(3),
        "none": None,
    }
    inexact, rest = _tree.split_inexact(tree)
    present = {path for path, x in _tree.named_leaves(inexact).items() if x is not None}
    assert present == {"w", "half", "z"}
    merged = _tree.merge(inexact, rest)
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    assert all(
        a is b
        for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(tree), strict=True)
    )


def test_python_numbers_count_as_floating_only_if_they_are():
    """A bare 1.5 has a gradient; 1 and True have none."""
    assert [_tree.is_inexact(x) for x in (1.5, 1j, np.float32(2))] == [True] * 3
    assert [_tree.is_inexact(x) for x in (1, True, np.int8(2))] == [False] * 3


def test_examples_are_the_common_first_dimension():
    """Whatever the other dimensions."""
    assert _tree.examples_in((np.zeros((7, 2)), np.zeros(7)), "f") == 7


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "Got x: 3, y: 4"),
        ({"x": np.zeros(3), "step": np.zeros(())}, "Got step: a scalar, x: 3"),
        ({}, "Got no leaves at all"),
    ],
)
def test_batches_without_a_common_length_are_refused(batch, message):
    """The message lists what each leaf has."""
    with pytest.raises(ValueError, match=message):
        _tree.examples_in(batch, "f(batch=...)")


def test_a_leaf_is_described_by_dtype_and_shape():
    """As it is: NumPy's float64 is not called float32 where 64-bit types are off."""
    with jax.enable_x64(False):
        assert _tree.described(np.zeros((3, 5))) == "float64 of shape (3, 5)"
        assert _tree.described(jnp.zeros((), jnp.bfloat16)) == "bfloat16 of shape ()"
        assert _tree.described(2.0) == "float32 of shape ()"
        assert _tree.described(jax.random.key(0)) == "key<fry> of shape ()"
        assert _tree.abbreviated(jnp.zeros((3, 5))) == "float32[3,5]"


def test_trees_are_added_where_both_have_a_leaf():
    """None is no zero: the other's leaf stands, itself and not a copy."""
    ours, theirs = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.25])
    found = _tree.add_trees((ours, None, ours, None), (theirs, theirs, None, None))
    assert found[0].tolist() == [1.5, 2.25]
    assert found[1] is theirs
    assert found[2] is ours
    assert found[3] is None
    assert _tree.add_trees([2.0], [3.0], lambda a, b: a * b) == [6.0]


def test_keys_are_taken_apart_and_made_again():
    """Of their own kind, also from NumPy's arrays; what is no key stays itself."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    words = _tree.words(keys)
    assert words.dtype == jnp.uint32
    again = _tree.unworded(np.asarray(words), keys)
    assert again.dtype == keys.dtype
    assert jax.random.normal(again[1], 5).tolist() == (
        jax.random.normal(keys[1], 5).tolist()
    )
    array = jnp.arange(4, dtype=jnp.uint32)
    assert _tree.words(array) is array
    assert _tree.unworded(array, words) is array
    assert [_tree.is_key(x) for x in (keys, words, 3.0, None)] == [True] + 3 * [False]


BATCHES = {
    "an iterator": iter([np.ones(3)]),
    "a generator": (np.ones(3) for _ in range(2)),
    "a loader": type("Loader", (), {"__iter__": lambda self: iter([np.ones(3)])})(),
    "a text": "data",
    "a class": int,
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_has_arrays_as_leaves(kind):
    """An iterator is not one batch, and JAX would take it for a leaf with a warning."""
    remedy = {
        "an iterator": r"Take one batch of it: `next\(batches\)`\.$",
        "a generator": r"Take one batch of it: `next\(batches\)`\.$",
        "a loader": r"Give one of the batches in it\.$",
    }.get(kind, r"Give what is in it, converted by `numpy\.asarray`\.$")
    for batch, where in (
        (BATCHES[kind], r"\(root\)"),
        ({"x": np.ones(5), "y": [np.ones(5), BATCHES[kind]]}, "y/1"),
    ):
        rule = rf"^`fit\(batch\)` must be a pytree .* Got an? .* at {where}\. {remedy}"
        with pytest.raises(TypeError, match=rule):
            _tree.check_batch("fit(batch)", batch)
        with pytest.raises(TypeError, match=rule):
            _tree.examples_in(batch, "fit(batch)")


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], r"\(root\)"),
        ({"y": np.ones(2), "x": [[1, 2], [3, 4]]}, "x"),
        ({"a": {"b": (True, False)}}, "a/b"),
    ],
)
def test_lists_of_numbers_are_no_arrays(batch, where):
    rule = rf"^`fit\(batch\)` .* Got a list of numbers at {where}\. `numpy.asarray` ma"
    with pytest.raises(TypeError, match=rule):
        _tree.examples_in(batch, "fit(batch)")
    _tree.check_batch("fit(batch)", batch)  # A loss may take them as they are.
    _tree.check_lists("fit(batch)", {"x": np.ones((2, 3)), "rate": 0.5, "y": None})


def test_types_are_named_as_users_know_them():
    named = [jnp.ones(2), jax.random.key(0), np.ones(2), 3, 0.5, None, {}, _tree.Shaped]
    assert list(map(_tree.type_name, named)) == [
        "an array",
        "an array",
        "a numpy.ndarray",
        "an int",
        "a float",
        "None",
        "a dict",
        "a typing._ProtocolMeta",
    ]
    traced = jax.eval_shape(lambda x: _tree.type_name(x) == "an array" or x.no, 1.0)
    assert traced.dtype == bool


@dataclasses.dataclass
class Rows:
    x: np.ndarray


def test_a_dataclass_that_is_not_registered_is_no_tree():
    rule = r"Got a Rows at \(root\)\. Register it: `jax.tree_util.register_dataclass\(R"
    with pytest.raises(TypeError, match=rule):
        _tree.check_batch("fit(batch)", Rows(np.ones(5)))
    registered = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Registered", ["x"]), ["x"], []
    )
    assert _tree.examples_in(registered(np.ones(5)), "fit(batch)") == 5


def test_functions_in_a_module_are_to_be_split_off():
    """As Equinox has them among the leaves of a whole module."""
    rule = r"Got a PjitFunction at act\. Split functions off, `arrays, rest = equinox.p"
    with pytest.raises(TypeError, match=rule):
        _tree.check_arrays("fn(params)", {"w": jnp.ones(3), "act": jnp.tanh})

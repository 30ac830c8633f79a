"""Leaf paths, splitting by dtype, and the count of examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import _tree


def test_paths_name_each_leaf_and_keep_none():
    """Dicts, lists, tuples and None all have their place in the name."""
    tree = {"layer10": [1.0, (2.0,)], "layer2": None}
    assert _tree.named_leaves(tree) == {
        "layer10/0": 1.0,
        "layer10/1/0": 2.0,
        "layer2": None,
    }
    assert _tree.named_leaves(3.0) == {"(root)": 3.0}


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

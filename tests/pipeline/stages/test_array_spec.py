"""Specs of arrays: what stands for a value between processes before it is there."""

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest

from jdist.pipeline.stages.array_spec import ArraySpec, is_spec, specs_of

DTYPES = ["float32", "bfloat16", "float16", "complex64", "int8", "bool", "uint32"]
KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]


def arrays():
    tree = {dtype: jnp.ones((2, 3), dtype) for dtype in DTYPES}
    return tree | {f"key {g}": jax.random.key(3, impl=g) for g in KEYS}


def test_a_spec_is_the_shape_and_dtype():
    """In JAX's own form, and as an array that stands for the value."""
    for name, array in arrays().items():
        (spec,) = jax.tree.leaves(specs_of([array]), is_leaf=is_spec)
        assert spec.struct == jax.ShapeDtypeStruct(array.shape, array.dtype), name
        blank = spec.blank(jax.devices()[0])
        assert (blank.shape, blank.dtype) == (array.shape, array.dtype), name
        assert spec.blank().dtype == array.dtype


def test_it_is_hashable_and_can_be_sent():
    """Through the codec of messages it comes back equal, though as a list."""
    for array in arrays().values():
        spec = specs_of(array)
        assert hash(spec) == hash(ArraySpec(*spec))
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(spec))
        assert ArraySpec(tuple(sent[0]), sent[1]) == spec


def test_numpys_dtypes_are_those_of_the_device():
    with jax.enable_x64(False):
        assert specs_of(np.zeros(3)).dtype == "float32"
        assert specs_of(np.zeros(3, ml_dtypes.bfloat16)).dtype == "bfloat16"
    with jax.enable_x64(True):
        assert specs_of(np.zeros(3)).dtype == "float64"


def test_a_tree_keeps_its_structure():
    tree = {"a": [np.zeros(2, np.float32)], "b": None}
    assert specs_of(tree) == {"a": [ArraySpec((2,), "float32")], "b": None}


def test_keys_of_an_unknown_generator():
    with pytest.raises(ValueError, match=r"keys of one of JAX's generators.*key<own>"):
        _ = ArraySpec((), "key<own>").struct

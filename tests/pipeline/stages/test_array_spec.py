"""Shapes and dtypes of values, and the arrays that stand in for them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jdist.pipeline.stages.array_spec import blank, specs_of

DTYPES = ["float32", "bfloat16", "float16", "complex64", "int8", "bool", "uint32"]
KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]


def arrays():
    tree = {dtype: jnp.ones((2, 3), dtype) for dtype in DTYPES}
    return tree | {f"key {g}": jax.random.key(3, impl=g) for g in KEYS}


def test_a_spec_is_the_shape_and_dtype():
    """In JAX's own form, and as an array that stands for the value."""
    for name, array in arrays().items():
        (spec,) = specs_of([array])
        assert spec == jax.ShapeDtypeStruct(array.shape, array.dtype), name
        assert hash(spec) == hash(specs_of(array))
        for place in (None, jax.devices()[1]):
            zeros = blank(spec, place)
            assert (zeros.shape, zeros.dtype) == (array.shape, array.dtype), name
            assert zeros.committed == (place is not None)
            assert place is None or zeros.device == place


def test_numpys_dtypes_are_those_of_the_device():
    with jax.enable_x64(False):
        assert specs_of(np.zeros(3)).dtype == "float32"
        assert specs_of(np.zeros(3, ml_dtypes.bfloat16)).dtype == "bfloat16"
    with jax.enable_x64(True):
        assert specs_of(np.zeros(3)).dtype == "float64"


def test_a_tree_keeps_its_structure():
    tree = {"a": [np.zeros(2, np.float32)], "b": None}
    spec = jax.ShapeDtypeStruct((2,), np.float32)
    assert specs_of(tree) == {"a": [spec], "b": None}

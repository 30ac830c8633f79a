"""Arrays of NumPy that a pipeline moves to the default device."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist.pipeline.stages.place import moved, spec_of

TYPES = [bool, np.int8, np.int64, np.uint32, np.float16, np.float32, np.float64]
TYPES += [np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.int4]


def told(array):
    kind = array.dtype, array.shape, array.weak_type
    return *kind, array.committed, array.sharding, np.asarray(array).tolist()


@pytest.mark.parametrize("wide", [False, True])
def test_they_become_what_device_put_makes_of_them(wide, rng):
    values = 3 * rng.normal(size=(4, 6))
    some = [values.astype(dtype) for dtype in TYPES]
    some += [some[2][::2], some[5].T, some[6][:, 1:4], np.array(2.5, np.float32)]
    some += [np.zeros((0, 3))]
    with jax.enable_x64(wide):
        for given, found in zip(some, moved(some, None), strict=True):
            assert told(found) == told(jax.device_put(given))
    assert moved({"x": 3}, None) == {"x": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (P(None, "model"), P()),
        (P("data", "model"), P("data")),
        (P(("model", "data"), None), P("data")),
        (P(None, ("data", "stage")), P(None, ("data", "stage"))),
        (P(("stage",), None), P("stage")),
    ],
    ids=str,
)
def test_one_layout_has_one_specification(given, expected):
    """Without axes of size 1, in whatever way it is written."""
    sizes, names = (2, 2, 1), ("stage", "data", "model")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(sizes), names)
    array = jax.device_put(np.ones((4, 8)), NamedSharding(mesh, given))
    assert spec_of(array) == expected
    again = NamedSharding(mesh, expected)
    assert array.sharding.is_equivalent_to(again, array.ndim)
    assert spec_of(np.ones(2)) == spec_of(jax.numpy.ones(2)) == P()


@pytest.mark.parametrize(
    "given",
    [
        np.ones(2, ">f4"),
        np.ones(2, np.longdouble),
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, "M8[s]"),
        np.ma.masked_array([1.0, 2.0], [0, 1]),
    ],
    ids=lambda given: str(given.dtype),
)
def test_what_device_put_refuses_is_refused_alike(given):
    with pytest.raises((TypeError, ValueError)) as expected:
        jax.device_put(given)
    with pytest.raises(expected.type) as found:
        moved(given, None)
    assert str(found.value) == str(expected.value)

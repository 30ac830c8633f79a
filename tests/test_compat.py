"""What jdist relies on in JAX beyond its documented surface; JAX changes show here."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jdist import _compat


def test_double_precision_is_local():
    """float64 exists inside, whatever the setting outside, and only there."""
    with jax.enable_x64(False):
        with _compat.double_precision():
            assert jnp.asarray(1.0).dtype == jnp.float64
        assert jnp.asarray(1.0).dtype == jnp.float32


def test_traced_values_are_told_from_concrete_ones():
    """Inside jit a value is traced; outside, and for Python numbers, it is not."""
    seen = []
    jax.jit(lambda x: seen.append(_compat.is_traced(x)))(1.0)
    assert seen == [True]
    assert not _compat.is_traced(jnp.ones(2))
    assert not _compat.is_traced(1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "complex64"])
def test_weak_types_can_be_given(dtype):
    """The same array, which now yields to others, as one of a Python number does."""
    array = jnp.asarray([1, 2, 3], dtype)
    weak = _compat.weakly_typed(array)
    assert (array.weak_type, weak.weak_type) == (False, True)
    assert weak.dtype == array.dtype
    assert weak.tolist() == array.tolist()
    assert jnp.broadcast_to(1.5, (3,)).weak_type


@pytest.mark.parametrize("check", [True, False])
def test_varying_axes_are_seen_only_when_checked(mesh, check):
    """A checking shard_map knows which values vary; a plain one knows nothing."""
    seen = {}

    def body(x, same):
        seen["x"] = _compat.varying_axes(x)
        seen["same"] = _compat.varying_axes(same)
        seen["tracks"] = _compat.tracks_varying_axes("data")
        return x

    spec = PartitionSpec("data")
    jax.shard_map(
        body, mesh=mesh(2), in_specs=(spec, PartitionSpec()), out_specs=spec,
        check_vma=check,
    )(jnp.arange(4.0), jnp.ones(3))  # fmt: skip
    varying = frozenset({"data"} if check else ())
    assert seen == {"x": varying, "same": frozenset(), "tracks": check}


def test_vmap_and_pmap_do_not_track():
    """Their axes are named but carry no types."""
    seen = []

    def body(x):
        seen.append(_compat.tracks_varying_axes("i"))
        return x

    jax.vmap(body, axis_name="i")(jnp.arange(3.0))
    jax.pmap(body, axis_name="i")(jnp.arange(2.0))
    assert seen == [False, False]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("placed", [True, False])
def test_map_shards_takes_any_mesh_and_any_layout(mesh, types, placed):
    """Explicit meshes refuse inputs laid out otherwise; here they are re-sharded."""
    devices = mesh(4, types)
    shard = PartitionSpec("data")
    fn = _compat.map_shards(
        lambda w, x: jax.lax.psum(x.sum(0) * w, "data"),
        devices,
        (PartitionSpec(), shard),
        PartitionSpec(),
    )
    x = np.arange(24.0).reshape(8, 3)
    given = (
        jax.device_put(x, jax.sharding.NamedSharding(devices, shard)) if placed else x
    )
    expected = x.sum(0) * 2.0
    np.testing.assert_array_equal(jax.jit(fn)(jnp.asarray(2.0), given), expected)


def test_cpu_devices_can_be_chosen_before_the_first_computation():
    """In a fresh process; afterwards JAX refuses, and says so."""
    program = (
        "import jax; from jdist import _compat\n"
        "_compat.set_cpu_device_count(3); print(len(jax.devices('cpu')))\n"
        "_compat.set_cpu_device_count(5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "3\n"
    assert "RuntimeError" in done.stderr

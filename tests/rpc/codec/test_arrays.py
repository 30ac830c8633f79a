"""Memory that JAX takes over, and arrays that move between workers of one process."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jdist import _compat
from jdist.rpc.wire.frame import aligned, host
from jdist.rpc.wire.in_process import adopt


def _address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 10**6])
def test_aligned_memory(nbytes):
    """Of the size asked for, writable, at a multiple of 64; each piece its own."""
    pieces = [aligned(nbytes) for _ in range(5)]
    for number, piece in enumerate(pieces):
        assert len(piece) == nbytes
        assert not piece.readonly
        piece[:] = bytes([number]) * nbytes
        if nbytes:
            assert _address(np.frombuffer(piece, np.uint8)) % 64 == 0
    assert [bytes(piece) for piece in pieces] == [bytes([n]) * nbytes for n in range(5)]


@pytest.mark.parametrize("shape", [(), (3, 3), (500, 400), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bfloat16", "bool"])
def test_placing_takes_the_memory_over(rng, shape, dtype):
    """On CPU the JAX array *is* the received memory, and keeps it alive."""
    dtype = jnp.dtype(dtype)
    memory = aligned(int(np.prod(shape)) * dtype.itemsize)
    array = np.ndarray(shape, dtype, memory)
    array[...] = rng.integers(0, 2, shape).astype(dtype)
    before = array.copy()
    for device in jax.devices("cpu")[1:3]:
        placed = _compat.placed(array, device)
        assert placed.devices() == {device}
        assert placed.dtype == dtype
        np.testing.assert_array_equal(np.asarray(placed), before)
        assert array.size == 0 or _address(np.asarray(placed)) == _address(array)
    del array, memory
    gc.collect()
    np.testing.assert_array_equal(np.asarray(placed), before)


def test_placing_unaligned_memory(rng):
    """Memory that JAX cannot take over is copied, whatever its address."""
    memory = aligned(10**5)
    for offset in (1, 16, 60):
        array = np.ndarray((9, 7), np.float32, memory, offset)
        array[...] = rng.normal(size=(9, 7))
        before = array.copy()
        placed = _compat.placed(array, jax.devices("cpu")[1]).block_until_ready()
        array[...] = 0
        np.testing.assert_array_equal(np.asarray(placed), before)


def test_placing_without_a_device():
    """On the default device, and free to mix with arrays of others."""
    placed = _compat.placed(np.arange(3.0), None)
    assert placed.devices() == {jax.devices()[0]}
    other = jax.device_put(jnp.ones(3), jax.devices("cpu")[3])
    assert (placed + other).devices() == {jax.devices("cpu")[3]}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("device", [None, 2])
def test_placing_keeps_wide_types(x64, weak, device):
    """64 bits stay 64 bits, without a warning, and the setting is as before."""
    device = None if device is None else jax.devices("cpu")[device]
    with jax.enable_x64(x64):
        placed = _compat.placed(np.array([1 / 3, 2**53 + 0.0]), device, weak)
        assert placed.dtype == np.float64
        assert placed.weak_type == weak
        assert np.asarray(placed).tolist() == [1 / 3, 2**53]
        assert jnp.asarray(1.5).dtype == (np.float64 if x64 else np.float32)


def test_host_is_a_view_where_it_can_be(rng):
    """No copy of what is in C order already; JAX's arrays on CPU included."""
    array = rng.normal(size=(20, 30))
    assert host(array) is array
    assert host(array.T).flags.c_contiguous
    np.testing.assert_array_equal(host(array.T), array.T)
    placed = jax.device_put(array)
    assert _address(host(placed)) == _address(np.asarray(placed))


def test_adopting(rng):
    """NumPy is copied in C order, JAX shared on its device and moved to another."""
    here, elsewhere = jax.devices("cpu")[1:3]
    array = np.asfortranarray(rng.normal(size=(4, 5)))
    placed = jax.device_put(array, here)
    copied, shared = adopt(array, here), adopt(placed, here)
    assert copied.flags.c_contiguous
    assert copied.flags.writeable
    assert not np.shares_memory(copied, array)
    np.testing.assert_array_equal(copied, array)
    assert shared is placed
    assert adopt(placed, None) is placed
    moved = adopt(placed, elsewhere)
    assert moved.devices() == {elsewhere}
    np.testing.assert_array_equal(np.asarray(moved), array)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("all")])
def test_an_array_that_leaves_a_mesh_forgets_its_explicit_axes(spec):
    """Functions that were compiled for one device, or never, take it."""
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((2,), ("all",), (AxisType.Explicit,), devices=devices[:2])
    sent = jax.device_put(np.arange(6.0).reshape(2, 3), NamedSharding(mesh, spec))
    for device in (devices[1], devices[3]):
        found = adopt(sent, device)
        assert found.devices() == {device}
        assert jax.jit(lambda x: (x * x).sum())(found) == 55.0

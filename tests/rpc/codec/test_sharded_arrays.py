"""Arrays over several devices: gathered on their way, kept as they are by references.

Each process here has eight CPU devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import data_parallel, rpc

LAYOUTS = {
    "rows of four": ((4,), ("a",), PartitionSpec("a"), (8, 3)),
    "rows of eight": ((8,), ("a",), PartitionSpec("a"), (16, 3)),
    "blocks": ((2, 4), ("a", "b"), PartitionSpec("a", "b"), (6, 12)),
    "blocks the other way": ((2, 4), ("a", "b"), PartitionSpec("b", "a"), (12, 6)),
    "rows over both axes": ((2, 4), ("a", "b"), PartitionSpec(("a", "b")), (8, 5)),
    "columns, repeated": ((2, 4), ("a", "b"), PartitionSpec(None, "b"), (3, 8)),
    "repeated": ((8,), ("a",), PartitionSpec(), (5, 7)),
    "large": ((2,), ("a",), PartitionSpec("a"), (512, 1031)),
}
DTYPES = ["float32", "bfloat16", "int8", "complex64", "bool"]


def numbers(shape, dtype):
    """Random bits, as numbers of this dtype."""
    rng = np.random.default_rng(sum(shape))
    if dtype == "complex64":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return (100 * rng.normal(size=shape)).astype(jnp.dtype(dtype))


def sharded(layout, dtype="float32", axis_type=AxisType.Auto):
    """An array in this layout."""
    axes, names, spec, shape = LAYOUTS[layout]
    devices = np.array(jax.devices("cpu")[: np.prod(axes)]).reshape(axes)
    mesh = Mesh(devices, names, axis_types=(axis_type,) * len(names))
    array = jax.device_put(numbers(shape, dtype), NamedSharding(mesh, spec))
    assert len(array.devices()) == devices.size
    return array


def told(x):
    """On the callee: how many devices it is on, and itself."""
    return len(x.devices()), x


def check(there_and_back, sent):
    count, got = there_and_back
    assert count == 1
    assert len(got.devices()) == 1
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()


def every_layout():
    for layout in LAYOUTS:
        for dtype in DTYPES if layout == "blocks" else DTYPES[:1]:
            sent = sharded(layout, dtype)
            check(rpc.rpc_sync("worker1", told, args=(sent,)), sent)
            check(rpc.rpc_async("worker2", told, kwargs={"x": sent}).wait(), sent)
            assert not sent.is_deleted()
    explicit = sharded("blocks", axis_type=AxisType.Explicit)
    check(rpc.rpc_sync("worker1", told, args=(explicit,)), explicit)


def test_they_are_gathered(cluster):
    """Whatever the layout, the callee has one array on its device."""
    cluster.run(0, every_layout)


def same_object(first, second, other):
    return first is second, first is other


def twice():
    one, other = sharded("blocks"), sharded("blocks")
    got = rpc.rpc_sync("worker1", same_object, args=(one, one, other))
    assert got == (True, False)


def test_one_of_them_twice_arrives_as_one(cluster):
    cluster.run(0, twice)


def keys():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("a",))
    for impl in ("threefry2x32", "rbg"):
        split = jax.random.split(jax.random.key(11, impl=impl), 12).reshape(4, 3)
        sent = jax.device_put(split, NamedSharding(mesh, PartitionSpec("a")))
        assert len(sent.devices()) == 4
        count, got = rpc.rpc_sync("worker1", told, args=(sent,))
        assert (count, len(got.devices())) == (1, 1)
        assert got.dtype == sent.dtype
        data = [np.asarray(jax.random.key_data(x)) for x in (got, split)]
        assert np.array_equal(*data)


def test_random_keys_are_gathered(cluster):
    cluster.run(0, keys)


def held(layout):
    """On the owner: it stays over its devices there."""
    return {"array": sharded(layout)}


def count_here(rref):
    return len(rref.local_value()["array"].devices())


def by_reference():
    sent = sharded("blocks")
    rref = rpc.remote("worker1", held, args=("blocks",))
    assert rpc.rpc_sync("worker1", count_here, args=(rref,)) == 8
    check((1, rref.to_here()["array"]), sent)
    check((1, rpc.rpc_sync("worker1", sharded, args=("blocks",))), sent)
    # What is here needs no way: it is itself.
    mine = rpc.RRef(sent)
    assert mine.local_value() is sent
    assert mine.to_here() is sent
    check((1, rpc.rpc_sync("worker2", fetched, args=(mine,))), sent)


def fetched(rref):
    return rref.to_here()


def test_a_reference_keeps_them_over_their_devices(cluster):
    """They are gathered when they are fetched or returned."""
    cluster.run(0, by_reference)


def to_itself():
    sent = sharded("blocks")
    count, got = rpc.rpc_sync(rpc.get_worker_info(), told, args=(sent,))
    assert np.array_equal(np.asarray(got), np.asarray(sent))
    return count


def test_a_call_to_oneself(cluster):
    """It brings them to the worker's device if it has one; else nothing moves."""
    assert cluster.run(0, to_itself) == {"in-process": 1, "process": 8}[cluster.kind]


def over_processes(rank):
    """In each of two processes whose devices make one mesh."""
    with data_parallel.process_group() as mesh:
        rpc.init_rpc(f"worker{rank}", allow=["tests"])
        values = numbers((mesh.size * 3, 5), "float32")
        part = jax.make_array_from_callback(
            values.shape,
            NamedSharding(mesh, PartitionSpec("data")),
            lambda index: values[index],
        )
        if rank == 0:
            refused(part)
            refused({"in": [part]})
            _, shard = rpc.rpc_sync("worker1", told, args=(part.addressable_data(0),))
            assert np.array_equal(np.asarray(shard), values[:3])
        whole = jax.make_array_from_callback(
            values.shape,
            NamedSharding(mesh, PartitionSpec()),
            lambda index: values[index],
        )
        if rank == 0:
            assert not whole.is_fully_addressable
            check(rpc.rpc_sync("worker1", told, args=(whole,)), values)
        rpc.shutdown()
        if rank == 1:
            with rpc.local_cluster(["a", "b"], allow=["tests"]):
                refused(part, "b")
                check(rpc.rpc_sync("b", told, args=(whole,)), values)
        return rank


def refused(value, to="worker1"):
    message = r"must be addressable by this process.*Got NamedSharding.*addressable_dat"
    for verb in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(ValueError, match=message):
            verb(to, told, args=(value,))


def test_what_is_partly_elsewhere_is_refused():
    """A real array over two processes; one that is whole in each of them is sent."""
    assert rpc.spawn(over_processes, nprocs=2) == [0, 1]

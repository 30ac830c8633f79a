"""Who is who, who has called, and rpc beside jax.distributed."""

import os
import threading

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jdist import rpc

PATIENCE = 60
_got: dict[str, list] = {}
_released = threading.Event()


def identity(x):
    return x


def info_there_and_back():
    for info in rpc.get_worker_infos():
        got = rpc.rpc_sync("worker2", identity, args=({"who": [info]},))
        assert got == {"who": [info]}
        assert hash(got["who"][0]) == hash(info)
        assert rpc.rpc_sync(got["who"][0], own_name) == info.name


def own_name():
    return rpc.get_worker_info().name


def test_a_worker_info_travels(cluster):
    cluster.run(1, info_there_and_back)


def tell(key, source, array):
    _got.setdefault(key, []).append((source, rpc.get_worker_info().id, array))


def tell_next(key):
    rank = rpc.get_worker_info().id
    array = np.random.default_rng(rank).normal(size=rank + 1)
    rpc.rpc_sync((rank + 1) % 4, tell, args=(key, rank, array))


def taken(key):
    rank = rpc.get_worker_info().id
    return [entry for entry in _got[key] if entry[1] == rank]


def test_each_hears_of_the_one_before(cluster):
    key = f"before {cluster.kind}"
    cluster.everywhere(tell_next, key)
    for rank, entries in enumerate(cluster.everywhere(taken, key)):
        ((source, _, array),) = entries
        assert source == (rank - 1) % 4
        expected = np.random.default_rng(source).normal(size=source + 1)
        assert np.array_equal(array, expected)


def test_a_reference_needs_a_worker():
    with pytest.raises(rpc.RpcError, match="Current RPC agent is not set! Did you"):
        rpc.RRef(np.arange(3.0))


def wait_for_release():
    return _released.wait(PATIENCE)


def release():
    _released.set()


def rpc_and_jax(rank):
    """rpc first, with a call under way while jax.distributed begins; then after it."""
    info = rpc.init_rpc(f"worker{rank}", allow=["tests"])
    other = 1 - info.id
    slow = rpc.rpc_async(other, wait_for_release)
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], num_processes=2, process_id=rank
    )
    assert jax.process_count() == 2
    assert not slow.done()
    multihost_utils.sync_global_devices("rpc first")
    assert rpc.rpc_sync(other, identity, args=(rank + 10,)) == rank + 10
    rpc.rpc_sync(other, release)
    assert slow.wait() is True
    rpc.shutdown()
    multihost_utils.sync_global_devices("rpc has ended")
    rpc.init_rpc(f"again{rank}", allow=["tests"])
    assert rpc.rpc_sync(f"again{other}", own_name) == f"again{other}"
    multihost_utils.sync_global_devices("jax first")
    rpc.shutdown()
    jax.distributed.shutdown()
    return rank


def test_rpc_before_and_after_jax_distributed():
    assert rpc.spawn(rpc_and_jax, nprocs=2, timeout=120) == [0, 1]

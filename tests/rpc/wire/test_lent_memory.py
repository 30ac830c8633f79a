"""The memory that workers lend each other for large arrays comes back in time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.wire import memory
from tests.rpc.hosts import be_no_worker, become_worker

KINDS = {"NumPy": np.asarray, "JAX": jnp.asarray}


def made(kind):
    numbers = np.random.default_rng(5).random(memory.THRESHOLD // 8 + 1)
    return KINDS[kind](numbers)


def blocks():
    return len(current.worker()._transport._pool._blocks)


def ask_again_and_again(kind):
    for _ in range(6):
        found = rpc.rpc_sync("worker1", made, args=(kind,))
        assert np.asarray(found).tobytes() == np.asarray(made(kind)).tobytes()
        del found
    return rpc.rpc_sync("worker1", blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_are_gone_make_room_for_the_next(hosts, kind):
    """JAX by itself would hold the memory of one until the next has come."""
    started = [hosts.start(rank, become_worker) for rank in sorted(hosts.alive)]
    for one in started:
        one.result()
    assert hosts.run(0, ask_again_and_again, kind) == 1
    hosts.everywhere(be_no_worker)

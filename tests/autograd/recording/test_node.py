"""Arrays on their way between nodes, and the sets of messages below them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdist._compat import placed
from jdist.autograd.recording.node import (
    NOWHERE,
    RecvNode,
    SendNode,
    ids_in,
    join,
    light,
    plus,
)
from jdist.rpc import WorkerInfo


def test_small_arrays_are_sent_as_those_of_numpy():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64):
        array = jnp.arange(6, dtype=dtype).reshape(2, 3)
        found = light(array)
        assert type(found) is np.ndarray
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, array)
        assert light(found) is found


def sharded():
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    place = NamedSharding(mesh, PartitionSpec("rows"))
    return jax.device_put(np.ones((4, 3), np.float32), place)


OTHERS = {
    "64 bits, which another worker may not have": lambda: jnp.ones(3, jnp.float64),
    "large": lambda: jnp.ones((33, 32), jnp.float32),
    "weak": lambda: placed(np.ones(3, np.float32), None, weak=True),
    "committed": lambda: jax.device_put(np.ones(3, np.float32), jax.devices()[0]),
    "sharded": sharded,
    "integers": lambda: jnp.arange(3, dtype=jnp.int32),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_sent_as_they_are(kind):
    array = OTHERS[kind]()
    assert light(array) is array


def test_a_deleted_array_is_left_to_the_codec():
    array = jnp.ones(3, jnp.float32)
    array.delete()
    assert light(array) is array


def test_a_sum_with_an_array_of_numpy_stays_where_it_may_be_anywhere():
    one, other = jnp.float32([1, 2]), np.float32([3, 5])
    for found in (plus(one, other), plus(other, one), plus(other, other)):
        assert isinstance(found, jax.Array)
        assert not found.committed
    there = jax.device_put(other, jax.devices()[1])
    for found in (plus(there, other), plus(other, there)):
        assert found.devices() == {jax.devices()[1]}
        assert found.tolist() == [6, 10]


def reach_of(*ids):
    worker, reach = WorkerInfo("a", 0, 0), NOWHERE
    for one in ids:
        send = SendNode(one, worker, "", (0, 0))
        reach = join(reach, send.reach)
    return reach


def test_the_messages_below_a_value_are_those_below_all_that_it_is_made_of(rng):
    numbers = [int(n) + (int(n % 3) << 48) for n in rng.integers(0, 300, 200)]
    one, other = numbers[:120], numbers[80:]
    joined = join(reach_of(*one), reach_of(*other))
    assert ids_in(joined) == sorted({*numbers})
    assert joined == reach_of(*numbers[::-1])


def test_a_value_shares_the_set_of_what_it_is_made_of():
    small, large = reach_of(1, 64), reach_of(63, 1, 64)
    for one, other in ((small, large), (large, small), (large, NOWHERE)):
        assert join(one, other) is large
    assert join(NOWHERE, large) is large
    assert RecvNode(1, 2, WorkerInfo("a", 0, 0), 1, large).reach is large

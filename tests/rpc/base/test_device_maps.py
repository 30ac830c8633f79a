"""Device maps: where the arrays of one worker arrive on another, and come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base.device_maps import placed
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.group.rendezvous import ReservedPort
from tests.rpc.hosts import (
    WORKERS,
    Cluster,
    be_no_worker,
    be_one_of,
    become_worker,
    in_threads,
    names,
)
from tests.rpc.sockets import nothing_left

MAPS = {"worker1": {2: 5, 3: 1}, "worker0": {4: 6}}
LARGE = 3 << 20  # In float32: beyond what goes through the socket.


@pytest.fixture
def in_one_process():
    options = rpc.RpcOptions(device_maps=MAPS)
    devices = [jax.devices()[0]] * WORKERS
    with rpc.local_cluster(names(), devices, options, allow=["tests"]):
        yield Cluster("in-process", names(), in_threads(names()))


@pytest.fixture
def in_processes(hosts):
    starts = [hosts.start(0, become_worker, device_maps=MAPS)]
    starts += [hosts.start(rank, become_worker) for rank in range(1, WORKERS)]
    for start in starts:
        start.result()
    yield Cluster("process", names(), hosts.start)
    hosts.everywhere(rpc.shutdown)


@pytest.fixture(params=["in_one_process", "in_processes"])
def mapped(request):
    """Worker 0 has maps; arrays without one arrive on device 0."""
    return request.getfixturevalue(request.param)


def _on(number, size=3):
    numbers = np.random.default_rng(number).random(size, np.float32)
    return jax.device_put(numbers, jax.local_devices()[number])


def _number(array):
    (device,) = array.devices()
    return jax.local_devices().index(device)


def numbers_of(*arrays):
    return [(_number(array), float(array[-1])) for array in arrays]


def made_on(*numbers):
    return [_on(number) for number in numbers]


def echo(value):
    return value


def _there(call, to, *sources):
    sent = [_on(source) for source in sources]
    found = call(to, numbers_of, args=tuple(sent))
    values = [value for _, value in found]
    assert values == [float(array[-1]) for array in sent]
    return [number for number, _ in found]


def _async(to, function, args):
    return rpc.rpc_async(to, function, args=args).wait()


def arrays_arrive_where_the_map_says():
    for call in (rpc.rpc_sync, _async):
        assert _there(call, "worker1", 3, 2, 3) == [1, 5, 1]


def arrays_on_other_devices_arrive_on_the_one_device():
    assert _there(rpc.rpc_sync, "worker1", 4, 2, 5, 1) == [0, 5, 0, 0]
    assert _there(rpc.rpc_sync, "worker2", 2, 3) == [0, 0]
    mesh = jax.sharding.Mesh(jax.local_devices()[2:4], "x")
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
    assert rpc.rpc_sync("worker1", numbers_of, args=(sharded,)) == [(0, 3.0)]


def results_come_back_by_the_inverse():
    for call in (rpc.rpc_sync, _async):
        results = call("worker1", made_on, args=(1, 5, 2, 3))
        assert list(map(_number, results)) == [3, 2, 0, 0]
        for result, number in zip(results, (1, 5, 2, 3), strict=True):
            assert result.tobytes() == _on(number).tobytes()


def values_of_references_come_back_too():
    held = rpc.remote("worker1", made_on, args=(5, 4))
    assert list(map(_number, held.to_here())) == [2, 0]


def maps_to_oneself_hold():
    assert _there(rpc.rpc_sync, "worker0", 4, 0) == [6, 0]
    assert list(map(_number, rpc.rpc_sync("worker0", made_on, args=(6, 0)))) == [4, 0]


def arrays_of_every_kind_come_back_to_where_they_were():
    large, key = _on(2, LARGE), jax.random.key(5)
    device = jax.local_devices()[3]
    sent = {
        "large": large,
        "key": jax.device_put(key, device),
        "weak": jax.device_put(2.5, device),
        "empty": _on(3, 0),
        "numpy": np.arange(3.0),
    }
    back = rpc.rpc_sync("worker1", echo, args=(sent,))
    assert [_number(back[name]) for name in ("large", "weak", "empty")] == [2, 3, 3]
    assert back["key"].devices() == {device}
    assert jnp.array_equal(jax.random.key_data(back["key"]), jax.random.key_data(key))
    assert back["large"].tobytes() == large.tobytes()
    assert back["weak"].weak_type
    assert type(back["numpy"]) is np.ndarray


@pytest.mark.parametrize(
    "body",
    [
        arrays_arrive_where_the_map_says,
        arrays_on_other_devices_arrive_on_the_one_device,
        results_come_back_by_the_inverse,
        values_of_references_come_back_too,
        maps_to_oneself_hold,
        arrays_of_every_kind_come_back_to_where_they_were,
    ],
)
def test_from_the_worker_with_maps(mapped, body):
    mapped.run(0, body)


def _asks_back(*numbers):
    return _there(rpc.rpc_sync, "worker0", *numbers)


def what_the_callee_sends_by_itself():
    return rpc.rpc_sync("worker1", _asks_back, args=(5, 1, 2))


def test_the_callees_own_messages_go_back_too(in_processes):
    assert in_processes.run(0, what_the_callee_sends_by_itself) == [2, 3, 0]


def test_the_callees_own_map_comes_first(in_one_process):
    """Worker 1 has the same options, so a map of its own to worker 0."""
    moved = in_one_process.run(1, _there, rpc.rpc_sync, "worker0", 4, 5)
    assert moved == [6, 2]
    # In answers the map of who asked holds: 6 for 4, not 4 for 6.
    results = in_one_process.run(1, rpc.rpc_sync, "worker0", made_on, args=(6, 4, 5))
    assert list(map(_number, results)) == [4, 0, 0]


# --- what is refused ---


@pytest.mark.parametrize(
    ("maps", "kind", "text"),
    [
        ([("b", {0: 1})], TypeError, "must be maps by worker's name"),
        ({"b": [0, 1]}, TypeError, "for the name of a worker"),
        ({1: {0: 1}}, TypeError, "for the name of a worker"),
        ({"b": {0: "1"}}, TypeError, "to numbers of devices"),
        ({"b": {0.5: 1}}, TypeError, "to numbers of devices"),
        ({"b": {True: 1}}, TypeError, "to numbers of devices"),
        ({"b": {jax.devices()[0]: 1}}, TypeError, "from numbers of devices"),
        ({"b": {-1: 1}}, ValueError, "Device index must not be negative"),
        ({"b": {0: -1}}, ValueError, "Device index must not be negative"),
        ({"b": {0: 1, 2: 1}}, ValueError, "'b' has duplicated target devices"),
        ({"b": {0: 1, 2: 1}}, ValueError, "only support 1-to-1 mapping"),
    ],
)
def test_what_is_no_map(maps, kind, text):
    with pytest.raises(kind, match=text):
        rpc.RpcOptions(device_maps=maps)


REFUSED = [
    ({"c": {0: 1}}, r"invalid target node names.*\['a', 'b'\].*'c'"),
    ({"b": {8: 1}}, "source devices with invalid indices in the map for 'b'.*Got 8"),
    ({"b": {0: 8}}, "target devices with invalid indices: 'b' has 8 devices"),
]


@pytest.mark.parametrize(("maps", "text"), REFUSED)
def test_maps_that_do_not_fit_the_group(maps, text):
    with nothing_left():
        options = rpc.RpcOptions(device_maps=maps)
        cluster = rpc.local_cluster(["a", "b"], options=options)
        with pytest.raises(ValueError, match=text), cluster:
            pytest.fail("it began")
        with rpc.local_cluster(["a", "b"]):
            assert rpc.rpc_sync("b", max, args=(2, 3)) == 3


@pytest.mark.parametrize(("maps", "text"), REFUSED)
def test_maps_that_do_not_fit_a_group_of_processes(hosts, maps, text):
    with ReservedPort() as reserved:
        place = (2, reserved.port)
        one = hosts.start(0, be_one_of, 0, *place, "a", device_maps=maps)
        other = hosts.start(1, be_one_of, 1, *place, "b")
        with pytest.raises(ValueError, match=text):
            one.result()
        other.result()
        hosts.everywhere(be_no_worker)


@pytest.mark.parametrize(
    "pairs", [[[0, 8]], [[0, 1 << 40]], [[0, -2]], [[1, 0]], [["a", 0]], [[0]], 7]
)
def test_devices_and_arrays_that_there_are_not(pairs):
    leaves = [jnp.arange(3.0)]
    with pytest.raises(
        ProtocolError, match="the message has 1 values, and this process 8 devices"
    ):
        placed(leaves, {"devices": pairs})
    with pytest.raises(ProtocolError, match=r"There is no array and device \[0, 0\]"):
        placed([np.arange(3.0)], {"devices": [[0, 0]]})

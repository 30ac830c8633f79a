"""A worker that has the key, belongs to an elastic group, and says what it likes."""

import contextlib
import math
import time

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import ERROR, REPLY, Frame
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.elastic.common import greet_all, infos, join
from tests.rpc.rref.common import wait_for
from tests.rpc.sockets import nothing_left

KEY = rpc.new_cluster_key()
ODD = (None, "x", -1, 0, 2**63, math.nan, math.inf, [], [[]], [5], {}, {"a": 1})
GATHER = {
    "names": ["mad", "worker0"],
    "operation": "x",
    "tag": "",
    "timeout": 1.0,
    "refused": None,
}


def soon():
    return time.monotonic() + 60


@pytest.fixture
def worker(port):
    """This process is worker 0."""
    with nothing_left():
        join("worker0", 0, port, key=KEY)
        try:
            yield current.worker()
        finally:
            rpc.shutdown()


@pytest.fixture
def mad(worker):
    """Joins as it is told to, on a channel of its own each time."""
    transport = SocketTransport("mad:1", KEY.encode())

    def enter(**odd):
        told = {
            "name": "mad",
            "rank": 1,
            "world_size": 0,
            "address": transport.address,
            "timeout": 5.0,
        }
        channel = transport.connect("", worker.group.coordinator.address, soon())
        channel.send(Frame("group.join", 1, told | odd, None, []))
        return channel

    yield enter
    transport.close()


def is_gone():
    """Whether worker 0 is alone again, as the coordinator sees it and it itself."""
    coordinator = current.worker().group.coordinator
    with coordinator._lock:
        present = [member.info.name for member in coordinator._membership.present()]
    told = [info.name for info in rpc.get_worker_infos()]
    return present == told == ["worker0"]


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("group.gather", GATHER),
        ("group.confirm", {"number": 1}),
        ("x", {}),
    ],
)
def test_requests_that_make_no_sense(worker, mad, kind, good):
    """Whatever it says, it is a member like others, and then lost."""
    metas = [good] + [
        {name: value for name, value in good.items() if name != left} for left in good
    ]
    metas += [good | {name: odd} for name in good for odd in ODD]
    for meta in metas:
        channel = mad()
        assert channel.receive(soon()).kind == REPLY
        with contextlib.suppress(ChannelClosed):
            channel.send(Frame(kind, 2, meta, None, []))
        channel.close()
        assert wait_for(is_gone)
    assert rpc.all_gather(5) == {"worker0": 5}
    assert worker.group.coordinator._rounds == []


@pytest.mark.parametrize("field", ["name", "rank", "world_size", "timeout"])
def test_requests_to_join_that_make_no_sense(worker, mad, field):
    """It is let in, or refused, or not answered; and the group goes on."""
    for odd in ODD:
        channel = mad(**{field: odd})
        with contextlib.suppress(ChannelClosed):
            assert channel.receive(soon()).kind in (REPLY, ERROR)
        channel.close()
        assert wait_for(is_gone)
    assert rpc.all_gather(5) == {"worker0": 5}


def test_who_does_not_answer_that_it_knows_somebody(worker, mad, fresh_hosts, port):
    """Holds a newcomer up until that has no more patience; then it may try again."""
    silent = mad()
    assert silent.receive(soon()).kind == REPLY
    hosts = fresh_hosts(1)
    with pytest.raises(rpc.RpcTimeout, match="guest was not let in in time: mad did"):
        hosts.run(0, join, "guest", 2, port, key=KEY, join_timeout=3.0)
    silent.close()
    assert hosts.run(0, join, "guest", 2, port, key=KEY).id == 2
    hosts.run(0, greet_all, ["worker0", "guest"])
    assert len(hosts.run(0, infos)) == 2
    hosts.run(0, rpc.shutdown)

"""Ends without waiting, and what a worker tells about its parts."""

import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.hosts import become_worker


def add(x, y):
    return x + y


def call_next():
    rank = rpc.get_worker_info().id
    return rpc.rpc_sync((rank + 1) % 4, add, args=(rank, 10))


def leave_at_once():
    rpc.shutdown(graceful=False)
    for start in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(rpc.RpcError, match=r"^RPC has not been initialized"):
            start("worker1", add, args=(1, 2))


def test_all_leave_at_once_after_calls(hosts):
    for _ in range(2):
        hosts.everywhere(become_worker)
        assert hosts.everywhere(call_next) == [10, 11, 12, 13]
        hosts.everywhere(leave_at_once)


def test_all_leave_at_once_without_calls(hosts):
    hosts.everywhere(become_worker)
    hosts.everywhere(leave_at_once)


def numbers():
    return rpc.debug_info(), current.worker().references.counts()


AUTOGRAD = {"num_current_backward_passes", "num_autograd_contexts"}


def test_no_part_takes_anothers_number(cluster):
    """The numbers of references stand beside the worker's and the group's own."""
    for info, references in cluster.everywhere(numbers):
        assert references.keys() < info.keys()
        # Those of autograd are there as soon as anything has imported it.
        own = info.keys() - references.keys() - AUTOGRAD
        assert {key.partition(".")[0] for key in own} == {"agent", "group"}
        assert len(own) == len(debug_keys(info))


def debug_keys(info):
    return [key for key in info if key.startswith(("agent.", "group."))]

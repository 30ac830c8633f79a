"""Clusters whose workers lose, delay, repeat and cut what they send.

`begin(make_rules)` starts one; `make_rules` is a function at the top level of a module,
because each worker process calls it for itself.
"""

import contextlib
import importlib
import threading

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.group import lifecycle
from jdist.rpc.group.coordinator import NAME
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.wire.in_process import InProcessTransport
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.faults import FaultyTransport, Plan
from tests.rpc.hosts import Cluster, be_one_of, in_threads, names, results

late = threading.Event()
"""For rules that delay: what is late goes on when it is set, in this process."""
_plans: list[Plan] = []


def struck():
    """What has happened to this process's frames: counts by (fault, kind)."""
    return dict(_plans[0].counts)


def let_go():
    """What was delayed in this process goes on."""
    late.set()


def include_own_calls():
    """This worker's calls to itself meet the faults too, from now on."""
    agent = current.worker()
    peer = agent.directory.find(agent.info)
    peer._transport = FaultyTransport(peer._transport, _plans[0])


def _faulty(inner, rules):
    """As the transport class `inner`, with faults in what the workers send."""
    late.clear()
    _plans[:] = [Plan(*rules)]

    def make(name, *args, **kwargs):
        made = inner(name, *args, **kwargs)
        return made if name == NAME else FaultyTransport(made, _plans[0])

    return make


def _become_faulty(rank, count, port, make_rules, options):
    with pytest.MonkeyPatch.context() as patch:
        make = _faulty(SocketTransport, make_rules())
        patch.setattr(lifecycle, "SocketTransport", make)
        be_one_of(rank, count, port, **options)


@contextlib.contextmanager
def threads(hosts, make_rules, count=2, **options):
    """Workers in this process."""
    # The package's attribute of this name is the function.
    module = importlib.import_module("jdist.rpc.processes.local_cluster")
    with pytest.MonkeyPatch.context() as patch:
        make = _faulty(InProcessTransport, make_rules())
        patch.setattr(module, "InProcessTransport", make)
        given = rpc.RpcOptions(**options)
        with rpc.local_cluster(names(count), options=given, allow=["tests"]):
            yield Cluster("in-process", names(count), in_threads(names(count)))


@contextlib.contextmanager
def processes(hosts, make_rules, count=2, **options):
    """Worker processes."""
    with ReservedPort() as port:
        joining = [
            hosts.start(
                rank, _become_faulty, rank, count, port.port, make_rules, options
            )
            for rank in range(count)
        ]
        results(joining)
        yield Cluster("process", names(count), hosts.start)
        results([hosts.start(rank, rpc.shutdown) for rank in range(count)])


WAYS = {"in-process": threads, "process": processes}

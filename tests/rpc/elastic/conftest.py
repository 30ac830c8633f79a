"""Elastic groups, within a process and between processes."""

import pytest

from jdist import rpc
from jdist.rpc.group.rendezvous import ReservedPort
from tests.rpc.elastic.common import Elastic, Processes, Threads


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.port


@pytest.fixture
def threads():
    """An elastic group in this process, of "worker0" so far."""
    with rpc.elastic_cluster("worker0", allow=["tests"]) as join:
        yield Elastic(Threads(join))


@pytest.fixture
def processes(hosts, port):
    """An elastic group of processes, of "worker0" so far."""
    group = Elastic(Processes(hosts, port))
    group.join("worker0")
    yield group
    group.end()


@pytest.fixture
def mortal(fresh_hosts, port):
    """`mortal(n, **options)`: one that may lose n processes; "worker0" is in."""

    def make(count, **options):
        group = Elastic(Processes(fresh_hosts(count), port, **options))
        group.join("worker0")
        return group

    return make


@pytest.fixture(params=["threads", "processes"], ids=["in-process", "process"])
def elastic(request):
    """An elastic group of "worker0", over one transport and then the other."""
    return request.getfixturevalue(request.param)

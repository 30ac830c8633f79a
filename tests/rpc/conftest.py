"""Clusters for tests of rpc: the same bodies over both transports.

A test takes `cluster`, and runs once with four workers in this process and once with
four processes. The processes live as long as the session; each module has its own group
of workers. A test that ends a group, or kills somebody, takes `hosts` or `fresh_hosts`.
"""

import contextlib

import pytest

from jdist import rpc
from tests.rpc.hosts import WORKERS, Cluster, Hosts, become_worker, in_threads, names


@pytest.fixture(scope="session")
def hosts():
    """Four processes that are no workers; they must be none again afterwards."""
    started = Hosts(WORKERS)
    yield started
    started.close()


@pytest.fixture
def fresh_hosts():
    """`fresh_hosts(n)`: n processes of this test alone, to be killed as it likes."""
    with contextlib.ExitStack() as stack:

        def make(count):
            made = Hosts(count)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="module")
def processes(hosts):
    """A cluster of four processes, shared by the tests of a module."""
    hosts.everywhere(become_worker)
    yield Cluster("process", names(), hosts.start)
    hosts.everywhere(rpc.shutdown)


@pytest.fixture
def threads():
    """A cluster of four workers in this process."""
    with rpc.local_cluster(names(), allow=["tests"]):
        yield Cluster("in-process", names(), in_threads(names()))


@pytest.fixture(params=["in-process", "process"])
def cluster(request):
    """Four workers, over one transport and then the other."""
    kinds = {"in-process": "threads", "process": "processes"}
    return request.getfixturevalue(kinds[request.param])

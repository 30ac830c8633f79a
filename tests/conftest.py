"""Clusters for tests of rpc: the same bodies over both transports; compilations seen.

A test takes `cluster`, and runs once with four workers in this process and once with
four processes. The processes live as long as the session; each module has its own group
of workers. A test that ends a group, or kills somebody, takes `hosts` or `fresh_hosts`.
"""

import contextlib

import jax
import pytest

from jdist import rpc
from tests import chaos
from tests.data_parallel import group_runs
from tests.rpc.fork_server import ForkServer
from tests.rpc.hosts import (
    WORKERS,
    Cluster,
    Hosts,
    be_no_worker,
    become_worker,
    in_threads,
    names,
)


def pytest_report_header():
    """The seed, with which the delays come again."""
    if chaos.PLAN is None:
        return []
    return f"delays: make chaos SEED={chaos.PLAN.seed} SHARE={chaos.SHARE}"


def pytest_collection_modifyitems(config, items):
    """With delays, runs the tests that the seed chooses."""
    if chaos.PLAN is not None:
        items[:], left = chaos.keep(items, chaos.PLAN, chaos.SHARE)
        config.hook.pytest_deselected(items=left)


@pytest.fixture
def compilations():
    """Counts the programs that XLA compiles."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def fork_server():
    """Where processes come from."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def host_processes(fork_server):
    """Four processes for the tests of the session."""
    started = Hosts(fork_server, WORKERS)
    yield started
    started.close()


@pytest.fixture
def hosts(host_processes):
    """Four processes that are no workers, and are none afterwards."""
    yield host_processes
    host_processes.everywhere(be_no_worker)


@pytest.fixture
def fresh_hosts(fork_server):
    """`fresh_hosts(n)`: n processes of this test alone, to be killed as it likes."""
    with contextlib.ExitStack() as stack:

        def make(count):
            made = Hosts(fork_server, count)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="module")
def processes(host_processes):
    """A cluster of four processes, shared by the tests of a module."""
    host_processes.everywhere(become_worker, leaks="error")
    yield Cluster("process", names(), host_processes.start)
    host_processes.everywhere(rpc.shutdown)
    # The next module has other programs, and all of them would take several GiB.
    host_processes.everywhere(jax.clear_caches)


@pytest.fixture(scope="module")
def pair(fork_server):
    """Two processes that have joined by `jax.distributed`; they part in peace."""
    hosts = Hosts(fork_server, 2)
    try:
        hosts.joined = hosts.everywhere(group_runs.join)
        yield hosts
        hosts.everywhere(group_runs.leave)
    finally:
        hosts.close()


@pytest.fixture
def threads():
    """A cluster of four workers in this process."""
    options = rpc.RpcOptions(leaks="error")
    with rpc.local_cluster(names(), options=options, allow=["tests"]):
        yield Cluster("in-process", names(), in_threads(names()))


@pytest.fixture(params=["in-process", "process"])
def cluster(request):
    """Four workers, over one transport and then the other."""
    kinds = {"in-process": "threads", "process": "processes"}
    return request.getfixturevalue(kinds[request.param])

"""The clusters of `tests/rpc`, for tests of pipelines."""

from tests.rpc.conftest import cluster as cluster
from tests.rpc.conftest import fresh_hosts as fresh_hosts
from tests.rpc.conftest import host_processes as host_processes
from tests.rpc.conftest import hosts as hosts
from tests.rpc.conftest import processes as processes
from tests.rpc.conftest import threads as threads

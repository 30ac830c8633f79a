"""A cluster of Ray on this machine, with resources that are made up."""

import os

import pytest

SMALL = {"object_store_memory": 78_643_200, "include_dashboard": False}


class Machines:
    """Two machines with two slots each, and one without for the driver."""

    def __init__(self, ray, cluster):
        self.address = cluster.address
        self._cluster = cluster
        self._nodes = [self._new(), self._new()]
        ray.init(address=cluster.address, log_to_driver=False)

    def replace_one(self):
        """A machine is lost without a word, and another one comes."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)
        self._nodes.append(self._new())

    def _new(self):
        return self._cluster.add_node(num_cpus=2, resources={"slot": 2}, **SMALL)


@pytest.fixture(scope="module")
def machines():
    ray = pytest.importorskip("ray", reason="needs the extra ray: make ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # A machine counts as lost after a second; Ray's own is 15.
    soon = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 2,
    }
    head = {"num_cpus": 0, "_system_config": soon, **SMALL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield Machines(ray, cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()

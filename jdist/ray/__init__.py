"""Workers that Ray places on machines; jdist makes the calls between them.

    import jdist.ray
    from jdist import rpc

    with jdist.ray.cluster(["worker0", "worker1"], resources={"GPU": 1}):
        rpc.rpc_sync("worker1", jnp.add, args=(x, y))

Needs the extra `ray`, on every machine.
"""

from jdist.ray.placement import PlacedWorkers, cluster

__all__ = ["PlacedWorkers", "cluster"]

"""A gather from a table whose gradient is not yet summed counts it for each device.

A table that is gathered for a step can be marked as `reduced`: its cotangent may stay a
partial sum on each device until the shards are summed. The published bug was in the
partitioner's treatment of such a gather's transpose. It does not occur on CPU; beside
it, the gradient is wrong wherever the indices are the same on all devices of the axis.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.museum.meshes import Judge, Trainer
from jdist import verify

Tree = Any

THREAD = "https://github.com/openxla/xla/issues/42481"
CLAIM = "The gradient of a sharded table, whatever its sharding when it is read."
EXPECTED = ("first difference: gradient, table", " 4 times")
KNOWN = """
The factor is the number of devices along the axis of `reduced` over which the indices
are replicated: 4 and 2 on a mesh of 4 x 2, on CPU with JAX 0.10.2 and 0.12.0.1. With
indices that are divided over that axis the gradient is right. Otherwise each device has
the whole cotangent, and the sum over devices counts it once for each. A derivative must
not depend on an annotation of the layout: this is a defect of JAX, which should refuse
the mixture, or divide.
"""


def buggy() -> P:
    """The table's sharding when it is read."""
    return P(None, None, reduced={"fsdp"})


def fixed() -> P:
    """The table's sharding when it is read."""
    return P(None, None)


def trainer(part: Trainer) -> Trainer:
    """A table over four devices, indices over two others."""
    over = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def step(params: Tree, batch: Tree) -> Tree:
        put = lambda x, *axes: jax.device_put(x, NamedSharding(over, P(*axes)))  # noqa: E731
        with jax.set_mesh(over):
            table, ids = put(params["table"], "fsdp"), put(batch["x"], None, "tp")
            y = put(batch["y"], None, "tp")

            def loss(p: Tree) -> Tree:
                whole = jax.sharding.reshard(p["table"], part())
                rows = whole.at[ids].get(out_sharding=P(None, "tp", None))
                return (jnp.sin(rows) * y).sum() / len(ids)

            return jax.jit(jax.value_and_grad(loss))({"table": table})

    return step


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The loss of each row of indices."""
    rows = verify.tap(params["table"][batch["x"]], "rows")
    return (jnp.sin(rows) * batch["y"]).sum((1, 2))


def judge() -> Judge:
    """The judge: the table on one device."""
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {
        "x": jax.random.randint(keys[0], (3, 8), 0, 5),
        "y": jax.random.normal(keys[1], (3, 8, 6)),
    }
    params = {"table": jax.random.normal(keys[2], (20, 6))}
    return verify.trace_judge(losses, params, batch)

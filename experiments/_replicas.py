"""Where replicas run, and whether they hold the same bits."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def over(where: Mesh | int) -> dict[str, Any]:
    """The arguments for the devices of a mesh, or for replicas that share one."""
    return {"mesh": where} if isinstance(where, Mesh) else {"replicas": where}


def replicas_identical(tree: Any) -> bool:
    """Whether all devices hold the same bits of every leaf."""
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(s.data).tobytes() for s in leaf.addressable_shards)
        if any(other != first for other in others):
            return False
    return True

"""Whether replicas hold the same bits."""

from typing import Any

import jax
import numpy as np


def replicas_identical(tree: Any) -> bool:
    """Whether all devices hold the same bits of every leaf."""
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(s.data).tobytes() for s in leaf.addressable_shards)
        if any(other != first for other in others):
            return False
    return True

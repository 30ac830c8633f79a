"""What has passed between stages: the host's record of every send and receive."""

from typing import Any, NamedTuple

import jax


class Transfer(NamedTuple):
    """A value, or its cotangent, that went from one stage to another.

    Attributes:
      step: Number of the call of the pipeline.
      micro_batch: Number of the micro-batch.
      name: Of the value.
      source: The stage that sent it; -1 for the batch.
      destination: The stage that took it; the number of stages for the loss.
      cotangent: Whether it is the cotangent of the value, on its way back.
      nbytes: Its size.
    """

    step: int
    micro_batch: int
    name: str
    source: int
    destination: int
    cotangent: bool
    nbytes: int


def size_of(value: Any) -> int:
    """The bytes of all arrays of a value.

    Example:
      >>> import numpy as np
      >>> size_of({"h": np.zeros((3, 5), np.float32), "mask": None})
      60
    """
    return sum(leaf.nbytes for leaf in jax.tree.leaves(value))

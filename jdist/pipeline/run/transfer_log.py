"""The transfer log: the host's record of the values that stages sent each other."""

from typing import NamedTuple


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

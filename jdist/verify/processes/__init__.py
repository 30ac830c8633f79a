"""Verification over several processes: shards are judged where they are held."""

from jdist.verify.processes.finding import (
    Finding,
    Products,
    merged,
    record,
    restored,
    worst_of,
)
from jdist.verify.processes.one_device import as_the_caller, brought, on_one_device
from jdist.verify.processes.peers import TIMEOUT, Peers, joined
from jdist.verify.processes.shards import HeldArray, Shard, held

__all__ = [
    "TIMEOUT",
    "Finding",
    "HeldArray",
    "Peers",
    "Products",
    "Shard",
    "as_the_caller",
    "brought",
    "held",
    "joined",
    "merged",
    "on_one_device",
    "record",
    "restored",
    "worst_of",
]

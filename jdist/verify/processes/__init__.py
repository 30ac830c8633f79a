"""Verification over several processes: shards are judged where they are held."""

from jdist.verify.processes.finding import (
    Finding,
    Products,
    merged,
    record,
    restored,
    worst_of,
)
from jdist.verify.processes.peers import TIMEOUT, Peers, PeersLost, joined
from jdist.verify.processes.shards import HeldArray, Shard, held

__all__ = [
    "TIMEOUT",
    "Finding",
    "HeldArray",
    "Peers",
    "PeersLost",
    "Products",
    "Shard",
    "held",
    "joined",
    "merged",
    "record",
    "restored",
    "worst_of",
]

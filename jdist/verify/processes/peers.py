"""The processes of one `jax.distributed` run, which judge together.

Each calls the judge in the same order, looks at its own shards, and exchanges what it
found with the others: records, which pass through the coordinator and not through the
devices (`jdist._agreement`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Event
from typing import Any, Final

import jax

from jdist._agreement import PAUSE, PeersLost, RecordExchange
from jdist._compat import distributed_client, is_computed
from jdist._errors import check_positive_seconds
from jdist._tree import PyTree

# Default seconds to wait for other processes, which may still be compiling.
TIMEOUT = 300.0

ADVICE = "Every process must call the judge, in the same order and on the same problem."


class Peers:
    """All processes of the run, as one of them sees them during one judgement.

    Attributes:
      size: Number of processes.
      rank: The number of this one.
    """

    def __init__(self, timeout: float, records: RecordExchange | None = None) -> None:
        self.size: Final = 1 if records is None else records.size
        self.rank: Final = 0 if records is None else records.rank
        self._timeout = timeout
        self._records = records
        if records is not None:
            records.begin()

    def exchange(self, record: object) -> list[Any]:
        """Every process's record, by rank; the same list on all of them.

        Args:
          record: What JSON can hold; NaN and infinity are allowed.

        Raises:
          PeersLost: A process raised, or its record did not come in time.
        """
        if self._records is None:
            return [record]
        return self._records.gather(record, self._timeout)

    def computed(self, arrays: PyTree) -> PyTree:
        """Waits until arrays, which all processes compute together, are computed.

        Raises:
          PeersLost: A process raised meanwhile, or did not compute in time.
        """
        if self._records is None:
            return jax.block_until_ready(arrays)
        until, pause = time.monotonic() + self._timeout, Event()
        pending = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        # `block_until_ready` would wait for ever for a process that has raised.
        while pending := [x for x in pending if not is_computed(x)]:
            self._records.check()
            if time.monotonic() > until:
                raise PeersLost(
                    f"process {self._records.rank} of {self.size}: what the candidate "
                    f"returned was not computed within {self._timeout:g} s. Every "
                    f"process must call it, with the same shapes."
                )
            pause.wait(PAUSE)
        return arrays

    def failed(self, error: BaseException) -> None:
        """Tells the others that this process has failed, and why."""
        # Each process detects a lost peer by itself, by its own deadline.
        if self._records is not None and not isinstance(error, PeersLost):
            self._records.refuse(f"{type(error).__name__}: {error}")


# Kept, since it counts judgements: all processes number them alike.
@cache
def _records(rank: int, size: int) -> RecordExchange:
    return RecordExchange("jdist/verify", rank, size, ADVICE)


@contextmanager
def joined(timeout: float) -> Iterator[Peers]:
    """Joins the processes of a run for one judgement; tells them of errors inside.

    Args:
      timeout: Seconds to wait for the others, at each exchange.
    """
    check_positive_seconds("timeout", timeout)
    alone = distributed_client() is None or jax.process_count() == 1
    own = None if alone else _records(jax.process_index(), jax.process_count())
    peers = Peers(timeout, own)
    try:
        yield peers
    # Interrupts too: the others would otherwise wait until their deadline.
    except BaseException as error:
        peers.failed(error)
        raise

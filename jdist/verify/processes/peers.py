"""Small records exchanged by the processes of one `jax.distributed` run.

The processes of a run judge together: each calls the judge in the same order, looks at
its own shards, and posts what it found under a number that all of them count up alike.
The records pass through the coordinator's key-value store, not through the devices: a
process that raises can still say so there, and every wait has a deadline, which a
collective has not.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event
from typing import Any, Final

import jax

from jdist._compat import distributed_client, is_computed
from jdist._errors import JdistError, check_positive_seconds
from jdist._tree import PyTree

# Seconds between two polls of the store.
PAUSE = 0.05

# Default seconds to wait for other processes, which may still be compiling.
TIMEOUT = 300.0

# Judgements are numbered, and exchanges within each: one that fails half-way leaves the
# next in step on all processes.
_judgements = count()
_posted: list[str] = []


class PeersLost(JdistError):
    """Another process of the run raised, or did not come to the same point in time."""


class Peers:
    """All processes of the run, as one of them sees them during one judgement.

    Attributes:
      rank: Rank of this process.
      size: Number of processes.
      timeout: Seconds to wait for the others, at each exchange.
    """

    def __init__(self, timeout: float, rank: int = 0, size: int = 1) -> None:
        self.rank: Final = rank
        self.size: Final = size
        self.timeout: Final = timeout
        self._exchanges = count()
        self._judgement = next(_judgements) if size > 1 else 0
        # Known before the next post: failures of other processes are posted under it.
        self._next = self._fresh()

    def exchange(self, record: object) -> list[Any]:
        """Every process's record, by rank; the same list on all of them.

        Args:
          record: What JSON can hold; NaN and infinity are allowed.

        Raises:
          PeersLost: A process raised, or its record did not come within `timeout`.
        """
        if self.size == 1:
            return [record]
        prefix = self._next
        self._post({"record": record})
        found = self._gathered(prefix)
        # Every process has posted in this exchange, hence has read all earlier ones.
        while len(_posted) > 1:
            distributed_client().key_value_delete(_posted.pop(0))
        return [json.loads(text)["record"] for text in found]

    def computed(self, arrays: PyTree) -> PyTree:
        """Waits until arrays, which all processes compute together, are computed.

        Raises:
          PeersLost: A process raised meanwhile, or `timeout` has passed.
        """
        if self.size == 1:
            return jax.block_until_ready(arrays)
        until = time.monotonic() + self.timeout
        pause = Event()
        pending = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        # `block_until_ready` would wait for ever for a process that has raised.
        while pending := [x for x in pending if not is_computed(x)]:
            self._notice_failures(self._records(self._next))
            if time.monotonic() > until:
                raise PeersLost(
                    f"process {self.rank} of {self.size}: what the candidate returned "
                    f"was not computed within {self.timeout:g} s. Every process must "
                    f"call it, with the same shapes."
                )
            pause.wait(PAUSE)
        return arrays

    def failed(self, error: BaseException) -> None:
        """Posts that this process has failed, and why."""
        # Each process detects a lost peer by itself, by its own deadline.
        if self.size == 1 or isinstance(error, PeersLost):
            return
        self._post({"error": f"{type(error).__name__}: {error}"})

    def _post(self, content: object) -> None:
        key = f"{self._next}{self.rank}"
        distributed_client().key_value_set(key, json.dumps(content))
        _posted.append(key)
        self._next = self._fresh()

    def _fresh(self) -> str:
        return f"jdist/verify/{self._judgement}/{next(self._exchanges)}/"

    def _gathered(self, prefix: str) -> list[str]:
        until = time.monotonic() + self.timeout
        pause = Event()
        while len(found := self._records(prefix)) < self.size:
            self._notice_failures(found)
            if time.monotonic() > until:
                absent = [str(r) for r in range(self.size) if r not in found]
                raise PeersLost(
                    f"process {self.rank} of {self.size}: nothing came from process "
                    f"{', '.join(absent)} within {self.timeout:g} s. Every process "
                    f"must call the judge, in the same order and on the same problem."
                )
            pause.wait(PAUSE)
        # All have posted, but a post may be an error.
        self._notice_failures(found)
        return [found[rank] for rank in range(self.size)]

    def _records(self, prefix: str) -> dict[int, str]:
        pairs = distributed_client().key_value_dir_get(prefix)
        return {int(key.rpartition("/")[2]): text for key, text in pairs}

    def _notice_failures(self, found: dict[int, str]) -> None:
        for rank, text in sorted(found.items()):
            if "error" in (content := json.loads(text)):
                raise PeersLost(f"process {rank} raised {content['error']}")


@contextmanager
def joined(timeout: float) -> Iterator[Peers]:
    """Joins the processes of a run for one judgement; posts errors raised inside.

    Args:
      timeout: Seconds to wait for the others, at each exchange.
    """
    check_positive_seconds("timeout", timeout)
    client = distributed_client()
    size = 1 if client is None else jax.process_count()
    peers = Peers(timeout, jax.process_index() if size > 1 else 0, size)
    try:
        yield peers
    # Interrupts too: the others would otherwise wait until their deadline.
    except BaseException as error:
        peers.failed(error)
        raise

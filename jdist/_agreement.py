"""Agreement between the processes of one `jax.distributed` run.

Processes leave small records for each other in the coordinator's key-value store, under
names that all of them know. A collective waits for ever for a process that has raised,
and names none. Here every wait has a deadline, a process that fails can say so, and
errors name the processes that are missing.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

from jdist._compat import distributed_client
from jdist._errors import JdistError

# Seconds between two reads of the store.
PAUSE = 0.05


class PeersLost(JdistError):
    """Another process of the run raised, or did not come to the same point in time."""


@dataclass(frozen=True, slots=True)
class Records:
    """The records that processes have left under one name, one for each rank.

    Attributes:
      name: The name.
    """

    name: str

    def leave(self, rank: int, record: object) -> None:
        """Leaves a record: what JSON can hold, NaN and infinity among it."""
        distributed_client().key_value_set(f"{self.name}/{rank}", json.dumps(record))

    def remove(self, rank: int) -> None:
        """Removes a process's record."""
        distributed_client().key_value_delete(f"{self.name}/{rank}")

    def by_rank(self) -> dict[int, Any]:
        """The records that are there, in the order of the ranks."""
        pairs = distributed_client().key_value_dir_get(f"{self.name}/")
        found = {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}
        return dict(sorted(found.items()))

    def wait(
        self, enough: Callable[[dict[int, Any]], bool], timeout: float
    ) -> dict[int, Any]:
        """The records that are there once they are enough, or after `timeout`."""
        until, pause = time.monotonic() + timeout, Event()
        while not enough(found := self.by_rank()) and time.monotonic() <= until:
            pause.wait(PAUSE)
        return found


class RecordExchange:
    """Rounds in which every process of a run gives a record and gets all of them.

    All processes call the same methods in the same order.

    Args:
      name: The name of all its records.
      rank: The rank of this process.
      size: The number of processes.
      advice: What all processes must do, for the errors' text.

    Attributes:
      rank: The rank of this process.
      size: The number of processes.
    """

    def __init__(self, name: str, rank: int, size: int, advice: str) -> None:
        self.rank: Final = rank
        self.size: Final = size
        self._name = name
        self._advice = advice
        self._session = self._round = 0
        self._left: list[Records] = []

    def begin(self) -> None:
        """Begins a session: rounds are counted anew.

        A session that fails half-way leaves the next in step on all processes.
        """
        self._session += 1
        self._round = 0

    def gather(self, record: object, timeout: float) -> list[Any]:
        """Every process's record by rank; the same list on all of them.

        Raises:
          PeersLost: A process refused, or its record did not come within `timeout`.
        """
        records = self._next
        self._leave({"record": record})
        found = records.wait(self._complete, timeout)
        if len(found) < self.size:
            absent = [str(rank) for rank in range(self.size) if rank not in found]
            raise PeersLost(
                f"process {self.rank} of {self.size}: nothing came from process "
                f"{', '.join(absent)} within {timeout:g} s. {self._advice}"
            )
        # Every process has come to this round, hence has read all earlier ones.
        while len(self._left) > 1:
            self._left.pop(0).remove(self.rank)
        return [content["record"] for content in found.values()]

    def refuse(self, reason: str) -> None:
        """Makes the other processes raise in this round, instead of a record."""
        self._leave({"refusal": reason})

    def check(self) -> None:
        """Raises PeersLost if another process has refused before the next round."""
        self._complete(self._next.by_rank())

    @property
    def _next(self) -> Records:
        return Records(f"{self._name}/{self._session}/{self._round}")

    def _leave(self, content: object) -> None:
        records = self._next
        records.leave(self.rank, content)
        self._left.append(records)
        self._round += 1

    def _complete(self, found: dict[int, Any]) -> bool:
        for rank, content in found.items():
            if "refusal" in content:
                raise PeersLost(f"process {rank} raised {content['refusal']}")
        return len(found) == self.size

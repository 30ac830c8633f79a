"""One all_gather as the coordinator sees it: who came, who is missing, how it ended."""

from typing import Any, NamedTuple

from jdist.rpc.deadline import moment
from jdist.rpc.frame import ERROR, REPLY, Frame

Key = tuple[str, ...] | None
"""The names that take part, sorted; None for all who belong to an elastic group."""


class Part(NamedTuple):
    """What one worker brought.

    Attributes:
      number: Of its request, for the answer.
      tree: The encoded value's structure.
      leaves: Its arrays.
      timeout: Seconds that it wants to wait.
      until: When that is over; None for no limit.
    """

    number: int
    tree: Any
    leaves: list[Any]
    timeout: float
    until: float | None


class Gathering:
    """Collects one part of each worker, and has an answer once it is decided.

    Args:
      names: Who takes part.
      purpose: What for, in words.

    Attributes:
      lost: Whether it came to nothing because somebody was lost.
    """

    def __init__(self, names: tuple[str, ...], purpose: str) -> None:
        self._names = names
        self._purpose = purpose
        self._parts: dict[str, Part] = {}
        self._excused: set[str] = set()
        self._answer: Frame | None = None
        self.lost = False

    @property
    def decided(self) -> bool:
        """Whether there is an answer, also for those who come late."""
        return self._answer is not None

    def expects(self, name: str) -> bool:
        """Whether this worker takes part and has not come yet."""
        return name in self.missing()

    def add(self, name: str, part: Part) -> None:
        """One more came."""
        self._parts[name] = part
        self._decide()

    def missing(self) -> list[str]:
        """Who has not come yet."""
        present = self._parts.keys() | self._excused
        return [name for name in self._names if name not in present]

    def excuse(self, name: str) -> None:
        """One who has not come need not. Another of that name may, another time."""
        if name in self.missing():
            self._excused.add(name)
            self._decide()

    def lose(self, name: str, reason: str) -> None:
        """One of them will not come, or has gone before it was complete."""
        if self._answer is None and name in self._names:
            self.lost = True
            meta = {"lost": name, "purpose": self._purpose, "reason": reason}
            self._answer = Frame(ERROR, 0, meta, None, [])

    def expire(self, now: float) -> None:
        """Ends it for all when somebody's patience is over: it can never be whole."""
        if self._answer is not None:
            return
        for name, part in self._parts.items():
            if part.until is not None and part.until <= now:
                text = (
                    f"{self._purpose} timed out in _all_gather after "
                    f"{part.timeout:.2f} seconds on {name!r}. "
                    f"Did not arrive: {', '.join(self.missing())}."
                )
                self._answer = Frame(ERROR, 0, {"timeout": text}, None, [])
                return

    def until(self) -> float | None:
        """The moment when `expire` has something to do."""
        moments = [
            part.until for part in self._parts.values() if part.until is not None
        ]
        return min(moments, default=None) if self._answer is None else None

    def take_answers(self) -> list[tuple[str, Frame]]:
        """The answers that are due, each only once, by name."""
        if self._answer is None:
            return []
        due = [(name, part) for name, part in self._parts.items() if part.number]
        for name, part in due:
            self._parts[name] = Part(0, None, [], part.timeout, None)
        return [(name, self._answer._replace(id=part.number)) for name, part in due]

    def _decide(self) -> None:
        if self._answer is None and not self.missing():
            self._answer = self._complete()

    def _complete(self) -> Frame:
        names = [name for name in self._names if name in self._parts]
        parts = [self._parts[name] for name in names]
        sizes = [len(part.leaves) for part in parts]
        meta = {"names": names, "sizes": sizes}
        trees = [part.tree for part in parts]
        leaves = [leaf for part in parts for leaf in part.leaves]
        return Frame(REPLY, 0, meta, trees, leaves)


def patience(timeout: object) -> float | None:
    """When a wait that begins now is over; `timeout` 0 for never.

    Raises:
      ValueError: A peer sent what is no timeout.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"a timeout of {timeout!r}")
    return moment(timeout)

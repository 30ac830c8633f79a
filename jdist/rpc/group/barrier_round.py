"""One collective as the coordinator sees it: who came for what, and how it ended."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jdist.rpc.base.deadline import moment
from jdist.rpc.group.member import Member
from jdist.rpc.wire.frame import ERROR, REPLY, Frame

SHUTDOWN = "shutdown"
"""The operation of the rounds in which workers end together."""


class Key(NamedTuple):
    """Which collectives can be one.

    A worker that waits in `shutdown` still serves calls, and a function that one of
    them runs may take part in a collective. So those are apart.

    Attributes:
      names: Who takes part, sorted; None for all who belong to an elastic group.
      ends: Whether it is a shutdown.
    """

    names: tuple[str, ...] | None
    ends: bool


class Purpose(NamedTuple):
    """What a worker came for: what must be the same on all of them.

    Attributes:
      operation: The public function, such as "all_gather".
      tag: The caller's own, or "".
      number: Counts the collectives of these workers, from 1. In an elastic group it
        differs between those who joined sooner and later.
    """

    operation: str
    tag: str
    number: int

    def __str__(self) -> str:
        if self.operation == SHUTDOWN:
            return SHUTDOWN
        tag = f"(tag={self.tag!r})" if self.tag else ""
        return f"{self.operation}{tag} number {self.number}"


class Part(NamedTuple):
    """What one worker brought.

    Attributes:
      member: The worker; not its name, which a successor may bear.
      request: Number of its request, for the answer; 0 once that is sent.
      purpose: What it came for.
      tree: The encoded value's structure.
      leaves: Its arrays.
      timeout: Seconds that it wants to wait.
      until: When that is over; None for no limit.
      refused: Why it has no value to give, or None.
    """

    member: Member
    request: int
    purpose: Purpose
    tree: Any
    leaves: list[Any]
    timeout: float
    until: float | None
    refused: str | None = None


class Gathering:
    """Collects one part of each worker, and has an answer once it is decided.

    Args:
      names: Who takes part.
      numbered: Whether all must have the same number.

    Attributes:
      lost: Whether it came to nothing because somebody was lost.
    """

    def __init__(self, names: tuple[str, ...], numbered: bool) -> None:
        self.lost = False
        self._names = names
        self._numbered = numbered
        self._parts: dict[str, Part] = {}
        self._excused: set[str] = set()
        self._answer: Frame | None = None

    @property
    def decided(self) -> bool:
        """Whether there is an answer, also for those who come late."""
        return self._answer is not None

    @property
    def parts(self) -> Sequence[Part]:
        """What came so far."""
        return list(self._parts.values())

    def expects(self, name: str) -> bool:
        """Whether this worker takes part and has not come yet."""
        return name in self.missing()

    def add(self, name: str, part: Part) -> None:
        """One more came."""
        self._parts[name] = part
        if self._answer is None and part.refused is not None:
            self._fail(
                f"{part.purpose} failed on all workers, because {name!r} had no value "
                f"to send: {part.refused}"
            )
        elif self._answer is None and self._differs(part.purpose):
            self.mismatch({})
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
            meta = {"lost": name, "purpose": self._what(), "reason": reason}
            self._answer = Frame(ERROR, 0, meta, None, [])

    def mismatch(self, elsewhere: dict[str, str]) -> None:
        """Those who came do not do the same; or the missing are `elsewhere` for good.

        Args:
          elsewhere: What workers are in that have not come.
        """
        if self._answer is None:
            came = {name: str(part.purpose) for name, part in self._parts.items()}
            there = {
                name: elsewhere[name] for name in self.missing() if name in elsewhere
            }
            text = ", ".join(
                f"{n!r} is in {what}" for n, what in (came | there).items()
            )
            self._fail(
                "The workers do not do the same collective: "
                f"{text}. Every worker must call the same ones in the same order, with "
                "the same tags.",
                mismatch=True,
            )

    def expire(self, now: float, elsewhere: Callable[[], dict[str, str]]) -> None:
        """Ends it for all when somebody's patience is over: it can never be whole."""
        if self._answer is not None:
            return
        for name, part in self._parts.items():
            if part.until is not None and part.until <= now:
                missing, known = self.missing(), elsewhere()
                where = [f"{n!r} is in {known[n]}" for n in missing if n in known]
                text = (
                    f"{part.purpose.operation} timed out in _all_gather after "
                    f"{part.timeout:.2f} seconds on {name!r}. "
                    f"Did not arrive: {', '.join(missing)}."
                )
                text += f" Instead, {', '.join(where)}." if where else ""
                self._answer = Frame(ERROR, 0, {"timeout": text}, None, [])
                return

    def until(self) -> float | None:
        """The moment when `expire` has something to do."""
        moments = [
            part.until for part in self._parts.values() if part.until is not None
        ]
        return min(moments, default=None) if self._answer is None else None

    def take_answers(self) -> list[tuple[Member, Frame]]:
        """The answers that are due, each only once."""
        if self._answer is None:
            return []
        due = [(name, part) for name, part in self._parts.items() if part.request]
        for name, part in due:
            self._parts[name] = part._replace(request=0, tree=None, leaves=[])
        return [(p.member, self._answer._replace(id=p.request)) for _, p in due]

    def _what(self) -> str:
        """The operation, of those who came; all came for the same."""
        return next((p.purpose.operation for p in self._parts.values()), "a collective")

    def _differs(self, purpose: Purpose) -> bool:
        for other in self._parts.values():
            same = (
                purpose
                if self._numbered
                else purpose._replace(number=other.purpose.number)
            )
            if same != other.purpose:
                return True
        return False

    def _fail(self, text: str, mismatch: bool = False) -> None:
        meta = {"failed": text, "mismatch": mismatch}
        self._answer = Frame(ERROR, 0, meta, None, [])

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


def part_of(member: Member, frame: Frame) -> tuple[Key, Part]:
    """What a request brings, and to which collectives it belongs.

    Raises:
      ValueError, KeyError: A peer sent what is no such request.
    """
    meta = frame.meta
    names, refused = meta["names"], meta["refused"]
    operation, tag, number = meta["operation"], meta["tag"], meta["number"]
    if type(operation) is not str or type(tag) is not str or type(number) is not int:
        raise ValueError("a collective without an operation, a tag and a number")
    if refused is not None and type(refused) is not str:
        raise ValueError("a refusal that is no text")
    if names is not None:
        if type(names) is not list or {type(one) for one in names} != {str}:
            raise ValueError("names that are none")
        if member.info.name not in names:
            raise ValueError(f"{member.info.name!r} meets others without itself")
    purpose, timeout = Purpose(operation, tag, number), meta["timeout"]
    key = Key(None if names is None else tuple(names), operation == SHUTDOWN)
    return key, Part(
        member,
        frame.id,
        purpose,
        frame.tree,
        frame.leaves,
        timeout,
        patience(timeout),
        refused,
    )


def patience(timeout: object) -> float | None:
    """When a wait that begins now is over; `timeout` 0 for never.

    Raises:
      ValueError: A peer sent what is no timeout.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"a timeout of {timeout!r}")
    return moment(timeout)

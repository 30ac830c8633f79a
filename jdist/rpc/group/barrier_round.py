"""The coordinator's state of one round of a collective."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from jdist.rpc.base.current import moment
from jdist.rpc.calls.agent import unpacked
from jdist.rpc.group.membership import Member
from jdist.rpc.wire.frame import ERROR, REPLY, Frame

SHUTDOWN = "shutdown"
"""The operation of the rounds in which workers end together."""


class RoundKey(NamedTuple):
    """The fields in which two requests of one round agree.

    Shutdowns are kept apart from other collectives: a worker that waits in `shutdown`
    still serves calls, and a called function may take part in a collective.

    Attributes:
      names: Sorted names of the workers that take part; None for all of an elastic
        group.
      ends: Whether it is a shutdown.
    """

    names: tuple[str, ...] | None
    ends: bool


class Purpose(NamedTuple):
    """The collective that a worker called; all workers of a round must agree in it.

    Attributes:
      operation: The public function, such as "all_gather".
      tag: The caller's own tag, or "".
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


class Contribution(NamedTuple):
    """One worker's part in a collective.

    Attributes:
      member: The worker; not its name, which a successor may bear.
      request: Number of its request, for the answer; 0 once that is sent.
      purpose: The collective that the worker called.
      tree: The encoded value's structure.
      leaves: Its arrays.
      timeout: The worker's timeout in seconds.
      until: Time at which the timeout ends; None for no limit.
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


class BarrierRound:
    """Collects one contribution per worker and decides the common answer.

    Args:
      names: Names of the workers that take part.
      numbered: Whether all must have the same number.

    Attributes:
      lost: Whether it failed because a worker was lost.
    """

    def __init__(self, names: tuple[str, ...], numbered: bool) -> None:
        self.lost = False
        self._names = names
        self._numbered = numbered
        self._came: dict[str, Contribution] = {}
        self._excused: set[str] = set()
        self._answer: Frame | None = None

    @property
    def decided(self) -> bool:
        """Whether there is an answer, also for workers that come late."""
        return self._answer is not None

    @property
    def contributions(self) -> Sequence[Contribution]:
        """The contributions received so far."""
        return list(self._came.values())

    def expects(self, name: str) -> bool:
        """Whether this worker takes part and has not come yet."""
        return name in self.missing()

    def add(self, name: str, contribution: Contribution) -> None:
        """Record a worker's contribution."""
        self._came[name] = contribution
        purpose, refused = contribution.purpose, contribution.refused
        if self._answer is None and refused is not None:
            self._fail(
                f"{purpose} failed on all workers, because {name!r} had no value "
                f"to send: {refused}"
            )
        elif self._answer is None and self._differs(purpose):
            # At the first difference, not at the timeout: the round cannot complete.
            self._mismatch()
        self._decide()

    def missing(self) -> list[str]:
        """The workers that have not come yet and are not excused."""
        present = self._came.keys() | self._excused
        return [name for name in self._names if name not in present]

    def excuse(self, name: str) -> None:
        """Stop waiting for this worker; its successor may join another round."""
        if name in self.missing():
            self._excused.add(name)
            self._decide()

    def lose(self, name: str, reason: str) -> None:
        """Fail an undecided round of a lost worker, even if it has contributed."""
        if self._answer is None and name in self._names:
            self.lost = True
            meta = {"lost": name, "purpose": self._operation(), "reason": reason}
            self._answer = Frame(ERROR, 0, meta, None, [])

    def expire(self, now: float, elsewhere: Callable[[], dict[str, str]]) -> None:
        """Fail for all once one worker's timeout has passed."""
        if self._answer is not None:
            return
        for name, one in self._came.items():
            # One worker's timeout fails the round for all: without that worker it can
            # never be complete.
            if one.until is not None and one.until <= now:
                missing, known = self.missing(), elsewhere()
                where = [f"{n!r} is in {known[n]}" for n in missing if n in known]
                text = (
                    f"{one.purpose.operation} timed out in _all_gather after "
                    f"{one.timeout:.2f} seconds on {name!r}. "
                    f"Did not arrive: {', '.join(missing)}."
                )
                text += f" Instead, {', '.join(where)}." if where else ""
                self._answer = Frame(ERROR, 0, {"timeout": text}, None, [])
                return

    def until(self) -> float | None:
        """The earliest moment at which `expire` can have an effect, or None."""
        moments = [one.until for one in self._came.values() if one.until is not None]
        return min(moments, default=None) if self._answer is None else None

    def take_answers(self) -> list[tuple[Member, Frame]]:
        """The answers that are due, each only once."""
        if self._answer is None:
            return []
        due = [(name, one) for name, one in self._came.items() if one.request]
        for name, one in due:
            # The values are released: the round may be kept for workers that come late.
            self._came[name] = one._replace(request=0, tree=None, leaves=[])
        return [(one.member, replace(self._answer, id=one.request)) for _, one in due]

    def _operation(self) -> str:
        # All came for the same one; with a mismatch there is an answer already.
        return next((c.purpose.operation for c in self._came.values()), "a collective")

    def _differs(self, purpose: Purpose) -> bool:
        others = [one.purpose for one in self._came.values()]
        if not self._numbered:
            # Each worker counts the collectives that it has seen: in an elastic group
            # those that joined later have seen fewer.
            others = [one._replace(number=purpose.number) for one in others]
        return any(one != purpose for one in others)

    def _mismatch(self) -> None:
        came = [f"{name!r} is in {one.purpose}" for name, one in self._came.items()]
        self._fail(
            f"The workers do not do the same collective: {', '.join(came)}. Every "
            "worker must call the same ones in the same order, with the same tags.",
            mismatch=True,
        )

    def _fail(self, text: str, mismatch: bool = False) -> None:
        meta = {"failed": text, "mismatch": mismatch}
        self._answer = Frame(ERROR, 0, meta, None, [])

    def _decide(self) -> None:
        if self._answer is None and not self.missing():
            self._answer = self._complete()

    def _complete(self) -> Frame:
        names = [name for name in self._names if name in self._came]
        parts = [self._came[name] for name in names]
        sizes = [len(part.leaves) for part in parts]
        meta = {"names": names, "sizes": sizes}
        trees = [part.tree for part in parts]
        leaves = [leaf for part in parts for leaf in part.leaves]
        return Frame(REPLY, 0, meta, trees, leaves)


class _CollectiveRequest(msgspec.Struct):
    """What a worker says of the collective that it comes to."""

    names: list[str] | None
    operation: str
    tag: str
    number: int
    timeout: float
    refused: str | None


def contribution_of(member: Member, frame: Frame) -> tuple[RoundKey, Contribution]:
    """Parse a request into the key of its round and its worker's contribution.

    Raises:
      ProtocolError, ValueError: A peer sent something else.
    """
    asked: _CollectiveRequest = unpacked(
        frame.meta, _CollectiveRequest, "A collective has names and a purpose"
    )
    if asked.names is not None and member.info.name not in asked.names:
        raise ValueError(f"{member.info.name!r} meets others without itself")
    names = None if asked.names is None else tuple(asked.names)
    return RoundKey(names, asked.operation == SHUTDOWN), Contribution(
        member,
        frame.id,
        Purpose(asked.operation, asked.tag, asked.number),
        frame.tree,
        frame.leaves,
        asked.timeout,
        end_of_wait(asked.timeout),
        asked.refused,
    )


def end_of_wait(timeout: object) -> float | None:
    """Return the moment at which a wait that begins now ends; never if `timeout` is 0.

    Raises:
      ValueError: A peer sent what is no timeout.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"a timeout of {timeout!r}")
    return moment(timeout)

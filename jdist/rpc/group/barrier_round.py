"""The coordinator's state of one round of a collective."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from jdist.rpc.base.current import moment
from jdist.rpc.codec.codes import unpacked
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


class CollectiveRequest(msgspec.Struct, frozen=True):
    """A worker's request to take part in a collective.

    Attributes:
      names: Sorted names of the workers that take part; None for all of an elastic
        group.
      operation: The public function, such as "all_gather".
      tag: The caller's own tag, or "".
      timeout: The worker's timeout in seconds.
      refused: Why it has no value to give, or None.
    """

    names: tuple[str, ...] | None
    operation: str
    tag: str
    timeout: float
    refused: str | None

    def __str__(self) -> str:
        return f"{self.operation}(tag={self.tag!r})" if self.tag else self.operation

    @property
    def key(self) -> RoundKey:
        """The key of its round."""
        return RoundKey(self.names, self.operation == SHUTDOWN)


class Contribution(NamedTuple):
    """One worker's part in a collective.

    Attributes:
      member: The worker; not its name, which a successor may bear.
      asked: The collective that the worker called.
      until: Time at which its timeout ends; None for no limit.
      frame: The request, with the worker's value; None once it is answered.
    """

    member: Member
    asked: CollectiveRequest
    until: float | None
    frame: Frame | None


class BarrierRound:
    """Collects one contribution per worker and decides the common answer.

    Args:
      key: What the requests agree in.
      names: Names of the workers that take part.
      number: Counts the rounds of this key, from 1.

    Attributes:
      key: The argument of the same name.
      lost: Whether it failed because a worker was lost.
    """

    def __init__(self, key: RoundKey, names: tuple[str, ...], number: int) -> None:
        self.key = key
        self.lost = False
        self._names = names
        self._number = number
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

    def named(self, asked: CollectiveRequest) -> str:
        """A collective in words, with its number among those of these workers."""
        return str(asked) if self.key.ends else f"{asked} number {self._number}"

    def expects(self, name: str) -> bool:
        """Whether this worker takes part and has not come yet."""
        return name in self.missing()

    def add(self, name: str, contribution: Contribution) -> None:
        """Record a worker's contribution."""
        self._came[name] = contribution
        asked = contribution.asked
        if self._answer is None and asked.refused is not None:
            self._fail(
                f"{self.named(asked)} failed on all workers, because {name!r} had no "
                f"value to send: {asked.refused}"
            )
        elif self._answer is None and self._differs(asked):
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
            meta = {"lost": name, "reason": reason}
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
                    f"{one.asked.operation} timed out in _all_gather after "
                    f"{one.asked.timeout:.2f} seconds on {name!r}. "
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
        answers = []
        for name, one in self._came.items():
            if one.frame is not None:
                answers.append((one.member, replace(self._answer, id=one.frame.id)))
                # The values are released: the round may be kept for late workers.
                self._came[name] = one._replace(frame=None)
        return answers

    def _differs(self, asked: CollectiveRequest) -> bool:
        return any(
            (one.asked.operation, one.asked.tag) != (asked.operation, asked.tag)
            for one in self._came.values()
        )

    def _mismatch(self) -> None:
        came = [
            f"{name!r} is in {self.named(one.asked)}"
            for name, one in self._came.items()
        ]
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
        frames = [frame for name in names if (frame := self._came[name].frame)]
        sizes = [len(frame.leaves) for frame in frames]
        meta = {"names": names, "sizes": sizes}
        trees = [frame.tree for frame in frames]
        leaves = [leaf for frame in frames for leaf in frame.leaves]
        return Frame(REPLY, 0, meta, trees, leaves)


def contribution_of(member: Member, frame: Frame) -> Contribution:
    """Parse a request to take part in a collective.

    Raises:
      ProtocolError, ValueError: A peer sent something else.
    """
    asked: CollectiveRequest = unpacked(
        frame.meta, CollectiveRequest, "A collective has names and a purpose"
    )
    if asked.names is not None and member.info.name not in asked.names:
        raise ValueError(f"{member.info.name!r} meets others without itself")
    return Contribution(member, asked, end_of_wait(asked.timeout), frame)


def end_of_wait(timeout: object) -> float | None:
    """Return the moment at which a wait that begins now ends; never if `timeout` is 0.

    Raises:
      ValueError: A peer sent what is no timeout.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"a timeout of {timeout!r}")
    return moment(timeout)

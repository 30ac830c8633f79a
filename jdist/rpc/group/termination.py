"""Termination detection: no call runs on any worker, and no call will begin.

A call may make calls on other workers after its caller has forgotten it, so no worker
can tell alone that all is done. Each counts the calls that have ever begun there, its
own and those it serves, and reports the count at a moment when none is under way. Two
rounds of reports in a row with equal counts prove termination; it is the principle of
Mattern's four-counter method. Let t be a moment after all reports of the first round
and before any of the second (one exists, because the second begins when the first is
complete). No worker began a call between its two reports, and none was under way there
at the first, so at t none was under way anywhere. A message in flight is entered by its
caller, so there was none either. From such a state only a program's own thread could
begin a call, and all that could wait here.

`wait_for_all` is what a graceful shutdown does on each worker.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.rpc.base.current import Deadline, Meta
from jdist.rpc.base.errors import RpcError, WorkerLost
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent
from jdist.rpc.calls.outstanding_calls import CallUnderWay
from jdist.rpc.group.barrier_round import SHUTDOWN

_KIND = "calls without a deadline"
_LOOK_SECONDS = 10.0
_ANSWER_SECONDS = 5.0

# A request is entered by its callee once it has arrived as a whole: the largest that
# frames allow takes less than this over a network that is made for it.
_ONE_SIDED_SECONDS = 240.0


def wait_for_all(agent: Agent, names: Sequence[str], deadline: Deadline) -> None:
    """Waits until all workers of `names` have called this and no call runs on them.

    Raises:
      RpcTimeout: It took longer; the message says what is under way, or which workers
        have not come.
      WorkerLost: One of them was lost meanwhile.
    """
    group = agent.group

    def check() -> None:
        for name, reason in group.lost().items():
            if name in names:
                raise WorkerLost(name, "shutdown", reason)

    before = None
    while True:
        begun = wait_until_idle(agent, deadline, check)
        # At least a millisecond: a timeout of 0 would mean no limit.
        timeout = 0.0 if deadline.at is None else max(1e-3, deadline.remaining() or 0.0)
        counts = group.all_gather(begun, names, timeout, SHUTDOWN)
        # The second round of equal counts proves termination.
        if counts == before:
            return
        before = counts


def wait_until_idle(agent: Agent, deadline: Deadline, check: Callable[[], None]) -> int:
    """Waits until no call is under way on this worker; later ones may begin.

    A call without a deadline is waited for as long as both its workers know of it. If
    only one does, its answer or its end was lost, and it counts as overdue.

    Args:
      agent: The worker.
      deadline: Deadline of the wait.
      check: As for `OutstandingCalls.when_empty`.

    Returns:
      How many calls have ever begun here.

    Raises:
      RpcTimeout: Some still are under way at the deadline, or long overdue.
    """
    one_sided, begun = _OneSidedCalls(agent), time.monotonic()
    while True:
        until = time.monotonic() + _LOOK_SECONDS
        count = agent.outstanding.when_empty(
            deadline, check, one_sided.end_of, begun, until
        )
        if count is not None:
            return count
        one_sided.look(deadline)


def install(agent: Agent) -> None:
    """Registers the handler that answers other workers' `_OneSidedCalls`."""

    def answer(caller: WorkerInfo, body: Any, meta: Meta) -> list[int]:
        return [
            sum(entry.peer == caller.name for entry in entries)
            for entries in _endless(agent)
        ]

    agent.register(_KIND, answer)


def _endless(agent: Agent) -> tuple[list[CallUnderWay], list[CallUnderWay]]:
    """The calls without a deadline that this worker awaits, and that it serves."""
    sent, served = agent.outstanding.sent(), agent.outstanding.served()
    return (
        [one for one in sent if one.deadline.at is None and not one.has_answer],
        [one for one in served if one.deadline.at is None],
    )


class _OneSidedCalls:
    """Finds calls without a deadline of which only one of their two workers knows.

    Args:
      agent: The worker that asks the others.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._ends: dict[CallUnderWay, float] = {}

    def end_of(self, entry: CallUnderWay) -> float | None:
        """The moment after which a call is no longer waited for; None for no limit."""
        at = entry.deadline.at
        return self._ends.get(entry) if at is None else at

    def look(self, deadline: Deadline) -> None:
        """Asks the other workers which of these calls they know."""
        sent, served = _endless(self._agent)
        before, self._ends = self._ends, {}
        for name in {entry.peer for entry in (*sent, *served)}:
            left = deadline.remaining()
            patience = _ANSWER_SECONDS if left is None else min(_ANSWER_SECONDS, left)
            try:
                # 0 would mean no limit.
                awaits, serves = self._agent.call(name, _KIND, None, patience or 1e-3)
            except RpcError:
                continue  # it may be busy, frozen or gone: ask again
            alone = [one for one in sent if one.peer == name and not serves]
            alone += [one for one in served if one.peer == name and not awaits]
            for entry in alone:
                # The time runs from the first such answer; an entry that the other side
                # knows again is not carried over.
                first = time.monotonic() + _ONE_SIDED_SECONDS
                self._ends[entry] = before.get(entry, first)

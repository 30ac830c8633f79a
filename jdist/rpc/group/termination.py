"""Waiting until nothing is under way anywhere: a graceful end.

A call may beget calls, on other workers, after its caller has forgotten it. So nobody
can tell alone that all is done. Every worker waits until its own ledger is empty and
tells how many calls have ever begun there; all see all numbers. That is a wave.

When two waves in a row give the same numbers, all is done: let t be a moment after
everybody's answer to the first wave and before anybody's to the second (one exists,
because the second begins when the first is complete). No worker began a call between
its two answers, and its ledger was empty at the first, so at t all ledgers were empty.
A message in flight is on its caller's ledger, so there was none either. From such a
state only somebody who is not in a call could begin one, and all who could wait here.
"""

from collections.abc import Sequence

from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.errors import WorkerLost
from jdist.rpc.calls.agent import Agent
from jdist.rpc.group.barrier_round import SHUTDOWN
from jdist.rpc.group.membership import Group


def wait_for_all(
    agent: Agent, group: Group, names: Sequence[str], deadline: Deadline
) -> None:
    """Returns once `names`, this worker among them, all wait here and nothing runs.

    Raises:
      RpcTimeout: It took longer; the message says what is under way, or who has not
        come.
      WorkerLost: One of them got lost meanwhile.
    """

    def check() -> None:
        for name, reason in group.lost().items():
            if name in names:
                raise WorkerLost(name, "shutdown", reason)

    # Whoever is lost will not come, so there is no use in waiting for one's own calls.
    group.on_lost(lambda name, reason: agent.outstanding.wake())
    before = None
    while True:
        begun = agent.outstanding.when_empty(deadline, check)
        timeout = 0.0 if deadline.at is None else max(1e-3, deadline.remaining() or 0.0)
        wave = group.all_gather(begun, names, timeout, SHUTDOWN)
        if wave == before:
            return
        before = wave

"""Termination detection of a pass: no worker has work, and no message is under way.

The algorithm is that of Dijkstra and Scholten. The first request that finds a worker at
rest *engages* it: the answer is held until the worker has no work and no request of its
own is unanswered. Every other request is answered as soon as there is no work. The
engagements form a tree below the root, so these waits cannot form a circle, and when
the root itself has no work and no unanswered request, the pass is quiet. A gradient
that rides on an answer needs no request: the receiver of the answer is engaged until
then.

Source: Dijkstra and Scholten, Termination detection for diffusing computations,
Information Processing Letters 11(1), 1980.
"""

from collections.abc import Mapping, Sequence

from jdist.autograd.engine.messages import Reports, StarvationReport, StarvingSend
from jdist.autograd.recording.node import RecvNode
from jdist.rpc import Future
from jdist.rpc.extension import Reply


class UnansweredRequest:
    """A request that has not been answered; used by the steps of one pass only.

    Args:
      peer: Incarnation of the worker that waits for the answer.

    Attributes:
      peer: The argument of the same name.
      reply: The answer, once it is there.
    """

    __slots__ = ("_future", "peer", "reply")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.reply: Reply | None = None
        # On demand: most requests are answered by the thread that brings them.
        self._future: Future[Reply] | None = None

    def complete(self, reply: Reply) -> None:
        """Answers the request."""
        self.reply = reply
        if self._future is not None:
            self._future.set_result(reply)

    def follow(self, future: Future[Reply]) -> None:
        """Completes `future` with the answer, now or when it is there."""
        self._future = future
        if self.reply is not None:
            future.set_result(self.reply)


class TerminationDetector:
    """The requests of one pass that one worker has to answer, and has unanswered.

    Args:
      worker: The worker's name.
      root: Whether the pass began here; a root is engaged from the beginning.

    Attributes:
      outstanding: Number of its own requests that are unanswered.
      engager: The request that engaged it; None at rest and at the root.
      others: The other requests, to be answered as soon as there is no work.
    """

    def __init__(self, worker: str, root: bool) -> None:
        self.outstanding = 0
        self.engager: UnansweredRequest | None = None
        self.others: list[UnansweredRequest] = []
        self._worker = worker
        self._root = root
        self._reports: dict[str, StarvationReport] = {}
        self._news: set[str] = set()
        self._number = 0

    def asked(self, request: UnansweredRequest) -> None:
        """Records a request, which engages a worker at rest."""
        # A second engagement would make two parents, and the tree a graph with circles.
        if self._root or self.engager is not None:
            self.others.append(request)
        else:
            self.engager = request

    def holds(self, peer: int) -> bool:
        """Whether a worker waits for an answer, on which gradients can ride."""
        engager = self.engager
        if engager is not None and engager.peer == peer:
            return True
        # Without a generator in the common case, where there are no others.
        return bool(self.others) and peer in [each.peer for each in self.others]

    def take_others(self) -> list[UnansweredRequest]:
        """Takes the requests to be answered."""
        others, self.others = self.others, []
        return others

    def disengage(self) -> UnansweredRequest | None:
        """Puts the worker at rest; takes the request that had engaged it, if any."""
        engager, self.engager = self.engager, None
        return engager

    def heard(self, reports: Reports) -> None:
        """Records other workers' reports."""
        for worker, report in reports.items():
            known = self._reports.get(worker)
            # Reports travel by several paths, so an older one may arrive later.
            if known is None or known.number < report.number:
                self._reports[worker] = report
                self._news.add(worker)

    def waits_for(self, starving: tuple[StarvingSend, ...]) -> None:
        """Records the send functions that this worker waits for before it rests."""
        known = self._reports.get(self._worker)
        # Unchanged reports are not sent again.
        if starving != (() if known is None else known.starving):
            self._number += 1
            self._reports[self._worker] = StarvationReport(self._number, starving)
            self._news.add(self._worker)

    def news(self) -> Reports:
        """Takes the reports that have changed since they were last taken."""
        if not self._news:
            return {}
        # Sorted, so that a pass sends the same bytes from run to run.
        news = {worker: self._reports[worker] for worker in sorted(self._news)}
        self._news.clear()
        return news

    def starving(self) -> Mapping[str, tuple[StarvingSend, ...]]:
        """Lists the send functions that workers wait for, by worker's name."""
        if not self._reports:
            return {}
        return {
            worker: report.starving
            for worker, report in self._reports.items()
            if report.starving
        }


def explain(
    starving: Mapping[str, Sequence[StarvingSend]],
    unreached: Sequence[RecvNode],
    smart: bool,
) -> str:
    """Format the error of a quiet pass whose send functions lack gradients.

    Args:
      starving: Send functions without a gradient, by the name of their worker.
      unreached: Receive functions here that the roots do not reach.
      smart: Whether it is SMART mode.
    """
    waits = "; ".join(
        f"{one.name} (message {one.message_id}, on {worker!r})"
        for worker, sends in starving.items()
        for one in sends
    )
    if smart:
        return (
            f"these send functions were marked, and no gradient came for them: {waits}."
        )
    unused = "".join(
        f" Message {node.message_id}, received from {node.worker!r}, takes no part in "
        "this pass."
        for node in unreached
    )
    return (
        f"FAST mode waits for a gradient at every send function of the context, and "
        f"none will come for {waits}.{unused} Use mode='smart', which waits only for "
        "what the roots depend on."
    )

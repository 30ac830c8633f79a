"""When a pass is quiet everywhere: nobody has anything to do, and nothing is under way.

The rule is that of Dijkstra and Scholten. The first request that finds a worker at rest
*engages* it: the answer is held until the worker has nothing to do and no request of
its own is unanswered. Every other request is answered as soon as there is nothing to
do. Who is engaged by whom forms a tree below the root, so these waits cannot form a
circle, and when the root itself has nothing to do and no unanswered request, the pass
is quiet. A gradient that rides on an answer needs no request: whoever receives the
answer is engaged until then.

Source: Dijkstra and Scholten, Termination detection for diffusing computations,
Information Processing Letters 11(1), 1980.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jdist.autograd.engine.messages import Reports, StarvationReport, StarvingSend
from jdist.rpc import Future
from jdist.rpc.extension import Reply


class UnansweredRequest(NamedTuple):
    """A request that has not been answered.

    Attributes:
      peer: Number of the worker that waits for the answer.
      answer: To be completed with it.
    """

    peer: int
    answer: Future[Reply]


class TerminationDetector:
    """What one worker owes to others and is owed by them in one pass.

    Args:
      worker: Its name.
      root: Whether the pass began here; a root is engaged from the beginning.

    Attributes:
      outstanding: How many of its requests are unanswered.
      engager: The request that engaged it; None at rest and at the root.
      others: The other requests, to be answered as soon as there is nothing to do.
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

    def asked(self, held: UnansweredRequest) -> None:
        """A request came."""
        if self._root or self.engager is not None:
            self.others.append(held)
        else:
            self.engager = held

    def holds(self, peer: int) -> bool:
        """Whether that worker waits for an answer, on which gradients can ride."""
        engager = self.engager
        if engager is not None and engager.peer == peer:
            return True
        return any(held.peer == peer for held in self.others)

    def take_others(self) -> list[UnansweredRequest]:
        """The requests that are to be answered now."""
        others, self.others = self.others, []
        return others

    def disengage(self) -> UnansweredRequest | None:
        """At rest: the request that is to be answered, if there is one."""
        held, self.engager = self.engager, None
        return held

    def heard(self, reports: Reports) -> None:
        """Others said what they wait for."""
        for worker, report in reports.items():
            known = self._reports.get(worker)
            if known is None or known.number < report.number:
                self._reports[worker] = report
                self._news.add(worker)

    def waits_for(self, starving: tuple[StarvingSend, ...]) -> None:
        """This worker is about to rest, and waits for these."""
        known = self._reports.get(self._worker)
        if starving != (() if known is None else known.starving):
            self._number += 1
            self._reports[self._worker] = StarvationReport(self._number, starving)
            self._news.add(self._worker)

    def news(self) -> Reports:
        """The reports that have changed since they were last asked for."""
        if not self._news:
            return {}
        news = {worker: self._reports[worker] for worker in sorted(self._news)}
        self._news.clear()
        return news

    def starving(self) -> Mapping[str, tuple[StarvingSend, ...]]:
        """All that anybody waits for, by the name of the worker."""
        return {
            worker: report.starving
            for worker, report in self._reports.items()
            if report.starving
        }

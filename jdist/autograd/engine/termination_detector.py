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

from collections.abc import Mapping
from typing import NamedTuple

from jdist.autograd.engine.messages import News, StarvingSend
from jdist.autograd.recording.node import SendNode
from jdist.rpc import Future
from jdist.rpc.extension import Reply


class UnansweredRequest(NamedTuple):
    """A request that has not been answered.

    Attributes:
      peer: Incarnation of the worker that waits for the answer.
      answer: The answer, once it is there.
    """

    peer: int
    answer: Future[Reply]


class TerminationDetector:
    """The requests of one pass that one worker has to answer, and has unanswered.

    Args:
      worker: The worker's name.
      root: Whether the pass began here; a root is engaged from the beginning.

    Attributes:
      outstanding: Number of its own requests that are unanswered.
      engager: The request that engaged it; None at rest and at the root.
      others: The other requests, to be answered as soon as there is no work.
      news: What workers wait for, as far as it was not passed on.
    """

    def __init__(self, worker: str, root: bool) -> None:
        self.outstanding = 0
        self.engager: UnansweredRequest | None = None
        self.others: list[UnansweredRequest] = []
        self._worker = worker
        self._root = root
        self.news: dict[int, StarvingSend | None] = {}
        # The messages that this worker has said to wait for.
        self._told: set[int] = set()

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

    def heard(self, news: News) -> None:
        """Records what workers wait for."""
        for message_id, starving in news.items():
            # News travel by several paths: that a gradient has come may be heard first.
            if starving is None or message_id not in self.news:
                self.news[message_id] = starving

    def waits_for(self, awaited: Mapping[int, SendNode]) -> None:
        """Records the send functions that this worker waits for before it rests."""
        for message_id in self._told - awaited.keys():
            self.news[message_id] = None
        for message_id in awaited.keys() - self._told:
            starving = StarvingSend(self._worker, awaited[message_id].name)
            self.news[message_id] = starving
        self._told = set(awaited)

    def take_news(self) -> News:
        """Takes what was heard since this was last called."""
        # Sorted, so that a pass sends the same bytes from run to run.
        news, self.news = dict(sorted(self.news.items())), {}
        return news

    def starving(self) -> dict[int, StarvingSend]:
        """Finds what workers wait for once the pass is quiet, by message id."""
        found = {id_: one for id_, one in self.news.items() if one is not None}
        # The worker's own last: they may starve because others do.
        order = sorted(found, key=lambda id_: (found[id_].worker == self._worker, id_))
        return {message_id: found[message_id] for message_id in order}


def explain(starving: Mapping[int, StarvingSend], smart: bool) -> str:
    """Format the error of a quiet pass whose send functions lack gradients.

    Args:
      starving: Send functions without a gradient, by the id of their message.
      smart: Whether it is SMART mode.
    """
    waits = "; ".join(
        f"{one.name} (message {message_id}, on {one.worker!r})"
        for message_id, one in starving.items()
    )
    if smart:
        return (
            f"these send functions were marked, and no gradient came for them: {waits}."
        )
    return (
        f"FAST mode waits for a gradient at every send function of the context, and "
        f"none will come for {waits}. Use mode='smart', which waits only for what the "
        "roots depend on."
    )

"""Which messages take part in a pass: the marking of SMART mode.

Every value knows which send functions lie below it, on any worker, because messages
carry that along. So the worker where a pass begins knows the marked part of the whole
graph before the first message. Where there are too many to carry, it asks their workers
from message to message; these answer at once from what they know.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jdist.autograd.context.ids import maker
from jdist.autograd.engine.messages import REACH, unpack_reached
from jdist.autograd.graph.node import Node, RecvNode

if TYPE_CHECKING:
    from jdist.autograd.context.container import Container


def lead_to(starts: Iterable[Node]) -> tuple[set[int], set[int]]:
    """What cotangents that arrive at these functions would reach.

    Returns:
      The ids of the send functions, and those among them, on other workers, of which it
      is not known here what they lead to.
    """
    known: set[int] = set()
    beyond: set[int] = set()
    seen: set[Node] = set()
    rest = list(starts)
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.reach is not None:
            known |= node.reach
        elif isinstance(node, RecvNode):
            known.add(node.message_id)
            beyond.add(node.message_id)
        else:
            rest += [edge.node for edge in node.inputs if edge is not None]
    return known, beyond


def mark(
    container: "Container", context_id: int, starts: Iterable[Node], timeout: float
) -> list[int]:
    """The ids of all send functions, on any worker, that these functions lead to.

    Args:
      container: That of this worker.
      context_id: Of the context.
      starts: Functions of this worker.
      timeout: Of each question, in seconds.

    Raises:
      RpcTimeout, WorkerLost: A worker that had to be asked did not answer.
      ContextNotFound: One has released the context.
    """
    known, beyond = lead_to(starts)
    asked: set[int] = set()
    while questions := beyond - asked:
        asked |= questions
        by_worker = defaultdict(list)
        for message_id in sorted(questions):
            by_worker[maker(message_id)].append(message_id)
        answers = [
            container.agent.call_async(
                container.worker(number), REACH, (context_id, ids), timeout
            )
            for number, ids in by_worker.items()
        ]
        for answer in answers:
            more, further = unpack_reached(answer.wait())
            known |= more
            beyond |= further
    return sorted(known)

"""The graph of one worker: what was computed from what, and how to pull back.

History hangs on values. A recorded value has an `Edge` to the node that made it, the
node has edges to the nodes that made its inputs, and so on down to leaves, which are
variables, and to receptions, where the graph goes on at another worker. A context has
no share in this; it only knows where the graph crosses workers.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jdist.autograd.errors import GraphFreed
from jdist.rpc import WorkerInfo
from jdist.rpc.extension import incarnation_of
from jdist.segment import Residuals, Segment
from jdist.segment.internal import passed_on

if TYPE_CHECKING:
    from jdist.autograd.graph.variable import Variable

Order = tuple[int, int]
"""The message id of the call in which a node was made, or 0; a counter within it."""

Reach = frozenset[int]
"""Send functions, by their message ids, which tell their workers too."""

REACH = 256
"""So many send functions a value knows below it; beyond, they are to be asked for."""

NOWHERE: Reach = frozenset()


class Edge(NamedTuple):
    """Output `index` of `node`: where a value came from, where its cotangent goes."""

    node: "Node"
    index: int  # type: ignore[assignment]  # nobody searches in an edge


class Node:
    """A function that was called, as its backward pass sees it.

    Args:
      name: For people.
      inputs: For each input the edge along which its cotangent goes, or None.
      outputs: How many outputs it has.
      order: Place in a total order that repeats from run to run.

    Attributes:
      reach: All send functions, on any worker, that a cotangent which arrives here
        would reach; None when they are more than `REACH`.
    """

    __slots__ = ("__weakref__", "inputs", "name", "order", "outputs", "reach")

    def __init__(
        self,
        name: str,
        inputs: tuple[Edge | None, ...],
        outputs: int,
        order: Order = (0, 0),
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.order = order
        self.reach: Reach | None = below(inputs)

    def pull(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """The cotangents of the inputs, from those of the outputs; None is absent.

        Raises:
          GraphFreed: The residuals were let go.
          Exception: What the user's code raised.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Lets the residuals go; `pull` does not work afterwards."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


class SegmentNode(Node):
    """A pure function that was run forward.

    Args:
      name: Of the function.
      inputs: An edge or None for each array that it was given.
      order: See `Node`.
      segment: The function's halves.
      residuals: What the forward half kept.
      structure: Of the outputs.
    """

    __slots__ = ("_residuals", "_segment", "_structure")

    def __init__(
        self,
        name: str,
        inputs: tuple[Edge | None, ...],
        order: Order,
        segment: Segment,
        residuals: Residuals,
        structure: Any,
    ) -> None:
        super().__init__(name, inputs, structure.num_leaves, order)
        self._segment = segment
        self._residuals: Residuals | None = residuals
        self._structure = structure

    def pull(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """See `Node`."""
        residuals = self._residuals
        if residuals is None:
            raise GraphFreed(
                "Trying to backward through the graph a second time: what "
                f"{self.name} had kept for it was let go after the first time. Say "
                "retain_graph=True in every backward pass but the last."
            )
        passed = passed_on(residuals, cotangents)
        if passed is not None:
            return passed
        d_outputs = self._structure.unflatten(cotangents)
        _, d_inputs = self._segment.backward((), residuals, d_outputs)
        return d_inputs

    def release(self) -> None:
        """See `Node`."""
        self._residuals = None


class LeafNode(Node):
    """A variable: its outputs are the leaves of the variable's tree.

    Cotangents end here: the engine adds them up in the context's gradients.
    """

    __slots__ = ("variable",)

    def __init__(self, variable: "Variable", leaves: int) -> None:
        super().__init__("variable", (), leaves)
        self.variable = variable

    def pull(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """See `Node`."""
        return ()


class SendNode(Node):
    """The recorded values in a message that this worker sent.

    Output k is the k-th value. The engine feeds it the cotangent that the receiver
    sends back; `pull` puts it where the value was, and hands it on.

    Args:
      message_id: Of the message.
      worker: The receiver.
      label: What the message was, for people.
      order: See `Node`.

    Attributes:
      message_id: Of the message.
      worker: Name of the receiver.
      number: Its number; another worker may come to bear the name.
    """

    __slots__ = ("_places", "_slots", "message_id", "number", "worker")

    def __init__(
        self, message_id: int, worker: WorkerInfo, label: str, order: Order
    ) -> None:
        super().__init__(f"send {label} to {worker.name}", (), 0, order)
        self.message_id = message_id
        self.worker, self.number = worker.name, incarnation_of(worker)
        self._slots: dict[Edge, int] = {}
        self._places: list[jax.sharding.Sharding | None] = []

    def slot(self, edge: Edge, value: jax.Array) -> int:
        """The number of a value in the message; the same value has one only."""
        known = self._slots.setdefault(edge, len(self._slots))
        if known == self.outputs:
            self.inputs = (*self.inputs, edge)
            self.outputs += 1
            # A value that is not committed may be anywhere, and so its cotangent.
            self._places.append(value.sharding if value.committed else None)
            self.reach = join(self.reach, edge.node.reach)
        return known

    def pull(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """See `Node`."""
        return [
            value
            if value is None or place is None or value.sharding == place
            else jax.device_put(value, place)
            for value, place in zip(cotangents, self._places, strict=True)
        ]


class RecvNode(Node):
    """The recorded values in a message that this worker received.

    Output k is the k-th value. The engine posts the cotangents of all of them to the
    send function of the same message id on `worker`.

    Args:
      context_id: Of the context in which the message was sent.
      message_id: Of the message.
      worker: The sender.
      outputs: How many recorded values it brings.
      reach: What lies beyond: the sender's send function, and all below it.

    Attributes:
      worker: Name of the sender.
      number: Its number; another worker may come to bear the name.
    """

    __slots__ = ("context_id", "message_id", "number", "worker")

    def __init__(
        self,
        context_id: int,
        message_id: int,
        worker: WorkerInfo,
        outputs: int,
        reach: Reach | None,
    ) -> None:
        super().__init__(f"receive from {worker.name}", (), outputs)
        self.context_id = context_id
        self.message_id = message_id
        self.worker, self.number = worker.name, incarnation_of(worker)
        self.reach = reach

    def pull(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """See `Node`."""
        return ()


def below(inputs: Iterable[Edge | None]) -> Reach | None:
    """What the nodes of these edges reach, together."""
    found: Reach | None = NOWHERE
    for edge in inputs:
        if edge is not None and edge.node.reach is not found:
            found = join(found, edge.node.reach)
    return found


def join(one: Reach | None, other: Reach | None) -> Reach | None:
    """Both together; None once they are too many, or either is."""
    if one is None or other is None:
        return None
    if other <= one:
        return one  # most nodes share their inputs' set, and take no memory for it
    if one <= other:
        return other
    both = one | other
    return both if len(both) <= REACH else None

"""Nodes and edges of one worker's part of the autograd graph.

A recorded value has an `Edge` to the node that made it, the node has edges to the nodes
that made its inputs, and so on down to leaves, which are variables, and to receive
functions, where the graph continues on another worker. Nodes are kept alive by values
that were computed from them; a context only lists the nodes that cross workers.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdist.autograd.recording.errors import GraphFreed
from jdist.rpc import WorkerInfo
from jdist.rpc.extension import incarnation_of
from jdist.segment import Residuals, Segment
from jdist.segment.internal import backward_arrays, passed_on

Numbers = jax.Array | np.ndarray
"""An array as compiled functions take it: NumPy's only if it came in a message."""

Cotangent = Numbers | None
"""A cotangent; None where no cotangent flows."""


def light(value: Numbers) -> Numbers:
    """Convert a small array to NumPy for sending; return any other unchanged."""
    # To put an array on its device costs a receiver more than a small computation, and
    # a compiled function takes NumPy arrays directly.
    if (
        isinstance(value, np.ndarray)
        or value.dtype not in LIGHT
        or value.size > _MOST_LIGHT
        or value.weak_type
        or value.committed  # within one process it stays on its device
        or value.is_deleted()  # the codec says what to do
        or type(value.sharding) is not SingleDeviceSharding
    ):
        return value
    return np.asarray(value)


LIGHT = frozenset(map(np.dtype, ("float16", jnp.bfloat16, "float32", "complex64")))
"""Dtypes that are the same under all settings of JAX."""

_MOST_LIGHT = 1024


def plus(one: Numbers, other: Numbers) -> jax.Array:
    """Add two arrays on the device of the first one."""
    place, other_place = (getattr(x, "sharding", None) for x in (one, other))
    # They may come from functions on different devices of one worker.
    if place is not None and other_place is not None and place != other_place:
        other = jax.device_put(other, place)
    return _add(one, other)


# The operator calls a compiled function through Python; this is one, in half the time.
_add = jax.jit(operator.add)


# --- the order of nodes, by which sums of cotangents are ordered ---

Order = tuple[int, int]
"""The message id of the call in which a node was made, or 0; a counter within it."""

LAST = 1 << 62
"""The counter of a reply's send function, which comes after all nodes of its call."""

Numbering = tuple[int, Iterator[int]]
"""The message id of a call, and the counter of the nodes that are made in it."""

# One counter for all that is computed where contexts are made: what was computed before
# a context comes before what is in it.
_OUTSIDE_CALLS: Numbering = (0, itertools.count())

# A context variable, because a call and its callbacks may change threads.
numbers: ContextVar[Numbering] = ContextVar(
    "jdist.autograd.node_numbers", default=_OUTSIDE_CALLS
)


def numbers_in(message_id: int) -> Numbering:
    """Return the numbering of nodes in a call; `message_id` is 0 outside of calls."""
    return (message_id, itertools.count()) if message_id else _OUTSIDE_CALLS


def next_order() -> Order:
    """Return the order of a new node."""
    message_id, counter = numbers.get()
    return message_id, next(counter)


# --- nodes ---

Id = Annotated[int, msgspec.Meta(ge=0)]
"""An id, or another number of a message that is not negative."""

Reach = dict[Id, Id]
"""A set of message ids: bit i of the mask at key k stands for the id 64 k + i.

A worker numbers its messages one by one, so that a mask has many of them. Sets are
shared, and never changed.
"""

NOWHERE: Reach = {}


class Edge(NamedTuple):
    """Output `index` of `node`: a value's origin and its cotangent's destination."""

    node: "Node"
    index: int  # type: ignore[assignment]  # hides tuple.index, which an edge never needs


class Node:
    """A recorded call of a function, for the backward pass.

    Args:
      name: Shown in messages and pictures.
      inputs: For each input the edge along which its cotangent goes, or None.
      outputs: Number of outputs.
      order: Position in a total order that repeats from run to run.

    Attributes:
      reach: All send functions, on any worker, that a cotangent which arrives here
        would reach.
    """

    # Slots: a training step makes as many nodes as it calls functions.
    __slots__ = ("__weakref__", "_name", "inputs", "order", "outputs", "reach")

    def __init__(
        self,
        name: str,
        inputs: tuple[Edge | None, ...],
        outputs: int,
        order: Order = (0, 0),
    ) -> None:
        self._name = name
        self.inputs = inputs
        self.outputs = outputs
        self.order = order
        self.reach: Reach = below(inputs) if inputs else NOWHERE

    @property
    def name(self) -> str:
        """The name as a text."""
        return self._name

    def pull(self, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """Computes the cotangents of the inputs from those of the outputs.

        Leaves and receive functions have no inputs here and are never asked.

        Raises:
          GraphFreed: The residuals were released.
          Exception: What the user's code raised.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Drops the residuals; `pull` raises `GraphFreed` afterwards."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


class SegmentNode(Node):
    """A call of a pure function, with the residuals of its forward half.

    Args:
      name: Name of the function.
      inputs: An edge or None for each array that it was given.
      order: See `Node`.
      segment: The function as a forward and a backward half.
      residuals: The residuals of the forward half.
      structure: Tree structure of the outputs.

    Attributes:
      segment: The argument of the same name.
    """

    __slots__ = ("_residuals", "_structure", "segment")

    def __init__(
        self,
        name: str,
        inputs: tuple[Edge | None, ...],
        order: Order,
        segment: Segment,
        residuals: Residuals,
        structure: jax.tree_util.PyTreeDef,
    ) -> None:
        super().__init__(name, inputs, structure.num_leaves, order)
        self.segment = segment
        self._residuals: Residuals | None = residuals
        self._structure = structure

    def pull(self, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """See `Node`."""
        residuals = self._residuals
        if residuals is None:
            raise GraphFreed(
                "Trying to backward through the graph a second time: what "
                f"{self.name} had kept for it was let go after the first time. Say "
                "retain_graph=True in every backward pass but the last."
            )
        # A function that passes its cotangents on unchanged, such as a sum to its
        # terms, needs no compiled program.
        passed = passed_on(residuals, cotangents)
        if passed is not None:
            return passed
        d_outputs = self._structure.unflatten(cotangents)
        return backward_arrays(self.segment, residuals, d_outputs)

    def release(self) -> None:
        """See `Node`."""
        self._residuals = None


class SendNode(Node):
    """The recorded values in a message that this worker sent.

    Output k is the k-th value. The engine feeds it the cotangent that the receiver
    sends back; `pull` moves it to the device of the value.

    Args:
      message_id: Id of the message.
      worker: The receiver.
      label: Describes the message as a text, for error messages.
      order: See `Node`.

    Attributes:
      message_id: Id of the message.
      worker: Name of the receiver.
      incarnation: Incarnation of the receiver, which no successor of the same name
        shares.
      light: Whether small arrays go as NumPy's; set by what sends them.
    """

    __slots__ = (
        "_label", "_places", "_slots", "incarnation", "light", "message_id", "worker",
    )  # fmt: skip

    def __init__(
        self,
        message_id: int,
        worker: WorkerInfo,
        label: object,
        order: Order,
    ) -> None:
        super().__init__("send", (), 0, order)
        # Itself among them, as the message tells them: its values lead to it first.
        self.reach = {message_id // 64: 1 << message_id % 64}
        self.message_id = message_id
        self.light = False
        self.worker, self.incarnation = worker.name, incarnation_of(worker)
        self._label = label
        self._slots: dict[Edge, int] = {}
        self._places: list[jax.sharding.Sharding | None] = []

    @property
    def name(self) -> str:
        """The name as a text, made where it is shown."""
        return f"send {self._label} to {self.worker}"

    def slot(self, edge: Edge, value: Numbers) -> int:
        """Returns the slot of a value in the message, the same for the same value."""
        # By edge, so that a value that occurs twice gets one cotangent, already summed.
        known = self._slots.setdefault(edge, len(self._slots))
        if known == self.outputs:
            self.inputs = (*self.inputs, edge)
            self.outputs += 1
            # A value that is not committed may be anywhere, and so its cotangent.
            self._places.append(
                None
                if isinstance(value, np.ndarray) or not value.committed
                else value.sharding
            )
            self.reach = join(self.reach, edge.node.reach)
        return known

    def pull(self, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """See `Node`."""
        pairs = zip(cotangents, self._places, strict=True)
        return [
            value if value is None or place is None else _moved(value, place)
            for value, place in pairs
        ]


def _moved(value: Numbers, place: jax.sharding.Sharding) -> jax.Array:
    if isinstance(value, jax.Array) and value.sharding == place:
        return value
    return jax.device_put(value, place)


class RecvNode(Node):
    """The recorded values in a message that this worker received.

    Output k is the k-th value. The engine sends the cotangents of all of them to the
    send function of the same message id on `worker`.

    Args:
      context_id: Id of the context in which the message was sent.
      message_id: Id of the message.
      worker: The sender.
      outputs: Number of recorded values in the message.
      reach: The sender's send function and all send functions below it.

    Attributes:
      worker: Name of the sender.
      incarnation: Incarnation of the sender, which no successor of the same name
        shares.
    """

    __slots__ = ("context_id", "incarnation", "message_id", "worker")

    def __init__(
        self,
        context_id: int,
        message_id: int,
        worker: WorkerInfo,
        outputs: int,
        reach: Reach,
    ) -> None:
        super().__init__("receive", (), outputs)
        self.context_id = context_id
        self.message_id = message_id
        self.worker, self.incarnation = worker.name, incarnation_of(worker)
        self.reach = reach

    @property
    def name(self) -> str:
        """The name as a text, made where it is shown."""
        return f"receive from {self.worker}"


# --- reach: the marking of SMART mode ---


def below(inputs: Iterable[Edge | None]) -> Reach:
    """Return the union of the reaches of the nodes of these edges."""
    reaches = [edge.node.reach for edge in inputs if edge is not None]
    return functools.reduce(join, reaches, NOWHERE)


def join(one: Reach, other: Reach) -> Reach:
    """Return the union of both, one of them if that is it."""
    # Identity first: most inputs share one set, and to compare it costs.
    if one is other or not other:
        return one
    if not one:
        return other
    joined = dict(one)
    for block, mask in other.items():
        joined[block] = joined.get(block, 0) | mask
    # Most nodes share their inputs' set, and take no memory for it.
    return next((known for known in (one, other) if known == joined), joined)


def ids_in(reach: Reach) -> list[int]:
    """List the ids in a set, in order.

    Example:
      >>> ids_in({2: 0b11, 0: 1 << 63})
      [63, 128, 129]
    """
    found = []
    for block, mask in sorted(reach.items()):
        while mask:
            # From bit to bit: most masks have few, and each pass asks.
            lowest = mask & -mask
            found.append(64 * block + lowest.bit_length() - 1)
            mask ^= lowest
    return found

"""The event record of backward passes.

Nothing is kept outside of `record_events`. A recording holds the events of all workers
of this process, in their order; a worker in another process is recorded there.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

COUNTED = "counted"
RECEIVED = "received"
RAN = "ran"
ACCUMULATED = "accumulated"
POSTED = "posted"
ENDED = "ended"


class Event(NamedTuple):
    """One step of one worker in a backward pass.

    Attributes:
      worker: Name of the worker.
      kind: "counted", the dependencies, once in a pass; "received", the gradient for a
        send function; "ran", a function's backward; "accumulated", a variable's
        gradient; "posted", that of a recv function; "ended", this worker's part.
      name: Name of the function.
      message_id: Message id of the send or recv function; 0 for another one.
      peer: Name of the worker on the other side of that function, or empty.
      counts: For a "counted" event, the name of each function and how many gradients it
        waits for.
    """

    worker: str
    kind: str
    name: str = ""
    message_id: int = 0
    peer: str = ""
    counts: tuple[tuple[str, int], ...] = ()


recordings: tuple[list[Event], ...] = ()
"""The recordings under way. Where there are none, no event is worth making."""


@contextlib.contextmanager
def record_events() -> Iterator[list[Event]]:
    """Records the events of this process's engines within the block.

    Yields:
      The events; the list grows while passes run.

    Example:
      >>> from jdist import autograd, rpc
      >>> import jax.numpy as jnp
      >>> with rpc.local_cluster(["worker0"]), autograd.context() as context_id:
      ...     x = autograd.variable(jnp.float32(3.0))
      ...     loss = autograd.apply(lambda x: x * x, x)
      ...     with autograd.record_events() as events:
      ...         autograd.backward(context_id, [loss])
      ...     [event.kind for event in events]
      ['counted', 'ran', 'accumulated', 'ended']
    """
    global recordings
    events: list[Event] = []
    # A new tuple: passes read it without a lock.
    recordings += (events,)
    try:
        yield events
    finally:
        recordings = tuple(other for other in recordings if other is not events)


def note(event: Event) -> None:
    """Adds an event to all recordings."""
    for events in recordings:
        events.append(event)

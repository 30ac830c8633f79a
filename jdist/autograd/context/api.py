"""Contexts, as users have them."""

import contextlib
from collections.abc import Iterator

from jdist.autograd.context import recording
from jdist.autograd.context.container import here
from jdist.autograd.context.context import Context
from jdist.autograd.context.recording import Recording
from jdist.autograd.errors import AutogradError
from jdist.rpc import Future


@contextlib.contextmanager
def context() -> Iterator[int]:
    """A context: what is called within it is recorded, also on other workers.

    At its end all workers that took part forget what they have recorded; nobody waits
    for that. `release` can be waited for.

    Yields:
      The id of the context: 64 bits, of which the top 16 are the rank of this worker.

    Raises:
      AutogradError: This thread of control is within a context already.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd.context`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     w = autograd.variable(3.0)
      ...     with autograd.context() as context_id:
      ...         y = rpc.rpc_sync("worker1", jnp.square, args=(w,))
      ...     y, autograd.is_valid_context(context_id)
      (Recorded(float32[] of receive from worker1), False)
    """
    container = here()
    outer = recording.current(container)
    if outer is not None:
        raise AutogradError(
            "Already have an autograd context id for this thread: "
            f"{outer.context.id}. Contexts cannot be nested; leave this one first."
        )
    made = container.new()
    try:
        with Recording(made):
            yield made.id
    finally:
        container.releases.leave(made.id)


def current_context() -> Context:
    """The context of this thread of control.

    Raises:
      AutogradError: It is within none.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._current_context`.
    """
    found = recording.current(here())
    if found is None:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Work within "
            "`with autograd.context() as context_id:`."
        )
    return found.context


def retrieve_context(context_id: int) -> Context:
    """What this worker has of a context.

    Raises:
      TypeError: That is no id.
      ContextNotFound: It has nothing of it, or not any more.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._retrieve_context`.
    """
    return here().retrieve(context_id)


def is_valid_context(context_id: int) -> bool:
    """Whether this worker has something of a context.

    Source: `torch.distributed.autograd._is_valid_context`.
    """
    return here().find(context_id) is not None


def release(context_id: int) -> Future[None]:
    """Ends a context now, on all workers that took part.

    Returns:
      A future, done when all of them have forgotten it, or are gone themselves.

    Raises:
      TypeError, ContextNotFound, RpcError: As `retrieve_context`.

    Source: `torch.distributed.autograd._release_context`.
    """
    return here().release(context_id)

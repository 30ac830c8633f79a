"""The public functions of contexts."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jdist._tree import PyTree
from jdist.autograd.contexts.context import Context, Recording, here, recorded_into
from jdist.autograd.recording.errors import AutogradError
from jdist.autograd.recording.variable import Variable
from jdist.rpc import Future


@contextlib.contextmanager
def context() -> Iterator[int]:
    """Records the calls made within the block, also on other workers.

    Shortly after its end all workers that took part drop their records; the end of a
    context by `release` can be waited for.

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
    # By the worker: several workers of one process may be each within a context.
    outer = recorded_into(container)
    if outer is not None:
        raise AutogradError(
            "Already have an autograd context id for this thread: "
            f"{outer.id}. Contexts cannot be nested; leave this one first."
        )
    made = container.new()
    try:
        with Recording(made):
            yield made.id
    finally:
        container.releases.leave(made.id)


def current_context() -> Context:
    """Returns the context of this thread of control.

    Raises:
      AutogradError: This thread of control is within no context.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._current_context`.
    """
    found = recorded_into(here())
    if found is None:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Work within "
            "`with autograd.context() as context_id:`."
        )
    return found


def retrieve_context(context_id: int) -> Context:
    """Returns this worker's share of a context.

    Raises:
      TypeError: `context_id` is no id.
      ContextNotFound: This worker does not have it, or not any more.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._retrieve_context`.
    """
    return here().retrieve(context_id)


def is_valid_context(context_id: int) -> bool:
    """Whether this worker has a share of a context.

    Source: `torch.distributed.autograd._is_valid_context`.
    """
    return here().find(context_id) is not None


def release(context_id: int) -> Future[None]:
    """Ends a context now, on all workers that took part.

    Returns:
      A future, done when all of them have forgotten it or are gone.

    Raises:
      TypeError, ContextNotFound, RpcError: As `retrieve_context`.

    Source: `torch.distributed.autograd._release_context`.
    """
    return here().release(context_id)


def get_gradients(context_id: int) -> Mapping[Variable, PyTree]:
    """Returns the gradients of this worker's variables, summed over backward passes.

    A gradient is a tree like its variable's value, with None for leaves that no pass
    reached. A variable that no pass reached is not in the mapping. Later passes do not
    change the mapping.

    Args:
      context_id: Of the context.

    Raises:
      ContextNotFound: There is no such context on this worker.

    Source: `torch.distributed.autograd.get_gradients`.
    """
    context = here().retrieve(context_id)
    with context.lock:
        # A copy: a later pass must not change what was handed out.
        return MappingProxyType(dict(context.gradients))

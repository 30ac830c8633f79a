"""What a worker knows of contexts; workers of other processes are asked by name."""

from jdist import rpc
from jdist.autograd import contexts


def is_valid_context(context_id):
    """Whether the current worker has a share of a context."""
    return contexts.here().find(context_id) is not None


def counts():
    """Numbers of passes and contexts of the current worker."""
    names = "num_current_backward_passes", "num_autograd_contexts"
    return {name: rpc.debug_info()[name] for name in names}

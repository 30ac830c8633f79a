"""Counts of outstanding work, read from inside a backward pass."""

from jdist import autograd, rpc
from tests.autograd.context_checks import counts
from tests.autograd.recording_cases import leaf, mul, name, nested

_seen = []


def watched(seed):
    """A variable whose hook looks at the counts of this worker."""
    found = leaf(seed)
    found.register_hook(lambda gradient: _seen.append(counts()))
    return found


@autograd.eager
def times_watched(x):
    return x * watched(7)


def seen():
    return _seen.pop()


def through_all():
    """torch: test_debug_info: a chain over all workers."""
    x = watched(1)
    with autograd.context() as context_id:
        far = rpc.rpc_sync(name(1), nested, args=(x, leaf(2), 2))
        y = rpc.rpc_sync(name(2), times_watched, args=(far,))
        before = counts()
        autograd.backward(context_id, [rpc.rpc_sync(name(3), mul, args=(y, x)).sum()])
        there = rpc.rpc_sync(name(2), seen)
        autograd.retrieve_context(context_id).release().wait(30.0)
    return before, seen(), there, counts()


def test_passes_and_contexts_are_counted(cluster):
    before, here, there, after = cluster.run(0, through_all)
    passes, contexts = "num_current_backward_passes", "num_autograd_contexts"
    assert before == {passes: 0, contexts: 1}
    assert here == there == {passes: 1, contexts: 1}
    assert after == {passes: 0, contexts: 0}

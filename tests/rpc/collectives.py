"""What workers call at the same time although it does not belong together."""

import numpy as np

from jdist import rpc

SAME = {f"worker{i}": 7 * i + 3 for i in range(4)}
"""What all of them gather by `gather`."""


def seen(call, *args, **kwargs):
    """What came of it: kind of error and its text, or the result."""
    try:
        return "result", call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)


def each(plans):
    """What the plan of this worker says, one call after another."""
    me = rpc.get_worker_info().id
    return [do(*call) for call in plans[me]]


def do(name, *args):
    """One of `CALLS`, and what came of it."""
    return seen(CALLS[name], *args)


def gather_named(tag):
    return {k: int(v[0]) for k, v in rpc.all_gather(mine(), tag=tag).items()}


def mine():
    return np.array([rpc.get_worker_info().id * 7 + 3])


def call_all(names):
    """Has these workers gather, within calls."""
    futures = [rpc.rpc_async(name, gather_named, args=("",)) for name in names]
    return rpc.wait_all(futures)


CALLS = {
    "gather": lambda: gather_named(""),
    "tagged": gather_named,
    "barrier": lambda: rpc.barrier(timeout=60),
    "tagged barrier": lambda tag: rpc.barrier(tag=tag),
    "shutdown": lambda: rpc.shutdown(timeout=60),
    "call": call_all,
    "sync": lambda to: rpc.rpc_sync(to, max, args=(3, 5)),
}


def averaged(gradient, tag=""):
    """A hook that averages over two workers."""
    found = rpc.all_gather(gradient, ("worker0", "worker1"), timeout=60, tag=tag)
    return (found["worker0"] + found["worker1"]) / 2

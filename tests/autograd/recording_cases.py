"""Functions and thread bodies for tests of recording."""

import jax.numpy as jnp
import numpy as np

from jdist import autograd, rpc
from jdist.autograd.contexts import here
from jdist.autograd.recording.node import RecvNode, SendNode
from jdist.autograd.recording.variable import LeafNode
from tests.autograd.context_checks import is_valid_context
from tests.rpc.rref.common import wait_for

PATIENCE = 60.0
WAYS = ("sync", "async", "remote")
_known = {}


def call(way, to, fn, *args, **kwargs):
    """`fn(*args)` on another worker, in one of three ways."""
    if way == "sync":
        return rpc.rpc_sync(to, fn, args=args, kwargs=kwargs)
    if way == "async":
        return rpc.rpc_async(to, fn, args=args, kwargs=kwargs).wait()
    return rpc.remote(to, fn, args=args, kwargs=kwargs).to_here()


def numbers(seed, shape=(3, 4), dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def leaf(seed, shape=(3, 4), dtype=np.float64):
    return autograd.variable(numbers(seed, shape, dtype))


def rank():
    return rpc.get_worker_info().id


def name(steps=0):
    """The worker so many ranks after this one, among four."""
    return f"worker{(rank() + steps) % 4}"


# --- looking at records ---


def current():
    """Send and receive functions of the current context, oldest message first."""
    return of(autograd.current_context())


def of(context):
    sends, recvs = context.send_functions(), context.recv_functions()
    assert all(isinstance(node, SendNode) for node in sends.values())
    assert all(isinstance(node, RecvNode) for node in recvs.values())
    assert all(message == node.message_id for message, node in sends.items())
    assert all(message == node.message_id for message, node in recvs.items())
    return [sends[k] for k in sorted(sends)], [recvs[k] for k in sorted(recvs)]


def records(context_id):
    """Here: what the sends lead to and from whom the receptions are, as plain data."""
    sends, recvs = of(autograd.retrieve_context(context_id))
    return (
        [(node.worker, [described(edge) for edge in node.inputs]) for node in sends],
        [(node.worker, node.outputs) for node in recvs],
    )


def described(edge):
    """A node as a tree of words: its kind or function, and its inputs."""
    if edge is None:
        return None
    node, index = edge
    if isinstance(node, LeafNode):
        return ("leaf", index)
    if isinstance(node, RecvNode):
        return ("receive", node.worker, index)
    return (node.name, index, [described(one) for one in node.inputs])


def counts(context_id):
    """How many send and receive functions this worker has; None without the context."""
    if not is_valid_context(context_id):
        return None
    context = autograd.retrieve_context(context_id)
    return len(context.send_functions()), len(context.recv_functions())


def has(context_id):
    return is_valid_context(context_id)


def loses(context_id):
    """Waits until this worker has nothing of the context; whether it has."""
    return wait_for(lambda: not is_valid_context(context_id))


def contexts():
    """How many contexts this worker has."""
    return len(here().contexts())


def has_none():
    return wait_for(lambda: not contexts())


# --- functions to call ---


def add(x, y):
    return x + y


def mul(x, y):
    return x * y


def nothing():
    return None


def stack(tensors):
    return jnp.stack(tensors)


def parts(x):
    """Outputs of several kinds, one of which depends on nothing recorded."""
    return {"double": x * 2, "whole": jnp.int32(7), "plain": jnp.zeros(3)}, x.sum()


def power(x, n, scale=1.0):
    return scale * x**n


def sees_arrays(x, y):
    """A function within a context gets arrays, never recorded values."""
    assert not isinstance(x, autograd.Recorded)
    return x + y


@autograd.eager
def kinds(*args):
    """The kinds of the arguments of an eager function."""
    return [type(arg).__name__ for arg in args]


@autograd.eager
def echo(x):
    return x


@autograd.eager
def nested(x, y, hops):
    """x + y, computed so many workers further."""
    if not hops:
        return autograd.apply(add, x, y)
    return rpc.rpc_sync(name(1), add if hops == 1 else nested,
                        args=(x, y) if hops == 1 else (x, y, hops - 1))  # fmt: skip


@autograd.eager
def nested_remote(x, y, hops):
    fn, args = (add, (x, y)) if hops == 1 else (nested_remote, (x, y, hops - 1))
    return rpc.remote(name(1), fn, args=args).to_here()


@autograd.eager
def back_to(to, x, y):
    return rpc.rpc_sync(to, add, args=(x, y))


@autograd.eager
def which(t2_recorded, x, y):
    """Branches on whether an argument is recorded."""
    assert isinstance(x, autograd.Recorded)
    assert isinstance(y, autograd.Recorded) == t2_recorded
    return x * y if isinstance(y, autograd.Recorded) else x * y * 3.0


@rpc.async_execution
def later(to, x, y):
    """Its result is that of another call, without a thread that waits."""
    return rpc.rpc_async(to, mul, args=(x, y)).then(lambda done: done.value() + x)


class Model:
    """Stays on its owner, with a variable of its own."""

    def __init__(self, seed):
        self.w = leaf(seed, (4, 2))

    def __call__(self, x):
        return autograd.apply(jnp.matmul, x, self.w)

    def forward(self, x):
        return autograd.apply(jnp.matmul, x, self.w)

    def variable(self):
        return rpc.RRef(self.w)


def own(seed):
    """A variable of this worker, kept here by its seed."""
    if seed not in _known:
        _known[seed] = leaf(seed)
    return _known[seed]


def get_own(seed):
    """Returns a variable of the callee's own; nothing recorded is given."""
    return own(seed)


def current_id():
    return autograd.current_context().id


def meet_others():
    """Calls all other workers with nothing recorded."""
    for steps in (1, 2, 3):
        rpc.rpc_sync(name(steps), nothing)

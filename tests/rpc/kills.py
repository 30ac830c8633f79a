"""What workers do, again and again, until one of them is killed or frozen."""

import jax.numpy as jnp
import numpy as np

from jdist import autograd, optim, rpc
from jdist.rpc.base import current
from tests.rpc import lost_workers

_kept = {}


def scale(x, y):
    return jnp.sin(x) * y


def negative(x):
    return -x


def parameter():
    return autograd.variable(jnp.array([0.5, -1.25, 2.0]))


@autograd.eager
def use(reference, x):
    return autograd.apply(scale, reference.to_here(), x)


def connect(victim):
    """Each call has a new connection, whose handshake may be what is hit."""
    for connection in list(current.worker().directory.find(victim)._idle):
        connection.channel.close("closed by a test")
    assert rpc.rpc_sync(victim, max, args=(1, 2), timeout=0) == 2


def transfer(victim):
    sent = np.arange(300_000.0)
    later = rpc.rpc_async(victim, negative, args=(sent,), timeout=0)
    assert rpc.rpc_sync(victim, negative, args=(sent,), timeout=0)[5] == -5.0
    assert later.wait(0)[7] == -7.0


def backward(victim):
    w = _kept.setdefault("w", autograd.variable(jnp.array([1.0, 2.0, 3.0])))
    with autograd.context() as context:
        y = rpc.rpc_sync(victim, scale, args=(w, jnp.array([3.0, 5.0, 7.0])))
        autograd.backward(context, [autograd.apply(jnp.sum, y)])


def step(victim):
    if "optimizer" not in _kept:
        _kept["parameter"] = rpc.remote(victim, parameter)
        made = autograd.DistributedOptimizer(optim.sgd, [_kept["parameter"]], lr=1e-3)
        _kept["optimizer"] = made
    with autograd.context() as context:
        x = autograd.variable(jnp.array([3.0, 5.0, 7.0]))
        y = rpc.rpc_sync(victim, use, args=(_kept["parameter"], x))
        autograd.backward(context, [autograd.apply(jnp.sum, y)])
        try:
            _kept["optimizer"].step(context)
        except ExceptionGroup as several:  # one for each worker where it failed
            (alone,) = several.exceptions
            raise alone from several


def barrier(victim):
    rpc.barrier()


OPERATIONS = {
    "connect": connect,
    "transfer": transfer,
    "backward": backward,
    "step": step,
    "barrier": barrier,
    "shutdown": None,
}


def prepare(name, victim):
    """Compiles what is about to be done, so that the blow does not hit that alone."""
    if name in ("connect", "transfer", "backward", "step") and me() != victim:
        OPERATIONS[name](victim)


def me():
    return rpc.get_worker_info().name


def until_lost(name, victim):
    """Does it until it fails; how it did."""
    while True:
        seen = lost_workers.see(OPERATIONS[name], victim)
        if seen.kind != "nothing":
            return seen


def forget():
    """References and variables of a worker that is gone, before all end."""
    _kept.clear()

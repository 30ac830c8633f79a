"""Reverse-mode differentiation across workers.

    from jdist import autograd, rpc

    w = autograd.variable(jnp.ones((3, 3)))
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", jnp.tanh, args=(w,))
        loss = autograd.apply(jnp.sum, y)
        autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[w]

Inside `jax.grad` and `jax.jit` it is `remote_call` that calls another worker.

Rooms, each built on those before it:

- `recording`: variables, recorded values, and the nodes that computed them.
- `contexts`: distributed computations, their ids and their end.
- `rpc_hooks`: the send and receive functions that calls and replies leave in the graph.
- `engine`: backward passes.
- `nnx_module`, `call_primitive`, `picture` and then `optimizer`: built on all that.
"""

from jdist.autograd.call_primitive.primitive import remote_call
from jdist.autograd.contexts import (
    Context,
    context,
    current_context,
    get_gradients,
    retrieve_context,
)
from jdist.autograd.engine.backward import backward
from jdist.autograd.engine.replicated import replicated, unreplicate
from jdist.autograd.install import install as _install
from jdist.autograd.nnx_module import TrainableModule
from jdist.autograd.optimizer.distributed_optimizer import DistributedOptimizer
from jdist.autograd.picture import Graph, graph
from jdist.autograd.recording.errors import (
    AutogradError,
    BackwardError,
    ContextNotFound,
    GraphFreed,
    UnusedSend,
)
from jdist.autograd.recording.pure import eager
from jdist.autograd.recording.recorded import Recorded, apply, detach
from jdist.autograd.recording.variable import Variable, variable
from jdist.rpc.extension import extend as _extend

__all__ = [
    "AutogradError",
    "BackwardError",
    "Context",
    "ContextNotFound",
    "DistributedOptimizer",
    "Graph",
    "GraphFreed",
    "Recorded",
    "TrainableModule",
    "UnusedSend",
    "Variable",
    "apply",
    "backward",
    "context",
    "current_context",
    "detach",
    "eager",
    "get_gradients",
    "graph",
    "remote_call",
    "replicated",
    "retrieve_context",
    "unreplicate",
    "variable",
]

# Every worker of this process records, those that exist and those to come.
_extend("jdist.autograd", _install)


def __dir__() -> list[str]:
    return __all__

"""Reverse-mode differentiation across workers.

    from jdist import autograd, rpc

    w = autograd.variable(jnp.ones((3, 3)))
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", jnp.tanh, args=(w,))
        loss = autograd.apply(jnp.sum, y)
        autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[w]

Inside `jax.grad` and `jax.jit` it is `remote_call` that calls another worker.
"""

from jdist.autograd import install as _install  # noqa: F401 - for all workers here
from jdist.autograd.context.api import context as context
from jdist.autograd.context.api import current_context as current_context
from jdist.autograd.context.api import get_gradients as get_gradients
from jdist.autograd.context.api import is_valid_context as is_valid_context
from jdist.autograd.context.api import release as release
from jdist.autograd.context.api import retrieve_context as retrieve_context
from jdist.autograd.context.context import Context as Context
from jdist.autograd.engine.backward import backward as backward
from jdist.autograd.engine.backward import debug_info as debug_info
from jdist.autograd.engine.events import Event as Event
from jdist.autograd.engine.events import record_events as record_events
from jdist.autograd.engine.failure import BackwardError as BackwardError
from jdist.autograd.engine.failure import UnusedSend as UnusedSend
from jdist.autograd.engine.replicated import replicated as replicated
from jdist.autograd.engine.replicated import unreplicate as unreplicate
from jdist.autograd.graph.apply import apply as apply
from jdist.autograd.graph.errors import AutogradError as AutogradError
from jdist.autograd.graph.errors import ContextNotFound as ContextNotFound
from jdist.autograd.graph.errors import GraphFreed as GraphFreed
from jdist.autograd.graph.padding import pad_to as pad_to
from jdist.autograd.graph.purity import eager as eager
from jdist.autograd.graph.recorded import Recorded as Recorded
from jdist.autograd.graph.recorded import detach as detach
from jdist.autograd.graph.variable import Variable as Variable
from jdist.autograd.graph.variable import variable as variable
from jdist.autograd.modules.nnx_module import TrainableModule as TrainableModule
from jdist.autograd.modules.nnx_module import module as module
from jdist.autograd.optimizer import DistributedOptimizer as DistributedOptimizer
from jdist.autograd.picture.graph import Graph as Graph
from jdist.autograd.picture.graph import graph as graph
from jdist.autograd.remote_call import remote_call as remote_call

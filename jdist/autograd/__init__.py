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
from jdist.autograd.api import context as context
from jdist.autograd.api import current_context as current_context
from jdist.autograd.api import is_valid_context as is_valid_context
from jdist.autograd.api import release as release
from jdist.autograd.api import retrieve_context as retrieve_context
from jdist.autograd.apply import apply as apply
from jdist.autograd.backward import backward as backward
from jdist.autograd.backward import debug_info as debug_info
from jdist.autograd.context import Context as Context
from jdist.autograd.eager import eager as eager
from jdist.autograd.engine.failure import BackwardError as BackwardError
from jdist.autograd.engine.failure import UnusedSend as UnusedSend
from jdist.autograd.errors import AutogradError as AutogradError
from jdist.autograd.errors import ContextNotFound as ContextNotFound
from jdist.autograd.errors import GraphFreed as GraphFreed
from jdist.autograd.events import Event as Event
from jdist.autograd.events import record_events as record_events
from jdist.autograd.gradients import get_gradients as get_gradients
from jdist.autograd.nnx_module import Module as Module
from jdist.autograd.nnx_module import module as module
from jdist.autograd.optimizer import DistributedOptimizer as DistributedOptimizer
from jdist.autograd.padding import pad_to as pad_to
from jdist.autograd.picture.graph import Graph as Graph
from jdist.autograd.picture.graph import graph as graph
from jdist.autograd.recorded import Recorded as Recorded
from jdist.autograd.recorded import detach as detach
from jdist.autograd.remote_call import remote_call as remote_call
from jdist.autograd.replicated import replicated as replicated
from jdist.autograd.replicated import unreplicate as unreplicate
from jdist.autograd.variable import Variable as Variable
from jdist.autograd.variable import variable as variable

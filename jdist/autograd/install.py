"""Installation of distributed autograd on a worker."""

from jdist.autograd import nnx_module, picture
from jdist.autograd.call_primitive import caller
from jdist.autograd.contexts import STATE, Container
from jdist.autograd.engine import backward, engine, replicated
from jdist.autograd.optimizer import owned_optimizer
from jdist.autograd.recording.recorded import Recorded
from jdist.autograd.recording.variable import Variable
from jdist.autograd.rpc_hooks import RpcHooks
from jdist.rpc.extension import Agent


def install(agent: Agent) -> None:
    """Gives a worker its contexts, and registers its hooks and message handlers."""
    container = Container(agent)
    agent.extension_state[STATE] = container
    hooks = RpcHooks(container)
    agent.codec.register(
        Recorded, "autograd.recorded", hooks.give, hooks.take, key=False
    )
    # A variable never leaves its worker: its value, or a recorded one, is sent.
    agent.codec.substitute(Variable, hooks.give_variable)
    agent.interceptor = hooks
    agent.extension_state.make_trainable = nnx_module.create
    agent.extension_state[caller.STATE] = caller.RemoteFunctions(agent)
    engine.install(container)
    replicated.install(container)
    backward.install(container)
    picture.install(container)
    owned_optimizer.install(agent)

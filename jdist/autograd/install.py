"""Giving every worker of this process its autograd."""

from typing import TYPE_CHECKING

from jdist.autograd import nnx_module, reference_backward
from jdist.autograd.boundary import Boundary
from jdist.autograd.container import PART, Container
from jdist.autograd.engine import engine
from jdist.autograd.optimizer import serving as optimizers
from jdist.autograd.picture import graph
from jdist.autograd.recorded import Recorded
from jdist.autograd.release import Releases
from jdist.autograd.variable import Variable
from jdist.rpc import extensions
from jdist.rpc.remote_module import TRAINABLE

if TYPE_CHECKING:
    from jdist.rpc.agent import Agent


def install(agent: "Agent") -> None:
    """Lets `agent` record: contexts, and recorded values in calls and answers."""
    container = Container(agent)
    container.releases = Releases(container)
    agent.parts[PART] = container
    boundary = Boundary(container)
    agent.codec.register(
        Recorded, "autograd.recorded", boundary.give, boundary.take, key=False
    )
    agent.codec.substitute(Variable, boundary.give_variable)
    agent.set_interceptor(boundary)
    agent.parts[TRAINABLE] = nnx_module.create
    engine.install(container)
    reference_backward.install(container)
    graph.install(container)
    optimizers.install(agent)


extensions.extend(PART, install)

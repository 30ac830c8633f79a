"""The interface for packages built upon rpc, beside the names of `jdist.rpc`.

Distributed autograd, pipelines over workers and launchers import from here and from
`jdist.rpc`, and from no other module of it. `extend` registers an installer that every
worker runs; the installer registers handlers, an interceptor and hooks of the codec on
the `Agent`, and keeps what it needs in its `extension_state`.

Two of the names are modules: `current` has deadlines, timeouts and the scope of the
running thread, `futures` what packages do with futures and users do not.
"""

from jdist.rpc.base import current
from jdist.rpc.base import future as futures
from jdist.rpc.base.ids import IdCounter
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.base.posix import require_posix
from jdist.rpc.base.worker_info import incarnation_of
from jdist.rpc.calls.agent import Agent, Invocation, current_agent, extend
from jdist.rpc.calls.callee import NEEDS, Reply
from jdist.rpc.calls.function_calls import is_asynchronous, named
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.codes import unpacked
from jdist.rpc.codec.nnx import StandIn
from jdist.rpc.group.rendezvous import Rendezvous, ReservedPort
from jdist.rpc.group.roll_call import AbsentRanks, RunPlace, roll_call
from jdist.rpc.modules.parameters import make_module
from jdist.rpc.processes.process_settings import settings_of_each
from jdist.rpc.processes.spawn import main_module
from jdist.rpc.processes.supervisor import ProcessCommand, Supervisor
from jdist.rpc.rref.reliable_delivery import ReliableDelivery

__all__ = [  # noqa: RUF022 - by subject
    # A worker, and the one as which the calling code acts.
    "Agent",
    "current_agent",
    "current",
    "incarnation_of",
    "IdCounter",
    # The state that a package keeps for each worker, and its installer.
    "extend",
    "NEEDS",
    # Around calls: the interceptor, values on their way, functions and their arguments.
    "Invocation",
    "MessageContext",
    "named",
    "is_asynchronous",
    "StandIn",
    "make_module",
    # Requests of a package's own.
    "Reply",
    "unpacked",
    "ReliableDelivery",
    # Futures and locks.
    "futures",
    "InterruptSafeLock",
    # A meeting of processes that are no workers.
    "AbsentRanks",
    "RunPlace",
    "roll_call",
    # Processes, for launchers.
    "Rendezvous",
    "ReservedPort",
    "main_module",
    "settings_of_each",
    "ProcessCommand",
    "Supervisor",
    "require_posix",
]

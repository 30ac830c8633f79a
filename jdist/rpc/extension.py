"""The interface for packages built upon rpc, beside the names of `jdist.rpc`.

Distributed autograd, pipelines over workers and launchers import from here and from
`jdist.rpc`, and from no other module of it. `extend` registers an installer that every
worker runs; the installer registers handlers, an interceptor and hooks of the codec on
the `Agent`, and keeps what it needs in its `extension_state`.
"""

from jdist.rpc.base import current
from jdist.rpc.base.current import (
    DEFAULT,
    NEVER,
    Deadline,
    Operation,
    Scope,
    check_timeout,
    exceeded,
    resolve,
)
from jdist.rpc.base.future import await_done, call_when_done, cancel, complete, error_of
from jdist.rpc.base.ids import LOCAL_BITS
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock, releasing_all
from jdist.rpc.base.posix import require_posix
from jdist.rpc.base.worker_info import incarnation_of
from jdist.rpc.calls.agent import Agent, Invocation, current_agent, extend
from jdist.rpc.calls.callee import NEEDS, Reply
from jdist.rpc.calls.function_calls import is_asynchronous, named
from jdist.rpc.calls.outstanding_calls import Outgoing
from jdist.rpc.calls.peers import Peer
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.nnx import StandIn
from jdist.rpc.codec.remote_exception import describe, rebuild
from jdist.rpc.group.rendezvous import (
    KEY_VARIABLE,
    LAST_PORT,
    LOOPBACK,
    Rendezvous,
    ReservedPort,
    fresh_key,
)
from jdist.rpc.group.roll_call import AbsentRanks, RunPlace, roll_call
from jdist.rpc.modules import parameters
from jdist.rpc.modules.remote_module import TRAINABLE
from jdist.rpc.processes.process_settings import OFF, resolved, share_out
from jdist.rpc.processes.spawn import main_module
from jdist.rpc.processes.supervisor import (
    GRACE,
    Child,
    ProcessCommand,
    Supervisor,
    interpreter,
)
from jdist.rpc.rref.reference import BACKWARD
from jdist.rpc.rref.reliable_delivery import ReliableDelivery
from jdist.rpc.wire.frame import CALL

__all__ = [  # noqa: RUF022 - by subject
    # A worker, and the one as which the calling code acts.
    "Agent",
    "current_agent",
    "current",
    "Scope",
    "Peer",
    "incarnation_of",
    "LOCAL_BITS",
    # The state that a package keeps for each worker, and its installer.
    "extend",
    "NEEDS",
    "TRAINABLE",
    "BACKWARD",
    # Around calls: the interceptor, values on their way, functions and their arguments.
    "Invocation",
    "Operation",
    "MessageContext",
    "named",
    "is_asynchronous",
    "StandIn",
    "describe",
    "rebuild",
    "parameters",
    # Requests of a package's own.
    "Reply",
    "Outgoing",
    "ReliableDelivery",
    "CALL",
    # Time, futures and locks.
    "DEFAULT",
    "NEVER",
    "Deadline",
    "check_timeout",
    "exceeded",
    "resolve",
    "await_done",
    "call_when_done",
    "cancel",
    "complete",
    "error_of",
    "InterruptSafeLock",
    "releasing_all",
    # A meeting of processes that are no workers.
    "AbsentRanks",
    "RunPlace",
    "roll_call",
    # Processes, for launchers.
    "KEY_VARIABLE",
    "LAST_PORT",
    "LOOPBACK",
    "Rendezvous",
    "ReservedPort",
    "fresh_key",
    "main_module",
    "OFF",
    "resolved",
    "share_out",
    "Child",
    "GRACE",
    "ProcessCommand",
    "Supervisor",
    "interpreter",
    "require_posix",
]

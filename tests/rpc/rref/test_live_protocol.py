"""Any program of four live workers whose messages overtake each other, or get lost.

The protocol by itself is tested in `test_rref_protocol.py`. Here its messages travel
through the workers' threads and transports, and the values are real: a weak reference
tells whether one is there. What is delayed or lost is drawn with the program.
"""

import gc
import importlib
import weakref

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.group.coordinator import NAME
from jdist.rpc.rref.messages import KINDS
from jdist.rpc.wire.in_process import InProcessTransport
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.faults import FaultyTransport, Plan, Rule
from tests.rpc.hosts import names
from tests.rpc.rref.common import NOTHING, references, wait_for, wait_for_references

SIZE = 4
KEY = rpc.new_cluster_key().encode()
LATE = (*KINDS.values(), "rref.create", "rref.fetch", "call", "reply")
workers = st.integers(0, SIZE - 1)
choices = st.integers(0, 1 << 16)
_held = {}
_values = {}


def at_rest():
    """Whether this worker waits for nobody's answer about references."""
    told = references()
    waits = told["forks_under_way"] + told["pending_users"]
    return not waits and current.worker().references.delivery.idle()


class Value:
    """Stays where it was made; its own worker's list of values refers to it weakly."""

    def __init__(self, key):
        self.key = key
        _values[key] = weakref.ref(self)

    def tell(self):
        return self.key


def hold(handle, rref):
    """A call brings a reference, which is kept as this handle from now on."""
    _held[handle] = [rref]


def sockets(name, hub, device=None):
    return SocketTransport(name, KEY)


def faulty(inner, seed):
    """A factory of transports: a third of all frames is late, some messages are lost.

    Calls are only late: what is lost of them is the business of other tests.
    """
    rules = [Rule("drop", kind, probability=0.1) for kind in KINDS.values()]
    for until in (0.001, 0.004, 0.016):
        rules += [Rule("delay", kind, probability=0.15, until=until) for kind in LATE]
    plan = Plan(*rules, seed=seed)

    def make(name, hub, device=None):
        if name == NAME:
            return InProcessTransport(name, hub, device)
        return FaultyTransport(inner(name, hub, device), plan)

    return make


class Program(RuleBasedStateMachine):
    """Workers that create, share, fetch and drop.

    `handles` are the references that programs hold: the key of the value and the rank
    of the holder, by number. `calls` are those that bring one, with its future handle.
    """

    inner = staticmethod(InProcessTransport)

    @initialize(seed=st.integers(0, 1 << 32))
    def start(self, seed):
        # The package's attribute of this name is the function.
        module = importlib.import_module("jdist.rpc.processes.local_cluster")
        options = rpc.RpcOptions(leaks="error")
        self.names = names(SIZE)
        self.cluster = rpc.local_cluster(self.names, options=options, allow=["tests"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "InProcessTransport", faulty(self.inner, seed))
            self.cluster.__enter__()
        for name in self.names:
            with rpc.use_worker(name):
                current.worker().references.delivery.patience = 0.01
        self.handles, self.calls, self.count = {}, {}, 0

    def number(self):
        self.count += 1
        return self.count

    def one_of(self, choice):
        # What there is depends on threads, and what is drawn must not.
        chosen = sorted(self.handles)
        return chosen[choice % len(chosen)] if chosen else None

    @rule(worker=workers, owner=workers)
    def create(self, worker, owner):
        key = self.number()
        with rpc.use_worker(self.names[worker]):
            _held[key] = [rpc.remote(self.names[owner], Value, args=(key,))]
        self.handles[key] = (key, worker)

    @rule(worker=workers)
    def make(self, worker):
        key = self.number()
        with rpc.use_worker(self.names[worker]):
            _held[key] = [rpc.RRef(Value(key))]
        self.handles[key] = (key, worker)

    @rule(choice=choices, to=workers)
    def share(self, choice, to):
        handle = self.one_of(choice)
        if handle is None:
            return
        key, worker = self.handles[handle]
        new = self.number()
        with rpc.use_worker(self.names[worker]):
            done = rpc.rpc_async(self.names[to], hold, args=(new, _held[handle][0]))
        self.calls[new] = (key, to, done)

    @rule(choice=choices)
    def fetch(self, choice):
        handle = self.one_of(choice)
        if handle is not None:
            key, worker = self.handles[handle]
            with rpc.use_worker(self.names[worker]):
                assert _held[handle][0].rpc_sync().tell() == key

    @rule(choice=choices, cycle=st.booleans())
    def drop(self, choice, cycle):
        handle = self.one_of(choice)
        if handle is not None:
            del self.handles[handle]
            dropped = _held.pop(handle)
            if cycle:  # Then it is there until somebody collects garbage.
                dropped.append(dropped)

    @rule()
    def collect(self):
        gc.collect()

    @rule()
    def arrive(self):
        """All calls that are under way end."""
        for _, _, done in self.calls.values():
            done.wait()

    @rule()
    def rest(self):
        """Everything that was said has arrived, and has had its effect."""
        self.arrive()
        gc.collect()
        for name in self.names:
            with rpc.use_worker(name):
                assert wait_for(at_rest)

    @invariant()
    def what_is_held_is_there(self):
        for new, (key, to, done) in list(self.calls.items()):
            if done.done():
                done.wait()
                del self.calls[new]
                self.handles[new] = (key, to)
        held = [key for key, _ in self.handles.values()]
        held += [key for key, _, _ in self.calls.values()]
        for key in held:
            if key in _values:  # Otherwise it is still to be made.
                assert _values[key]() is not None, f"value {key} is gone"

    def teardown(self):
        try:
            self.arrive()
            self.what_is_held_is_there()
            for handle in sorted(self.handles)[::2]:
                del self.handles[handle], _held[handle]
            self.rest()
            for choice in range(len(self.handles)):
                self.fetch(choice)
            self.what_is_held_is_there()
            _held.clear()
            gc.collect()
            for name in self.names:
                with rpc.use_worker(name):
                    wait_for_references(user_rrefs=0, forks_under_way=0)
            for name in self.names:
                with rpc.use_worker(name):
                    wait_for_references(**NOTHING)
            gc.collect()
            # A thread of the pool drops them once they are counted no more.
            assert wait_for(lambda: all(value() is None for value in _values.values()))
        finally:
            _held.clear()
            _values.clear()
            self.cluster.__exit__(None, None, None)


class ProgramOverSockets(Program):
    """The same over sockets."""

    inner = staticmethod(sockets)


@pytest.mark.parametrize(
    "program", [Program, ProgramOverSockets], ids=["in-process", "sockets"]
)
def test_values_live_as_long_as_they_are_held(program):
    """No value goes while somebody holds it, all go in the end, nothing is counted."""
    run_state_machine_as_test(
        program,
        settings=settings(
            max_examples=8,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],  # threads do not repeat, so nothing is shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )

"""The reference protocol by itself: any program, any order of messages, any loss."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.ids import IdCounter
from jdist.rpc.rref.messages import Accept, Delete, Take
from jdist.rpc.rref.protocol import Protocol, Send
from tests.rpc.simulated_workers import Call, Creation, OwnerValue, SimulatedWorkers

SIZE = 4
workers = st.integers(0, SIZE - 1)


class Program(RuleBasedStateMachine):
    """Four workers that create, share and drop; messages overtake each other."""

    def __init__(self):
        super().__init__()
        self.workers = SimulatedWorkers(SIZE)

    def one_of(self, data, items):
        return data.draw(st.sampled_from(items)) if items else None

    @rule(worker=workers)
    def make(self, worker):
        if worker in self.workers.alive:
            self.workers.make(worker)

    @rule(worker=workers, owner=workers)
    def remote(self, worker, owner):
        if worker in self.workers.alive and worker != owner:
            self.workers.remote(worker, owner)

    @rule(data=st.data(), to=workers)
    def share(self, data, to):
        handle = self.one_of(data, self.workers.handles)
        if handle is not None:
            self.workers.share(handle, to)

    @rule(data=st.data())
    def drop(self, data):
        handle = self.one_of(data, self.workers.handles)
        if handle is not None:
            self.workers.drop(handle)

    @rule(data=st.data())
    def deliver(self, data):
        item = self.one_of(data, self.workers.bag)
        if item is not None:
            self.workers.deliver(item)

    @rule(data=st.data(), arrives_late=st.booleans())
    def fail(self, data, arrives_late):
        carriers = [i for i in self.workers.bag if isinstance(i, Call | Creation)]
        item = self.one_of(data, carriers)
        if item is not None:
            self.workers.fail(item, arrives_late)

    @invariant()
    def nothing_is_freed_too_early(self):
        self.workers.check()

    def teardown(self):
        self.workers.finish()


class ProgramWithLosses(Program):
    """So do these, and die meanwhile."""

    @rule(worker=workers)
    def lose(self, worker):
        if worker in self.workers.alive and len(self.workers.alive) > 2:
            self.workers.lose(worker)

    @rule(worker=workers, data=st.data())
    def tell(self, worker, data):
        lost = self.one_of(data, sorted(self.workers.lost))
        if lost is not None:
            self.workers.tell(worker, lost)


@pytest.mark.parametrize("program", [Program, ProgramWithLosses])
def test_no_value_is_freed_too_early_and_all_in_the_end(program):
    """Whatever four workers do and however their messages travel."""
    run_state_machine_as_test(
        program,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def two_workers():
    return [Protocol(me, IdCounter(me), OwnerValue) for me in range(2)]


def test_a_lost_message_of_a_worker_that_is_gone_changes_nothing():
    """All that it had given was forgotten when it went, and must not begin anew."""
    receiver, giver = two_workers()
    rref = giver.name()
    ref = giver.give_owned(rref, OwnerValue(), 0)
    receiver.gone(1, "it was killed")
    assert receiver.on_take(1, Take(ref)) == []
    assert receiver.decline(1, ref) == []
    assert (receiver.user_forks, dict(receiver._taken)) == ({}, {})


@pytest.mark.parametrize("marked", [True, False])
def test_a_reference_whose_taking_was_interrupted_is_given_up(marked):
    """Before or after it counts as taken; the owner is told in both cases."""
    receiver, owner = two_workers()
    rref = owner.name()
    ref = owner.give_owned(rref, OwnerValue(), 0)

    class Interrupted(DedupWindow):
        def take(self, number, low_water_mark):
            if marked:
                super().take(number, low_water_mark)
            raise KeyboardInterrupt("pressed")

    receiver._taken[1] = Interrupted()
    with pytest.raises(KeyboardInterrupt, match="pressed"):
        receiver.take(1, ref)
    window = DedupWindow()
    if marked:
        window.take(ref.fork.local_id, ref.low_water_mark)
    receiver._taken[1] = window
    sent = [e for e in receiver.decline(1, ref) if isinstance(e, Send)]
    assert Send(1, Delete(ref.rref, ref.fork)) in sent
    assert Send(1, Accept(ref.fork)) in sent
    assert receiver.user_forks == {}
    assert receiver.decline(1, ref) == []


def test_an_interrupt_between_counting_and_accepting_leaves_nothing_under_way():
    """What was to be sent is lost; the giver would wait for it when it shuts down."""
    receiver, owner = two_workers()
    ref = owner.give_owned(owner.name(), OwnerValue(), 0)
    receiver.take(1, ref)
    for sent in receiver.decline(1, ref):
        match sent:
            case Send(1, Accept() as message):
                owner.on_accept(0, message)
            case Send(1, Delete() as message):
                owner.on_delete(0, message)
    assert owner.forks_in_transit == 0
    assert owner.owned.forks == 0


def test_a_reference_that_came_home_is_accepted_again():
    """Its giver keeps its own share until it learns that; twice does no harm."""
    owner, user = two_workers()
    ref = owner.give_owned(owner.name(), OwnerValue(), 1)
    taken, _ = user.take(0, ref)
    home = user.give(taken, 0)
    entry, effects = owner.take(1, home)
    assert entry is not None
    assert effects == owner.decline(1, home) == [Send(1, Accept(home.fork))]

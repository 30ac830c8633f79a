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

from tests.rpc.reference_world import Call, Creation, World

SIZE = 4
workers = st.integers(0, SIZE - 1)


class Program(RuleBasedStateMachine):
    """Four workers that create, share and drop; messages overtake each other."""

    def __init__(self):
        super().__init__()
        self.world = World(SIZE)

    def one_of(self, data, items):
        return data.draw(st.sampled_from(items)) if items else None

    @rule(worker=workers)
    def make(self, worker):
        if worker in self.world.alive:
            self.world.make(worker)

    @rule(worker=workers, owner=workers)
    def remote(self, worker, owner):
        if worker in self.world.alive and worker != owner:
            self.world.remote(worker, owner)

    @rule(data=st.data(), to=workers)
    def share(self, data, to):
        handle = self.one_of(data, self.world.handles)
        if handle is not None:
            self.world.share(handle, to)

    @rule(data=st.data())
    def drop(self, data):
        handle = self.one_of(data, self.world.handles)
        if handle is not None:
            self.world.drop(handle)

    @rule(data=st.data())
    def deliver(self, data):
        item = self.one_of(data, self.world.bag)
        if item is not None:
            self.world.deliver(item)

    @rule(data=st.data(), arrives_late=st.booleans())
    def fail(self, data, arrives_late):
        carriers = [i for i in self.world.bag if isinstance(i, Call | Creation)]
        item = self.one_of(data, carriers)
        if item is not None:
            self.world.fail(item, arrives_late)

    @invariant()
    def nothing_is_freed_too_early(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


class ProgramWithLosses(Program):
    """So do these, and die meanwhile."""

    @rule(worker=workers)
    def lose(self, worker):
        if worker in self.world.alive and len(self.world.alive) > 2:
            self.world.lose(worker)

    @rule(worker=workers, data=st.data())
    def tell(self, worker, data):
        lost = self.one_of(data, sorted(self.world.lost))
        if lost is not None:
            self.world.tell(worker, lost)


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

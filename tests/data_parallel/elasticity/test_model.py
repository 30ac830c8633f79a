"""The protocol of elastic runs, driven by whatever can happen, on a virtual clock."""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.data_parallel.elasticity.simulation import Simulation

RUNS = int(os.environ.get("JDIST_ELASTIC_RUNS", "25"))


class ElasticRun(RuleBasedStateMachine):
    """Replicas arrive, work, freeze and die, and so does the leader's machine."""

    @initialize(
        least=st.integers(1, 2),
        save_every=st.sampled_from([None, 1, 2]),
        log=st.integers(1, 3),
    )
    def begin(self, least, save_every, log):
        self.run = Simulation(least=least, save_every=save_every, log=log)
        self.run.arrive()

    def one(self, data, able):
        return data.draw(st.sampled_from(sorted(able)))

    @precondition(lambda self: len(self.run.replicas) < 5)
    @rule()
    def arrive(self):
        self.run.arrive()

    @precondition(lambda self: self.run.able(self.run.reports))
    @rule(data=st.data(), more=st.integers(1, 4))
    def deliver(self, data, more):
        for _ in range(more):
            if able := self.run.able(self.run.reports):
                self.run.deliver(self.one(data, able))

    @precondition(lambda self: self.run.able(self.run.directives))
    @rule(data=st.data(), more=st.integers(1, 4))
    def act(self, data, more):
        for _ in range(more):
            if able := self.run.able(self.run.directives):
                self.run.act(self.one(data, able))

    @precondition(lambda self: self.run.able(self.run.writers()))
    @rule(data=st.data())
    def write(self, data):
        self.run.write(self.one(data, self.run.able(self.run.writers())))

    @precondition(lambda self: self.run.replicas)
    @rule(data=st.data(), count=st.integers(1, 2))
    def die(self, data, count):
        for _ in range(min(count, len(self.run.replicas))):
            self.run.die(self.one(data, self.run.replicas))

    @precondition(lambda self: self.run.deaths)
    @rule()
    def note_death(self):
        self.run.note_death()

    @precondition(lambda self: self.run.replicas)
    @rule(data=st.data())
    def freeze(self, data):
        self.run.freeze(self.one(data, self.run.replicas))

    @precondition(lambda self: self.run.frozen)
    @rule(data=st.data())
    def thaw(self, data):
        self.run.thaw(self.one(data, self.run.frozen))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds):
        self.run.wait(seconds)

    @rule()
    def lose_leader(self):
        self.run.lose_leader()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.settle()
            self.run.check_end()


def test_every_history_ends_in_the_state_of_an_uninterrupted_run():
    run_state_machine_as_test(
        ElasticRun,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=40,
            deadline=None,
            derandomize=RUNS == 25,
            database=None,
        ),
    )


def begun(replicas):
    """A run in which so many replicas compute; the first has read the parameters."""
    run = Simulation(save_every=None, least=replicas)
    for number in range(replicas):
        run.arrive()
        run.deliver(number)
        run.act(number)  # It restores or fetches.
        run.deliver(number)
    return run


def test_a_state_of_before_a_restart_does_not_count():
    run = begun(2)
    run.freeze(0)
    run.wait(11.0)
    run.die(1)
    run.note_death()
    run.arrive()
    run.deliver(2)
    run.act(2)  # It begins anew: no replica can hand out a state.
    run.thaw(0)
    run.act(0)
    run.deliver(2)
    run.deliver(0)
    run.settle()
    run.check_end()


def test_a_sole_holder_of_the_state_is_not_expelled():
    run = begun(1)
    run.wait(11.0)
    run.arrive()
    run.deliver(1)
    run.settle()
    assert run.restored == 1

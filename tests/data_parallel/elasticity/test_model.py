"""The protocol of elastic runs, driven by whatever can happen, on a virtual clock."""

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jdist.data_parallel.elasticity.leader import (
    Abandon,
    Commit,
    Leader,
    Order,
    Part,
    ReplicaReport,
    RunTerms,
)
from tests.data_parallel.elasticity.simulation import Simulation

RUNS = int(os.environ.get("JDIST_ELASTIC_RUNS", "25"))


class ElasticRun(RuleBasedStateMachine):
    """Replicas arrive, work, freeze and die, and so does the leader's machine."""

    @initialize(
        min_replicas=st.integers(1, 2),
        save_every=st.sampled_from([None, 1, 2]),
        log=st.integers(1, 3),
    )
    def begin(self, min_replicas, save_every, log):
        self.run = Simulation(min_replicas=min_replicas, save_every=save_every, log=log)
        self.run.arrive()

    def one(self, data, able):
        return data.draw(st.sampled_from(sorted(able)))

    def some(self, data, count, waiting, act):
        for _ in range(count):
            if able := self.run.able(waiting):
                act(self.one(data, able))

    @precondition(lambda self: len(self.run.replicas) < 5)
    @rule()
    def arrive(self):
        self.run.arrive()

    @precondition(lambda self: self.run.able(self.run.reports))
    @rule(data=st.data(), more=st.integers(1, 4))
    def deliver(self, data, more):
        self.some(data, more, self.run.reports, self.run.deliver)

    @precondition(lambda self: self.run.able(self.run.directives))
    @rule(data=st.data(), more=st.integers(1, 4))
    def act(self, data, more):
        self.some(data, more, self.run.directives, self.run.act)

    @precondition(lambda self: self.run.able(self.run.writers()))
    @rule(data=st.data())
    def write(self, data):
        self.run.write(self.one(data, self.run.able(self.run.writers())))

    @precondition(lambda self: self.run.mortal())
    @rule(data=st.data(), count=st.integers(1, 2))
    def die(self, data, count):
        for _ in range(min(count, len(self.run.mortal()))):
            self.run.die(self.one(data, self.run.mortal()))

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


def begun(replicas, **terms):
    """A run in which so many replicas compute; the first has read the parameters."""
    run = Simulation(min_replicas=replicas, **{"save_every": None} | terms)
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


@pytest.mark.parametrize("moment", range(12))
def test_the_last_checkpoint_is_there_whenever_its_writer_dies(moment):
    """The leader hears of the death when rank 0 has done all that it can."""
    run = begun(2, steps=2, save_every=1)
    for turn in range(moment):
        number, acts = turn // 2 % 2, turn % 2 == 0
        happens, able = (
            (run.act, run.directives) if acts else (run.deliver, run.reports)
        )
        if number in able:
            happens(number)
    run.die(1)
    for _ in range(8):
        for happens, able in ((run.act, run.directives), (run.deliver, run.reports)):
            if 0 in able:
                happens(0)
    run.wait(11.0)
    run.settle()
    run.check_end()


def test_the_first_step_waits_for_rank_0():
    run = Simulation(save_every=None)
    run.arrive()
    run.arrive()
    run.deliver(1)
    run.act(1)  # It has the first parameters,
    run.deliver(1)
    assert not run.directives  # and nothing to do with them.
    run.settle()
    run.check_end()


def test_rank_0_hands_out_its_state_last():
    leader = Leader(RunTerms(3, lambda step: 16, 10.0), 4)
    for replica in (4, 2, 7):
        leader.report(replica, ReplicaReport(), 0.0)
    leader.report(4, ReplicaReport(1, 0), 0.0)
    for replica in (2, 7):
        leader.report(replica, ReplicaReport(1, 0), 0.0)
    found = []
    for _ in range(3):
        effects = leader.report(9, ReplicaReport(1), 1.0)
        found += [each.instruction.fetch for each in effects if each.replica == 9]
        leader.gone(found[-1], 1.0)
    assert found == [7, 2, 4]


def test_a_run_that_waits_too_long_for_replicas_is_abandoned():
    leader = Leader(RunTerms(3, lambda step: 16, 10.0, 2, 100.0), 4)
    assert leader.next_deadline() is None
    leader.report(4, ReplicaReport(), 5.0)
    restored = ReplicaReport(1, 0)
    assert leader.report(4, restored, 6.0) == []
    assert leader.next_deadline() == 106.0
    leader.report(7, ReplicaReport(), 90.0)
    leader.report(7, restored, 91.0)  # Both compute.
    leader.gone(7, 95.0)
    assert leader.next_deadline() == 101.0  # When replica 4 is late.
    whole = ReplicaReport(1, 0, 0, (Part(0, 8),))
    leader.report(4, whole, 96.0)
    commit, _ = leader.report(4, whole._replace(parts=(Part(8, 16),)), 97.0)
    assert commit == Commit(0, (Part(0, 8), Part(8, 16)), 0)
    assert leader.report(4, ReplicaReport(1, 1), 98.0) == []
    assert leader.next_deadline() == 197.0
    assert leader.tick(196.0) == []
    assert leader.tick(197.0) == [Abandon(1)]
    assert leader.tick(198.0) == []


@pytest.mark.parametrize("last", [0, 1])
def test_one_replica_writes_at_a_time(last):
    """Replica 1 still writes what it was told to when the run is over."""
    leader = Leader(RunTerms(2, lambda step: 2, 10.0, min_replicas=2, save_every=1), 0)
    told = [*leader.report(0, ReplicaReport(), 0.0)]
    told += leader.report(0, ReplicaReport(1, 0), 0.0)
    told += leader.report(1, ReplicaReport(), 0.0)
    told += leader.report(1, ReplicaReport(1, 0), 0.0)
    for step in (0, 1):
        for number in (1 - last, last):
            parts = (Part(number, number + 1),)
            told += leader.report(number, ReplicaReport(1, step, step, parts), 0.0)
        for number in (last, 1 - last) if step == 0 else ():
            told += leader.report(number, ReplicaReport(1, 1), 0.0)
    told += leader.report(0, ReplicaReport(1, 2), 0.0)
    assert not any(each.instruction.end for each in told if isinstance(each, Order))
    told += leader.report(1, ReplicaReport(1, 2, saved=2), 0.0)
    orders = [each for each in told if isinstance(each, Order)]
    assert [each.replica for each in orders if each.instruction.save] == [1, 1]
    assert [each.replica for each in orders if each.instruction.wait] == [1]
    assert sorted(each.replica for each in orders if each.instruction.end) == [0, 1]

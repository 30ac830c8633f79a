"""The protocol of elastic runs, driven by whatever can happen, on a virtual clock."""

import os
from concurrent.futures import Future
from types import SimpleNamespace

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

from jdist.data_parallel.elasticity.follower import Follower
from jdist.data_parallel.elasticity.leader import (
    Abandon,
    Commit,
    Directive,
    Leader,
    Order,
    Part,
    ReplicaReport,
    RunTerms,
)
from jdist.data_parallel.elasticity.replica_work import Snapshot
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
        if number:
            run.act(number)  # It takes the state of rank 0.
            run.deliver(number)
    return run


def test_the_state_of_a_slow_rank_0_lasts_when_all_others_die():
    run = begun(2)
    run.freeze(0)
    run.wait(11.0)
    run.die(1)
    run.note_death()
    run.arrive()
    run.deliver(2)
    run.act(2)  # It takes the state of rank 0, and computes.
    run.deliver(2)
    run.act(2)
    run.thaw(0)
    run.act(0)
    run.deliver(2)
    run.deliver(0)
    run.settle()
    run.check_end()
    assert run.restored == 1


def test_what_a_slow_replica_computed_counts_if_no_other_did():
    run = begun(1)
    run.wait(11.0)
    run.act(0)
    run.deliver(0)
    assert run.committed == [0]


@pytest.mark.parametrize("moment", range(12))
def test_the_last_checkpoint_is_there_whenever_the_other_replica_dies(moment):
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
    assert not run.directives  # There is no state yet.
    run.settle()
    run.check_end()


NEW = ReplicaReport(None, None, ())


def computed(held, step, *parts):
    return ReplicaReport(held, step, tuple(Part(*each) for each in parts))


def has(held):
    return ReplicaReport(held, None, ())


def orders(effects):
    return [tuple(each) for each in effects if isinstance(each, Order)]


def test_no_gradient_is_dropped_that_rank_0_needs():
    leader = Leader(RunTerms(9, lambda step: 1, 10.0, log=2), 0)
    leader.report(0, has(0), 0.0)  # It computes the first step, and takes long.
    assert orders(leader.report(1, NEW, 0.0)) == [(1, Directive(fetch=True))]
    leader.report(1, has(0), 0.0)
    leader.tick(11.0)
    one, both = Directive(apply=(0,)), Directive(apply=(0, 1))
    next_step = one._replace(heir=True, step=1, parts=(Part(0, 1),))
    found = leader.report(1, computed(0, 0, (0, 1)), 12.0)
    assert found == [Commit(0, (Part(0, 1),), 0), Order(1, next_step)]
    found = leader.report(1, computed(1, 1, (0, 1)), 13.0)
    last = Directive(apply=(1,))
    assert found == [Commit(1, (Part(0, 1),), 0), Order(1, last)]
    assert leader.report(1, has(2), 14.0) == []  # The next step waits for rank 0,
    assert leader.report(0, computed(0, 0, (0, 1)), 15.0) == [Order(0, both)]
    begun = orders(leader.report(0, has(2), 16.0))  # which has both gradients now.
    assert [(each, told.step) for each, told in begun] == [(0, 2)]


def test_no_replica_leaves_before_rank_0_has_the_last_state():
    """It reports that state when its checkpoint is complete."""
    leader = Leader(RunTerms(1, lambda step: 2, 10.0, min_replicas=2), 0)
    leader.report(0, has(0), 0.0)
    leader.report(1, NEW, 0.0)
    assert len(leader.report(1, has(0), 0.0)) == 2
    leader.report(0, computed(0, 0, (0, 1)), 0.0)
    last = Directive(apply=(0,))
    found = leader.report(1, computed(0, 0, (1, 2)), 0.0)
    assert orders(found) == [(0, last), (1, last)]
    assert leader.report(1, has(1), 0.0) == []
    end = Directive(end=True)
    assert leader.report(0, has(1), 0.0) == [Order(0, end), Order(1, end)]
    assert leader.is_over
    assert leader.report(2, NEW, 0.0) == [Order(2, Directive(fetch=True))]
    assert leader.report(2, has(1), 0.0) == [Order(2, end)]


def test_a_run_that_waits_too_long_for_replicas_is_abandoned():
    leader = Leader(RunTerms(3, lambda step: 16, 10.0, 2, 100.0), 4)
    assert leader.next_deadline() is None
    assert leader.report(4, has(0), 6.0) == []
    assert leader.next_deadline() == 106.0
    leader.report(7, NEW, 90.0)
    leader.report(7, has(0), 91.0)  # Both compute.
    leader.gone(7, 95.0)
    assert leader.next_deadline() == 101.0  # When replica 4 is late.
    leader.report(4, computed(0, 0, (0, 8)), 96.0)
    commit, _ = leader.report(4, computed(0, 0, (8, 16)), 97.0)
    assert commit == Commit(0, (Part(0, 8), Part(8, 16)), 0)
    assert leader.report(4, has(1), 98.0) == []
    assert leader.next_deadline() == 197.0
    assert leader.tick(196.0) == []
    assert leader.tick(197.0) == [Abandon(1)]
    assert leader.tick(198.0) == []


def test_one_checkpoint_is_written_at_a_time_and_the_last_one_completed():
    written = {}

    def save(step, state):
        written[step] = Future()
        if step >= 4:
            written[step].set_result(None)
        return written[step]

    work = SimpleNamespace(apply=lambda state, step, total: state, save=save)
    follower = Follower(work, steps=5, save_every=1)
    follower.snapshot = Snapshot(0, "state")
    for step, so_far in enumerate(([1], [1], [1, 3], [1, 3], [1, 3, 5])):
        if step in (2, 4):
            written[step - 1].set_result(None)
        report, _ = follower.follow(Directive(apply=(step,)), {step: None})
        assert report == has(step + 1)
        assert list(written) == so_far

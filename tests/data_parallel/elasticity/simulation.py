"""An elastic run on a virtual clock: the leader and the replicas that users run.

Messages, deaths and time come in any order that the driver chooses. In the place of
arrays there are numbers: a sum is a hash of the tree by which it was added up, so that
another order, a unit that is missing and one that is there twice all give another one.
"""

import random
from concurrent.futures import Future

from jdist.data_parallel.elasticity.follower import Follower
from jdist.data_parallel.elasticity.leader import (
    Commit,
    Leader,
    Part,
    ReplicaReport,
    RunTerms,
)
from jdist.data_parallel.elasticity.replica_work import (
    Snapshot,
    nodes_within,
    tree_sum,
)

DEADLINE = 10.0


def leaf(step, unit, state):
    return hash((step, unit, state))


def add(left, right):
    return hash((left, right))


def uninterrupted(terms):
    """The states of a run in which nothing happens, by step."""
    states = [17]
    for step in range(terms.steps):
        units = terms.units(step)
        values = {
            Part(unit, unit + 1): leaf(step, unit, states[-1]) for unit in range(units)
        }
        states.append(hash((states[-1], tree_sum(values, Part(0, units), add))))
    return states


class Writing(Future):
    """A checkpoint that is being written; to wait for it completes it."""

    def __init__(self, complete):
        super().__init__()
        self._complete = complete

    def result(self, timeout=None):
        if not self.done():
            self._complete()
        return super().result(0)


class FakeWork:
    """A replica's arithmetic, and its part in the simulated disk and network."""

    def __init__(self, simulation, number):
        self.simulation = simulation
        self.number = number
        self.writing = None

    def restore(self):
        simulation = self.simulation
        simulation.restored += 1
        step = max(simulation.disk, default=0)
        return Snapshot(step, simulation.disk.get(step, 17))

    def apply(self, state, step, total):
        assert state == self.simulation.expected[step]
        return hash((state, total))

    def compute(self, state, step, part):
        assert state == self.simulation.expected[step]
        found = []
        for node in nodes_within(part, self.simulation.terms.units(step)):
            units = range(node.start, node.stop)
            values = {Part(unit, unit + 1): leaf(step, unit, state) for unit in units}
            found.append((node, tree_sum(values, node, add)))
        return found

    def save(self, step, state):
        assert self.number == self.simulation.own
        assert self.writing is None  # One at a time.
        written = Writing(lambda: self.simulation.write(self.number))
        self.writing = (step, state, written)
        return written


class Simulation:
    """One run; its methods are what can happen."""

    def __init__(self, steps=4, units=(16, 7), min_replicas=1, save_every=2, log=3):
        self.terms = RunTerms(
            steps,
            lambda step: units[step % len(units)],
            DEADLINE,
            min_replicas=min_replicas,
            log=log,
        )
        self.save_every = save_every
        self.expected = uninterrupted(self.terms)
        self.disk = {}
        self.now = 0.0
        self.restored = 0
        self.committed = []
        self.numbers = 0
        self._begin()

    def _begin(self):
        self.own = self.numbers  # Of the next one that arrives.
        self.leader = Leader(self.terms, self.own)
        self.totals = {}
        self.replicas = {}
        self.work = {}
        self.reports = {}  # On their way to the leader.
        self.directives = {}  # On their way from it.
        self.deaths = []  # Of which the leader does not know yet.
        self.frozen = set()

    # --- what can happen ---

    def arrive(self):
        number, self.numbers = self.numbers, self.numbers + 1
        self.work[number] = work = FakeWork(self, number)
        is_own = number == self.own
        follower = Follower(work, self.terms.steps, self.save_every if is_own else None)
        if is_own:
            follower.snapshot = work.restore()
        self.replicas[number] = follower
        self.reports[number] = (ReplicaReport(follower.snapshot.held, None, ()), [])

    def deliver(self, number):
        """The leader gets what a replica reported."""
        report, sums = self.reports.pop(number)
        for part, total in zip(report.parts, sums, strict=True):
            self.totals[report.step, part] = total
        self._handle(self.leader.report(number, report, self.now))

    def act(self, number):
        """A replica does what it was told."""
        follower = self.replicas[number]
        self.reports[number] = follower.follow(*self.directives.pop(number))
        if follower.over:
            del self.reports[number]

    def write(self, number):
        """A checkpoint is complete."""
        step, state, written = self.work[number].writing
        self.work[number].writing = None
        self.disk[step] = state
        written.set_result(None)

    def die(self, number):
        self._vanish(number)
        self.deaths.append(number)

    def note_death(self):
        """The leader hears of it."""
        self._handle(self.leader.gone(self.deaths.pop(0), self.now))

    def freeze(self, number):
        self.frozen.add(number)

    def thaw(self, number):
        self.frozen.discard(number)

    def wait(self, seconds):
        self.now += seconds
        self._handle(self.leader.tick(self.now))

    def lose_leader(self):
        """Its machine dies; an heir writes what it has, and the run is begun anew."""
        for follower in list(self.replicas.values())[1:]:
            if follower.heir and follower.snapshot.held is not None:
                self.disk[follower.snapshot.held] = follower.snapshot.state
        self._begin()

    # --- questions ---

    def able(self, waiting):
        return [n for n in waiting if n in self.replicas and n not in self.frozen]

    def mortal(self):
        """Replicas that can die alone: all but the one with the leader."""
        return [number for number in self.replicas if number != self.own]

    def writers(self):
        return [n for n, work in self.work.items() if work.writing is not None]

    def living(self):
        """Replicas that have not come to the end."""
        return [n for n, follower in self.replicas.items() if not follower.over]

    def settle(self, seed=0):
        """Nothing happens any more: the run has to come to its end."""
        self.frozen.clear()
        choose = random.Random(seed)
        for _ in range(10_000):
            if not self.living() and self.leader.is_over:
                return
            able = (
                [(self.deliver, n) for n in self.able(self.reports)]
                + [(self.act, n) for n in self.able(self.directives)]
                + [(self.write, n) for n in self.able(self.writers())]
            )
            if self.deaths:
                self.note_death()
            elif able:
                happens, number = choose.choice(able)
                happens(number)
            elif len(self.living()) < self.terms.min_replicas:
                self.arrive()
            else:
                self.wait(DEADLINE)
        raise AssertionError("the run does not end")

    def check_end(self):
        """All who are there have what an uninterrupted run has."""
        for follower in self.replicas.values():
            assert follower.snapshot == (self.terms.steps, self.expected[-1])
        if self.save_every:
            assert self.disk[self.terms.steps] == self.expected[-1]

    # --- inside ---

    def _handle(self, effects):
        for effect in effects:
            if isinstance(effect, Commit):
                self._commit(effect)
            else:
                number, directive = effect
                if number in self.replicas:
                    totals = {step: self.totals[step] for step in directive.apply}
                    assert number not in self.directives
                    sent = self.replicas[self.own].snapshot if directive.fetch else None
                    self.directives[number] = (directive, totals, sent)

    def _commit(self, commit):
        step, parts, oldest = commit
        units = [unit for part in parts for unit in range(*part)]
        assert units == list(range(self.terms.units(step)))
        values = {part: self.totals[step, part] for part in parts}
        self.totals[step] = tree_sum(values, Part(0, len(units)), add)
        self.committed.append(step)
        for each in [k for k in self.totals if isinstance(k, int) and k < oldest]:
            del self.totals[each]

    def _vanish(self, number):
        for place in (self.replicas, self.work, self.reports, self.directives):
            place.pop(number, None)
        self.frozen.discard(number)

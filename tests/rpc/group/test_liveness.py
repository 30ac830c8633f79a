"""A worker dies or freezes: who needed it learns it at once, the others go on.

Killed workers are seen by their connections alone: in those tests the heartbeat would
take longer than the test waits. Frozen ones are seen by the heartbeat. How long it took
is shown by `--log-cli-level=INFO`; it is no condition.
"""

import logging
import re
import signal
import threading
import time
import types

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from jdist.rpc.group import liveness
from jdist.rpc.group.rendezvous import ReservedPort
from tests.rpc import hosts, lost_workers
from tests.rpc.elastic.common import join
from tests.rpc.hosts import be_one_of
from tests.rpc.lost_workers import PATIENCE
from tests.rpc.process_watch import await_gone

DEATH, FROST = signal.SIGKILL, signal.SIGSTOP
OPTIONS = {
    DEATH: {"heartbeat_timeout": 100 * PATIENCE},
    FROST: {"heartbeat_timeout": 3.0},
}
# It broke where the kernel threw away what the dead had not read.
REASON = {DEATH: r"connection (closed|broke)", FROST: "no sign of life"}
OPERATIONS = {
    "sync": "rpc_sync(hang)",
    "asynchronous": "rpc_async(hang)",
    "through_a_callback": "rpc_async(hang)",
    "through_another": "rpc_sync(hang)",
    "barrier": "barrier",
    "gather": "all_gather",
}


class Group:
    """Workers in processes of their own, one of which will be hit."""

    def __init__(self, made, blow, victim):
        self.hosts = made
        self.blow = blow
        self.victim = victim
        self.names = hosts.names(len(made.pids))
        self.lost = self.names[victim]
        self.left = [rank for rank in sorted(made.alive) if rank != victim]
        self.names_left = [self.names[rank] for rank in self.left]
        made.everywhere(lost_workers.note_what_is_open)
        made.everywhere(hosts.become_worker, **OPTIONS[blow])
        self.sockets = set(made.everywhere(lost_workers.my_socket))

    def start(self, body, *args, ranks=None):
        chosen = self.left if ranks is None else ranks
        return {rank: self.hosts.start(rank, body, *args) for rank in chosen}

    def run(self, body, *args):
        """Runs a body on all who are left; results by rank."""
        return results(self.start(body, *args))

    def hit(self):
        """The moment of the blow."""
        at = time.monotonic()
        self.hosts.signal(self.victim, self.blow)
        if self.blow == DEATH:
            await_gone([self.hosts.pids[self.victim]])
        return at

    def end(self, ending=None):
        """All who are left shut down, told whom they miss, and leave nothing."""
        ended = results(ending or self.start(lost_workers.shut_down))
        for seen, after in ended.values():
            shown = (seen.kind, seen.worker, seen.operation)
            assert shown == ("WorkerLost", self.lost, "shutdown")
            assert re.search(REASON[self.blow], seen.text)
            assert after.startswith("RPC has not been initialized")
        self.check_leftovers()
        return [seen for seen, _ in ended.values()]

    def check_leftovers(self):
        if self.blow == FROST:
            self.hosts.signal(self.victim, signal.SIGCONT)
            self.hosts.run(self.victim, lost_workers.let_go)
            woken, _ = self.hosts.run(self.victim, lost_workers.shut_down)
            assert woken.kind == "WorkerLost"
            self.left.append(self.victim)
        self.check_nothing_left()

    def check_nothing_left(self):
        assert self.run(lost_workers.what_is_left) == {rank: [] for rank in self.left}
        assert not self.sockets & lost_workers.sockets_by_name()


def results(tasks):
    return {rank: task.result() for rank, task in tasks.items()}


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.port


@pytest.fixture
def group(fresh_hosts):
    return lambda blow, victim: Group(fresh_hosts(3), blow, victim)


def show(what, begun, found):
    """Says how long the slowest took."""
    took = max(seen.at for seen in found) - begun
    logging.getLogger(__name__).info("%s: %.3f s after the blow", what, took)


BLOWS = pytest.mark.parametrize("blow", [DEATH, FROST], ids=["killed", "frozen"])


def test_a_stop_in_the_midst_of_a_step_counts_as_a_whole(monkeypatch):
    """It may have come before the step had said anything to the others."""
    stopped, seen, done = 0.0, [], threading.Event()

    def step(now, held_up):
        nonlocal stopped
        seen.append((liveness.time.monotonic() - now, held_up))
        stopped = 1000.0
        if len(seen) == 2:
            done.set()

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + stopped)
    monkeypatch.setattr(liveness, "time", clock)
    pool = ThreadPool("pool", 1)
    timer = Timer("timer", pool)
    pace = liveness.Pace(timer, 0.2, step, memory=PATIENCE)
    assert done.wait(PATIENCE)
    pace.close()
    timer.close()
    pool.close(PATIENCE)
    assert pace.held_up() >= 1000
    # What a step sees as it begins is judged by the moment for which it is told.
    assert max(passed for passed, _ in seen) < 1000
    assert seen[1][1]


def test_what_a_worker_found_out_about_itself_is_kept(monkeypatch):
    """Its answer is the same when the stop that explains it was long ago."""
    with rpc.local_cluster(["here", "there"]), rpc.use_worker("here"):
        group = current.worker().group
        monkeypatch.setattr(group, "_held_up", lambda: "this worker was stopped")
        first = group.unreachable("barrier", "closed")
        monkeypatch.setattr(group, "_held_up", lambda: None)
        for error in (first, group.unreachable("all_gather", "closed")):
            assert isinstance(error, rpc.WorkerLost)
            assert (error.worker, error.reason) == ("here", "this worker was stopped")
        assert group.expelled() == "this worker was stopped"
        with pytest.raises(rpc.WorkerLost, match="'here' during shutdown"):
            group.check("shutdown")
        group._expelled = None


def test_who_was_taken_for_lost_is_not_served():
    """It may not know yet, and connect anew."""
    with rpc.local_cluster(["here", "there"]):
        with rpc.use_worker("here"):
            agent = current.worker()
            agent.drop_peer(agent.directory.find("there"), "no sign of life")
        with rpc.use_worker("there"):
            with pytest.raises(rpc.WorkerLost, match="'here' does not know 'there'"):
                rpc.rpc_sync("here", max, (1, 2))
            with pytest.raises(rpc.WorkerLost, match="Lost worker 'here'"):
                rpc.rpc_async("here", max, (1, 2)).wait()


def test_a_worker_that_thaws_learns_that_it_was_taken_for_lost(group):
    """It does not blame those who have closed their connections to it."""
    group = group(FROST, victim=2)
    asking = group.hosts.start(2, lost_workers.asked_by, "worker1")
    group.hosts.run(1, lost_workers.await_caller)
    group.hit()
    for seen in results(group.start(lost_workers.miss)).values():
        assert (seen.kind, seen.worker) == ("WorkerLost", "worker2")
    group.hosts.signal(2, signal.SIGCONT)
    found = {"rpc_sync(hang)": asking.result()}
    found |= group.hosts.run(2, lost_workers.after_thawing, "worker0")
    for name, seen in found.items():
        shown = (name, seen.kind, seen.worker, seen.operation)
        assert shown == (name, "WorkerLost", "worker2", name)
        assert "this worker itself gave no sign of life for" in seen.text
        assert "the others have taken it for lost" in seen.text
    group.hosts.run(1, lost_workers.let_go)
    group.left.append(2)
    group.hosts.everywhere(hosts.be_no_worker)
    group.check_nothing_left()


def test_a_coordinators_worker_that_thaws_does_not_blame_the_others(group):
    """It hears itself, but the others have closed their connections to it."""
    group = group(FROST, victim=0)
    group.hit()
    for seen in results(group.start(lost_workers.miss)).values():
        assert (seen.kind, seen.worker) == ("WorkerLost", "worker0")
    group.hosts.signal(0, signal.SIGCONT)
    for name, seen in group.hosts.run(0, lost_workers.after_thawing, "worker1").items():
        shown = (name, seen.kind, seen.worker, seen.operation)
        assert shown == (name, "WorkerLost", "worker0", name)
        assert "this worker itself gave no sign of life for" in seen.text
    group.left.append(0)
    group.hosts.everywhere(hosts.be_no_worker)
    group.check_nothing_left()


@BLOWS
@pytest.mark.parametrize("victim", [2, 0], ids=["a worker", "the coordinator"])
def test_everybody_who_needed_a_worker_is_told(group, blow, victim):
    group = group(blow, victim)
    waiting = group.start(lost_workers.wait_for, group.lost)
    parts = len(lost_workers.MEETINGS) * len(group.left)
    group.hosts.run(victim, lost_workers.be_waited_for, group.names_left, parts)
    begun = group.hit()
    found = [seen for each in results(waiting).values() for seen in each.items()]
    assert len(found) == len(group.left) * len(OPERATIONS)
    for name, seen in found:
        shown = (name, seen.kind, seen.worker, seen.operation)
        assert shown == (name, "WorkerLost", group.lost, OPERATIONS[name])
        assert re.search(REASON[blow], seen.text)
    show("all are told", begun, [seen for _, seen in found])
    # What the lost worker had begun ends as well, however deep it waits.
    first, second = group.left[-2:]
    for word in (lost_workers.SYNC, lost_workers.ASYNC):
        for rank, name in (
            (first, f"3 from the end, {word}"),
            (second, f"2 from the end, {word}"),
            (first, f"1 from the end, {word}"),
            (second, word),
        ):
            ended = group.hosts.run(rank, lost_workers.how_it_ended, name)
            assert (name, ended) == (name, "RpcTimeout")
    group.run(lost_workers.call_each, group.names_left, 3)
    refused = group.run(lost_workers.see, lost_workers.sync, group.lost).values()
    assert {(seen.kind, seen.worker) for seen in refused} == {
        ("WorkerLost", group.lost)
    }
    for told in group.run(lost_workers.lost).values():
        assert list(told) == [group.lost]
    check_meetings(group, has_coordinator=victim != 0)
    group.end()


def check_meetings(group, has_coordinator):
    """Who is left can meet; without a coordinator nobody can, and all are told so."""
    missed = group.run(lost_workers.see, lost_workers.barrier, group.lost).values()
    found = group.run(lost_workers.see, lost_workers.meet, group.names_left).values()
    if has_coordinator:
        gathered = {group.names[rank]: rank * 11 + 1 for rank in group.left}
        assert [seen.text for seen in found] == [str(gathered)] * len(group.left)
    else:
        missed = [*missed, *found]
    told = {(seen.kind, seen.worker, seen.operation) for seen in missed}
    assert told == {("WorkerLost", group.lost, "barrier")}


@pytest.mark.parametrize(
    ("blow", "victim"),
    [(DEATH, 2), (FROST, 2), (DEATH, 0)],
    ids=["killed", "frozen", "coordinator killed"],
)
def test_a_worker_is_lost_while_the_others_shut_down(group, blow, victim):
    group = group(blow, victim)
    # Nobody waits for what the lost worker wanted to know.
    group.hosts.run(victim, lost_workers.call_and_forget, "worker1")
    group.hosts.run(1, lost_workers.await_caller)
    ending = group.start(lost_workers.shut_down)
    group.hosts.run(victim, lost_workers.await_ends, group.names_left)
    begun = group.hit()
    show("all have ended", begun, group.end(ending))


def test_a_worker_is_killed_while_it_shuts_down(group, port):
    group = group(DEATH, victim=2)
    group.hosts.start(2, lost_workers.shut_down)
    ending = group.start(lost_workers.shut_down, ranks=[0])
    group.hosts.run(1, lost_workers.await_ends, ["worker2", "worker0"])
    begun = group.hit()
    show("the one who waited", begun, [ending[0].result()[0]])
    group.hosts.run(1, lost_workers.call_each, ["worker1"], 5)
    group.end(ending | group.start(lost_workers.shut_down, ranks=[1]))
    # Those who are left may form another group.
    again = [group.hosts.start(rank, be_one_of, rank, 2, port) for rank in (0, 1)]
    assert [task.result().id for task in again] == [0, 1]
    assert group.run(lost_workers.meet, ["worker0", "worker1"]) == {
        rank: {"worker0": 1, "worker1": 12} for rank in (0, 1)
    }
    group.run(rpc.shutdown)


def test_a_worker_dies_before_all_have_come(fresh_hosts, port):
    hosts = fresh_hosts(3)
    hosts.everywhere(lost_workers.note_what_is_open)
    waiting = [
        hosts.start(rank, lost_workers.join_in_vain, rank, 4, port, join_timeout=4.0)
        for rank in (0, 1)
    ]
    hosts.run(2, lost_workers.begin_to_join, "worker2", 2, port, 4, join)
    hosts.signal(2, DEATH)
    for task in waiting:
        seen = task.result()
        assert seen.kind == "RpcTimeout"
        assert "Missing ranks: [2, 3]. Here: " in seen.text
    assert hosts.everywhere(lost_workers.what_is_left) == [[], []]

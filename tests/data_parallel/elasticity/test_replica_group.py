"""What a replica may send to rank 0, and in which order rank 0 answers."""

import queue
import threading
from contextlib import suppress
from functools import partial
from threading import Thread
from types import SimpleNamespace

import jax
import pytest

from jdist.data_parallel.elasticity.leader import ReplicaReport, RunTerms
from jdist.data_parallel.elasticity.replica_group import (
    ElasticRuns,
    LeaderService,
    Message,
    _unpacked,
)
from jdist.data_parallel.elasticity.replica_work import Snapshot
from jdist.rpc import ProtocolError, RpcError, WorkerInfo
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from jdist.rpc.extension import futures

REPORT = (2, 3, ((0, 2), (4, 5)))


def test_reports_and_goodbyes_are_read():
    for report, sums in ((REPORT, [[], []]), (None, [])):
        assert _unpacked(("run", {"steps": "3"}, report, sums)).report == report


@pytest.mark.parametrize(
    "body",
    [
        None,
        (),
        ("run", {"steps": "3"}, REPORT),
        (1, {"steps": "3"}, REPORT, [[], []]),
        ("run", {"steps": 3}, REPORT, [[], []]),
        ("run", {"steps": "3"}, REPORT[:2], []),
        ("run", {"steps": "3"}, ("2", *REPORT[1:]), [[], []]),
        ("run", {"steps": "3"}, (2, "3", REPORT[2]), [[], []]),
        ("run", {"steps": "3"}, (2, 3, ((0,), (1, 2))), [[], []]),
        ("run", {"steps": "3"}, (2, 3, [0, 2]), [[], []]),
        ("run", {"steps": "3"}, REPORT, [1.0, 2.0]),
        ("run", {"steps": "3"}, REPORT, [[]]),
        ("run", {"steps": "3"}, None, [[]]),
    ],
)
def test_anything_else_is_refused(body):
    """A request that waits for the leader would else wait for ever."""
    with pytest.raises(ProtocolError, match="A report of an elastic run has a name"):
        _unpacked(body)


OWN, PEERS = 4, (2, 7)


class Tasks:
    """A pool that keeps its tasks until they are wanted."""

    def __init__(self):
        self.waiting = []

    def run(self, task):
        self.waiting.append(task)

    def go(self):
        """Runs them and all later ones, each on a thread of its own."""
        waiting, self.run = self.waiting, lambda task: Thread(target=task).start()
        for task in waiting:
            self.run(task)


@pytest.fixture
def made():
    """A leader of runs of one step, with a deadline of 0.4 s, on replica 4."""
    pool = ThreadPool("leader", 1)
    timer, tasks = Timer("leader", pool), Tasks()
    agent = SimpleNamespace(
        pool=tasks,
        timer=timer,
        info=WorkerInfo("worker0", 0, OWN),
        register=lambda kind, handler: None,
        extension_state=SimpleNamespace(on_gone=lambda listener: None),
    )
    terms = RunTerms(1, lambda step: 3, 0.4, min_replicas=3)
    work = SimpleNamespace(sum_structure=jax.tree.structure(()))
    follower = SimpleNamespace(snapshot=Snapshot(0, ()))
    runs = ElasticRuns(agent)
    leader = LeaderService(agent, terms, {}, work, follower, runs.departed)
    yield SimpleNamespace(runs=runs, leader=leader, tasks=tasks)
    timer.close()
    pool.close(60)


def message(held):
    return Message("run", {}, ReplicaReport(held, None, ()), [])


def begin(made, replicas, when_answered):
    """Rank 0 has the state, the others take it, and the last report begins a step.

    Returns:
      The answers of the last reports, by replica.
    """
    made.leader.report(OWN, message(0))
    for replica in PEERS:
        made.leader.report(replica, message(None))
    made.leader.gone(OWN)  # So that its next report may be the last one.
    made.tasks.waiting = []
    answers = {replica: made.leader.report(replica, message(0)) for replica in replicas}
    for replica, answer in answers.items():
        futures.call_when_done(answer, partial(when_answered, replica))
    made.tasks.go()
    return answers


@pytest.mark.parametrize("last", [OWN, *PEERS])
def test_rank_0_has_its_own_answer_last(made, last):
    """The others' answers would wait for the core on which its share is computed."""
    order, all_are = [], threading.Event()

    def answered(replica):
        order.append(replica)
        if len(order) == 3:
            all_are.set()

    begin(made, sorted((OWN, *PEERS), key=lambda each: each == last), answered)
    assert all_are.wait(60)
    assert sorted(order[:2]) == sorted(PEERS)
    assert order[2:] == [OWN]


def test_a_peer_that_stops_reading_holds_up_no_other_for_long(made):
    gone_on, went_on = threading.Event(), queue.SimpleQueue()

    def send(replica):
        if replica == OWN:
            gone_on.set()
        else:  # Each of their sends waits for room in its socket.
            went_on.put(gone_on.wait(60))

    begin(made, (OWN, *PEERS), send)
    assert all(went_on.get(timeout=90) for _ in PEERS)


LEAVING = [
    lambda runs, worker: runs._on_report(worker, ("run", {}, None, []), {}),
    lambda runs, worker: runs._on_gone(worker, "it is lost"),
]


def workers():
    return [WorkerInfo(f"worker{each}", each, each) for each in PEERS]


@pytest.mark.parametrize("leave", LEAVING, ids=["goodbye", "loss"])
def test_who_has_left_is_not_answered(made, leave):
    runs, peers = made.runs, workers()
    with runs.taking_part("run", made.leader):
        made.leader.report(OWN, message(0))
        answers = [runs._on_report(each, tuple(message(0)), {}) for each in peers[:1]]
        leave(runs, peers[0])
        # A third one is missing.
        answers.append(runs._on_report(peers[1], tuple(message(0)), {}))
    assert [answer.done() for answer in answers] == [False, True]
    with pytest.raises(RpcError, match="The elastic run 'run' is over on rank 0"):
        runs._on_report(peers[1], tuple(message(None)), {})


def test_a_report_that_is_handled_after_a_loss_gives_no_seat_back(made):
    """It came before, and is handled on another thread."""
    runs, (lost, other) = made.runs, workers()
    with runs.taking_part("run", made.leader):
        made.leader.report(OWN, message(0))
        runs._on_gone(lost, "it is lost")
        with pytest.raises(RpcError, match="'worker2' was given up by the group"):
            runs._on_report(lost, tuple(message(0)), {})
        assert not runs._on_report(other, tuple(message(0)), {}).done()
        assert not made.tasks.waiting  # No step has begun with it.


def test_a_report_to_a_run_that_has_not_begun_is_sent_again(made):
    assert made.runs._on_report(workers()[0], tuple(message(None)), {}) is None
    with made.runs.taking_part("run", made.leader):
        assert made.runs._on_report(workers()[0], tuple(message(None)), {}) is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_report_learns_that_the_run_has_ended(made, when):
    """Also where the leader's failure comes between its arrival and its handling."""
    worker, found = workers()[0], []
    with (
        suppress(InterruptedError),
        made.runs.taking_part("run", made.leader),
    ):
        made.leader.report(OWN, message(0))
        if when == "before":
            found.append(made.runs._on_report(worker, tuple(message(0)), {}))
        raise InterruptedError
    if when == "after":
        found.append(made.leader.report(PEERS[0], message(0)))
    with pytest.raises(RpcError, match="rank 0 has left it"):
        found[0].wait(0)

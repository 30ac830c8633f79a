"""What a replica may send to rank 0, and in which order rank 0 answers."""

import threading
from contextlib import suppress
from functools import partial
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
from jdist.rpc import ProtocolError, RpcError, WorkerInfo
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from jdist.rpc.extension import futures

REPORT = (0, None, 3, ((0, 2), (4, 5)), None, 7)


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
        ("run", {"steps": "3"}, REPORT[:5], [[], []]),
        ("run", {"steps": "3"}, (None, *REPORT[1:]), [[], []]),
        ("run", {"steps": "3"}, (0, "1", *REPORT[2:]), [[], []]),
        ("run", {"steps": "3"}, (*REPORT[:3], ((0,), (1, 2)), None, 7), [[], []]),
        ("run", {"steps": "3"}, (*REPORT[:3], [0, 2], None, 7), [[], []]),
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


@pytest.fixture
def leader():
    """A leader of runs of one step, with a deadline of 0.4 s, on replica 4."""
    pool = ThreadPool("leader", 1)
    timer = Timer("leader", pool)
    info = WorkerInfo("worker0", 0, OWN)
    terms = RunTerms(1, lambda step: 3, 0.4, min_replicas=3)
    work = SimpleNamespace(sum_structure=jax.tree.structure(()))
    yield LeaderService(
        SimpleNamespace(pool=pool, timer=timer, info=info), terms, {}, work
    )
    timer.close()
    pool.close(60)


def begin(leader, replicas, when_answered):
    """The first replica restores the state, and the last one's report begins a step.

    Returns:
      The answers of the second reports, by replica.
    """
    for replica in replicas:
        leader.report(replica, ReplicaReport(), [], leader.expect(replica, {}))
    answers = {replica: leader.expect(replica, {}) for replica in replicas}
    for replica, answer in answers.items():
        futures.call_when_done(answer, partial(when_answered, replica))
        leader.report(replica, ReplicaReport(1, 0), [], answer)
    return answers


def message(generation, held):
    return tuple(Message("run", {}, ReplicaReport(generation, held), []))


@pytest.mark.parametrize("last", [OWN, *PEERS])
def test_rank_0_has_its_own_answer_last(leader, last):
    """The others' answers would wait for the core on which its share is computed."""
    order = []
    replicas = sorted((OWN, *PEERS), key=lambda each: each == last)
    begin(leader, replicas, order.append)
    assert sorted(order[:2]) == sorted(PEERS)
    assert order[2:] == [OWN]


def test_a_peer_that_stops_reading_holds_up_no_other_for_long(leader):
    gone_on, blocked = threading.Event(), []

    def send(replica):
        if replica == OWN:
            gone_on.set()
        else:  # Each of their sends waits for room in its socket.
            blocked.append(gone_on.wait(60))

    for answer in begin(leader, (OWN, *PEERS), send).values():
        answer.wait(60)
    assert blocked[0]


LEAVING = [
    lambda runs, worker: runs._on_report(worker, ("run", {}, None, []), {}),
    lambda runs, worker: runs._on_gone(worker, "it is lost"),
]


def runs_with(tasks):
    """The runs of a worker, whose pool keeps the tasks that it is given."""
    agent = SimpleNamespace(
        pool=SimpleNamespace(run=tasks.append),
        register=lambda kind, handler: None,
        extension_state=SimpleNamespace(on_gone=lambda listener: None),
    )
    return ElasticRuns(agent)


def workers():
    return [WorkerInfo(f"worker{each}", each, each) for each in PEERS]


@pytest.mark.parametrize("leave", LEAVING, ids=["goodbye", "loss"])
def test_a_report_that_is_handled_late_gives_no_seat_back(leader, leave):
    """It is handled on another thread than the departure that came after it."""
    tasks, peers = [], workers()
    runs = runs_with(tasks)
    with runs.taking_part("run", None, leader):
        answers = [runs._on_report(each, message(0, None), {}) for each in peers]
        leave(runs, peers[0])
        for task in tasks:
            task()
        # The first one in the run is told at once to restore the state.
        assert [answer.done() for answer in answers] == [False, True]
    with pytest.raises(RpcError, match="The elastic run 'run' is over on rank 0"):
        runs._on_report(peers[1], message(0, None), {})


def test_a_report_to_a_run_that_has_not_begun_is_sent_again(leader):
    runs = runs_with([])
    assert runs._on_report(workers()[0], message(0, None), {}) is None
    with runs.taking_part("run", None, leader):
        assert runs._on_report(workers()[0], message(0, None), {}) is not None


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_report_that_is_handled_late_learns_that_the_run_has_ended(
    leader, monkeypatch, when
):
    """Also where the leader's failure comes between the end and the report."""
    tasks, fail = [], leader.fail

    def failing(reason):
        monkeypatch.setattr(leader, "fail", fail)
        if when == "before":
            tasks.pop()()
        fail(reason)
        if when == "within":
            tasks.pop()()

    runs = runs_with(tasks)
    with suppress(InterruptedError), runs.taking_part("run", None, leader):
        # The first one in the run is told at once to restore the state, and then waits
        # for two others.
        leader.report(PEERS[0], ReplicaReport(), [], leader.expect(PEERS[0], {}))
        answer = runs._on_report(workers()[0], message(1, 0), {})
        monkeypatch.setattr(leader, "fail", failing)
        raise InterruptedError
    for task in tasks:
        task()
    assert answer.done()
    with pytest.raises(RpcError, match="rank 0 has left it"):
        answer.wait(0)

"""How long workers of a pipeline wait for each other."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from jdist import rpc
from jdist.pipeline.run.update import StageUpdates
from jdist.pipeline.run.worker_channels import CallFailure, PipelineMailbox, mailbox_of
from jdist.rpc.base import current
from tests.pipeline import slow
from tests.pipeline.test_workers import on_each, same_bits
from tests.rpc import hosts as processes_of
from tests.rpc.sockets import Outcome, wait_until
from tests.rpc.test_interrupts import interrupt


def same_as_one_process(found, expected):
    told, params = expected
    for rank, (own_told, own) in enumerate(found):
        same_bits(own_told, told)
        same_bits(own[rank], params[rank])


@pytest.fixture
def questions(monkeypatch):
    """Those of the workers of this process."""
    found, answer = slow.Questions(), PipelineMailbox._rested

    def noted(mailbox, caller, body, meta):
        told = answer(mailbox, caller, body, meta)
        found.note(caller, told)
        return told

    monkeypatch.setattr(PipelineMailbox, "_rested", noted)
    yield found
    slow.set_pauses()
    assert found.awaited


def test_a_compilation_beyond_the_timeout_is_waited_for(cluster, request):
    request.addfinalizer(slow.set_pauses)
    found = on_each(cluster, slow.steps, slow.PLACES, slow.for_long)
    slow.set_pauses()
    same_as_one_process(found, slow.steps(None))


def test_those_who_wait_are_told_who_may_be_compiling(threads, questions, caplog):
    slow.set_pauses(questions.await_some)
    found = on_each(threads, slow.steps, slow.PLACES)
    slow.set_pauses()
    same_as_one_process(found, slow.steps(None))
    told = [one for one in caplog.records if one.name == "jdist.pipeline"]
    said = (
        r"'worker2' waited more than 0\.4 s in train_step, call 1 of a pipeline: "
        r"(shapes of 'm' for the shapes|2F0 for (the shapes of )?an output) of "
        r"'worker1'\. "
        r"It goes on waiting\. At work there, and perhaps compiling: .*'worker1'"
    )
    assert re.search(said, "\n".join(one.getMessage() for one in told))


def test_a_worker_that_is_still_in_the_call_before(threads, questions, monkeypatch):
    """Its update compiles after the decision; the others are in the next step."""
    apply, done = StageUpdates.apply, []

    def slowly(update, stage, *args):
        if stage == 1 and not done and rpc.get_worker_info().name == "worker1":
            done.append(stage)
            questions.await_some()
        return apply(update, stage, *args)

    monkeypatch.setattr(StageUpdates, "apply", slowly)
    found = on_each(threads, slow.steps, slow.PLACES)
    monkeypatch.undo()
    assert done == [1]
    same_as_one_process(found, slow.steps(None))


@pytest.mark.parametrize("what", ["compilation", "data"])
def test_an_epoch_waits_for_slow_workers(threads, questions, what):
    slow_data = questions.await_some if what == "data" else None
    if what == "compilation":
        slow.set_pauses(questions.await_some)
    tasks = [
        threads.start(rank, slow.epoch, slow.PLACES, slow_data if rank == 1 else None)
        for rank in range(3)
    ]
    found = [task.result() for task in tasks]
    slow.set_pauses()
    same_as_one_process(found, slow.epoch(None))


@pytest.fixture
def no_outputs(monkeypatch):
    """What stages put out is lost: all workers wait."""
    receive = PipelineMailbox._receive

    def losing(mailbox, caller, body, meta):
        if meta["tag"][0] != "F":
            receive(mailbox, caller, body, meta)

    monkeypatch.setattr(PipelineMailbox, "_receive", losing)


@pytest.mark.usefixtures("no_outputs")
def test_workers_that_all_wait_give_up(threads, monkeypatch):
    """All are in the call, and none is at work."""
    # Long enough for the last of them to come into the call on a busy machine.
    monkeypatch.setattr(slow, "TIMEOUT", 6.5)
    tasks = [threads.start(rank, slow.steps, slow.PLACES) for rank in range(3)]
    said = r"waited more than 6\.5 s in train_step, call 1 of a pipeline: [^.]*\.$"
    for task in tasks:
        with pytest.raises(rpc.RpcTimeout, match=re.compile(said, re.M)):
            task.result()


@pytest.mark.usefixtures("no_outputs")
def test_a_worker_that_has_given_up_was_in_the_call(threads, monkeypatch):
    """The others ask it before they hear of that: here they never do."""
    monkeypatch.setattr(PipelineMailbox, "_fail", lambda *message: None)
    monkeypatch.setattr(slow, "TIMEOUT", 6.5)
    tasks = [threads.start(rank, slow.steps, slow.PLACES) for rank in range(3)]
    for task in tasks:
        with pytest.raises(rpc.RpcTimeout, match="call 1 of a pipeline") as raised:
            task.result()
        assert "Not in the call" not in str(raised.value)


@pytest.mark.usefixtures("no_outputs")
def test_a_worker_that_is_lost_when_it_is_asked(threads, monkeypatch):
    """Its connection closes before the group knows that it is gone."""

    def closed(mailbox, caller, body, meta):
        raise rpc.WorkerLost("worker1", "a question", "its connection closed")

    monkeypatch.setattr(PipelineMailbox, "_rested", closed)
    tasks = [threads.start(rank, slow.name_of_the_lost) for rank in range(3)]
    for task in tasks:
        name, text = task.result()
        assert name == "worker1"
        assert "train_step, call 1 of a pipeline" in text
        assert "its connection closed" in text


def test_a_worker_that_is_killed_while_it_compiles_is_lost(fresh_hosts):
    """It has been waited for beyond the timeout."""
    group = fresh_hosts(3)
    group.everywhere(processes_of.become_worker, heartbeat_timeout=600.0)
    tasks = {rank: group.start(rank, slow.name_of_the_lost) for rank in (0, 2)}
    group.start(1, slow.name_of_the_lost, slow.for_long, slow.dies)
    group.alive.discard(1)
    for task in tasks.values():
        name, text = task.result()
        assert name == "worker1"
        assert "train_step, call 1 of a pipeline" in text


def together(mailbox):
    """What two workers call a new pipeline of both."""
    names = ["first", "second"]

    def others():
        with rpc.use_worker("second"):
            return mailbox_of(current.worker()).new_pipeline(names)

    with ThreadPoolExecutor() as pool:
        found = pool.submit(others)
        return mailbox.new_pipeline(names), found.result(timeout=30)


def test_a_pipeline_of_an_elastic_group_is_of_the_workers_that_are_there():
    """A newcomer has made none before, and its predecessor's loss is not its own."""
    with rpc.elastic_cluster("first") as join:
        mailbox = mailbox_of(current.worker())
        join("second")
        before = [together(mailbox)[0] for _ in range(2)]
        with rpc.use_worker("second"):
            rpc.shutdown()
        wait_until(lambda: mailbox.loss(before[0], "second"))
        left = "it has left the group"
        assert [mailbox.loss(each, "second") for each in before] == [left] * 2
        join("second")
        here, there = together(mailbox)
        assert here == there
        assert here not in before
        assert mailbox.loss(here, "second") is None
        assert mailbox.loss(before[1], "second") == left


def a_failed_call(mailbox):
    address = mailbox.new_pipeline(["only"]), 0
    mailbox.fail(address, CallFailure(ValueError("refused"), told=False))
    with mailbox.resting(address):
        pass
    mailbox.end(address)


def test_ctrl_c_leaves_no_mailbox_taken():
    """At whatever place it comes, another thread may use the mailbox after it."""
    with rpc.local_cluster(["only"]):
        mailbox, number = mailbox_of(current.worker()), 0
        while interrupt(number, a_failed_call, mailbox):
            assert Outcome(a_failed_call, mailbox).get() is None
            number += 1
    assert number > 5

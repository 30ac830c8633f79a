"""Reliable delivery by itself: batches, answers, repetitions, and ends."""

import functools
import threading

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.rref.reliable_delivery import QueuedMessage, ReliableDelivery
from tests.rpc.hosts import names
from tests.rpc.rref.common import PATIENCE, wait_for

KIND = "test.note"


def positive(row):
    if type(row) is not int or row < 0:
        raise rpc.ProtocolError("A note is a number from 0 on.")
    return row


class Notes:
    """A worker's delivery, what it has handled, and what it was answered."""

    def __init__(self, name):
        with rpc.use_worker(name):
            self.agent = current.worker()
        self.number = self.agent.info.incarnation
        self.delivery = ReliableDelivery(self.agent)
        self.delivery.handle(KIND, positive, self.take)
        self.batches, self.answers, self.later = [], [], None

    def take(self, sender, rows):
        self.batches.append((sender.name, list(rows)))
        answers = [2 * row for row in rows]
        return answers if self.later is None else self.later, lambda: None

    def send(self, to, row, **options):
        unreachable = functools.partial(self.answers.append, "unreachable")
        answered = self.answers.append
        self.delivery.send(to.number, KIND, row, answered, unreachable, **options)

    def handled(self):
        return [row for _, rows in self.batches for row in rows]


@pytest.fixture
def workers():
    with rpc.local_cluster(names(2), allow=["tests"]):
        yield [Notes(name) for name in names(2)]


def test_each_message_is_handled_and_answered_once(workers):
    one, other = workers
    for row in range(2500):
        one.send(other, row)
    assert wait_for(lambda: len(one.answers) == 2500)
    assert sorted(other.handled()) == list(range(2500))
    assert sorted(one.answers) == [2 * row for row in range(2500)]
    assert max(len(rows) for _, rows in other.batches) <= 1000
    assert one.delivery.idle()


def test_messages_that_can_wait_go_together(workers, monkeypatch):
    one, other = workers
    due = []
    monkeypatch.setattr(one.agent.timer, "later", lambda *given: due.append(given))
    for row in range(5):
        one.send(other, row, gather=True)
    ((seconds, send),) = due
    assert 0 < seconds < 1
    assert not one.delivery.idle()
    send()
    assert wait_for(one.delivery.idle)
    assert other.batches == [("worker0", [0, 1, 2, 3, 4])]


def test_messages_that_are_sent_together_go_together(workers, monkeypatch):
    """And wake one thread, not one each."""
    one, other = workers
    given = []
    monkeypatch.setattr(one.agent.pool, "run", given.append)
    messages = [QueuedMessage(KIND, row, one.answers.append) for row in range(50)]
    one.delivery.send_all(other.number, messages)
    (send,) = given
    monkeypatch.undo()
    send()
    assert wait_for(one.delivery.idle)
    assert other.batches == [("worker0", list(range(50)))]
    assert one.answers == [2 * row for row in range(50)]


def repeated(one, other, number, rows):
    return one.agent.call(other.agent.info, KIND, (number, number, rows))


def test_a_repetition_gets_the_first_answer_and_is_not_handled(workers):
    one, other = workers
    assert [repeated(one, other, 7, [1, 2]) for _ in range(3)] == [[2, 4]] * 3
    assert other.handled() == [1, 2]
    # With a later one its sender says that it has that answer.
    assert repeated(one, other, 8, [3]) == [6]
    assert repeated(one, other, 7, [1, 2]) == [None, None]
    assert other.handled() == [1, 2, 3]


def test_an_answer_that_comes_later_reaches_every_attempt(workers):
    """An attempt that is given up does not take the answer from the next ones."""
    one, other = workers
    other.later, one.delivery.patience = rpc.Future(), 0.02
    asked = threading.Event()
    call = one.agent.call_async

    def count(*given):
        if len(other.batches) == 1:
            asked.set()
        return call(*given)

    one.agent.call_async = count
    one.send(other, 5)
    assert asked.wait(PATIENCE)
    other.later.set_result(["late"])
    assert wait_for(lambda: one.answers == ["late"])
    assert other.handled() == [5]


def test_what_is_malformed_is_refused(workers, caplog):
    one, other = workers
    for body in (5, (1, 0), (1, 0, 5), ("1", 0, []), (1, 0, ["x"]), (1, 0, [-1])):
        with pytest.raises(rpc.ProtocolError, match=r"A batch has|A note is"):
            one.agent.call(other.agent.info, KIND, body)
    one.send(other, -1)
    assert wait_for(lambda: one.answers == ["unreachable"])
    assert "1 messages 'test.note'" in caplog.text
    assert one.delivery.idle()


def test_answers_that_do_not_fit_are_refused(workers, caplog):
    one, other = workers
    other.later = rpc.Future()
    other.later.set_result([1, 2])
    one.send(other, 1)
    assert wait_for(lambda: one.answers == ["unreachable"])
    assert "one answer for each message" in caplog.text


def test_nothing_is_sent_to_a_worker_that_is_gone(workers):
    one, other = workers
    with rpc.use_worker("worker1"):
        rpc.shutdown(graceful=False)
    one.send(other, 1)
    assert wait_for(lambda: one.answers == ["unreachable"])
    assert one.delivery.idle()


def test_what_a_worker_takes_with_it_when_it_leaves_is_no_refusal(workers, caplog):
    """It has left the group and is not closed yet; nothing is wrong with that."""
    one, other = workers
    other.later = rpc.Future()
    one.send(other, 1)
    assert wait_for(lambda: other.batches)
    one.agent.ending = True
    one.agent.directory.find("worker1").close("they have parted")
    assert wait_for(lambda: one.answers == ["unreachable"])
    assert caplog.text == ""


@pytest.mark.parametrize("end", ["forget", "close"])
def test_the_end_of_what_is_under_way_is_told_once(workers, end):
    one, other = workers
    other.later = rpc.Future()
    one.send(other, 1)
    assert wait_for(lambda: other.batches)
    one.send(other, 2, gather=True)
    given = (other.number,) if end == "forget" else ()
    getattr(one.delivery, end)(*given)
    assert wait_for(lambda: len(one.answers) == 2)
    assert one.answers == ["unreachable"] * 2
    other.later.set_result([None])
    assert one.delivery.idle()
    assert len(one.answers) == 2


@pytest.mark.parametrize("gather", [False, True])
def test_an_interrupted_send_stops_no_later_one(workers, monkeypatch, gather):
    """The interrupt comes where the message is handed to another thread."""
    one, other = workers

    def interrupted(*given):
        raise KeyboardInterrupt

    where = one.agent.timer if gather else one.agent.pool
    with monkeypatch.context() as patch:
        patch.setattr(where, "later" if gather else "run", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            one.send(other, 1, gather=gather)
    one.send(other, 2, gather=gather)
    assert wait_for(lambda: 2 in other.handled())
    assert wait_for(one.delivery.idle)

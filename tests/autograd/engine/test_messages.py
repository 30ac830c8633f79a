"""Messages of passes: absent cotangents travel as None; malformed ones are refused."""

import re
import subprocess
import sys

import pytest

from jdist.autograd import AutogradError
from jdist.autograd.engine.messages import (
    END,
    GRADIENTS,
    GradientAnswer,
    MessageGradient,
    PassFailure,
    PassTerms,
    StarvingSend,
    pack_gradients,
    unpack_gradients,
)
from jdist.autograd.recording.errors import BackwardError
from jdist.rpc import ProtocolError, WorkerLost
from jdist.rpc.base import current

TERMS = PassTerms(5, 6, False, {7: 8})


def test_gradients_arrive_as_they_were(rng):
    some = [rng.normal(size=size) for size in (2, 3, 5)]
    gradients = [
        MessageGradient(7, [None, some[0], None]),
        MessageGradient(8, [None]),
        MessageGradient(9, [some[1], some[2]]),
    ]
    body = pack_gradients(gradients)
    assert body[0] == (7, [None, some[0], None])
    assert unpack_gradients(body) == gradients
    assert unpack_gradients(pack_gradients([])) == []


def test_answers_arrive_as_they_were(rng):
    gradients = [MessageGradient(7, [rng.normal(size=4), None])]
    news = {11: StarvingSend("c", "send f to d"), 12: None}
    reply = GradientAnswer(gradients, news).pack()
    arrived = GradientAnswer.unpack(reply.value, reply.meta)
    assert arrived == GradientAnswer(gradients, news)


def test_failures_arrive_in_place_of_gradients():
    error = ValueError("singular")
    answer = GradientAnswer([MessageGradient(7, [None])], {}, PassFailure("c", error))
    reply = answer.pack()
    assert GradientAnswer.unpack(reply.value, reply.meta) == GradientAnswer(
        (), {}, PassFailure("c", error)
    )


def terms(position, value):
    changed = list(TERMS)
    changed[position] = value
    return {"terms": changed}


NO_REQUESTS = {
    "without metadata": ([], {}, "No request with gradients: Expected `array`"),
    "too short": ([], {"terms": [1]}, "No request with gradients: Expected"),
    "too long": ([], {"terms": [*TERMS, 1]}, "length 4, got 5"),
    "id": ([], terms(0, "5"), "`int`, got `str` - at `$[0]`"),
    "truth": ([], terms(0, True), "got `bool` - at `$[0]`"),
    "retain": ([], terms(2, 1), "`bool`, got `int` - at `$[2]`"),
    "marks": ([], terms(3, {7: "8"}), "`int`, got `str` - at `$[3][...]`"),
    "negative marks": ([], terms(3, {7: -8}), "`int` >= 0 - at `$[3][...]`"),
    "body": ({}, {"terms": list(TERMS)}, "has a message's id and cotangents"),
    "row": ([(7,)], {"terms": list(TERMS)}, "has a message's id and cotangents"),
    "row of texts": ([("7", [])], {"terms": list(TERMS)}, "has a message's id"),
    "truth for an id": ([(True, [])], {"terms": list(TERMS)}, "has a message's id"),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_what_is_no_request_is_refused(name, threads):
    body, meta, words = NO_REQUESTS[name]
    with pytest.raises(ProtocolError, match=re.escape(words)):
        current.worker().call("worker1", GRADIENTS, body, meta=meta)


NO_ANSWERS = {
    "without metadata": ([], {}, "No answer to gradients"),
    "news": ([], {"news": 5}, "`object`, got `int`"),
    "one of the news": ([], {"news": {5: ["b", 1]}}, "`str`, got `int`"),
    "gradients": (5, {"news": {}}, "has a message's id and cotangents"),
    "failure": (("b", "no exception"), {"news": None}, "A failure"),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_refused(name):
    body, meta, words = NO_ANSWERS[name]
    with pytest.raises(ProtocolError, match=re.escape(words)):
        GradientAnswer.unpack(body, meta)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (END, [], "The end of a pass has a context"),
        (END, (5, "6", "b", KeyError("w")), "The end of a pass has a context"),
        (END, (5, 6, "b", "words"), "The end of a pass has a context"),
    ],
)
def test_other_messages_are_checked(kind, body, words, threads):
    with pytest.raises(ProtocolError, match=words):
        current.worker().call("worker1", kind, body)


def test_an_error_is_raised_with_its_place_and_cause():
    cause = KeyError("w")
    error = PassFailure("worker1", cause).exception()
    assert type(error) is BackwardError
    assert isinstance(error, RuntimeError)
    assert isinstance(error, AutogradError)
    assert str(error) == "Error on worker worker1: 'w'"
    assert (error.worker, error.__cause__) == ("worker1", cause)
    silent = PassFailure("worker1", KeyError()).exception()
    assert re.fullmatch(r"Error on worker worker1: KeyError\(\)", str(silent))


def test_errors_of_rpc_and_of_passes_are_raised_as_they_are():
    for error in (WorkerLost("b", "f", "it died"), BackwardError("b", "why")):
        assert PassFailure("worker1", error).exception() is error


FIRST_MESSAGES = """
import threading, time, types
import msgspec._utils
from jdist.autograd.engine import messages

# From here on msgspec takes long to read the types of a class.
utils = msgspec._utils
code = utils.get_class_annotations.__code__
utils._read = types.FunctionType(code, vars(utils))
utils._wait = time.sleep

def slowly(kind):
    _wait(0.05)
    return _read(kind)

utils.get_class_annotations.__code__ = slowly.__code__

terms = messages.PassTerms(5, 6, True, {7: 1})
news = {5: messages.StarvingSend("worker1", "send")}
answer = messages.GradientAnswer([], news)
found = []

def read(after):
    time.sleep(after)
    found.append(messages.unpacked(list(terms), messages.PassTerms, "no") == terms)
    meta = {"news": {5: ["worker1", "send"]}}
    found.append(messages.GradientAnswer.unpack([], meta) == answer)

threads = [threading.Thread(target=read, args=(n / 50,)) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found.count(True), len(found))
"""


def test_first_messages_that_threads_read_at_the_same_time():
    """A process ended where one used what msgspec had read by half for another."""
    command = [sys.executable, "-c", FIRST_MESSAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "16 16\n"), done.stderr

"""Gradient messages: an absent gradient takes no bytes; malformed ones are refused."""

import re
import subprocess
import sys

import pytest

from jdist.autograd import AutogradError
from jdist.autograd.engine.messages import (
    GradientAnswer,
    GradientRequest,
    MessageGradient,
    PassFailure,
    PassTerms,
    StarvationReport,
    StarvingSend,
    unpack_end,
    unpack_reach,
    unpack_reached,
)
from jdist.autograd.recording.errors import BackwardError
from jdist.rpc import ProtocolError, WorkerLost

TERMS = PassTerms(5, 6, True, False)


def test_requests_arrive_as_they_were_and_absent_cotangents_do_not_travel(rng):
    some = [rng.normal(size=size) for size in (2, 3, 5)]
    gradients = [
        MessageGradient(7, [None, some[0], None]),
        MessageGradient(8, [None]),
        MessageGradient(9, [some[1], some[2]]),
    ]
    body, meta = GradientRequest(TERMS, [7, 8, 9], gradients).pack()
    assert [id(array) for array in body] == [id(array) for array in some]
    assert GradientRequest.unpack(body, meta) == GradientRequest(
        TERMS, [7, 8, 9], gradients
    )
    body, meta = GradientRequest(TERMS, None, []).pack()
    assert GradientRequest.unpack(body, meta) == GradientRequest(TERMS, None, [])


def test_answers_arrive_as_they_were(rng):
    gradients = [MessageGradient(7, [rng.normal(size=4), None])]
    reports = {
        "c": StarvationReport(3, (StarvingSend(11, "d", "send f to d"),)),
        "d": StarvationReport(1, ()),
    }
    reply = GradientAnswer(gradients, reports).pack()
    arrived = GradientAnswer.unpack(reply.value, reply.meta)
    assert arrived == GradientAnswer(gradients, reports)


def test_failures_arrive_in_place_of_gradients():
    error = ValueError("singular")
    answer = GradientAnswer([MessageGradient(7, [None])], {}, PassFailure("c", error))
    reply = answer.pack()
    assert GradientAnswer.unpack(reply.value, reply.meta) == GradientAnswer(
        (), {}, PassFailure("c", error)
    )


def field(position, value):
    _, meta = GradientRequest(TERMS, [7], []).pack()
    meta["gradients"][position] = value
    return meta


NO_REQUESTS = {
    "without metadata": ([], {}, "No request with gradients: Expected `array`"),
    "too short": ([], {"gradients": [1]}, "No request with gradients: Expected"),
    "too long": ([], {"gradients": [TERMS, [], [], 1]}, "at most length 3"),
    "id": ([], field(0, ["5", 6, True, False]), "`int`, got `str` - at `$[0][0]`"),
    "truth": ([], field(0, [True, 6, True, False]), "got `bool` - at `$[0][0]`"),
    "mode": ([], field(0, [5, 6, 1, False]), "`bool`, got `int` - at `$[0][2]`"),
    "marks": ([], field(1, ["7"]), "`int`, got `str` - at `$[1][0]`"),
    "rows": ([], field(2, 1), "`array`, got `int` - at `$[2]`"),
    "body": ({}, field(2, []), "rows and arrays"),
    "row": ([], field(2, [[7]]), "length 3, got 1 - at `$[2][0]`"),
    "row of texts": ([], field(2, [["7", 1, []]]), "got `str` - at `$[2][0][0]`"),
    "positions": ([1], field(2, [[7, 1, [1]]]), "more positions than its size"),
    "negative": ([1], field(2, [[7, 1, [-1]]]), "more positions than its size"),
    "too many": ([1, 1], field(2, [[7, 1, [0, 0]]]), "more positions than its size"),
    "arrays": ([], field(2, [[7, 1, [0]]]), "fewer arrays than positions"),
    "more arrays": ([1, 2], field(2, [[7, 1, [0]]]), "more arrays than"),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_what_is_no_request_is_refused(name):
    body, meta, words = NO_REQUESTS[name]
    with pytest.raises(ProtocolError, match=re.escape(words)):
        GradientRequest.unpack(body, meta)


NO_ANSWERS = {
    "without metadata": ([], {}, "length 2, got 0"),
    "too short": ([], {"gradients": [[]]}, "length 2, got 1"),
    "reports": ([], {"gradients": [[], 5]}, "`array`, got `int` - at `$[1]`"),
    "report": ([], {"gradients": [[], [["b", [1, [[1]]]]]]}, "at `$[1][0][1][1][0]`"),
    "failure": (("b", "no exception"), {"gradients": None}, "A failure"),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_refused(name):
    body, meta, words = NO_ANSWERS[name]
    with pytest.raises(ProtocolError, match=re.escape(words)):
        GradientAnswer.unpack(body, meta)


def test_the_end_of_a_pass_and_questions_are_checked():
    error = KeyError("w")
    assert unpack_end((5, 6, "b", error)) == (5, 6, PassFailure("b", error))
    for body in ([], (5, "6", "b", error), (5,)):
        with pytest.raises(ProtocolError, match="names a context and a pass"):
            unpack_end(body)
    with pytest.raises(ProtocolError, match="A failure"):
        unpack_end((5, 6, "b", "words"))
    assert unpack_reach((5, [7, 8])) == (5, [7, 8])
    with pytest.raises(ProtocolError, match="a context and ids"):
        unpack_reach((5, ["7"]))
    assert unpack_reached(([7, 8], [8])) == ({7, 8}, {8})
    with pytest.raises(ProtocolError, match="ids of messages"):
        unpack_reached(([7],))


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

terms = messages.PassTerms(5, 6, True, False)
sent = [messages.MessageGradient(7, [11.0])]
request = messages.GradientRequest(terms, [5], sent)
report = {"worker1": messages.StarvationReport(7, ())}
answer = messages.GradientAnswer(sent, report)
found = []

def read(after):
    time.sleep(after)
    reply = answer.pack()
    got = messages.GradientAnswer.unpack(reply.value, reply.meta)
    found.append(messages.GradientRequest.unpack(*request.pack()) == request)
    found.append(dict(got.reports) == report)

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

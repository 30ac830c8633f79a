"""Channels that break in the middle of calls, although both workers live."""

import contextlib
from collections import Counter

import pytest

from jdist import rpc
from jdist.rpc.wire.frame import CALL, CANCEL, REPLY
from tests.rpc.conformance import test_faulty as faulty
from tests.rpc.faults import Rule
from tests.rpc.faulty_clusters import WAYS, struck

FAULTS = ("drop", "duplicate", "truncate", "close")
CALLS = 400


@pytest.fixture(params=WAYS)
def begin(request, hosts):
    """`begin(make_rules)`: two workers whose frames meet those faults."""
    with contextlib.ExitStack() as stack:

        def start(make_rules):
            cluster = stack.enter_context(WAYS[request.param](hosts, make_rules))
            cluster.everywhere(faulty.forget)
            return cluster

        yield start


def closed_calls():
    return [Rule("close", CALL, first=2)]


def cut_calls():
    return [Rule("truncate", CALL, first=2)]


def closed_answers():
    return [Rule("close", REPLY, first=2)]


def cut_answers():
    return [Rule("truncate", REPLY, first=2)]


def two_that_break():
    for number, start in enumerate((faulty.synchronous, faulty.asynchronous)):
        verb = ("rpc_sync", "rpc_async")[number]
        match = rf"Lost worker 'worker1' during {verb}\(note\): its connection closed"
        with pytest.raises(rpc.WorkerLost, match=match):
            start(faulty.note, (number,))


def lost_workers():
    return rpc.debug_info()["group.lost"]


@pytest.mark.parametrize(
    ("make_rules", "before"),
    [
        (closed_calls, []),
        (cut_calls, []),
        (closed_answers, [0, 1]),
        (cut_answers, [0, 1]),
    ],
)
def test_only_the_call_itself_is_lost(begin, make_rules, before):
    """It has not run, or only its answer is missing; the next ones succeed."""
    cluster = begin(make_rules)
    cluster.run(0, two_that_break)
    values = cluster.run(0, faulty.calls_that_succeed)
    assert [value for _, value in values] == [7, 8]
    assert cluster.run(1, faulty.ran) == [*before, 7, 8]
    assert cluster.everywhere(lost_workers) == [{}, {}]


def all_faults():
    return [
        Rule(fault, kind, probability=0.02)
        for fault in FAULTS
        for kind in (CALL, REPLY, CANCEL)
    ]


def outcome(wait):
    try:
        return wait()[1]
    except (rpc.RpcTimeout, rpc.WorkerLost) as error:
        return type(error).__name__


def call_many(count):
    """What came of each call, by its number: half of them one after the other."""
    found = {}
    futures = {
        i: rpc.rpc_async("worker1", faulty.note, args=(i,), timeout=0.2)
        for i in range(0, count, 2)
    }
    for i in range(1, count, 2):
        found[i] = outcome(
            lambda i=i: faulty.synchronous(faulty.note, (i,), timeout=0.2)
        )
    for i, future in futures.items():
        found[i] = outcome(future.wait)
    assert rpc.debug_info()["agent.client_active_calls"] == 0
    return found


def test_whatever_happens_to_frames_every_call_ends(begin):
    """With its own value or an error of rpc; and none runs twice."""
    cluster = begin(all_faults)
    found = cluster.run(0, call_many, CALLS)
    ran = Counter(cluster.run(1, faulty.ran))
    assert set(found) == set(range(CALLS))
    succeeded = {number for number, value in found.items() if value == number}
    failed = {number: value for number, value in found.items() if value != number}
    assert set(failed.values()) == {"RpcTimeout", "WorkerLost"}
    # A fault on the shared channel ends all that are under way there, so look at those
    # made one after the other.
    assert sum(number % 2 for number in succeeded) > CALLS / 4
    assert succeeded <= set(ran)
    assert set(ran.values()) == {1}
    faults = cluster.run(0, struck)
    assert {fault for fault, kind in faults if kind == CALL} == set(FAULTS)
    assert cluster.everywhere(lost_workers) == [{}, {}]

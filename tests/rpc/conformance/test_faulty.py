"""Calls whose frames are lost, late or sent twice on the way."""

import contextlib

import jax
import pytest

from jdist import rpc
from jdist.rpc.wire.frame import CALL, REPLY
from tests.rpc.faults import Rule
from tests.rpc.faulty_clusters import WAYS, late, let_go, struck

RAN = "RPC ran for more than set timeout"
LIMIT = 0.1
ARRIVES = 0.5  # Enough for a call to begin on a slow machine; in vain otherwise.
_ran: list = []


def late_requests():
    """Calls wait for an event of the process in which this runs."""
    return [Rule("delay", CALL, until=late)]


@pytest.fixture(params=WAYS)
def begin(request, hosts):
    """`begin(make_rules)`: two workers whose frames meet those faults."""
    with contextlib.ExitStack() as stack:

        def start(make_rules):
            way = WAYS[request.param](hosts, make_rules)
            cluster = stack.enter_context(way)
            cluster.everywhere(forget)
            return cluster

        yield start


def difference(x, y):
    return x - y


@jax.jit
def compiled_difference(x, y):
    return x - y


def synchronous(function, args, **timeout):
    return rpc.rpc_sync("worker1", function, args=args, **timeout)


def asynchronous(function, args, **timeout):
    return rpc.rpc_async("worker1", function, args=args, **timeout).wait()


def late_calls(function, expected):
    # A limit of its own, and the default when that is short.
    for start in (synchronous, asynchronous):
        with pytest.raises(rpc.RpcTimeout, match=rf"{RAN} \(100 ms\)"):
            start(function, (20, 7), timeout=LIMIT)
    by_default = rpc.rpc_async("worker1", function, args=(20, 7))
    rpc.set_rpc_timeout(LIMIT)
    for start in (synchronous, asynchronous):
        with pytest.raises(rpc.RpcTimeout, match=rf"{RAN} \(100 ms\)"):
            start(function, (20, 7))
    unlimited = rpc.rpc_async("worker1", function, args=(20, 6), timeout=0)
    assert not by_default.done()
    let_go()
    # The calls given up have come too late: nobody gets their results.
    assert by_default.wait() == expected[0]
    assert unlimited.wait() == expected[1]
    assert synchronous(function, (20, 5), timeout=0) == expected[2]
    rpc.set_rpc_timeout(60)


FUNCTIONS = {
    "builtin": (divmod, [(2, 6), (3, 2), (4, 0)]),
    "Python": (difference, [13, 14, 15]),
    "compiled": (compiled_difference, [13, 14, 15]),
}


def late_calls_of(name):
    late_calls(*FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_that_come_late(begin, name):
    begin(late_requests).run(0, late_calls_of, name)


def note(x):
    _ran.append(x)
    return len(_ran), x


def forget():
    _ran.clear()


def ran():
    return list(_ran)


def calls_in_vain(limit=LIMIT):
    for number, start in enumerate((synchronous, asynchronous)):
        with pytest.raises(rpc.RpcTimeout, match=RAN):
            start(note, (number,), timeout=limit)


def calls_that_succeed():
    return synchronous(note, (7,)), asynchronous(note, (8,))


def lost_requests():
    return [Rule("drop", CALL, first=2)]


def test_calls_that_are_lost(begin):
    """They end with their limits and never run; the next ones do."""
    cluster = begin(lost_requests)
    # A call that is over before it is sent would leave its fault to a later one.
    cluster.run(0, calls_in_vain, ARRIVES)
    assert cluster.run(0, calls_that_succeed) == ((1, 7), (2, 8))
    assert cluster.run(1, ran) == [7, 8]


def lost_answers():
    return [Rule("drop", REPLY)]


def test_answers_that_are_lost(begin):
    """Nothing is sent again, so nothing runs twice."""
    cluster = begin(lost_answers)
    cluster.run(0, calls_in_vain, ARRIVES)
    assert cluster.run(1, ran) == [0, 1]


def late_answers():
    return [Rule("delay", REPLY, until=late)]


def test_answers_that_come_too_late(begin):
    """Nobody takes them for those of the next calls."""
    cluster = begin(late_answers)
    cluster.run(0, calls_in_vain, ARRIVES)
    cluster.run(1, let_go)
    assert cluster.run(0, calls_that_succeed) == ((3, 7), (4, 8))
    assert cluster.run(1, ran) == [0, 1, 7, 8]


def twice():
    return [Rule("duplicate", CALL), Rule("duplicate", REPLY)]


def many_calls():
    futures = [rpc.rpc_async("worker1", note, args=(i,)) for i in range(20)]
    values = [future.wait()[1] for future in futures]
    return values + [synchronous(note, (i,))[1] for i in range(20, 40)]


def test_calls_and_answers_that_come_twice(begin):
    cluster = begin(twice)
    assert cluster.run(0, many_calls) == list(range(40))
    assert sorted(cluster.run(1, ran)) == list(range(40))


def test_faults_happen_where_they_should(begin):
    """Once for each call here, and for each answer there."""
    cluster = begin(twice)
    assert cluster.run(0, many_calls) == list(range(40))
    there = cluster.run(1, struck)
    assert there["duplicate", REPLY] == 40
    assert cluster.run(0, struck)["duplicate", CALL] == 40


def no_faults():
    return [Rule("drop", "no.such.kind")]


def test_without_faults(begin):
    cluster = begin(no_faults)
    assert cluster.run(0, many_calls) == list(range(40))
    assert cluster.run(0, struck) == cluster.run(1, struck) == {}

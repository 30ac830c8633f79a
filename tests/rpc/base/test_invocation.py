"""The hook around calls, for parts built upon rpc."""

import pytest
from msgspec.structs import replace

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.wire.frame import CALL
from tests.rpc.hosts import names


def add(x, y):
    return x + y


@rpc.async_execution
def later(x):
    future = rpc.Future()
    future.set_result(x)
    return future


def returns_future():
    return rpc.Future()


class Doubling:
    """Doubles arguments on the way out, adds ten at the callee, negates on return."""

    def __init__(self):
        self.log = []

    def request(self, to, call):
        self.log.append(("request", to.name, call.kind, call.function.__name__))
        doubled = tuple(2 * x for x in call.args)
        return replace(call, args=doubled), {"note": "out"}

    def execute(self, caller, call, meta, run):
        self.log.append(("execute", caller.name, meta["note"]))
        value = run(call)
        if isinstance(value, rpc.Future):
            return value.then(lambda done: done.value() + 10), {"note": "later"}
        return value if type(value).__name__ == "Reply" else value + 10, {
            "note": "back"
        }

    def local(self, value):
        self.log.append(("local", value))
        return value + 100

    def reply(self, to, value, meta):
        self.log.append(("reply", to.name, meta["note"]))
        return -value


@pytest.fixture
def interceptor():
    with rpc.local_cluster(names(2), allow=["tests"]):
        doubling = Doubling()
        for name in names(2):
            with rpc.use_worker(name):
                current.worker().interceptor = doubling
        yield doubling


def waiting(to, fn, args):
    return rpc.rpc_async(to, fn, args=args).wait()


@pytest.mark.parametrize("start", [rpc.rpc_sync, waiting])
def test_a_call_passes_it_on_both_sides(interceptor, start):
    assert start("worker1", add, args=(1, 2)) == -16
    assert interceptor.log == [
        ("request", "worker1", CALL, "add"),
        ("execute", "worker0", "out"),
        ("reply", "worker1", "back"),
    ]


@pytest.mark.parametrize("start", [rpc.rpc_sync, waiting])
def test_so_does_a_deferred_one(interceptor, start):
    assert start("worker1", later, args=(4,)) == -18
    assert interceptor.log[-1] == ("reply", "worker1", "later")


def test_an_exception_passes_no_reply(interceptor):
    with pytest.raises(TypeError, match="add"):
        rpc.rpc_sync("worker1", add, args=(1,))
    assert [entry[0] for entry in interceptor.log] == ["request", "execute"]


def test_a_future_is_refused_with_it_too(interceptor):
    with pytest.raises(TypeError, match="Can not pickle"):
        rpc.rpc_sync("worker1", returns_future)


def test_requests_of_other_parts_do_not_pass_it(interceptor):
    agent = current.worker()
    with rpc.use_worker("worker1"):
        current.worker().register(
            "test.echo", lambda caller, body, meta: (caller.name, body)
        )
    assert agent.call("worker1", "test.echo", [1]) == ("worker0", [1])
    assert agent.call_async("worker1", "test.echo", [2]).wait() == ("worker0", [2])
    assert interceptor.log == []
    with pytest.raises(ValueError, match="have a handler already"):
        agent.register(CALL, lambda caller, body, meta: None)
    with pytest.raises(
        rpc.ProtocolError, match=r"Nothing here answers .* 'test\.none'"
    ):
        agent.call("worker1", "test.none", None)


def test_a_value_of_one_s_own_passes_it(interceptor):
    """`to_here` on the owner; `local_value` does not."""
    rref = rpc.RRef(7)
    assert (rref.to_here(), rref.local_value()) == (107, 7)
    assert interceptor.log == [("local", 7)]

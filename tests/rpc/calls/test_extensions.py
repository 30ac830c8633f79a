"""Packages built upon rpc: installed on every worker, told of all workers' ends."""

import threading

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.calls import agent as agents
from jdist.rpc.codec.codec import MessageContext
from tests.rpc.hosts import names


@pytest.fixture
def part(monkeypatch):
    """A part of this test's own: its installer, and whom it was called with."""
    monkeypatch.setattr(agents, "_installers", dict(agents._installers))
    seen = []
    return seen


def test_workers_that_are_there_and_those_to_come_get_it(part):
    with rpc.local_cluster(names(2)):
        agents.extend("test.part", lambda agent: part.append(agent.info.name))
        assert sorted(part) == names(2)
        agents.extend("test.part", lambda agent: part.append("again"))
        assert len(part) == 2
    with rpc.local_cluster(["later"]):
        assert part[2:] == ["later"]
    agents.extend("test.other", lambda agent: part.append("closed"))
    assert part[2:] == ["later"]


def test_it_is_told_of_workers_that_go_and_of_the_end():
    gone, closed, told = [], [], threading.Event()
    with rpc.local_cluster(names(2)):
        agent = current.worker()
        agent.extension_state.on_gone(
            lambda who, why: (gone.append((who.name, why)), told.set())
        )
        agent.extension_state.on_close(lambda: closed.append(agent.closed))
        with rpc.use_worker("worker1"):
            rpc.shutdown(graceful=False)
        assert told.wait(30.0)
        assert closed == []
    assert [name for name, _ in gone] == ["worker1"]
    assert closed == [True]


class Token:
    """A type of the test's own; notes the messages of what it travels in."""


@pytest.fixture
def seen():
    """Parcels that the hooks of both sides saw, as (side, meta, operation)."""
    found = []

    def give(token, message):
        message.meta.setdefault("notes", []).append(message.worker.name)
        message.if_lost = [*message.if_lost, lambda: found.append(("lost",))]
        found.append(("give", message.worker.name, str(message.operation)))
        return None

    def take(_, message):
        found.append(("take", message.worker.name, message.meta.get("notes")))
        return Token()

    with rpc.local_cluster(names(2), allow=["tests"]):
        for name in names(2):
            with rpc.use_worker(name):
                current.worker().codec.register(Token, "test.token", give, take)
        yield found


def keep(token):
    return 5


def answer(token):
    return token


def refuse(token):
    raise ValueError("Expected error")


def waiting(to, fn, args):
    return rpc.rpc_async(to, fn, args=args).wait()


@pytest.mark.parametrize("call", [rpc.rpc_sync, waiting])
def test_hooks_of_types_know_the_message(seen, call):
    verb = "rpc_sync" if call is rpc.rpc_sync else "rpc_async"
    assert isinstance(call("worker1", answer, (Token(),)), Token)
    assert seen == [
        ("give", "worker1", f"{verb}(answer)"),
        ("take", "worker0", ["worker1"]),
        ("give", "worker0", "call(answer)"),
        ("take", "worker1", ["worker0"]),
    ]


@pytest.mark.parametrize("call", [rpc.rpc_sync, waiting])
def test_hooks_learn_of_a_call_that_failed(seen, call):
    assert call("worker1", keep, (Token(),)) == 5
    assert ("lost",) not in seen
    with pytest.raises(ValueError, match="Expected error"):
        call("worker1", refuse, (Token(),))
    assert seen.count(("lost",)) == 1
    with pytest.raises(TypeError, match="must be made of"):
        call("worker1", keep, ((Token(), threading.Lock()),))
    assert seen.count(("lost",)) == 2


def test_hooks_find_the_metadata_of_the_message(seen):
    agent = current.worker()
    with rpc.use_worker("worker1"):
        current.worker().register("test.take", lambda caller, body, meta: meta["notes"])
    given = agent.call("worker1", "test.take", Token(), meta={"notes": ["before"]})
    assert given == ["before", "worker1"]


def test_an_empty_parcel_shares_nothing():
    one, other = (MessageContext(rpc.WorkerInfo(name, 0)) for name in "ab")
    one.meta["x"] = 1
    assert (other.meta, other.if_lost, str(other.operation)) == ({}, (), "")

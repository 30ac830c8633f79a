"""Handlers that run on the thread that reads a connection, and what is kept off it."""

import threading

import numpy as np
import pytest

from jdist import pipeline, rpc
from jdist.rpc.base import current
from jdist.rpc.calls.callee import ServedConnection
from jdist.rpc.wire.frame import Frame
from tests.rpc.hosts import names
from tests.rpc.sockets import connected_pair, soon

KIND = "test.inline"
ONE, OTHER = names(2)
PATIENCE = 60

assert pipeline  # it registers handlers of its own


def told(caller, body, meta):
    """Whether the thread that reads the connection runs this."""
    return current.scope.get().reading


@pytest.fixture
def agents():
    with rpc.local_cluster([ONE, OTHER], allow=["tests"]):
        found = []
        for name in (ONE, OTHER):
            with rpc.use_worker(name):
                found.append(current.worker())
        yield found


def asked(agent, body=None, kind=KIND):
    with rpc.use_worker(agent.info.name):
        return agent.call_async(OTHER, kind, body).wait(PATIENCE)


def test_it_runs_on_the_thread_that_reads(agents):
    one, other = agents
    other.register(KIND, told, inline=True)
    other.register("test.pool", told)
    assert asked(one, 1)
    assert not asked(one, 1, "test.pool")


def test_a_body_that_names_code_is_decoded_elsewhere(agents):
    """To look a name up imports a module, which may wait."""
    one, other = agents
    other.register(KIND, told, inline=True)
    assert asked(one, (1, "text", [2.5]))
    assert not asked(one, max)


def wait_for_a_call(caller, body, meta):
    current.worker().call(ONE, "test.pool", None)


def wait_for_a_future(caller, body, meta):
    rpc.Future().wait(PATIENCE)


def wait_for_several(caller, body, meta):
    rpc.wait_all([rpc.Future()], PATIENCE)


@pytest.mark.parametrize(
    "handler", [wait_for_a_call, wait_for_a_future, wait_for_several]
)
def test_one_that_waits_is_refused(agents, handler):
    one, other = agents
    one.register("test.pool", told)
    other.register(KIND, handler, inline=True)
    with pytest.raises(rpc.RpcError, match="must never wait"):
        asked(one)


def test_users_functions_are_never_inline(agents):
    with pytest.raises(ValueError, match="must not run users' functions"):
        agents[0].register(KIND, told, limited=True, inline=True)


def test_an_answer_waits_for_a_peer_that_reads_slowly(agents, monkeypatch):
    """Requests behind it wait too; other connections and the pool do not."""
    one, other = agents
    count, handled = 40, []

    def answer(caller, body, meta):
        handled.append(body)
        return np.full(1 << 15, float(body))

    other.register(KIND, answer, inline=True)
    other.register("test.pool", told)

    def send(channel):
        for number in range(1, count + 1):
            channel.send(Frame(KIND, number, {}, number, [], shared=True), soon())

    full = threading.Event()
    with connected_pair() as (near, far):
        wait_for_room = far._stream._wait_for_room

        def wait(*args):
            full.set()
            wait_for_room(*args)

        monkeypatch.setattr(far._stream, "_wait_for_room", wait)
        serving = ServedConnection(other.callee, far, one.info)
        threads = [
            threading.Thread(target=serving.read),
            threading.Thread(target=send, args=(near,)),
        ]
        for thread in threads:
            thread.start()
        # The first answers fill the socket. Then nothing more is handled.
        assert full.wait(PATIENCE)
        waiting = len(handled)
        assert asked(one, 0)[0] == 0.0
        assert not asked(one, 0, "test.pool")
        handled.remove(0)
        assert len(handled) == waiting < count
        for number in range(1, count + 1):
            frame = near.receive(soon())
            assert (frame.kind, frame.id) == ("reply", number)
            assert {*np.asarray(frame.leaves[0])} == {float(number)}
        assert handled == [*range(1, count + 1)]
        near.close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_the_librarys_own(agents):
    """Each of these was read for waits; a new one has to be."""
    assert {*agents[0].callee._inline} <= {
        "pipeline.value",
        "rref.abort",
        "rref.accept",
        "rref.delete",
        "rref.fork",
        "rref.take",
    }

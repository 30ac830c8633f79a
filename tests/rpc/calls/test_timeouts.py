"""Deadlines: of calls, of what they beget, and what a call given up leaves behind."""

import datetime
import threading
import unittest.mock

import pytest

from jdist import rpc
from jdist.rpc.calls import debug

PATIENCE = 60
ARRIVES = 0.5  # Enough for a call to begin on a slow machine; in vain otherwise.
RAN = "RPC ran for more than set timeout"
_gates: dict[str, threading.Event] = {}
_seen: dict[str, list] = {}


def add(x, y):
    return x + y


def gate(name):
    return _gates.setdefault(name, threading.Event())


def wait_at(name):
    return gate(name).wait(PATIENCE)


def open_gate(name):
    gate(name).set()


def patient():
    """Waits for what the callee is doing as long as a slow machine takes to say it."""
    return unittest.mock.patch.object(debug, "_PATIENCE", PATIENCE)


def call_with_limit(start, name):
    start("worker1", add, args=(1, 2), timeout=0)  # Whose connection is there then.
    with patient(), pytest.raises(rpc.RpcTimeout, match=RAN) as caught:
        start("worker1", wait_at, args=(name,), timeout=ARRIVES)
    rpc.rpc_sync("worker1", open_gate, args=(name,))
    # The channel that was given up is not used again with an old answer on it.
    assert rpc.rpc_sync("worker1", add, args=(1, 2), timeout=PATIENCE) == 3
    return str(caught.value)


def asynchronous(to, fn, args, timeout):
    return rpc.rpc_async(to, fn, args=args, timeout=timeout).wait()


@pytest.mark.parametrize("start", [rpc.rpc_sync, asynchronous])
def test_a_call_has_a_limit(cluster, start):
    text = cluster.run(
        0, call_with_limit, start, f"limit {start.__name__} {cluster.kind}"
    )
    assert f"{RAN} (500 ms)" in text
    assert "wait_at) to 'worker1'" in text


@pytest.mark.parametrize("start", [rpc.rpc_sync, asynchronous])
def test_the_error_says_what_the_callee_is_doing(cluster, start):
    text = cluster.run(
        0, call_with_limit, start, f"doing {start.__name__} {cluster.kind}"
    )
    assert "It executes call(wait_at) of 'worker0' since" in text


def waiting_in_turn(name):
    """worker0 waits for worker1, which waits for worker2."""
    future = rpc.rpc_async("worker1", relay, args=("worker2", name))
    rpc.rpc_sync("worker2", has_begun, args=(name,))
    with patient(), pytest.raises(rpc.RpcTimeout, match=RAN) as caught:
        rpc.rpc_sync("worker1", wait_at, args=(f"{name} more",), timeout=0.05)
    for to in ("worker1", "worker2"):
        rpc.rpc_sync(to, open_gate, args=(name,))
        rpc.rpc_sync(to, open_gate, args=(f"{name} more",))
    assert future.wait() is True
    return str(caught.value)


def relay(to, name):
    return rpc.rpc_sync(to, begin_and_wait, args=(name,))


def begin_and_wait(name):
    gate(f"{name} begun").set()
    return wait_at(name)


def has_begun(name):
    assert gate(f"{name} begun").wait(PATIENCE)


def test_the_error_says_who_waits_for_whom(cluster):
    text = cluster.run(0, waiting_in_turn, f"in turn {cluster.kind}")
    assert "executes call(relay) of 'worker0'" in text
    assert "waits for rpc_sync(begin_and_wait) of 'worker2'" in text


def defaults(name):
    in_flight = rpc.rpc_async("worker1", wait_at, args=(name,))
    assert rpc.set_rpc_timeout(0.05) == 60.0
    try:
        late = [rpc.rpc_async("worker1", wait_at, args=(name,)) for _ in range(10)]
        for future in late:
            with pytest.raises(rpc.RpcTimeout, match=rf"{RAN} \(50 ms\)"):
                future.wait()
        with pytest.raises(rpc.RpcTimeout, match=rf"{RAN} \(50 ms\)"):
            rpc.rpc_sync("worker1", wait_at, args=(name,))
        # A limit of its own, or none, goes before the default.
        longer = rpc.rpc_async("worker1", wait_at, args=(name,), timeout=PATIENCE)
        unlimited = rpc.rpc_async("worker1", wait_at, args=(name,), timeout=0)
        assert not in_flight.done()
        rpc.rpc_sync("worker1", open_gate, args=(name,), timeout=0)
        assert [f.wait() for f in (in_flight, longer, unlimited)] == [True] * 3
        rpc.set_rpc_timeout(0)
        assert rpc.rpc_sync("worker1", add, args=(1, 2)) == 3
    finally:
        rpc.set_rpc_timeout(60.0)


def test_the_default_limit(cluster):
    cluster.run(0, defaults, f"defaults {cluster.kind}")


def test_the_default_limit_from_the_options():
    options = rpc.RpcOptions(timeout=0.05)
    with rpc.local_cluster(["a", "b"], options=options, allow=["tests"]):
        assert rpc.set_rpc_timeout(0.05) == 0.05
        with pytest.raises(rpc.RpcTimeout, match=RAN):
            rpc.rpc_sync("b", wait_at, args=("options",))
        rpc.rpc_sync("b", open_gate, args=("options",))


@pytest.mark.parametrize(
    ("timeout", "kind", "text"),
    [
        (-2, ValueError, "RPC Timeout must be non-negative"),
        (float("nan"), ValueError, "RPC Timeout must be non-negative"),
        (float("inf"), ValueError, "RPC Timeout must be non-negative"),
        (datetime.timedelta(seconds=1), TypeError, "must be a number of seconds"),
        (True, TypeError, "must be a number of seconds"),
        ("1", TypeError, "must be a number of seconds"),
    ],
)
def test_what_is_no_limit(timeout, kind, text):
    with rpc.local_cluster(["a"]):
        for start in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(kind, match=text):
                start("a", max, args=(1, 2), timeout=timeout)
        if timeout != -1:
            with pytest.raises(kind, match=text):
                rpc.set_rpc_timeout(timeout)
        with pytest.raises(kind, match=text):
            rpc.RpcOptions(timeout=timeout)


def outer_limit(name):
    """The inner call asks for no limit; the outer one's ends it nevertheless."""
    with pytest.raises(rpc.RpcTimeout, match=RAN):
        rpc.rpc_sync("worker1", wait_inside, args=("worker2", name), timeout=1.0)
    told = rpc.rpc_sync("worker1", take_seen, args=(name,))
    assert "RpcTimeout" in told
    rpc.rpc_sync("worker2", open_gate, args=(name,))


def wait_inside(to, name):
    try:
        rpc.rpc_sync(to, wait_at, args=(name,), timeout=0)
    except rpc.RpcTimeout:
        see(name, "RpcTimeout")
        raise


def see(name, what):
    _seen.setdefault(name, []).append(what)
    gate(f"{name} seen").set()


def take_seen(name):
    assert gate(f"{name} seen").wait(PATIENCE)
    return _seen[name]


def test_an_outer_limit_holds_for_inner_calls(cluster):
    cluster.run(0, outer_limit, f"outer {cluster.kind}")


def own_future_inside(name):
    """Waiting for a future of one's own ends with the call as well."""
    with pytest.raises(rpc.RpcTimeout, match=RAN):
        rpc.rpc_sync("worker1", wait_for_own_future, args=(name,), timeout=ARRIVES)
    assert rpc.rpc_sync("worker1", take_seen, args=(name,)) == ["RpcTimeout"]


def wait_for_own_future(name):
    try:
        rpc.Future().wait()
    except rpc.RpcTimeout:
        see(name, "RpcTimeout")
        raise


def test_an_outer_limit_holds_for_futures(cluster):
    cluster.run(0, own_future_inside, f"own future {cluster.kind}")


@rpc.async_execution
def deferred(name):
    future = rpc.Future()
    future.add_done_callback(lambda done: see(name, _error_of(done)))
    return future


def _error_of(future):
    try:
        return future.value()
    except Exception as error:  # noqa: BLE001 - named in the answer
        return type(error).__name__


def give_up_deferred(start, name):
    with pytest.raises(rpc.RpcTimeout, match=RAN):
        start("worker1", deferred, args=(name,), timeout=ARRIVES)
    return rpc.rpc_sync("worker1", take_seen, args=(name,))


@pytest.mark.parametrize("start", [rpc.rpc_sync, asynchronous])
def test_giving_up_cancels_a_deferred_call(cluster, start):
    name = f"deferred {start.__name__} {cluster.kind}"
    assert cluster.run(0, give_up_deferred, start, name) == ["RpcTimeout"]


def cancelled_nested(name):
    """Cancelling a call ends what it waits for, before the deadline of either."""
    with pytest.raises(rpc.RpcTimeout, match=RAN):
        # Two seconds on the wire, but the asynchronous caller gives up earlier.
        rpc.rpc_async(
            "worker1", wait_inside, args=("worker2", name), timeout=ARRIVES
        ).wait()
    assert "RpcTimeout" in rpc.rpc_sync("worker1", take_seen, args=(name,))
    rpc.rpc_sync("worker2", open_gate, args=(name,))


def test_giving_up_ends_what_the_callee_waits_for(cluster):
    cluster.run(0, cancelled_nested, f"nested {cluster.kind}")


def test_a_result_after_cancellation_is_dropped(threads):
    """The function completes its future although nobody waits any more."""
    futures = threads.run(0, late_result)
    assert futures == "no error"


_late: list[rpc.Future] = []


@rpc.async_execution
def late():
    _late.append(rpc.Future())
    return _late[-1]


def late_result():
    with pytest.raises(rpc.RpcTimeout, match=RAN):
        rpc.rpc_async("worker1", late, timeout=ARRIVES).wait()
    assert isinstance(_wait_error(_late[-1]), rpc.RpcTimeout)
    _late[-1].set_result("nobody waits")
    return "no error"


def _wait_error(future):
    try:
        return future.wait(PATIENCE)
    except rpc.RpcTimeout as error:
        return error


def test_a_thousand_calls_given_up(cluster):
    cluster.run(0, thousand_given_up, f"thousand {cluster.kind}")


def thousand_given_up(name):
    futures = [
        rpc.rpc_async("worker1", deferred, args=(f"{name} {i}",), timeout=0.2)
        for i in range(1000)
    ]
    for future in futures:
        with pytest.raises(rpc.RpcTimeout, match=RAN):
            future.wait()
    info = rpc.debug_info()
    assert info["agent.client_active_calls"] == 0

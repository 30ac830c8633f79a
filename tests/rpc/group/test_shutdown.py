"""Ends: graceful ones wait for all that is under way, others for nobody."""

import os
import signal
import threading
import time
from typing import NamedTuple

import pytest

from jdist import rpc
from jdist.rpc.base.current import NEVER, Deadline, Operation
from jdist.rpc.calls import outstanding_calls
from jdist.rpc.calls.agent import current_agent
from jdist.rpc.calls.callee import ServedConnection
from jdist.rpc.group import termination
from jdist.rpc.group.coordinator_client import CoordinatorClient
from jdist.rpc.wire.connection import Connection
from tests.rpc import collectives
from tests.rpc.collectives import SAME, each
from tests.rpc.hosts import become_worker, names, results
from tests.rpc.sockets import nothing_left, wait_until

PATIENCE = 60
_counts: dict[str, int] = {}
_lock = threading.Lock()
_gates: dict[str, threading.Event] = {}


def add(x, y):
    return x + y


def count(name):
    with _lock:
        _counts[name] = _counts.get(name, 0) + 1


def taken(name):
    return _counts.pop(name, 0)


def chain(name, ttl):
    """Fire and forget: nobody waits for the next one."""
    rpc.rpc_async("worker0", count, args=(name,))
    if ttl:
        to = (rpc.get_worker_info().id + 1) % 4
        rpc.rpc_async(to, chain, args=(name, ttl - 1))


def start_chain_and_end(name, ttl):
    chain(name, ttl)
    rpc.shutdown()


def callbacks(name, ttl):
    """Fire and forget from a callback, once the call itself is over."""
    rpc.rpc_async("worker0", count, args=(name,))
    if ttl:
        to = (rpc.get_worker_info().id + 1) % 4
        rpc.rpc_async(to, add, args=(1, 1)).add_done_callback(
            lambda done: rpc.rpc_async(to, callbacks, args=(name, ttl - 1))
        )


def start_callbacks_and_end(name, ttl):
    callbacks(name, ttl)
    rpc.shutdown()


@pytest.mark.parametrize("begin", [start_chain_and_end, start_callbacks_and_end])
def test_it_waits_for_what_calls_have_started(hosts, begin):
    for turn in range(5):
        name = f"{begin.__name__} {turn}"
        hosts.everywhere(become_worker)
        hosts.everywhere(begin, name, 20)
        assert hosts.run(0, taken, name) == 4 * 21


@pytest.mark.parametrize("begin", [chain, callbacks])
def test_it_waits_for_what_calls_have_started_in_process(begin):
    for turn in range(5):
        with rpc.local_cluster(names(), allow=["tests"]):
            begin(f"local {turn}", 20)
        assert taken(f"local {turn}") == 21


def uneven():
    if rpc.get_worker_info().id == 0:
        for to in ("worker1", "worker2"):
            futures = [rpc.rpc_async(to, add, args=(i, 1)) for i in range(30)]
            assert rpc.wait_all(futures) == list(range(1, 31))
    rpc.shutdown()


def test_one_works_while_the_others_already_wait(hosts):
    hosts.everywhere(become_worker)
    hosts.everywhere(uneven)


def gate(name):
    return _gates.setdefault(name, threading.Event())


def wait_at(name):
    assert gate(name).wait(PATIENCE)


def call_and_forget(name):
    rpc.rpc_async("worker1", wait_at, args=(name,))


def end_with_error(kind, timeout):
    with pytest.raises(kind) as caught:
        rpc.shutdown(timeout=timeout)
    with pytest.raises(rpc.RpcError, match=r"^RPC has not been initialized"):
        rpc.get_worker_info()
    return str(caught.value)


def test_calls_that_do_not_end(hosts):
    hosts.everywhere(become_worker)
    hosts.run(0, call_and_forget, "slow")
    text = hosts.run(0, end_with_error, rpc.RpcTimeout, 0.2)
    assert "Calls were still under way after 0.20 seconds: waiting for" in text
    assert "rpc_async(wait_at) of 'worker1'" in text
    hosts.run(1, open_gate, "slow")
    results([hosts.start(rank, rpc.shutdown, graceful=False) for rank in (1, 2, 3)])


def open_gate(name):
    gate(name).set()


class Leaked(NamedTuple):
    """A call whose end was lost by a mistake of ours."""

    deadline: Deadline
    peer: str = "worker1"
    operation: Operation = Operation("rpc_sync", max)
    since: float = 0.0
    has_answer: bool = False


def be_impatient():
    """Gives calls that nothing waits for a moment instead of minutes."""
    outstanding_calls._OVERDUE = 0.05
    termination._LOOK_SECONDS = termination._ONE_SIDED_SECONDS = 0.02


def be_patient():
    outstanding_calls._OVERDUE = 60.0
    termination._LOOK_SECONDS, termination._ONE_SIDED_SECONDS = 10.0, 240.0


@pytest.fixture
def impatient(hosts):
    hosts.everywhere(be_impatient)
    yield
    hosts.everywhere(be_patient)


def leak_and_end(seconds, side):
    """A graceful end without a limit of its own."""
    deadline = NEVER if seconds is None else Deadline(time.monotonic() + seconds, 1.0)
    getattr(current_agent().outstanding, side)(Leaked(deadline))
    return end_with_error(rpc.RpcTimeout, 0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("seconds", "side"),
    [(-1000.0, "send"), (0.1, "send"), (None, "send"), (None, "serve")],
)
def test_a_call_whose_end_was_lost_holds_no_worker_for_ever(hosts, seconds, side):
    """Not the worker that has it, and not the others, which end in order."""
    hosts.everywhere(become_worker)
    others = [hosts.start(rank, rpc.shutdown) for rank in (0, 1, 2)]
    text = hosts.run(3, leak_and_end, seconds, side)
    assert "still under way 0.05 seconds after their own deadlines" in text
    assert "rpc_sync(max) of 'worker1' since" in text
    assert results(others) == [None] * 3


def lose_the_next_answer():
    """As a mistake of ours would: the call is over here, and its answer never goes."""
    send = ServedConnection._send

    def lose(self, execution, answer):
        if "wait_at" not in str(execution.operation):
            send(self, execution, answer)

    ServedConnection._send = lose


def begin_without_deadline(name):
    rpc.rpc_async("worker0", wait_at, args=(name,), timeout=0)
    rpc.rpc_sync("worker0", open_gate, args=(name,))


def test_an_answer_that_was_lost_holds_no_worker_for_ever(fresh_hosts):
    made = fresh_hosts(2)
    made.everywhere(be_impatient)
    made.everywhere(be_one_of_two)
    made.run(0, lose_the_next_answer)
    made.run(1, begin_without_deadline, "lost")
    other = made.start(0, rpc.shutdown)
    text = made.run(1, end_with_error, rpc.RpcTimeout, 0)
    assert "waiting for rpc_async(wait_at) of 'worker0'" in text
    assert other.result() is None


def be_one_of_two():
    rank = int(os.environ["RANK"])
    return rpc.init_rpc(f"worker{rank}", world_size=2, allow=["tests"])


def call_without_deadline(name, begin):
    begin(name)
    rpc.shutdown()


def in_a_function(name):
    rpc.rpc_async("worker1", begin_and_wait, args=(name,), timeout=0)
    rpc.rpc_sync("worker1", has_begun, args=(name,))


def in_a_callback(name):
    future = rpc.rpc_async("worker1", add, args=(1, 2), timeout=0)
    future.then(lambda done: begin_and_wait(name))
    has_begun(name)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("begin", "where"), [(in_a_function, 1), (in_a_callback, 0)])
def test_a_call_without_a_deadline_that_runs_is_waited_for(hosts, begin, where):
    """However long that is."""
    name = f"endless {begin.__name__}"
    hosts.everywhere(become_worker)
    ending = [hosts.start(0, call_without_deadline, name, begin)]
    ending += [hosts.start(rank, rpc.shutdown) for rank in (2, 3)]
    assert not any(task.done(0.5) for task in ending)
    hosts.run(1, rpc.rpc_sync, f"worker{where}", open_gate, (name,))
    ending.append(hosts.start(1, rpc.shutdown))
    assert results(ending) == [None] * 4


def test_a_call_without_a_deadline_is_waited_for():
    """As it asked for; with a limit of its own the end names it."""
    entered = outstanding_calls.OutstandingCalls()
    entered.serve(Leaked(NEVER))
    entered.send(Leaked(Deadline(0.0, 1.0)))
    begun = time.monotonic()
    limit = Deadline(begun + 0.1, 0.1)
    with pytest.raises(rpc.RpcTimeout, match=r"after 0.10 seconds: .*serving rpc_sync"):
        entered.when_empty(
            limit, lambda: None, lambda call: call.deadline.at, begun, begun + 60
        )


def test_others_that_do_not_come(hosts):
    hosts.everywhere(become_worker)
    text = hosts.run(2, end_with_error, rpc.RpcTimeout, 0.1)
    assert "shutdown timed out in _all_gather after 0.10 seconds on 'worker2'" in text
    assert "Did not arrive: worker0, worker1, worker3" in text
    results([hosts.start(rank, rpc.shutdown, graceful=False) for rank in (0, 1, 3)])


def test_an_end_of_ones_own(hosts):
    """The others go on, calls to the one that left fail, and it is not lost."""
    hosts.everywhere(become_worker)
    hosts.run(3, rpc.shutdown, graceful=False)
    with pytest.raises(
        rpc.WorkerLost, match=r"Lost worker 'worker3' during rpc_sync\(add\)"
    ):
        hosts.run(1, rpc.rpc_sync, "worker3", add, (1, 2))
    with pytest.raises(rpc.WorkerLost, match="'worker3' during barrier: it has left"):
        hosts.run(1, rpc.barrier)
    assert hosts.run(1, rpc.rpc_sync, "worker2", add, (1, 2)) == 3
    assert hosts.run(1, lost_workers) == {}
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def lost_workers():
    return rpc.debug_info()["group.lost"]


def test_the_coordinators_worker_leaves(hosts):
    hosts.everywhere(become_worker)
    hosts.run(0, rpc.shutdown, graceful=False)
    assert hosts.run(1, rpc.rpc_sync, "worker2", add, (1, 2)) == 3
    with pytest.raises(
        rpc.WorkerLost, match="Lost worker 'worker0' during barrier: as c"
    ):
        hosts.run(1, rpc.barrier)
    for rank in (1, 2, 3):
        with pytest.raises(
            rpc.WorkerLost, match="Lost worker 'worker0' during shutdown"
        ):
            hosts.run(rank, rpc.shutdown)
    for rank in range(4):
        with pytest.raises(rpc.RpcError, match=r"^RPC has not been initialized"):
            hosts.run(rank, rpc.get_worker_info)


def leave_slowly():
    real = Connection.close

    def close(connection, reason):
        real(connection, reason)
        time.sleep(0.1)

    Connection.close = close
    try:
        rpc.shutdown(graceful=False)
    finally:
        Connection.close = real


def test_an_ending_coordinator_reports_no_losses(hosts):
    """It closes one control channel after another while the others are still open."""
    hosts.everywhere(become_worker)
    hosts.run(0, leave_slowly)
    assert [hosts.run(rank, lost_workers) for rank in (1, 2, 3)] == [{}] * 3
    for rank in (1, 2, 3):
        hosts.run(rank, rpc.shutdown, graceful=False)


def waiting_caller(name):
    future = rpc.rpc_async("worker1", wait_at, args=(name,))
    rpc.shutdown(graceful=False)
    with pytest.raises(rpc.RpcError, match="RPC was shut down on this worker during"):
        future.wait()
    open_gate(name)


def test_a_future_of_a_worker_that_has_ended(hosts):
    hosts.everywhere(become_worker)
    hosts.run(0, waiting_caller, "ended")
    hosts.run(1, open_gate, "ended")
    results([hosts.start(rank, rpc.shutdown, graceful=False) for rank in (1, 2, 3)])


def end_from_within():
    rpc.shutdown(graceful=False)


def test_a_called_function_may_end_its_worker(hosts):
    hosts.everywhere(become_worker)
    with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker3'"):
        hosts.run(0, rpc.rpc_sync, "worker3", end_from_within)
    with pytest.raises(rpc.RpcError, match=r"^RPC has not been initialized"):
        hosts.run(3, rpc.get_worker_info)
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def worker_that_forgets(rank):
    become_worker()
    rpc.barrier()
    if rank == 1:
        return rank  # and the interpreter ends, with rpc's threads still there
    for _ in range(2):
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker1'"):
            rpc.barrier()
    with pytest.raises(rpc.WorkerLost, match="'worker1' during shutdown"):
        rpc.shutdown()
    return rank


def test_a_forgotten_end_does_not_hang_the_interpreter():
    assert rpc.spawn(worker_that_forgets, nprocs=3, timeout=240) == [0, 1, 2]


def cluster_that_raises(begun):
    with rpc.local_cluster(["a", "b"], allow=["tests"]):
        begun.append(rpc.rpc_async("b", wait_at, args=("never",)))
        raise KeyError("body")


def test_a_body_that_raises_ends_the_cluster_at_once():
    begun = []
    with nothing_left():
        with pytest.raises(KeyError, match="body"):
            cluster_that_raises(begun)
        gate("never").set()
        # Which of the two ended first is not settled.
        either = "RPC was shut down on this worker|Lost worker 'b'"
        with pytest.raises(rpc.RpcError, match=either):
            begun[0].wait()


def test_clusters_in_this_process_leave_nothing():
    with nothing_left():
        for _ in range(5):
            with rpc.local_cluster(names(), allow=["tests"]):
                assert rpc.rpc_sync("worker1", add, args=(1, 2)) == 3
                assert rpc.rpc_async("worker2", add, args=(1, 2)).wait() == 3


def test_workers_that_end_together_are_not_told_of_each_other(monkeypatch):
    """Of n workers each would get n messages; one that leaves alone is announced."""
    told = []
    real = CoordinatorClient._pushed

    def push(self, frame):
        if frame.kind == "group.left":
            told.append(self)
        real(self, frame)

    monkeypatch.setattr(CoordinatorClient, "_pushed", push)
    with rpc.local_cluster(names(4)):
        pass
    assert told == []
    with rpc.local_cluster(names(4)):
        with rpc.use_worker("worker3"):
            rpc.shutdown(graceful=False)
        wait_until(lambda: len(told) == 3)


def test_workers_of_a_cluster_may_end_on_their_own():
    with rpc.local_cluster(["a", "b"], allow=["tests"]):
        with rpc.use_worker("b"):
            rpc.shutdown(graceful=False)
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'b'"):
            rpc.rpc_sync("b", add, args=(1, 2))


def forget_call(name):
    rpc.rpc_async("worker1", begin_and_wait, args=(name,), timeout=0)
    rpc.rpc_sync("worker1", has_begun, args=(name,))


def begin_and_wait(name):
    gate(f"{name} begun").set()
    wait_at(name)


def has_begun(name):
    assert gate(f"{name} begun").wait(PATIENCE)


def test_a_loss_ends_the_wait_for_ones_own_calls(fresh_hosts):
    """The call that worker1 executes does not end, but the wait for it does."""
    made = fresh_hosts(3)
    made.everywhere(become_worker)
    made.run(0, forget_call, "does not end")
    ending = made.start(1, end_with_error, rpc.WorkerLost, 0)
    assert not ending.done(0.2)
    made.signal(2, signal.SIGKILL)
    assert "Lost worker 'worker2' during shutdown" in ending.result()
    assert "Lost worker 'worker2' during shutdown" in made.run(
        0, end_with_error, rpc.WorkerLost, 0
    )


# --- while others are in a collective ---


def everyone(hosts, plans):
    hosts.everywhere(become_worker)
    return hosts.everywhere(each, plans)


def ending():
    """On worker0: how many wait in their shutdown."""
    rounds = current_agent().group.coordinator._rounds
    return sum(len(one.contributions) for one in rounds if one.key.ends)


def gather_while_others_end():
    wait_until(lambda: rpc.rpc_sync("worker0", ending) == 3)
    told = collectives.seen(rpc.barrier, timeout=0.1)
    rpc.shutdown(timeout=60)
    return told


@pytest.mark.parametrize("rank", [0, 2])
def test_one_gathers_and_the_others_shut_down(hosts, rank):
    """It does not get their counts of calls as data, and is told where they are."""
    hosts.everywhere(become_worker)
    others = [hosts.start(other, rpc.shutdown) for other in range(4) if other != rank]
    kind, text = hosts.run(rank, gather_while_others_end)
    assert kind == "RpcTimeout"
    assert text.count("is in shutdown") == 3
    assert results(others) == [None] * 3


def test_workers_in_their_shutdown_serve_collectives(hosts):
    """As servers do: one drives, the others wait in `shutdown`."""
    names = [f"worker{i}" for i in range(4)]
    plans = [[("shutdown",)] for _ in range(4)]
    plans[0] = [("call", names), ("call", names), ("shutdown",)]
    told = everyone(hosts, plans)
    expected = ("result", [SAME] * 4)
    assert told[0] == [expected, expected, ("result", None)]
    assert told[1:] == [[("result", None)]] * 3


def gather_beside_calls(others):
    """This worker's program gathers, the others within calls."""
    futures = [rpc.rpc_async(n, collectives.gather_named, args=("",)) for n in others]
    mine = collectives.gather_named("")
    theirs = rpc.wait_all(futures)
    rpc.shutdown()
    return [mine, *theirs]


def test_a_program_gathers_with_servers(hosts):
    hosts.everywhere(become_worker)
    servers = [hosts.start(rank, rpc.shutdown) for rank in (0, 1, 3)]
    others = ["worker0", "worker1", "worker3"]
    assert hosts.run(2, gather_beside_calls, others) == [SAME] * 4
    assert results(servers) == [None] * 3


def wait_and_call(name, others):
    assert gate(name).wait(PATIENCE)
    found = gather_beside_calls(others)
    return found


def gather_and_end():
    found = collectives.gather_named("")
    rpc.shutdown()
    return found


def test_a_worker_that_does_not_wait_may_still_call(hosts):
    """Nothing is given up as long as one of them computes."""
    hosts.everywhere(become_worker)
    servers = [hosts.start(rank, rpc.shutdown) for rank in (1, 2)]
    others = ["worker1", "worker2"]
    busy = hosts.start(3, wait_and_call, "busy", others)
    waiting = hosts.start(0, rpc.rpc_sync, "worker3", open_gate, ("busy",))
    waiting.result()
    waiting = hosts.start(0, gather_and_end)
    assert results([waiting, busy]) == [SAME, [SAME] * 3]
    assert results(servers) == [None] * 2

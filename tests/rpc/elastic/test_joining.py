"""Workers join one by one: who can reach whom, and when; who may not."""

import secrets

import pytest

from jdist import rpc
from tests.rpc.elastic.common import greet, greet_all, infos, join, who
from tests.rpc.hosts import PATIENCE, results


def test_each_newcomer_meets_all_and_all_meet_it(elastic):
    for count in range(1, 4):
        info = elastic.join(f"worker{count}")
        assert info == rpc.WorkerInfo(f"worker{count}", count)
        elastic.run(info.name, greet_all, elastic.names)
        elastic.everywhere(greet_all, elastic.names)
        expected = [rpc.WorkerInfo(f"worker{i}", i) for i in range(count + 1)]
        assert set(map(tuple, elastic.everywhere(infos).values())) == {tuple(expected)}


def test_all_join_at_once(elastic):
    names = ["worker1", "worker2", "worker3"]
    if elastic.kind == "process":
        tasks = [elastic.begin_to_join(name, i + 1) for i, name in enumerate(names)]
    else:
        tasks = [elastic.begin_to_join(name) for name in names]
    results(tasks)
    for name in names:
        elastic.joined(name)
    elastic.everywhere(greet_all, elastic.names)


def call_until(name, stop):
    """Calls `name` without a pause until it says so; how often."""
    count = 0
    while not rpc.rpc_sync(name, is_set, args=(stop,)):
        count += 1
    return count


_stops = set()


def is_set(stop):
    return stop in _stops


def set_stop(stop):
    _stops.add(stop)


def test_calls_go_on_while_others_join(elastic):
    elastic.join("worker1")
    stop = secrets.token_hex(4)
    calling = elastic.start("worker1", call_until, "worker0", stop)
    elastic.join("worker2")
    if elastic.kind == "process":
        elastic.join("worker3")
    assert not calling.done()
    elastic.run("worker2", rpc.rpc_sync, "worker0", set_stop, (stop,))
    assert calling.result() > 0
    elastic.everywhere(greet_all, elastic.names)


def relay(path):
    """Calls along a path of workers."""
    first, *rest = path
    return rpc.rpc_sync(first, relay if rest else who, args=(rest,) if rest else ())


def test_whoever_knows_a_newcomer_may_speak_of_it_to_anybody(elastic):
    """A call to it may come from somebody who heard of it from a third."""
    names = ["worker0", "worker1", "worker2", "worker3"]
    for name in names[1:]:
        elastic.join(name)
        path = [*elastic.names, name] * 2
        for found in elastic.everywhere(relay, path).values():
            assert found == name


@pytest.mark.parametrize("taken", ["worker1", "worker0"])
def test_a_name_of_somebody_who_lives(elastic, taken):
    elastic.join("worker1")
    with pytest.raises(rpc.RpcError, match=f"name {taken} is not unique"):
        elastic.stranger(taken, rank=5).result()
    elastic.join("worker2")
    elastic.everywhere(greet_all, elastic.names)


def test_a_rank_of_somebody_who_lives(processes):
    processes.join("worker1")
    with pytest.raises(rpc.RpcError, match="Rank 1 is not unique: worker1 and other"):
        processes.stranger("other", rank=1).result()
    processes.join("another", rank=40_000)
    processes.everywhere(greet_all, processes.names)


def test_ranks_need_no_order(processes):
    for name, rank in (("x", 17), ("y", 3), ("z", 65_535)):
        assert processes.join(name, rank).id == rank
    # Who has called a newcomer has been told that it came, not only that it comes.
    processes.everywhere(greet_all, processes.names)
    told = processes.everywhere(infos)
    assert [info.id for info in told["y"]] == [0, 3, 17, 65_535]
    assert processes.run("x", rpc.rpc_sync, 3, who) == "y"


def test_who_comes_before_rank_0_waits_for_it(hosts, port):
    early = [hosts.start(rank, join, f"worker{rank}", rank, port) for rank in (2, 1)]
    assert not any(task.done(0.3) for task in early)
    assert hosts.run(0, join, "worker0", 0, port).id == 0
    results(early)
    names = ["worker0", "worker1", "worker2"]
    results([hosts.start(rank, greet_all, names) for rank in range(3)])
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def test_the_size_from_the_variables_does_not_count_when_it_is_said(hosts, port):
    """The processes of these tests all have WORLD_SIZE=4."""
    assert hosts.run(0, join, "alone", 0, port).name == "alone"
    assert hosts.run(0, rpc.rpc_sync, "alone", greet, ("me",)) == "me, I am alone"
    hosts.run(0, rpc.shutdown)


def without_variable(port):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE")
        rpc.init_rpc("first", rank=0, coordinator=("127.0.0.1", port))
    seen = rpc.get_worker_infos()
    rpc.shutdown()
    return seen


def test_without_any_size_a_group_is_elastic(hosts, port):
    assert hosts.run(1, without_variable, port) == [rpc.WorkerInfo("first", 0)]


MIXED = "RPC group mixes statically and dynamically initialized members"


def test_a_member_of_a_fixed_group_comes_to_an_elastic_one(processes, port):
    stranger = processes.hosts.start(3, join, "worker1", 1, port, size=2)
    with pytest.raises(rpc.RpcError, match=f"{MIXED}.* worker1 was given a world_size"):
        stranger.result()
    processes.join("worker1")
    processes.everywhere(greet_all, processes.names)


def test_a_member_of_an_elastic_group_comes_to_a_fixed_one(hosts, port):
    group = [
        hosts.start(rank, join, f"worker{rank}", rank, port, size=3)
        for rank in range(3)
    ]
    results(group)
    with pytest.raises(rpc.RpcError, match=f"{MIXED}.* worker3 was given none"):
        hosts.run(3, join, "worker3", 3, port)
    names = ["worker0", "worker1", "worker2"]
    results([hosts.start(rank, greet_all, names) for rank in range(3)])
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def test_before_a_fixed_group_is_complete_all_are_told(hosts, port):
    """The stranger may be one of those it waits for, started wrongly."""
    waiting = [
        hosts.start(rank, join, f"worker{rank}", rank, port, size=3) for rank in (0, 1)
    ]
    stranger = hosts.start(2, join, "worker2", 2, port)
    for task in (stranger, *waiting):
        with pytest.raises(rpc.RpcError, match=MIXED):
            task.result()


def test_nobody_is_at_the_coordinators_place(hosts, port):
    task = hosts.start(1, join, "worker1", 1, port, join_timeout=0.3)
    with pytest.raises(rpc.RpcTimeout, match="could not reach the coordinator"):
        task.result(PATIENCE)

"""Meeting: barriers and all_gather, of all workers and of some."""

import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc

_arrived: list[str] = []
_lock = threading.Lock()


def arrive(name):
    with _lock:
        _arrived.append(name)


def count():
    return sorted(_arrived)


def clear():
    _arrived.clear()


def meet(names):
    """Says on worker0 that this one came, and counts after the barrier."""
    me = rpc.get_worker_info().name
    if me not in names:
        return None
    rpc.rpc_sync("worker0", arrive, args=(me,))
    rpc.barrier(names)
    return rpc.rpc_sync("worker0", count)


@pytest.mark.parametrize(
    "names",
    [
        ("worker0", "worker1", "worker2", "worker3"),
        ("worker0", "worker2"),
        ("worker1", "worker2", "worker3"),
    ],
)
def test_nobody_passes_a_barrier_before_all_have_come(cluster, names):
    cluster.run(0, clear)
    for rank, seen in enumerate(cluster.everywhere(meet, names)):
        assert seen == (list(names) if f"worker{rank}" in names else None)


def meet_in_threads(rounds):
    me = rpc.get_worker_info().name

    def body():
        with rpc.use_worker(me):
            for _ in range(rounds):
                rpc.barrier()

    threads = [threading.Thread(target=body) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [thread.is_alive() for thread in threads]


def test_barriers_from_several_threads(cluster):
    assert cluster.everywhere(meet_in_threads, 10) == [[False] * 3] * 4


def gather_everything():
    rank = rpc.get_worker_info().id
    array = np.arange(rank + 1.0)
    found = rpc.all_gather({"rank": rank, "numpy": array, "jax": jnp.ones((rank, 2))})
    assert list(found) == [f"worker{i}" for i in range(4)]
    for i, value in enumerate(found.values()):
        assert value["rank"] == i
        assert value["numpy"].tolist() == list(range(i + 1))
        assert value["jax"].shape == (i, 2)
    array[:] = -1
    some = [f"worker{i}" for i in (0, 3)]
    if rank in (0, 3):
        assert rpc.all_gather(rank, some) == {"worker0": 0, "worker3": 3}
    return rpc.all_gather(rank * 10)


def test_everybody_gets_what_everybody_gave(cluster):
    expected = {f"worker{i}": 10 * i for i in range(4)}
    assert cluster.everywhere(gather_everything) == [expected] * 4


def gather_many(rounds):
    me = rpc.get_worker_info()
    return [rpc.all_gather((me.id, i), timeout=60) for i in range(rounds)]


def test_rounds_are_not_mixed_up(cluster):
    expected = [{f"worker{i}": (i, turn) for i in range(4)} for turn in range(50)]
    assert cluster.everywhere(gather_many, 50) == [expected] * 4


def gather_large():
    rank = rpc.get_worker_info().id
    rng = np.random.default_rng(rank)
    found = rpc.all_gather(rng.normal(size=300_000))
    return all(
        np.array_equal(value, np.random.default_rng(i).normal(size=300_000))
        for i, value in enumerate(found.values())
    )


def test_large_values(cluster):
    assert cluster.everywhere(gather_large) == [True] * 4


def some_wait(absent):
    name = rpc.get_worker_info().name
    if name in absent:
        return None
    timeout = 1.0 if name == "worker1" else 60
    with pytest.raises(rpc.RpcTimeout, match="timed out in _all_gather") as caught:
        rpc.all_gather(None, timeout=timeout)
    return str(caught.value)


def test_somebody_does_not_come(cluster):
    """The one who gives up ends it for all: it can never be complete."""
    told = cluster.everywhere(some_wait, ["worker0", "worker3"])
    for text in (told[1], told[2]):
        assert re.search(
            r"timed out in _all_gather after \d\.\d+ seconds on 'worker1'", text
        )
        assert "Did not arrive: worker0, worker3" in text
    # Those who come late are told the same, and the next round is in step again.
    late = [cluster.start(rank, late_comer) for rank in (0, 3)]
    for task in late:
        assert "on 'worker1'" in task.result()
    assert cluster.everywhere(gather_many, 1)[2][0]["worker3"] == (3, 0)


def late_comer():
    with pytest.raises(rpc.RpcTimeout, match="timed out in _all_gather") as caught:
        rpc.all_gather(None)
    return str(caught.value)


def wait_alone():
    with pytest.raises(rpc.RpcTimeout, match=r"barrier timed out.*after 0\.10 seconds"):
        rpc.barrier(["worker2", "worker3"], timeout=0.1)


def test_a_barrier_has_a_limit(cluster):
    cluster.run(2, wait_alone)
    cluster.run(3, wait_again)


def wait_again():
    with pytest.raises(rpc.RpcTimeout, match="on 'worker2'"):
        rpc.barrier(["worker2", "worker3"])


@pytest.mark.parametrize("names", [["worker1"], ["worker0", "worker9"], [], "worker1"])
def test_names_that_are_wrong(cluster, names):
    for call in (rpc.barrier, lambda_gather):
        with pytest.raises(ValueError, match="must be workers of the group"):
            cluster.run(0, call, names)


def lambda_gather(names):
    return rpc.all_gather(1, names)


UNSENDABLE = {
    "future": lambda: rpc.all_gather(rpc.Future()),
    "timeout": lambda: rpc.all_gather(1, timeout=-3),
    "tag": lambda: rpc.barrier(tag=7),
    "long tag": lambda: rpc.all_gather(1, tag="x" * 201),
    "leaves": lambda: rpc.all_gather(list(np.zeros(((1 << 16) + 1, 1)))),
}
REFUSALS = {
    "future": (TypeError, "Can not pickle"),
    "timeout": (ValueError, "RPC Timeout must be non-negative"),
    "tag": (TypeError, r"`barrier\(tag=...\)` must be a string. Got 7"),
    "long tag": (ValueError, "must be shorter than 201 characters. Got 201"),
    "leaves": (ValueError, "65537"),
}


def gather_or_refuse(kind):
    """What worker2 refuses on its own; the others mean the same collective."""
    if rpc.get_worker_info().name == "worker2":
        expected, text = REFUSALS[kind]
        with pytest.raises(expected, match=text) as caught:
            UNSENDABLE[kind]()
        return str(caught.value)
    call = rpc.barrier if kind == "tag" else gather_one
    with pytest.raises(rpc.RpcError, match="failed on all workers") as caught:
        call()
    return str(caught.value)


def gather_one():
    rpc.all_gather(rpc.get_worker_info().id)


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_gathered(cluster, kind):
    """All are told, and the next collective is in step on all of them."""
    if (kind, cluster.kind) == ("leaves", "in-process"):
        pytest.skip("frames have no limits within a process")
    told = cluster.everywhere(gather_or_refuse, kind)
    for text in (told[0], told[1], told[3]):
        assert "because 'worker2' had no value to send" in text
        assert told[2] in text
    assert cluster.everywhere(gather_many, 1)[1][0]["worker2"] == (2, 0)


def within_a_call():
    """A called function may meet others; the call's deadline holds there too."""
    calls = [rpc.rpc_async(f"worker{i}", gather_many, args=(1,)) for i in range(4)]
    return rpc.wait_all(calls)[3]


def test_meeting_within_calls(cluster):
    assert cluster.run(0, within_a_call) == [{f"worker{i}": (i, 0) for i in range(4)}]

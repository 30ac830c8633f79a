"""Large arrays from device to device, between processes, past the wire.

On CPU devices, which takes being asked for. Every worker counts what went this way.
"""

import contextlib
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist._compat import ArrayServer
from jdist.rpc.base import current
from jdist.rpc.group.rendezvous import ReservedPort
from tests.rpc.hosts import be_one_of, results
from tests.rpc.sockets import wait_until

LEAST = 1 << 12
ON = rpc.Transfer(least_bytes=LEAST, cpu=True)
_kept: list = []


@pytest.fixture
def pair(hosts):
    """The processes of two workers that transfer; bodies run on the first one."""
    with group(hosts, ON, ON):
        yield hosts


@contextlib.contextmanager
def group(hosts, *settings):
    """Workers with these settings, in the first processes."""
    begin(hosts, *settings)
    yield
    results([hosts.start(rank, rpc.shutdown) for rank in range(len(settings))])


def begin(hosts, *settings):
    with ReservedPort() as reserved:
        results(
            [
                hosts.start(
                    rank, be_one_of, rank, len(settings), reserved.port, transfer=one
                )
                for rank, one in enumerate(settings)
            ]
        )


def port():
    """Of the current worker: where arrays go from device to device."""
    return current.worker()._transport.port


def counts():
    """What has gone this way: sent, received, offered at the moment."""
    return port().sent, port().received, port().offers


def numbers(count, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "complex64":
        drawn = rng.normal(size=count) + 1j * rng.normal(size=count)
    else:
        drawn = 100 * rng.normal(size=count)
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def bits(array):
    return np.asarray(array).tobytes()


def same(got, sent):
    assert isinstance(got, jax.Array)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert (got.weak_type, got.committed) == (sent.weak_type, False)
    assert bits(got) == bits(sent)


def echo(value):
    return value


def echoes():
    before = counts()
    for seed, dtype in enumerate(
        ("float32", "bfloat16", "int8", "complex64", "float64", "float8_e4m3fn", "int4")
    ):
        sent = numbers(3 * LEAST, dtype, seed).reshape(3, LEAST)
        same(rpc.rpc_sync("worker1", echo, args=(sent,)), sent)
        same(rpc.rpc_async("worker1", echo, args=(sent,)).wait(), sent)
        assert not sent.is_deleted()
    weak = jax.lax.full_like(numbers(LEAST), 2.5) * 1.0
    same(rpc.rpc_sync("worker1", echo, args=(weak,)), weak)
    key = jax.random.split(jax.random.key(3), LEAST)
    got = rpc.rpc_sync("worker1", echo, args=(key,))
    assert got.dtype == key.dtype
    assert bits(jax.random.key_data(got)) == bits(jax.random.key_data(key))
    after = counts()
    return after[0] - before[0], after[1] - before[1]


def test_what_arrives_is_what_was_sent(pair):
    """All kinds of dtypes, there and back; none of these arrays went by the wire."""
    assert pair.run(0, echoes) == (16, 16)


def others():
    """What does not go this way arrives all the same."""
    before = counts()
    for value in (np.asarray(numbers(LEAST)), numbers(5), {"list": [1, "two"]}):
        got = rpc.rpc_sync("worker1", echo, args=(value,))
        assert isinstance(got, type(value))
    mixed = {"a": numbers(LEAST), "b": np.arange(LEAST), "c": (numbers(3), None)}
    got = rpc.rpc_sync("worker1", echo, args=(mixed,))
    assert [bits(got["a"]), bits(got["b"]), bits(got["c"][0])] == [
        bits(mixed["a"]), bits(mixed["b"]), bits(mixed["c"][0]),
    ]  # fmt: skip
    assert rpc.rpc_sync("worker1", is_one, args=(mixed["a"], mixed["a"]))
    return counts()[0] - before[0]


def is_one(first, second):
    return first is second


def test_small_arrays_and_other_values_go_by_the_wire(pair):
    """Among large ones in one value; and an array that occurs twice goes once."""
    assert pair.run(0, others) == 2


def make(seed):
    return numbers(LEAST, seed=seed)


def references():
    rref = rpc.remote("worker1", make, args=(5,))
    same(rref.to_here(), make(5))
    mine = rpc.RRef(make(6))
    got = rpc.rpc_sync("worker1", total, args=(mine, rref))
    assert bits(got) == bits(make(5) + make(6))
    assert rpc.rpc_sync("worker1", counts)[:2] == (2, 1)


def total(mine, rref):
    return mine.to_here() + rref.local_value()


def test_values_of_references(pair):
    """A value is pulled when it is fetched."""
    pair.run(0, references)


def many():
    sent = [numbers(LEAST + k, seed=k) for k in range(40)]
    errors = []
    threads = [threading.Thread(target=call_back, args=(x, errors)) for x in sent[:4]]
    for thread in threads:
        thread.start()
    futures = [rpc.rpc_async("worker1", echo, args=(x,)) for x in sent]
    for future, x in zip(futures, sent, strict=True):
        same(future.wait(), x)
    for thread in threads:
        thread.join()
    assert errors == []
    both_are_done()


def call_back(x, errors):
    try:
        rpc.rpc_sync("worker1", return_calls, args=(x,))
    except rpc.RpcError as error:
        errors.append(error)


def return_calls(x):
    futures = [rpc.rpc_async("worker0", echo, args=(x,)) for _ in range(10)]
    for future in futures:
        same(future.wait(), x)


def both_are_done():
    """Every offer was taken, or withdrawn."""
    wait_until(lambda: counts()[2] == 0)
    wait_until(lambda: rpc.rpc_sync("worker1", counts)[2] == 0)


def test_many_at_once_in_both_directions(pair):
    """Each is the right one; every offer is taken, and its worker hears of it."""
    pair.run(0, many)


def let_go():
    rpc.rpc_async("worker1", echo, args=(1,)).wait()  # The connection is there now.
    sent = numbers(LEAST)
    expected = bits(sent)
    future = rpc.rpc_async("worker1", echo, args=(sent,))
    sent.delete()
    assert bits(future.wait()) == expected


def test_the_caller_may_donate_what_it_sent(pair):
    pair.run(0, let_go)


def offer_nothing():
    """From now on every offer of this worker is an empty promise."""
    _kept.append(ArrayServer.offer)
    ArrayServer.offer = lambda *arguments: None


def offer_other_arrays():
    """From now on this worker offers others than it says."""
    real = ArrayServer.offer
    _kept.append(real)
    ArrayServer.offer = lambda server, number, arrays, seconds: real(
        server, number, [array[:3] for array in arrays], seconds
    )


def offer_truly():
    ArrayServer.offer = _kept.pop()


def in_vain():
    offer_nothing()
    try:
        for verb in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(rpc.RpcTimeout, match=r"set timeout \(\d+ ms\)"):
                value_of(verb("worker1", echo, args=(numbers(LEAST),), timeout=0.3))
    finally:
        offer_truly()
    works_again()


def value_of(result):
    return result.wait() if isinstance(result, rpc.Future) else result


def works_again():
    for _ in range(3):
        sent = numbers(LEAST, seed=9)
        for verb in (rpc.rpc_sync, rpc.rpc_async):
            same(value_of(verb("worker1", echo, args=(sent,))), sent)
    both_are_done()


def test_an_argument_that_never_comes_ends_with_the_call(pair):
    """The caller gets its timeout in time, and nothing remains."""
    pair.run(0, in_vain)


def spoiled():
    offer_other_arrays()
    try:
        for make_call in CALLS[:2]:
            with pytest.raises(rpc.TransferFailed, match=NOT_PULLED.format("worker0")):
                make_call(echo, numbers(LEAST))
        # With words before it where the creation's own error comes first.
        with pytest.raises(rpc.RpcError, match=NOT_PULLED.format("worker0")):
            CALLS[2](echo, numbers(LEAST))
    finally:
        offer_truly()
    rpc.rpc_sync("worker1", offer_other_arrays)
    for make_call in CALLS:
        with pytest.raises(rpc.TransferFailed, match=NOT_PULLED.format("worker1")):
            make_call(make, 3)
    rpc.rpc_sync("worker1", offer_truly)
    works_again()


NOT_PULLED = "An array of worker '{}' did not arrive: it cannot be pulled: "
CALLS = [
    lambda function, x: rpc.rpc_sync("worker1", function, args=(x,)),
    lambda function, x: rpc.rpc_async("worker1", function, args=(x,)).wait(),
    lambda function, x: rpc.remote("worker1", function, args=(x,)).to_here(),
]


def test_a_pull_that_fails_is_an_error_of_its_call(pair):
    """Of an argument and of a result, for each kind of call; and of that call only."""
    pair.run(0, spoiled)


def by_wire():
    sent = numbers(LEAST)
    same(rpc.rpc_sync("worker1", echo, args=(sent,)), sent)
    return None if port() is None else counts()


@pytest.mark.parametrize("settings", [(ON, None), (None, ON)])
def test_it_takes_two(hosts, settings):
    """With one of them it goes by the wire."""
    with group(hosts, *settings):
        expected = (0, 0, 0) if settings[0] else None
        assert hosts.run(0, by_wire) == expected


def test_workers_of_one_process_share_their_arrays():
    """There it means nothing."""
    options = rpc.RpcOptions(transfer=ON)
    with rpc.local_cluster(["worker0", "worker1"], options=options, allow=["tests"]):
        sent = numbers(LEAST)
        assert bits(rpc.rpc_sync("worker1", echo, args=(sent,))) == bits(sent)


def wait_for_its_array():
    """The other one announces an array that it will not give."""
    rpc.rpc_sync("worker1", offer_nothing)
    _kept.append(rpc.rpc_async("worker1", make, args=(4,), timeout=0))
    wait_until(lambda: rpc.rpc_sync("worker1", counts)[0] == 1)


def offer_an_array():
    """The other one is stopped: it does not pull."""
    _kept.append(rpc.rpc_async("worker1", echo, args=(numbers(LEAST),), timeout=0))
    wait_until(lambda: counts()[2] == 1)


def learn_of_the_loss():
    for future in _kept:
        with pytest.raises((rpc.WorkerLost, rpc.TransferFailed), match="worker1"):
            future.wait()
    wait_until(lambda: counts()[2] == 0)
    with pytest.raises(rpc.WorkerLost, match="worker1"):
        rpc.shutdown()


def test_a_worker_that_dies(fresh_hosts):
    """Who waits for its arrays is told; what was offered to it is withdrawn."""
    both = fresh_hosts(2)
    begin(both, ON, ON)
    both.run(0, wait_for_its_array)
    both.signal(1, signal.SIGSTOP)
    both.run(0, offer_an_array)
    both.signal(1, signal.SIGKILL)
    both.run(0, learn_of_the_loss)

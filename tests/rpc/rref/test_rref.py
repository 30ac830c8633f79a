"""References made by `remote` and by hand: what they refer to, and what they say."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from tests.rpc.rref.common import (
    Counter,
    add,
    after_gate,
    close_gate,
    fail,
    identity,
    make,
    open_gate,
    references,
    settle,
    value_of,
    wait_for,
)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """Every test gives back what it had."""
    yield
    settle(cluster)


def fetch_of_all_kinds(to):
    x = np.random.default_rng(7).normal(size=(3, 5))
    rref = rpc.remote(to, add, args=(x,), kwargs={"y": 2.5})
    assert rref.owner() == rpc.get_worker_info(to)
    assert rref.owner_name() == to
    first, second = rref.to_here(), rref.to_here()
    assert np.array_equal(first, x + 2.5)
    assert np.array_equal(second, x + 2.5)
    many = [rpc.remote(to, add, args=(x, i)) for i in range(10)]
    assert all(np.array_equal(r.to_here(), x + i) for i, r in enumerate(many))


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_value_created_elsewhere_and_here(cluster, to):
    cluster.run(0, fetch_of_all_kinds, to)


def copies_and_originals():
    x = np.arange(6.0).reshape(2, 3)
    here = rpc.remote("worker0", identity, args=(x,))
    assert here.is_owner()
    assert here.to_here() is here.local_value()
    there = rpc.remote("worker1", identity, args=(x,))
    assert not there.is_owner()
    copy = there.to_here()
    copy[:] = 0  # ours alone
    assert np.array_equal(there.to_here(), x)
    array = rpc.remote("worker1", jnp.add, args=(jnp.arange(3.0), 1.0)).to_here()
    assert isinstance(array, jax.Array)
    assert array.tolist() == [1.0, 2.0, 3.0]


def test_users_get_copies_and_the_owner_the_value_itself(cluster):
    cluster.run(0, copies_and_originals)


def by_rank_and_info():
    info = rpc.get_worker_info("worker3")
    for to in (3, info, "worker3"):
        assert rpc.remote(to, add, args=(1, 2)).owner() == info
        assert hash(rpc.remote(to, add, args=(1, 2)).owner()) == hash(info)
    assert rpc.remote(3, add, args=(1, 2)).owner() != 23


def test_a_worker_is_named_in_three_ways(cluster):
    cluster.run(0, by_rank_and_info)


@pytest.mark.parametrize(
    ("to", "kind", "message"),
    [
        ("worker9", rpc.RpcError, "could not find destination"),
        (4, rpc.RpcError, "could not find destination"),
        (-1, rpc.RpcError, "could not find destination"),
        (0.5, ValueError, "Cannot get WorkerInfo from name"),
    ],
)
def test_nobody_of_that_name(cluster, to, kind, message):
    with pytest.raises(kind, match=message):
        cluster.run(1, rpc.remote, to, add, (1, 2))


def refused_calls():
    with pytest.raises(TypeError, match="function should be callable"):
        rpc.remote("worker1", "add")
    with pytest.raises(ValueError, match="other workers can find by its name"):
        rpc.remote("worker1", lambda: 3)
    with pytest.raises(TypeError, match="must be made of scalars"):
        rpc.remote("worker1", identity, args=(object(),))
    with pytest.raises(ValueError, match="RPC Timeout must be non-negative"):
        rpc.remote("worker1", identity, args=(1,), timeout=-3)


def test_a_call_that_cannot_be_made_leaves_no_reference(cluster):
    cluster.run(0, refused_calls)


def local_references():
    value = Counter(35)
    rref = rpc.RRef(value)
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner_name() == "worker2"
    assert rref.creation().wait() is None
    return references()["owner_rrefs"]


def test_a_reference_to_a_value_here_is_nobody_elses_business(cluster):
    assert cluster.run(2, local_references) == 0


def elsewhere():
    rref = rpc.remote("worker1", add, args=(1, 2))
    with pytest.raises(rpc.RpcError, match=r"^For UserRRef") as caught:
        rref.local_value()
    text = str(caught.value)
    assert text.startswith(f"For UserRRef(rref_id={rref._handle.rref}, fork_id=")
    assert "can't call local_value() (localValue() in torch) on user " in text
    assert f"{rpc.get_worker_info()}. Call it on owner {rref.owner()}" in text


def test_the_value_itself_is_on_its_owner_only(cluster):
    cluster.run(0, elsewhere)


def ids_of_references():
    here, there = rpc.RRef(1), rpc.remote("worker0", add, args=(1, 2))
    first, rref, fork = (
        here._handle.rref,
        there._handle.rref,
        there._handle.user_fork.fork,
    )
    assert {first.created_on, rref.created_on, fork.created_on} == {3}
    assert (rref.local_id, fork.local_id) == (first.local_id + 1, first.local_id + 2)
    assert str(here) == f"OwnerRRef({first})"
    assert repr(there) == f"UserRRef(RRefId = {rref}, ForkId = {fork})"
    assert str(first) == f"GloballyUniqueId(created_on=3, local_id={first.local_id})"


def test_ids_and_what_is_printed(cluster):
    cluster.run(3, ids_of_references)


def creation_of(to):
    rpc.rpc_sync(to, close_gate, args=("creation",))
    rref = rpc.remote(to, after_gate, args=("creation", 5))
    future = rref.creation()
    assert isinstance(future, rpc.Future)
    assert not future.done()
    rpc.rpc_sync(to, open_gate, args=("creation",))
    assert future.wait() is None
    assert wait_for(rref.confirmed_by_owner)
    assert rref.to_here() == 5


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_the_creation_has_a_future(cluster, to):
    cluster.run(0, creation_of, to)


def fetch_before_creation(to):
    rpc.rpc_sync(to, close_gate, args=("early",))
    rref = rpc.remote(to, after_gate, args=("early", 11))
    fetching = rpc.rpc_async("worker2", value_of, args=(rref,))
    with pytest.raises(rpc.RpcTimeout, match="RPC ran for more than set timeout"):
        rref.to_here(timeout=0.05)
    rpc.rpc_sync(to, open_gate, args=("early",))
    assert rref.to_here() == 11
    assert fetching.wait() == 11


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_who_comes_before_the_value_waits(cluster, to):
    cluster.run(0, fetch_before_creation, to)


def failing(to):
    rref = rpc.remote(to, fail, args=("a\nb",))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^a\nb"):
            rref.to_here()
    rref.creation().wait()  # the owner did what it was asked
    wrong = rpc.remote(to, add, args=(1,))
    with pytest.raises(TypeError, match="missing 1 required positional"):
        wrong.to_here()
    return rref.owner_name()


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_what_the_function_raises_comes_with_the_value(cluster, to):
    assert cluster.run(0, failing, to) == to


def everybody_gets_the_error():
    rref = rpc.remote("worker1", fail)
    told = [rpc.rpc_async(f"worker{i}", error_of, args=(rref,)) for i in range(4)]
    assert rpc.wait_all(told) == ["ValueError: Expected error"] * 4


def error_of(rref):
    try:
        rref.to_here()
    except ValueError as error:
        return f"ValueError: {error}"


def test_every_holder_gets_the_functions_error(cluster):
    cluster.run(0, everybody_gets_the_error)


def remote_of_async():
    assert rpc.remote("worker1", Counter.double, args=(4,)).to_here() == 8
    assert rpc.remote("worker1", tripled, args=(4,)).to_here() == 12
    assert rpc.remote("worker0", tripled, args=(5,)).to_here() == 15
    with pytest.raises(ValueError, match="async error"):
        rpc.remote("worker1", fails_later).to_here()
    with pytest.raises(TypeError, match="must return a Future"):
        rpc.remote("worker1", no_future).to_here()
    with pytest.raises(TypeError, match="Can not pickle"):
        rpc.remote("worker1", forgotten_mark, args=(4,)).to_here()


@rpc.async_execution
def tripled(x):
    return rpc.rpc_async("worker2", Counter.double, args=(x,)).then(
        lambda done: done.value() + x
    )


@rpc.async_execution
def fails_later():
    future = rpc.Future()
    future.set_exception(ValueError("async error"))
    return future


@rpc.async_execution
def no_future():
    return 3


def forgotten_mark(x):
    future = rpc.Future()
    future.set_result(x)
    return future


def test_a_function_whose_result_comes_later(cluster):
    cluster.run(0, remote_of_async)


def unpicklable():
    for rref in (rpc.RRef(3), rpc.remote("worker1", add, args=(1, 2))):
        with pytest.raises(rpc.RpcError, match="Can not pickle rref in python pickler"):
            pickle.dumps(rref)


def test_a_reference_is_not_pickled(cluster):
    cluster.run(0, unpicklable)


def gathered():
    rref = rpc.remote("worker1", add, args=(1, 2))
    with pytest.raises(rpc.RpcError, match=r"all_gather\(obj\).* must not contain"):
        rpc.all_gather([rref], names=["worker0"])


def test_a_reference_travels_in_calls_only(cluster):
    cluster.run(0, gathered)


def types(to):
    cases = [
        (identity, np.arange(3), np.ndarray),
        (identity, jnp.arange(3), jax.Array),
        (identity, None, type(None)),
        (identity, "x", str),
        (Counter, 3, Counter),
    ]
    for function, argument, kind in cases:
        rref = rpc.remote(to, function, args=(argument,))
        assert issubclass(rref.value_type(), kind)
        future = rref.value_type(blocking=False)
        assert future is rref.value_type(blocking=False)
    failing = rpc.remote(to, fail)
    with pytest.raises(ValueError, match="Expected error"):
        failing.value_type()


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_the_type_of_the_value(cluster, to):
    cluster.run(0, types, to)


def slow_type():
    rpc.rpc_sync("worker1", close_gate, args=("type",))
    rref = rpc.remote("worker1", after_gate, args=("type", 5))
    with pytest.raises(rpc.RpcTimeout, match="RPC ran for more than"):
        rref.value_type(timeout=0.05)
    waiting = rref.value_type(blocking=False)
    assert not waiting.done()
    rpc.rpc_sync("worker1", open_gate, args=("type",))
    assert waiting.wait() is int


def test_the_type_of_a_value_that_is_not_there_yet(cluster):
    cluster.run(0, slow_type)


def local_class():
    class Local:
        pass

    return Local()


def foreign_type():
    rref = rpc.remote("worker1", local_class)
    with pytest.raises(rpc.ForbiddenFunction, match="ordinary names"):
        rref.value_type()


def test_a_type_that_cannot_be_imported(cluster):
    cluster.run(0, foreign_type)


def test_several_workers_in_one_process(threads):
    """A reference belongs to one of them, and acts as it."""
    with rpc.use_worker("worker1"):
        rref = rpc.remote("worker2", add, args=(1, 2))
    assert rref.to_here() == 3  # as worker1, although this is worker0
    assert rref.rpc_sync().bit_length() == 2
    with pytest.raises(ValueError, match="must belong to the worker that sends it"):
        rpc.rpc_sync("worker2", identity, args=(rref,))
    del rref


def rref_of_rref():
    inner = rpc.rpc_sync("worker1", make, args=(5,))
    outer = rpc.remote("worker2", identity, args=([inner, 7],))
    (again, seven) = outer.to_here()
    assert (again.to_here(), seven) == (5, 7)
    assert again.owner_name() == "worker1"


def test_a_reference_to_references(cluster):
    cluster.run(0, rref_of_rref)

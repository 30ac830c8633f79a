"""What goes into calls and comes out of them: containers, objects, methods, arrays."""

import dataclasses
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Account:
    """Has every kind of method and travels by value."""

    balance: int

    def deposit(self, amount, *, times=1):
        self.balance += amount * times
        return self

    @classmethod
    def opened(cls, amount):
        return cls, cls(amount)

    @staticmethod
    def interest(amount, rate):
        return amount * rate


def use_accounts():
    here = Account(5)
    for to in ("worker1", rpc.get_worker_info()):
        assert rpc.rpc_sync(to, Account, args=(7,)) == Account(7)
        assert rpc.rpc_sync(to, Account, kwargs={"balance": 8}) == Account(8)
        got = rpc.rpc_sync(to, here.deposit, args=(3,), kwargs={"times": 4})
        assert got == Account(17)
        assert here == Account(5)  # The method ran on a copy.
        assert rpc.rpc_sync(to, Account.opened, args=(9,)) == (Account, Account(9))
        assert rpc.rpc_async(to, Account.interest, args=(6, 0.5)).wait() == 3.0


def test_a_class_and_its_methods(cluster):
    cluster.run(0, use_accounts)


def total(container):
    arrays = [*container["list"], *container["pair"], container["dict"]["x"]]
    one_object = container["list"][0] is container["pair"].second
    return {"sum": sum(a.sum() for a in arrays), "same": one_object, "back": container}


def send_containers():
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 100, size=n) for n in (3, 5, 7))
    container = {"list": [a, b], "pair": Pair(c, a), "dict": {"x": b}}
    for to in ("worker3", rpc.get_worker_info()):
        got = rpc.rpc_sync(to, total, args=(container,))
        assert got["sum"] == 2 * a.sum() + 2 * b.sum() + c.sum()
        assert got["same"]  # One array of the sender is one array of the receiver.
        back = got["back"]
        assert type(back["pair"]) is Pair
        assert back["list"][0] is back["pair"].second
        assert back["list"][0] is not a
        assert np.array_equal(back["pair"].first, c)


def test_containers_of_shared_arrays(cluster):
    cluster.run(2, send_containers)


def compute():
    rng = np.random.default_rng(4)
    futures, expected = [], []
    for i in range(100):
        x = rng.normal(size=(i % 3 + 1, 2))
        to = f"worker{i % 4}"
        futures.append(rpc.rpc_async(to, jnp.add, args=(jnp.asarray(x), float(i))))
        expected.append(x + i)
    for got, want in zip(rpc.wait_all(futures), expected, strict=True):
        assert np.array_equal(got, want)
    x = jnp.asarray([[0, 3, 0], [5, 0, 7]])
    rows, columns = rpc.rpc_sync("worker1", jnp.nonzero, args=(x,))
    assert rows.tolist() == [0, 1, 1]
    assert columns.tolist() == [1, 0, 2]


def test_a_hundred_array_functions(cluster):
    cluster.run(0, compute)


class Nested:
    """Encodes itself with the encoder that is just encoding it, and calls meanwhile."""

    def __init__(self, array, label):
        self.array = array
        self.label = label


def register_nested():
    codec = current.worker().codec

    def encode(nested, message):
        label = rpc.rpc_sync("worker3", upper, (nested.label,))
        tree, leaves = codec.encode({"array": nested.array})
        return [label, tree, leaves]

    def decode(value, message):
        label, tree, leaves = value
        return Nested(codec.decode(tree, leaves)["array"], label)

    codec.register(Nested, "conformance.nested", encode, decode)


def upper(text):
    return text.upper()


def describe(before, nested, after):
    return before.sum(), nested.array.sum(), nested.label, after.sum()


def send_nested():
    before, inner, after = np.arange(3), np.arange(10, 15), np.arange(100, 102)
    for start in (rpc.rpc_sync, asynchronous):
        got = start("worker1", describe, (before, Nested(inner, "x y"), after))
        assert got == (3, 60, "X Y", 201)


def asynchronous(to, function, args):
    return rpc.rpc_async(to, function, args=args).wait()


def test_encoding_within_encoding(cluster):
    cluster.everywhere(register_nested)
    cluster.run(0, send_nested)


def call_what_only_the_caller_has():
    module = sys.modules[__name__]

    def only_here(x):
        return x

    only_here.__qualname__ = "only_here"
    module.only_here = only_here
    try:
        for start in (rpc.rpc_sync, asynchronous):
            with pytest.raises(
                rpc.RpcError, match="RPC pickler does not serialize function code"
            ):
                start("worker1", only_here, (1,))
    finally:
        del module.only_here
    assert rpc.rpc_sync("worker1", upper, args=("on",)) == "ON"


def test_a_function_that_the_callee_lacks(processes):
    processes.run(0, call_what_only_the_caller_has)

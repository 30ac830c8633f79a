"""Methods called through a reference, and what may not be called."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.rref.proxy import Method
from tests.rpc.rref.common import (
    Counter,
    close_gate,
    fail,
    gate,
    identity,
    make,
    open_gate,
    settle,
)

FORMS = {
    "rpc_sync": lambda result: result,
    "rpc_async": lambda result: result.wait(),
    "remote": lambda result: result.to_here(),
}
forms = pytest.mark.parametrize("form", FORMS)
owners = pytest.mark.parametrize("owner", ["worker1", "worker0"])
TIMED_OUT = "RPC ran for more than set timeout|RRef creation"


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """Every test gives back what it had."""
    yield
    settle(cluster)


def call(rref, form, name, *args, **kwargs):
    return FORMS[form](getattr(getattr(rref, form)(), name)(*args, **kwargs))


def methods(owner, form):
    rref = rpc.remote(owner, Counter, args=(3,))
    assert call(rref, form, "increment") == 4
    assert call(rref, form, "increment", 10) == 14
    assert call(rref, form, "increment", by=-4) == 10
    assert call(rref, form, "double", 21) == 42
    assert call(rref, form, "named", "x") == ("Counter", "x")
    assert call(rref, form, "later", 5) == 15
    assert FORMS[form](getattr(rref, form)()(100)) == 115
    assert rpc.rpc_sync("worker2", call, args=(rref, form, "increment")) == 16
    proxy = getattr(rref, form)()
    assert [FORMS[form](proxy.increment()) for _ in range(3)] == [17, 18, 19]


@forms
@owners
def test_methods_of_an_object(cluster, owner, form):
    cluster.run(0, methods, owner, form)


def methods_of_plain_values(owner, form):
    x = np.random.default_rng(5).normal(size=(3, 4))
    for value in (x, jnp.asarray(x)):
        rref = rpc.remote(owner, identity, args=(value,))
        assert np.allclose(call(rref, form, "sum", axis=1), x.sum(axis=1))
        assert call(rref, form, "reshape", (2, 6)).shape == (2, 6)
    names = rpc.remote(owner, identity, args=(["b", "a"],))
    assert call(names, form, "append", "c") is None
    assert call(names, form, "index", "c") == 2
    table = rpc.remote(owner, identity, args=({"x": 1},))
    assert call(table, form, "get", "x") == 1
    assert call(rpc.remote(owner, identity, args=(6,)), form, "bit_length") == 3


@forms
@owners
def test_methods_of_arrays_and_containers(cluster, owner, form):
    cluster.run(0, methods_of_plain_values, owner, form)


def method_of(value, form, name):
    call(rpc.remote("worker1", identity, args=(value,)), form, name, "x")


REFUSED = "must be a method that its class defines|may name"


@forms
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tofile", np.ones(2)),
        ("dump", np.ones(2)),
        ("delete", jnp.ones(2)),
        ("format", "{0.__class__}"),
        ("format_map", "{x.__class__}"),
    ],
)
def test_methods_that_do_more_than_compute(cluster, form, name, value):
    with pytest.raises(rpc.ForbiddenFunction, match=REFUSED):
        cluster.run(0, method_of, value, form, name)


def unknown(form):
    rref = rpc.remote("worker1", Counter)
    with pytest.raises(AttributeError, match=r"'Counter' .* no attribute 'non_exist'"):
        call(rref, form, "non_exist")
    with pytest.raises(ValueError, match="Expected error"):
        call(rref, form, "fail")
    with pytest.raises(TypeError, match="missing 1 required positional"):
        call(rref, form, "double")
    for attribute in ("count", "lock"):  # of the object, not of its class
        with pytest.raises(AttributeError, match=f"no attribute '{attribute}'"):
            call(rref, form, attribute)
    with pytest.raises(rpc.ForbiddenFunction, match="must be a method"):
        call(rref, form, "size")  # a property


@forms
def test_what_the_value_does_not_have(cluster, form):
    cluster.run(0, unknown, form)


def hidden(form):
    rref = rpc.remote("worker1", Counter)
    with pytest.raises(AttributeError, match="public methods only"):
        call(rref, form, "_hidden")
    # A peer that does not ask its own proxy is refused by the owner.
    for name in ("_hidden", "__init__", "__class__", "__reduce__"):
        with pytest.raises(rpc.ForbiddenFunction, match="leading underscore"):
            FORMS[form](getattr(rref, form)()._invoke(name))


@forms
def test_what_has_an_underscore_is_not_called(cluster, form):
    cluster.run(0, hidden, form)


def foreign():
    return pytest.MonkeyPatch()  # of a module that nobody may name


def foreign_methods(form):
    rref = rpc.remote("worker1", foreign)
    with pytest.raises(rpc.ForbiddenFunction, match="must be defined in a module"):
        call(rref, form, "undo")


@forms
def test_methods_of_a_class_that_may_not_be_named(cluster, form):
    cluster.run(0, foreign_methods, form)


def failed_value(form):
    rref = rpc.remote("worker1", fail)
    with pytest.raises(ValueError, match="Expected error"):
        call(rref, form, "increment")


@forms
def test_a_value_whose_creation_failed(cluster, form):
    cluster.run(0, failed_value, form)


def slow_method(form):
    rpc.rpc_sync("worker1", close_gate, args=("method",))
    rref = rpc.remote("worker1", Counter)
    with pytest.raises(rpc.RpcTimeout, match=TIMED_OUT):
        FORMS[form](getattr(rref, form)(timeout=0.05).after("method", 5))
    rpc.rpc_sync("worker1", open_gate, args=("method",))
    assert FORMS[form](getattr(rref, form)(timeout=60).after("method", 1)) > 0


@forms
def test_a_method_that_takes_too_long(cluster, form):
    cluster.run(0, slow_method, form)


def slow_counter(name):
    assert gate(name).wait(60)
    return Counter(1)


def slow_creation(form):
    rpc.rpc_sync("worker1", close_gate, args=("slow",))
    rref = rpc.remote("worker1", slow_counter, args=("slow",))
    with pytest.raises(rpc.RpcTimeout, match=TIMED_OUT):
        FORMS[form](getattr(rref, form)(timeout=0.05).double(2))
    waiting = rref.rpc_async().increment()
    rpc.rpc_sync("worker1", open_gate, args=("slow",))
    assert waiting.wait() == 2


@forms
def test_a_value_that_is_not_there_yet(cluster, form):
    cluster.run(0, slow_creation, form)


def results_that_stay():
    rref = rpc.remote("worker1", Counter, args=(5,))
    inner = rref.remote().increment(2)
    assert inner.owner_name() == "worker1"
    assert inner.to_here() == 7  # Before the next one, which it might come after.
    added = rpc.rpc_sync("worker3", incremented, args=(rref,))
    assert added.to_here() == 8


def incremented(rref):
    return rpc.RRef(rref.rpc_sync().increment())


def test_what_methods_return_may_stay_there_too(cluster):
    cluster.run(0, results_that_stay)


def misdirected():
    method = Method(rpc.rpc_sync("worker1", make, args=(5,)), "bit_length")
    with pytest.raises(rpc.ProtocolError, match="goes to the owner, by its name"):
        rpc.rpc_sync("worker2", method)
    with pytest.raises(rpc.ProtocolError, match="bound on its owner only"):
        method()
    assert repr(method).endswith(".bit_length")


def test_a_method_is_called_on_the_owner_only(cluster):
    cluster.run(0, misdirected)

"""Answers that cannot be described or packed: the caller hears of it, calls go on."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.sockets import wait_until


class Plain(Exception):
    """An exception with nothing odd in it yet."""


class NoArguments(Exception):
    """Its `args` cannot be read."""

    @property
    def args(self):
        raise RuntimeError("no arguments")


class NoAttributes(Exception):
    """Its `__dict__` cannot be read."""

    @property
    def __dict__(self):
        raise RuntimeError("no attributes")


class ExitsAsText(Exception):
    """To ask for its text ends the thread."""

    def __str__(self):
        raise SystemExit(1)


def raise_odd(kind):
    if kind == "attribute that is no name":
        error = Plain("odd")
        vars(error)[5] = 1
        raise error
    if kind == "notes that are none":
        error = Plain("odd")
        error.__notes__ = 7
        raise error
    if kind == "place of a syntax error":
        raise SyntaxError("odd", ("f.py", 1, 2, b"line"))
    if kind == "argument that is no text":
        raise ValueError("\ud800", {"\udfff": "x"})
    raise {
        "no arguments": NoArguments,
        "no attributes": NoAttributes,
        "text": ExitsAsText,
    }[kind]("odd")


KINDS = {
    "attribute that is no name": (Plain, "odd"),
    "notes that are none": (Plain, "odd"),
    "place of a syntax error": (SyntaxError, "odd"),
    "argument that is no text": (ValueError, "ud800"),
    "no arguments": (rpc.RemoteError, "NoArguments: odd"),
    "no attributes": (rpc.RemoteError, "NoAttributes: odd"),
    "text": (ExitsAsText, None),  # to ask for its text would end this thread as well
}


def ping():
    return "pong"


def all_calls_end_with_it(kind):
    error, text = KINDS[kind]
    with pytest.raises(error, match=text):
        rpc.rpc_sync("worker1", raise_odd, args=(kind,))
    future = rpc.rpc_async("worker1", raise_odd, args=(kind,))
    neighbour = rpc.rpc_async("worker1", ping)
    with pytest.raises(error, match=text):
        future.wait()
    assert neighbour.wait() == "pong"
    with pytest.raises(error, match=text):
        rpc.remote("worker1", raise_odd, args=(kind,)).to_here()
    rpc.rpc_sync("worker1", serves_nothing_else)


def serves_nothing_else():
    """Returns once this worker serves this call alone; a leaked entry would stay."""
    wait_until(lambda: len(current.worker().outstanding.served()) == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_exception_is_told(cluster, kind):
    """Whatever is odd about an exception, its call ends and nothing of it is left."""
    cluster.run(0, all_calls_end_with_it, kind)


def _fail(x):
    raise RuntimeError("too late")


@jax.jit
def deferred(x):
    """Fails only when its result is looked at."""
    return jax.pure_callback(_fail, jax.ShapeDtypeStruct((3,), jnp.float32), x)


def failing_array(wrapped):
    array = deferred(jnp.array([1.0, 2.5, -3.0], jnp.float32))
    return {"a": [1, array]} if wrapped else array


def deleted_array(wrapped):
    array = jnp.array([1.0, 2.5, -3.0])
    array.delete()
    return {"a": [1, array]} if wrapped else array


def the_caller_hears_of(function, text):
    for wrapped in (False, True):
        with pytest.raises(Exception, match=text) as caught:
            rpc.rpc_sync("worker1", function, args=(wrapped,))
        assert not isinstance(caught.value, rpc.WorkerLost | rpc.RpcTimeout)
        with pytest.raises(Exception, match=text) as caught:
            rpc.rpc_async("worker1", function, args=(wrapped,)).wait()
        assert not isinstance(caught.value, rpc.WorkerLost | rpc.RpcTimeout)
    assert rpc.rpc_async("worker1", ping).wait() == "pong"
    rpc.rpc_sync("worker1", serves_nothing_else)


@pytest.mark.parametrize(
    ("function", "text"), [(failing_array, "too late"), (deleted_array, "deleted")]
)
def test_an_answer_that_cannot_be_packed(processes, function, text):
    """A donated array, and one whose computation fails, are the caller's errors."""
    processes.run(0, the_caller_hears_of, function, text)


ENDINGS = {
    "value": ValueError,
    "cancelled": asyncio.CancelledError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
}


def end_with(kind, text):
    raise ENDINGS[kind](text)


@rpc.async_execution
def chained(kind):
    me = rpc.get_worker_info()
    return rpc.rpc_async(me, ping).then(lambda done: end_with(kind, "in a chain"))


def children_end(kind):
    future = rpc.rpc_async("worker1", ping)
    with pytest.raises(ENDINGS[kind], match="in a child"):
        future.then(lambda done: end_with(kind, "in a child")).wait(60)
    # Only exceptions travel as themselves: there, this one stopped no program.
    known = ValueError if kind == "value" else rpc.RemoteError
    with pytest.raises(known, match="in a chain"):
        rpc.rpc_async("worker1", chained, args=(kind,)).wait(60)
    assert rpc.rpc_async("worker1", ping).wait() == "pong"


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_callback_may_raise_anything(cluster, kind):
    """Its child ends with that, and the connection lives on."""
    cluster.run(0, children_end, kind)


def test_arrays_of_an_odd_exception_stay_behind(cluster):
    """An array among the arguments is told in the text."""
    cluster.run(0, _array_in_an_exception)


def raise_array():
    raise ValueError(np.arange(3))


def _array_in_an_exception():
    with pytest.raises(rpc.RemoteError, match=r"ValueError: \[0 1 2\]"):
        rpc.rpc_sync("worker1", raise_array)

"""What is given as `args` and `kwargs` of a function that runs elsewhere."""

import collections
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc

Point = collections.namedtuple("Point", ["x", "y"])
SEVEN = (7.0,)


def scaled(x=SEVEN):
    return [2 * float(value) for value in x]


def total(x=7.0, y=70.0):
    return float(x) + float(y)


def begun(to, fn, args=None, kwargs=None):
    return rpc.remote(to, fn, args, kwargs).to_here()


def made(to, fn, args=None, kwargs=None):
    module = rpc.RemoteModule(to, fn, args, kwargs)
    return module.module_rref.to_here()


def asked(to, fn, args=None, kwargs=None):
    return rpc.rpc_async(to, fn, args, kwargs).wait()


CALLS = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": asked,
    "remote": begun,
    "RemoteModule": made,
}

NO_ARGUMENTS = {
    "an array that is false": lambda: jnp.array([0.0]),
    "an array that is true": lambda: jnp.array([3.0]),
    "an array of several": lambda: np.array([3.0, 4.0]),
    "an array of none": lambda: np.zeros((0,)),
    "a string": lambda: "ab",
    "an empty string": lambda: "",
    "bytes": lambda: b"ab",
    "a number": lambda: 0,
    "a dict": lambda: {"x": 3.0},
    "an empty dict": dict,
    "a set": lambda: {3.0},
    "a generator": lambda: (value for value in (3.0,)),
    "a range": lambda: range(2),
    "a named tuple": lambda: Point(3.0, 4.0),
    "a variable": lambda: autograd.variable(jnp.array([0.0])),
}

NO_KEYWORDS = {
    "an array that is false": lambda: jnp.array([0.0]),
    "an empty tuple": tuple,
    "pairs": lambda: [("x", 3.0)],
    "a string": lambda: "",
    "a key that is a number": lambda: {1: 3.0},
    "a key that is an array": lambda: {b"x": 3.0},
}


@pytest.fixture(scope="module")
def pair():
    with rpc.local_cluster(["a", "b"], allow=["tests"]):
        yield


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("kind", NO_ARGUMENTS)
def test_arguments_come_in_a_tuple_or_a_list(pair, verb, kind):
    text = (
        rf"`{verb}\(args=\.\.\.\)` must be a tuple or a list of the positional "
        r"arguments\. Got a value of type .+\. All of them go together, "
        r"`args=\(x, y\)`; a single one takes a comma, `args=\(x,\)`\."
    )
    with pytest.raises(TypeError, match=text):
        CALLS[verb]("b", scaled, NO_ARGUMENTS[kind]())


@pytest.mark.parametrize("verb", CALLS)
def test_arguments_one_after_the_other_are_refused(pair, verb):
    """As a local call has them; they go together."""
    text = rf"`{verb}\(args=\.\.\.\)` .* type builtins.int\. .* `args=\(x, y\)`;"
    with pytest.raises(TypeError, match=text):
        CALLS[verb]("b", total, 1, 2)


@pytest.mark.parametrize("kind", NO_ARGUMENTS)
def test_those_of_processes_too(kind):
    with pytest.raises(TypeError, match=r"`spawn\(args=\.\.\.\)` must be a tuple or a"):
        rpc.spawn(scaled, NO_ARGUMENTS[kind](), nprocs=1)


@pytest.mark.parametrize("verb", [*CALLS, "remote_call"])
@pytest.mark.parametrize("kind", NO_KEYWORDS)
def test_keywords_come_in_a_mapping(pair, verb, kind):
    text = (
        rf"`{verb}\(kwargs=\.\.\.\)` must be a mapping from the names of arguments to "
        r"their values\. Got (a value of type|the key) .+\. For example: `kwargs="
    )
    call = CALLS.get(verb) or autograd.remote_call
    with pytest.raises(TypeError, match=text):
        call("b", scaled, kwargs=NO_KEYWORDS[kind]())


@pytest.mark.parametrize("verb", CALLS)
def test_what_is_right_arrives(pair, verb):
    call = CALLS[verb]
    for value in (0.0, 3.0):
        x = jnp.array([value])
        assert call("b", scaled, (x,)) == [2 * value]
        assert call("b", scaled, [x]) == [2 * value]
        assert call("b", scaled, (), {"x": x}) == [2 * value]
    assert call("b", scaled, None, None) == [14.0]
    assert call("b", scaled, (), {}) == [14.0]
    mapping = types.MappingProxyType({"y": 5.0})
    assert call("b", total, [1.0], mapping) == 6.0
    assert call("b", total, tuple(Point(3.0, 4.0))) == 7.0

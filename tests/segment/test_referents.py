"""A compiled function is never stale, and never loses a derivative: kind by kind."""

import collections
import itertools
import sys
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import segment
from jdist.segment._lookup.contents import contents_of
from tests.segment.referents import BY_IDENTITY, KINDS, NO_TRACER


@pytest.fixture
def values(rng):
    return jnp.float32(rng.normal()), jnp.asarray(rng.normal(size=3), jnp.float32)


@pytest.mark.parametrize("name", KINDS)
def test_a_change_is_seen(name, values):
    """A segment made after a change computes with the new value; and with the old."""
    p, x = values
    fn, change = KINDS[name](2.0)
    with warnings.catch_warnings():
        # Two programs are not three; of equal arrays each is a program of its own.
        warnings.simplefilter("ignore" if name in BY_IDENTITY else "error")
        for k in (2.0, 3.0, 2.0):
            change(k)
            y, _ = segment(fn).forward(p, x)
            np.testing.assert_allclose(y, p * x * k, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NO_TRACER])
@pytest.mark.parametrize("transform", [jax.grad, jax.jit])
def test_a_traced_value_is_refused(name, transform, values):
    """Wherever it hides: compiled as a constant it would have no derivative."""
    p, x = values

    def loss(k):
        fn, change = KINDS[name](k)
        try:
            return segment(fn).forward(p, x)[0].sum()
        finally:
            change(2.0)

    with pytest.raises(TypeError, match=r"must not refer to values .*being traced"):
        transform(loss)(jnp.float32(1.5))


_pop = collections.OrderedDict.pop

# How to make a container, and how to add an entry to it and remove that again.
CONTAINERS = {
    "attributes": (types.SimpleNamespace, lambda x, i: setattr(x, i, 0), delattr),
    "set": (set, set.add, set.discard),
    "dict": (dict, lambda x, i: x.update({i: 0}), dict.pop),
    "ordered": (collections.OrderedDict, lambda x, i: x.update({i: 0}), _pop),
    "deque": (collections.deque, collections.deque.append, collections.deque.remove),
    "list": (list, list.append, list.remove),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_others_may_change_what_is_read(name):
    """A container that another thread writes to is read without an error."""
    make, add, remove = CONTAINERS[name]
    held, done = make(), threading.Event()
    for i in range(20):
        add(held, f"kept{i}")

    def write():
        for i in itertools.cycle("abcdefg"):
            add(held, i)
            remove(held, i)
            if done.is_set():
                return

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer.start()
    try:
        for _ in range(200):
            assert contents_of(lambda x: (held, x), "f").complete
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1.0

    def move(self):
        self.b = self.a
        del self.a


def with_keywords(*, a=1.0, b=2.0):
    return a, b


def exchange(fn):
    a, b = fn.__kwdefaults__.values()
    fn.__kwdefaults__ = {"b": a, "a": b}


# A thing, and a change of the places of what it holds, not of what that is.
EXCHANGES = {
    "key": (lambda: {"a": 1.0}, lambda x: x.update(b=x.pop("a"))),
    "order of keys": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda x: x.move_to_end("a"),
    ),
    "order of a deque": (lambda: collections.deque([1, 2]), lambda x: x.rotate()),
    "slot": (Slots, Slots.move),
    "attribute": (
        lambda: types.SimpleNamespace(a=1.0),
        lambda x: vars(x).update(b=vars(x).pop("a")),
    ),
    "class": (
        lambda: type("Config", (), {})(),
        lambda x: setattr(x, "__class__", type("Config", (), {})),
    ),
    "default": (lambda: with_keywords, exchange),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_seen(name):
    """Of objects that are still there, in another place."""
    make, change = EXCHANGES[name]
    held = make()
    contents = contents_of(lambda x: (held, x), "f")
    assert contents.complete
    assert contents.hold()
    change(held)
    assert not contents.hold()

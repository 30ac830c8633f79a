"""Modules for tests: they live on one worker and are used from others."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import rpc

PATIENCE = 60
_gates: dict[str, threading.Event] = {}


class Branch(nnx.Module):
    """Two layers of different sizes, one of them a list's."""

    def __init__(self, width, rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(5, width, rngs=rngs),
                nnx.Linear(width, 3, rngs=rngs),
            ]
        )

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


class Network(nnx.Module):
    """Parameters on two levels, one used twice, and state that training changes."""

    def __init__(self, seed, width=7):
        rngs = nnx.Rngs(seed)
        self.branch = Branch(width, rngs)
        self.tail = self.branch.layers[1]
        self.scale = nnx.Param(jax.random.normal(rngs(), (3,), "float32"))
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.shell = threading  # An attribute that is nobody's to reach.

    def __call__(self, x, twice=False):
        y = self.branch(self.dropout(self.norm(x))) * self.scale[...][None]
        return 2 * y if twice else y

    def encode(self, x):
        return self.branch.layers[0](x)

    def wait_at(self, name):
        return gate(name).wait(PATIENCE)

    def fail(self):
        raise KeyError("no such layer")

    def _inner(self):
        return self.scale[...]

    @property
    def mode(self):
        return "train" if not self.dropout.deterministic else "eval"


def shared_layer(seed):
    """A layer of Flax's own, of which no method is defined in a module of ours."""
    return nnx.Linear(5, 4, rngs=nnx.Rngs(seed))


class Shadowed(nnx.Module):
    """One with an attribute in the place of Flax's method."""

    def __init__(self):
        self.eval = threading.Event


class Cell:
    """What autograd's variables are like: a value that can be replaced."""

    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


class Table:
    """No NNX module, but it lists its parameters."""

    def __init__(self, rows):
        self.cells = {name: Cell(row) for name, row in rows.items()}
        self.frozen = False

    def __call__(self, name):
        return self.cells[name].value * 2

    def parameters(self):
        return dict(self.cells)

    def train(self):
        self.frozen = False

    def eval(self):
        self.frozen = True

    def is_frozen(self):
        return self.frozen


class Silent:
    """An object without parameters, and without modes."""

    def answer(self):
        return 42


class Wrong:
    """Its parameters have no names."""

    def parameters(self):
        return [Cell(1.0)]


def broken(seed):
    raise ValueError(f"cannot make a network of {seed}")


def stuck(name):
    gate(name).wait(PATIENCE)
    return Silent()


@rpc.async_execution
def later(seed):
    return rpc.Future()


def gate(name):
    return _gates.setdefault(name, threading.Event())


def open_gate(name):
    gate(name).set()


def inputs(count=6):
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, 5)), "float32")


def same(got, expected):
    """Whether two arrays are bit-equal, kind and dtype included."""
    assert isinstance(got, jax.Array)
    assert got.dtype == expected.dtype
    return np.asarray(got).tobytes() == np.asarray(expected).tobytes()

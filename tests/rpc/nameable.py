"""A module that tests allow: what it defines may be named, what it imports may not."""

import argparse
import collections
import dataclasses
import enum
import functools
import subprocess
from collections import namedtuple
from os import system as imported_function
from pathlib import Path
from subprocess import Popen
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

CALLS = []
"""What ran, for tests that nothing does."""


def add(x, y):
    return x + y


def read(path: Path) -> str:
    return path.read_text()


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def decorate_badly(function):
    return lambda *args: function(*args)


@decorate
def wrapped(x):
    return -x


@decorate_badly
def badly_wrapped(x):
    return -x


@jax.jit
def compiled(x):
    return x * 3


def outer():
    def inner(x):
        return x

    return inner


double = lambda x: 2 * x  # noqa: E731 - to be refused
three_more = functools.partial(add, 3)
module = subprocess
constant = {"a": 1}
alias_of_add = add
add.attribute = imported_function


class Counter:
    """A class with every kind of method, and no way to travel itself."""

    made = 0
    shell = imported_function
    process = Popen
    library = subprocess

    def __init__(self, start):
        CALLS.append("Counter.__init__")
        self.count = start

    @classmethod
    def make(cls, start):
        return cls(start)

    @staticmethod
    def twice(x):
        return 2 * x

    @property
    def danger(self):
        CALLS.append("danger")
        return imported_function

    class Inner:
        @staticmethod
        def thrice(x):
            return 3 * x

    class _Inner:
        @staticmethod
        def _aside(x):
            CALLS.append("_Inner._aside")

    def _secret(self):
        CALLS.append("Counter._secret")

    @staticmethod
    def _aside():
        CALLS.append("Counter._aside")

    @classmethod
    def _make(cls):
        CALLS.append("Counter._make")


class Meta(type):
    @property
    def danger(cls):
        CALLS.append("Meta.danger")
        return imported_function

    def method_of_the_class(cls):
        return cls.__name__


class WithMeta(metaclass=Meta):
    pass


instance = Counter(0)


def __getattr__(name):
    CALLS.append(name)
    raise AttributeError(name)


@dataclasses.dataclass
class Point:
    """A dataclass whose construction is seen."""

    x: Any
    y: Any = 5
    hidden: Any = dataclasses.field(default=0, init=False)
    shared: ClassVar[int] = 3

    def __post_init__(self):
        CALLS.append("Point.__post_init__")

    def shifted(self, by):
        return Point(self.x + by, self.y)

    @classmethod
    def origin(cls):
        return cls(0, 0)

    @staticmethod
    def dimension():
        return 2

    @jax.jit
    def scaled(self_x, by):
        return self_x * by

    also_shifted = shifted
    system = imported_function


@dataclasses.dataclass
class Point3(Point):
    z: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


@dataclasses.dataclass
class Table(dict):
    name: str = "t"


class Pair(NamedTuple):
    left: Any
    right: Any


Old = namedtuple("Old", ["a", "b"])


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"
    CRIMSON = "r"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@jax.tree_util.register_pytree_node_class
class Line:
    """A pytree in the form that JAX documents for classes."""

    def __init__(self, ends, name):
        CALLS.append("Line.__init__")
        self.ends, self.name = ends, name

    def tree_flatten(self):
        return tuple(self.ends), self.name

    @classmethod
    def tree_unflatten(cls, name, ends):
        if name == "broken":
            raise KeyError(name)
        line = object.__new__(cls)
        line.ends, line.name = tuple(ends), name
        return line


class Plain:
    """An ordinary object: it does not travel, unless by pickle."""

    def __init__(self, x):
        self.x = x

    def method(self):
        return self.x


class TwoArguments(Exception):
    """Cannot be made of its own args."""

    def __init__(self, number, text):
        super().__init__(text)
        self.number = number


class Embellished(Exception):
    """Makes its text longer each time it is made."""

    def __init__(self, text):
        super().__init__(f"embellished: {text}")


class WithState(Exception):
    """Carries more than its args."""

    def __init__(self, text):
        super().__init__(text)
        self.code = None
        self.open_file = None


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    number: int


class Failures(ExceptionGroup):
    """A group whose constructor takes something else, as in Python's documentation."""

    def __new__(cls, errors, code):
        made = super().__new__(cls, f"code {code}", errors)
        made.code = code
        return made

    def derive(self, errors):
        return Failures(errors, self.code)

    @property
    def exceptions(self):
        raise AttributeError("hidden")


class Halt(BaseException):
    pass


def _remote_method(method, rref, *args):
    return method(rref.local_value(), *args)


class _Private:
    def __call__(self):
        return 7


class Shell(Popen):
    """Runs what it is given."""


class QuietShell(Shell):
    def poll(self):
        return None


class Handle(Path):
    """Its `__new__` is another module's."""


class Mapped(np.memmap):
    """Opens files."""


class Parser(argparse.ArgumentParser):
    """As harmless as can be; but who knows."""


class Maker(type):
    """Makes classes."""


class OwnShell(Popen):
    def __init__(self, number):
        CALLS.append("OwnShell.__init__")


class Words(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Generally(Generic[TypeVar("T")]):
    pass


class Layer(nnx.Linear):
    pass


class LateError(TwoArguments):
    pass


NOT_ITS_OWN = [Shell, QuietShell, Handle, Mapped, Parser, Maker]
ITS_OWN = [OwnShell, Words, Ordered, Generally, Layer, LateError, Point3, Pair, Old]
ITS_OWN += [Color, Level, Counter, Plain, Unprintable]

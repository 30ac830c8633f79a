"""Kinds of thing that a function can read a value from, and change behind its back."""

import argparse
import array
import collections
import contextvars
import dataclasses
import enum
import functools
import os
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
from flax import nnx

KINDS = {}
"""By name a function of a first value that returns `(fn, change)`.

`fn(p, x)` is p * x times the value that was given to `change` last.
"""

FOREIGN = types.ModuleType("foreign_package")
sys.modules["foreign_package"] = FOREIGN
exec(
    "class Thing:\n"
    "    def __init__(self, k): self.k = k\n"
    "    def times(self, x): return x * self.k\n"
    "K = None\n"
    "def scaled(x): return x * K\n",
    vars(FOREIGN),
)

GLOBAL = None
CLASS_LEVEL = None


def kind(make):
    KINDS[make.__name__] = make
    return make


def setter(thing, name):
    return functools.partial(setattr, thing, name)


def held(thing, first, name="k"):
    """A closure over an object that is read at one attribute."""
    setattr(thing, name, first)
    return (lambda p, x: p * x * thing.k), setter(thing, name)


@kind
def global_variable(first):
    def change(value):
        globals()["GLOBAL"] = value

    change(first)
    return (lambda p, x: p * x * GLOBAL), change


@kind
def global_of_a_helper(first):
    _, change = global_variable(first)
    return (lambda p, x: p * helper(x)), change


def helper(x):
    return x * GLOBAL


@kind
def global_of_another_module(first):
    FOREIGN.K = first
    fn = FOREIGN.scaled
    return (lambda p, x: p * fn(x)), setter(FOREIGN, "K")


@kind
def attribute_of_a_module(first):
    FOREIGN.K = first
    return (lambda p, x: p * x * FOREIGN.K), setter(FOREIGN, "K")


@kind
def closure_variable(first):
    k = first

    def change(value):
        nonlocal k
        k = value

    return (lambda p, x: p * x * k), change


@kind
def dict_in_a_closure(first):
    d = {"k": first}
    return (lambda p, x: p * x * d["k"]), functools.partial(d.__setitem__, "k")


@kind
def nested_containers(first):
    inner = [first]
    d = {"a": ({"b": inner},)}
    return (lambda p, x: p * x * d["a"][0]["b"][0]), lambda v: inner.__setitem__(0, v)


@kind
def set_in_a_closure(first):
    held = {first}
    return (lambda p, x: p * x * next(iter(held))), lambda v: (
        held.clear(),
        held.add(v),
    )


@kind
def positional_default(first):
    cell = [first]
    return (lambda p, x, k=cell: p * x * k[0]), lambda v: cell.__setitem__(0, v)


@kind
def keyword_default(first):
    def fn(p, x, *, k=first):
        return p * x * k

    return fn, lambda v: setattr(fn, "__kwdefaults__", {"k": v})


@kind
def attribute_of_the_function(first):
    def fn(p, x):
        return p * x * fn.k

    fn.k = first
    return fn, setter(fn, "k")


@kind
def namespace(first):
    return held(argparse.Namespace(), first)


@kind
def simple_namespace(first):
    return held(types.SimpleNamespace(), first)


@kind
def namespace_passed_on(first):
    thing = types.SimpleNamespace(k=first)
    return (lambda p, x: p * x * vars(thing)["k"]), setter(thing, "k")


@kind
def class_attribute(first):
    class Config:
        k = first

    return (lambda p, x: p * x * Config.k), setter(Config, "k")


@kind
def class_attribute_of_an_instance(first):
    class Config:
        k = first

    thing = Config()
    return (lambda p, x: p * x * thing.k), setter(Config, "k")


@kind
def class_attribute_of_a_base(first):
    class Base:
        k = first

    class Config(Base):
        pass

    thing = Config()
    return (lambda p, x: p * x * getattr(thing, "k")), setter(Base, "k")  # noqa: B009


@kind
def slot(first):
    class Slots:
        __slots__ = ("k",)

    return held(Slots(), first)


@kind
def property_that_reads_a_global(first):
    class Config:
        @property
        def k(self):
            return GLOBAL

    thing, (_, change) = Config(), global_variable(first)
    return (lambda p, x: p * x * thing.k), change


@kind
def computed_attribute(first):
    class Config:
        def __getattr__(self, name):
            return self.__dict__["hidden" + name]

    thing = Config()
    thing.hiddenk = first
    return (lambda p, x: p * x * thing.k), setter(thing, "hiddenk")


@kind
def descriptor_of_the_users(first):
    class Descriptor:
        def __get__(self, owner, kind):
            return self.k

    class Config:
        k = Descriptor()

    vars(Config)["k"].k = first
    thing = Config()
    return (lambda p, x: p * x * thing.k), setter(vars(Config)["k"], "k")


@kind
def attribute_of_self(first):
    class Layer:
        def __init__(self):
            self.k = first

        def call(self, p, x):
            return p * x * self.k

    layer = Layer()
    return layer.call, setter(layer, "k")


@kind
def attribute_of_an_attribute_of_self(first):
    class Layer:
        def call(self, p, x):
            return (lambda y: y * self.config.k)(p * x)

    layer = Layer()
    layer.config = types.SimpleNamespace(k=first)
    return layer.call, lambda v: setattr(layer, "config", types.SimpleNamespace(k=v))


@kind
def self_through_other_methods(first):
    class Base:
        def scale(self):
            return self.k

    class Layer(Base):
        def scale(self):
            return super().scale()

        def call(self, p, x):
            return p * x * self.scale()

    layer = Layer()
    layer.k = first
    return layer.call, setter(layer, "k")


@kind
def method_replaced_in_its_class(first):
    class Layer:
        def scale(self):
            return first

        def call(self, p, x):
            return p * x * self.scale()

    return Layer().call, lambda v: setattr(Layer, "scale", lambda self: v)


@kind
def inherited_method_that_reads_a_global(first):
    class Base:
        def scale(self):
            return GLOBAL

    class Layer(Base):
        pass

    layer, (_, change) = Layer(), global_variable(first)
    return (lambda p, x: p * x * layer.scale()), change


@kind
def class_method(first):
    class Layer:
        k = first

        @classmethod
        def scale(cls):
            return cls.k

    return (lambda p, x: p * x * Layer.scale()), setter(Layer, "k")


@kind
def object_made_inside(first):
    class Made:
        def scale(self):
            return GLOBAL

    _, change = global_variable(first)
    return (lambda p, x: p * x * Made().scale()), change


@kind
def object_of_another_package(first):
    thing = FOREIGN.Thing(first)
    return (lambda p, x: p * thing.times(x)), setter(thing, "k")


@kind
def method_of_another_package(first):
    thing = FOREIGN.Thing(first)
    times = thing.times
    return (lambda p, x: p * times(x)), setter(thing, "k")


@kind
def dataclass(first):
    @dataclasses.dataclass
    class Config:
        k: object

    thing = Config(first)
    return (lambda p, x: p * x * dataclasses.astuple(thing)[0]), setter(thing, "k")


@kind
def frozen_dataclass_that_holds_a_list(first):
    @dataclasses.dataclass(frozen=True)
    class Config:
        k: object

        def __call__(self, p, x):
            return p * x * self.k[0]

    thing = Config([first])
    return thing, lambda v: thing.k.__setitem__(0, v)


@kind
def named_tuple_that_holds_a_list(first):
    thing = collections.namedtuple("Config", "k")([first])
    return (lambda p, x: p * x * thing.k[0]), lambda v: thing.k.__setitem__(0, v)


@kind
def deque(first):
    held = collections.deque([first])
    return (lambda p, x: p * x * held[0]), lambda v: held.__setitem__(0, v)


@kind
def default_dict(first):
    held = collections.defaultdict(lambda: None, k=first)
    return (lambda p, x: p * x * held["k"]), functools.partial(held.__setitem__, "k")


@kind
def factory_of_a_default_dict(first):
    held = collections.defaultdict(lambda: first)
    return (
        lambda p, x: p * x * held.copy()["k"],
        lambda v: setattr(held, "default_factory", lambda: v),
    )


@kind
def subclass_of_dict(first):
    class Config(dict):
        __getattr__ = dict.__getitem__

    thing = Config(k=first)
    return (lambda p, x: p * x * thing.k), functools.partial(thing.__setitem__, "k")


@kind
def numpy_array_written_to(first):
    held = np.array([first, 7.0], np.float32)
    return (lambda p, x: p * x * held[0]), lambda v: held.__setitem__(0, v)


@kind
def large_numpy_array_written_to(first):
    held = np.full(300_000, first, np.float32)
    return (lambda p, x: p * x * held[123_456]), lambda v: held.__setitem__(123_456, v)


@kind
def array_module(first):
    held = array.array("d", [first])
    return (lambda p, x: p * x * held[0]), lambda v: held.__setitem__(0, v)


@kind
def view_of_memory(first):
    held = memoryview(array.array("d", [first]))
    return (lambda p, x: p * x * held[0]), lambda v: held.__setitem__(0, v)


@kind
def jax_array_in_a_list(first):
    held = [jnp.float32(first)]
    return (lambda p, x: p * x * held[0]), lambda v: held.__setitem__(0, jnp.float32(v))


@kind
def long_list(first):
    held = [1.0] * 50_000 + [first]
    return (lambda p, x: p * x * held[-1]), lambda v: held.__setitem__(-1, v)


@kind
def argument_of_partial(first):
    def fn(p, x, d):
        return p * x * d["k"]

    bound = functools.partial(fn, d={"k": first})
    return bound, functools.partial(bound.keywords["d"].__setitem__, "k")


@kind
def callable_object(first):
    class Layer:
        def __call__(self, p, x):
            return p * x * self.k

    layer = Layer()
    layer.k = first
    return layer, setter(layer, "k")


@kind
def callable_that_lies_about_equality(first):
    class Layer:
        def __call__(self, p, x):
            return p * x * self.k

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    layer = Layer()
    layer.k = first
    return layer, setter(layer, "k")


@kind
def member_of_an_enum(first):
    class Mode(enum.Enum):
        SCALE = [first]  # noqa: RUF012

    return (
        lambda p, x: p * x * Mode.SCALE.value[0],
        lambda v: Mode.SCALE.value.__setitem__(0, v),
    )


@kind
def nnx_variable(first):
    class Scale(nnx.Module):
        def __init__(self):
            self.k = nnx.Param(jnp.float32(first))

        def __call__(self, x):
            return x * self.k

    module = Scale()

    def change(value):
        module.k[...] = value

    return (lambda p, x: p * module(x)), change


@kind
def attribute_of_an_nnx_module(first):
    class Scale(nnx.Module):
        def __init__(self):
            self.k = first

        def __call__(self, x):
            return x * self.k

    module = Scale()
    return (lambda p, x: p * module(x)), setter(module, "k")


@kind
def list_of_functions(first):
    held = [lambda x: x * first]
    return (lambda p, x: p * held[0](x)), lambda v: held.__setitem__(0, lambda x: x * v)


@kind
def decorated_function(first):
    def decorated(fn):
        @functools.wraps(fn)
        def wrapper(*arguments):
            return fn(*arguments)

        return wrapper

    fn, change = global_variable(first)
    return decorated(fn), change


@kind
def function_under_a_name_of_a_library(first):
    fn, change = global_variable(first)

    @functools.wraps(jnp.tanh)
    def tanh(p, x):
        return fn(p, x)

    return tanh, change


@kind
def environment(first):
    os.environ["JDIST_TEST_SCALE"] = str(first)
    return (
        lambda p, x: p * x * float(os.environ["JDIST_TEST_SCALE"]),
        lambda v: os.environ.__setitem__("JDIST_TEST_SCALE", str(v)),
    )


@kind
def globals_by_name(first):
    _, change = global_variable(first)
    return (lambda p, x: p * x * globals()["GLOBAL"]), change


@kind
def evaluated_text(first):
    _, change = global_variable(first)
    return (lambda p, x: p * x * eval("GLOBAL")), change


@kind
def import_inside(first):
    FOREIGN.K = first

    def fn(p, x):
        import foreign_package

        return p * x * foreign_package.K

    return fn, setter(FOREIGN, "K")


@kind
def context_variable(first):
    held = contextvars.ContextVar("held")
    held.set(first)
    return (lambda p, x: p * x * held.get()), held.set


@kind
def method_of_a_list(first):
    held = [first]
    get = held.__getitem__
    return (lambda p, x: p * x * get(0)), lambda v: held.__setitem__(0, v)


@kind
def view_of_a_dict(first):
    d = {"k": first}
    view = types.MappingProxyType(d)
    return (lambda p, x: p * x * view["k"]), functools.partial(d.__setitem__, "k")


@kind
def attribute_of_a_module_in_a_package(first):
    package = types.ModuleType("foreign")
    package.inner = types.ModuleType("foreign.inner")
    package.inner.k = first
    return (lambda p, x: p * x * package.inner.k), setter(package.inner, "k")


@kind
def descriptor_that_deletes_only(first):
    class Descriptor:
        def __get__(self, owner, kind):
            return GLOBAL

        def __delete__(self, owner):
            pass

    class Config:
        k = Descriptor()

    thing, (_, change) = Config(), global_variable(first)
    vars(thing)["k"] = 5.0
    return (lambda p, x: p * x * thing.k), change


@kind
def thread_local(first):
    return held(threading.local(), first)


NO_TRACER = {
    "set_in_a_closure",  # A traced value has no hash.
    "numpy_array_written_to",
    "large_numpy_array_written_to",
    "array_module",
    "view_of_memory",
    "environment",
}
"""They cannot hold a traced value."""

BY_IDENTITY = {"jax_array_in_a_list", "nnx_variable"}
"""They are changed by another JAX array, which is not compared."""

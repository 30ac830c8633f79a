"""Objects, functions and exceptions as values: by name, and only what is allowed."""

import concurrent.futures
import copy
import dataclasses
import enum
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import optim
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError, RemoteError
from jdist.rpc.base.future import Future
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.codec import Codec, codes
from jdist.rpc.codec.functions import FunctionTable
from tests.rpc import nameable
from tests.rpc.carriers import CARRIERS, assert_same

HERE = "tests.rpc.nameable"


@pytest.fixture
def codec():
    nameable.CALLS.clear()
    return Codec(FunctionTable(allow=["tests"]))


@pytest.fixture(params=CARRIERS, ids=lambda carrier: carrier.__name__)
def there(request, codec):
    """Sends a value from one worker to another."""

    def send(value, device=None):
        return codec.decode(*request.param(*codec.encode(value), device))

    return send


# --- objects ---


def test_dataclasses(there, rng):
    """Field by field, nested, frozen and with slots; nothing is constructed again."""
    point = nameable.Point(rng.normal(size=(3, 2)), {"y": nameable.Frozen((1, "a"))})
    point.hidden = 7
    point.note = "not a field"
    third = nameable.Point3(1, 2, 3)
    nameable.CALLS.clear()
    got, got_third = there((point, third))
    assert_same(got, point)
    assert_same(got_third, third)
    assert got.hidden == 7
    assert not hasattr(got, "note")
    assert nameable.CALLS == []


def test_worker_infos(there):
    """rpc's own values travel without being allowed by anybody."""
    assert there([WorkerInfo("a", 3)]) == [WorkerInfo("a", 3)]


def test_named_tuples(there, rng):
    """Both kinds, and the states of jdist's optimizers, which are made of them."""
    value = nameable.Pair(rng.normal(size=4), nameable.Old(1, nameable.Pair(2, 3)))
    assert_same(there(value), value)
    params = {"w": jnp.asarray(rng.normal(size=(2, 3)))}
    state = optim.adam(lr=0.1).init(params)
    assert_same(there((params, state)), (params, state))


def test_states_of_a_library_that_is_allowed(rng):
    """optax's states travel once optax is allowed, and not before."""
    params = {"w": jnp.asarray(rng.normal(size=3))}
    state = optax.adam(0.1).init(params)
    codec = Codec(FunctionTable(allow=["optax"]))
    assert_same(codec.decode(*codec.encode(state)), state)
    with pytest.raises(ForbiddenFunction, match=r"optax.*allow=.*init_rpc"):
        Codec(FunctionTable()).encode(state)


class Local(enum.Enum):
    """Not in the module of the others."""

    ONE = 1


@pytest.mark.parametrize(
    "member",
    [nameable.Color.RED, nameable.Color.CRIMSON, nameable.Level.LOW, Local.ONE,
     nameable.Access.READ, nameable.Access.READ | nameable.Access.WRITE,
     nameable.Access(0)],
)  # fmt: skip
def test_enums(there, member):
    """The very member; a combination of flags too."""
    assert there({member: member}) == {member: member}
    assert there(member) is member


def test_registered_pytrees(there, rng):
    """In the form of JAX's class decorator, by their own two methods."""
    line = nameable.Line((rng.normal(size=2), nameable.Pair(1, None)), ("n", 3))
    nameable.CALLS.clear()
    got = there([line])[0]
    assert type(got) is nameable.Line
    assert_same((got.ends, got.name), (line.ends, line.name))
    assert nameable.CALLS == []


def test_objects_that_would_lose_something(codec):
    """A dataclass with contents beside its fields is not cut to its fields."""
    table = nameable.Table("t")
    table["k"] = 1
    with pytest.raises(TypeError, match="not be a dataclass with contents beside"):
        codec.encode(table)


def test_types_of_modules_not_allowed():
    """The sender refuses first, and says what to do."""
    strict = Codec(FunctionTable())
    objects = [
        nameable.Point(1),
        nameable.Pair(1, 2),
        nameable.Color.RED,
        nameable.Access(3),
        nameable.Line([1], "n"),
    ]
    for value in objects:
        with pytest.raises(ForbiddenFunction, match=r"may name.*nameable.*allow="):
            strict.encode([value])


@dataclasses.dataclass
class Planned(nnx.Module):
    """A module that is a dataclass, too."""

    size: int = 3


MODULE = r"must not be a Flax NNX module, .*rpc\.RemoteModule.*nnx\.to_pure_dict\("
PART = r"must not be a part of a Flax NNX module\. Got .*nnx\.to_pure_dict\(state\)"
OF_FLAX = {
    "a layer": (lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), MODULE),
    "a dataclass": (Planned, MODULE),
    "a state": (lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), PART),
    "a parameter": (lambda: nnx.Param(jnp.ones(3)), PART),
    "a structure": (lambda: nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))[0], PART),
    "streams": (lambda: nnx.Rngs(0), PART),
}


@pytest.mark.parametrize("what", OF_FLAX)
def test_modules_are_refused_by_their_name(codec, what):
    make, text = OF_FLAX[what]
    with pytest.raises(TypeError, match=f"`rpc\\(value\\)` {text}"):
        codec.encode({"value": make()})


def test_the_arrays_of_a_module_travel(there):
    """As the remedy says."""
    sent, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    arrived = there(nnx.to_pure_dict(nnx.state(sent)))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, arrived)
    nnx.update(other, state)
    np.testing.assert_array_equal(other.kernel[...], sent.kernel[...])


def test_a_receiver_with_a_shorter_list(codec):
    """What the sender allows the receiver still refuses."""
    strict = Codec(FunctionTable())
    for value in (nameable.Point(1), nameable.Color.RED, nameable.add, nameable.Pair):
        with pytest.raises(ForbiddenFunction, match="may name"):
            strict.decode(*codec.encode([value]))


@pytest.mark.parametrize("kind", [Future, concurrent.futures.Future])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_futures_do_not_travel(kind, allow_pickle):
    """In torch's words, with the two ways out."""
    codec = Codec(FunctionTable(), allow_pickle=allow_pickle)
    message = r"Can not pickle torch\.futures\.Future.*wait\(\).*async_execution"
    with pytest.raises(TypeError, match=message):
        codec.encode((kind(),))


# --- functions ---


def _same_function(one, other):
    return one is other


FUNCTIONS = [
    nameable.add, nameable.alias_of_add, nameable.wrapped, nameable.compiled,
    nameable.Counter, nameable.Counter.twice, nameable.Counter.Inner.thrice,
    nameable.Point.dimension, nameable.Point, nameable.Color, jnp.add, jnp.sin,
    jnp.linalg.norm, jnp.fft.fft, jnp.where, jnp.maximum, min, len, sorted, int, dict,
    ValueError, KeyError, np.linalg.LinAlgError, jax.errors.JaxRuntimeError,
    optim.sgd, nameable.Point.shifted, nameable.Point.scaled,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_functions_and_classes(there, function):
    """The receiver's own object of that name."""
    assert there({"f": function})["f"] is function


def test_bound_methods(there, rng):
    """The object travels with its method; class methods go with their class."""
    point = nameable.Point(rng.normal(size=3))
    shifted = there(point.shifted)(1)
    np.testing.assert_array_equal(shifted.x, point.x + 1)
    assert there(nameable.Point.origin)().x == 0
    assert there(nameable.Point3.origin)().x == 0
    assert type(there(nameable.Point3.origin).__self__) is type
    assert there(nameable.Point3(2, 3).dimension)() == 2


def test_partials(there, rng):
    """What a closure would carry can be given as arguments."""
    array = rng.normal(size=3)
    got = there(functools.partial(nameable.add, array, y=2))
    assert type(got) is functools.partial
    np.testing.assert_array_equal(got(), array + 2)
    assert there(nameable.three_more)(4) == 7


NAMELESS = {
    "lambda": (nameable.double, "'tests.rpc.nameable:<lambda>'|<lambda>.*top of a"),
    "closure": (nameable.outer(), "outer.<locals>.inner.*pass what it closes over"),
    "decorated badly": (nameable.badly_wrapped, "decorate_badly.<locals>"),
    "jitted lambda": (jax.jit(lambda x: x), "<lambda>"),
    "callable object": (operator.itemgetter(1), "itemgetter object.*has none"),
    "vmapped": (jax.vmap(nameable.double), "<lambda>|locals"),
}


@pytest.mark.parametrize("name", NAMELESS)
def test_functions_without_a_name(codec, name):
    """A lambda or closure is refused at the sender, with the remedy."""
    function, message = NAMELESS[name]
    with pytest.raises(ValueError, match=message):
        codec.encode((function, (1,)))


def test_partials_of_nothing_allowed(codec):
    """The function inside is held to the same rules."""
    with pytest.raises(ForbiddenFunction, match="posix:system"):
        codec.encode(functools.partial(nameable.imported_function, "true"))
    with pytest.raises(ValueError, match="<lambda>"):
        codec.encode(functools.partial(lambda x: x, 1))


def test_functions_that_are_not_what_their_name_says(codec, monkeypatch):
    """A name that means something else by now is refused, not looked up."""
    original = nameable.add
    monkeypatch.setattr(nameable, "add", nameable.decorate(original))
    codec.encode(nameable.add)
    with pytest.raises(ValueError, match=r"still be what its name.*redefined"):
        codec.encode(original)


METHODS = {
    "list": ([].append, ValueError, "find by its name"),
    "str": ("a".join, ValueError, "find by its name"),
    "jax": (jnp.ones(3).sum, ForbiddenFunction, r"its class defines.*`jnp\.sum`"),
    "metaclass": (
        nameable.WithMeta.method_of_the_class, ForbiddenFunction, "its class defines"),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_other_things(codec, name):
    """Methods of arrays and built-in objects have no way to travel."""
    method, error, message = METHODS[name]
    with pytest.raises(error, match=message):
        codec.encode(method)


def test_methods_by_another_name(codec):
    """A method goes by the name it was defined under."""
    method = nameable.Point(1).also_shifted
    got = codec.decode(*codec.encode(method))
    assert got.__func__ is nameable.Point.shifted
    assert got(2) == nameable.Point(3)


# --- exceptions as values ---


def test_exceptions_as_values(there):
    """Without a note about a worker: nobody raised them here."""
    got = there([ValueError("bad", 3), nameable.WithState("s")])
    assert [type(error) for error in got] == [ValueError, nameable.WithState]
    assert got[0].args == ("bad", 3)
    assert not hasattr(got[0], "__notes__")
    assert isinstance(there(KeyboardInterrupt()), RemoteError)


# --- trees that nobody encodes ---

MALFORMED = {
    "unknown code": ([99], "unknown kind"),
    "negative code": ([-1], "unknown kind"),
    "no code": ([], "unknown kind"),
    "code of another type": ([True, 1], "unknown kind"),
    "mapping": ({"a": 1}, "holds a dict"),
    "leaf out of range": ([codes.LEAF, 4], "names an array"),
    "negative leaf": ([codes.LEAF, -1], "names an array"),
    "leaf by bool": ([codes.LEAF, False], "names an array"),
    "leaf without index": ([codes.LEAF], "malformed"),
    "odd dictionary": ([codes.DICT, 1], "without a value"),
    "odd ordered one": ([codes.ORDERED_DICT, 1, 2, 3], "without a value"),
    "unhashable key": ([codes.DICT, [codes.LIST], 1], "unhashable"),
    "unhashable element": ([codes.SET, [codes.DICT]], "unhashable"),
    "array as key": ([codes.DICT, [codes.LEAF, 0], 1], "unhashable"),
    "factory": ([codes.DEFAULT_DICT, 3], "must be callable or None"),
    "no factory": ([codes.DEFAULT_DICT], "cannot be made: .* 'factory'"),
    "big int of text": ([codes.BIG_INT, "12"], "malformed"),
    "bytes of floats": ([codes.BYTES, 0], "as bytes"),
    "text of floats": ([codes.TEXT, 0], "as bytes"),
    "no text": ([codes.TEXT, 1], "cannot be made: 'utf-8'"),
    "complex of text": ([codes.COMPLEX, "1", 2.0], "malformed"),
    "range of floats": ([codes.RANGE, 0.5, 1, 1], "as an integer"),
    "range of step 0": ([codes.RANGE, 0, 1, 0], "must not be zero"),
    "short slice": ([codes.SLICE, 0, 1], "malformed"),
    "scalar too long": ([codes.SCALAR, "int8", b"ab"], "does not have 2 bytes"),
    "scalar of objects": ([codes.SCALAR, "O", b"12345678"], "No dtype"),
    "dtype of records": ([codes.DTYPE, "V4"], "No dtype"),
    "dtype with code": ([codes.DTYPE, "f4,f4"], "No dtype"),
    "dtype of no size": ([codes.DTYPE, ">f3"], "No dtype"),
    "dtype of a date": ([codes.DTYPE, "<M8[xy]"], "No dtype"),
    "key of numpy": ([codes.KEY, "threefry2x32", [codes.LEAF, 0]], "malformed"),
    "key of floats": ([codes.KEY, "threefry2x32", [codes.LEAF, 2]], "cannot be made: "),
    "unknown keys": ([codes.KEY, "mine", [codes.LEAF, 3]], "cannot be made: .*mine"),
    "reference to a number": ([codes.REFERENCE, 3], "malformed"),
    "method of a number": ([codes.METHOD, 3, 3], "malformed"),
    "partial of a number": ([codes.PARTIAL, 3, [codes.TUPLE], [codes.DICT]], "malf"),
    "partial keywords": (
        [codes.PARTIAL, [codes.REFERENCE, "builtins:min"], [codes.TUPLE],
         [codes.DICT, 1, 2]], "keyword"),
    "dataclass fields": ([codes.DATACLASS, f"{HERE}:Point", "x", 1], "others here"),
    "dataclass more": (
        [codes.DATACLASS, f"{HERE}:Frozen", "x", 1, "__class__", 2], "others here"),
    "dataclass of none": ([codes.DATACLASS, f"{HERE}:Pair", "x", 1], "no dataclass"),
    "dataclass error": (
        [codes.DATACLASS, f"{HERE}:FrozenError", "number", 1], "no dataclass"),
    "dataclass of dict": ([codes.DATACLASS, f"{HERE}:Table", "name", 1], "made: obj"),
    "dataclass unnamed": ([codes.DATACLASS], "must name a class"),
    "dataclass of number": ([codes.DATACLASS, 3], "must name a class"),
    "dataclass of function": ([codes.DATACLASS, f"{HERE}:add"], "must name a class"),
    "tuple too short": ([codes.NAMEDTUPLE, f"{HERE}:Pair", 1], "others here"),
    "tuple of none": ([codes.NAMEDTUPLE, f"{HERE}:Point", 1], "no named tuple"),
    "member": ([codes.ENUM, f"{HERE}:Color", "BLUE"], "has no member 'BLUE'"),
    "member of none": ([codes.ENUM, f"{HERE}:Point", "x"], "has no member"),
    "member of many": ([codes.ENUM, f"{HERE}:Color", "RED", "RED"], "cannot be made"),
    "unhashable member": ([codes.ENUM, f"{HERE}:Color", [codes.LIST]], "unhashable"),
    "flag": ([codes.ENUM, f"{HERE}:Access", 64], "cannot be made: .*64"),
    "flag of enum": ([codes.ENUM, f"{HERE}:Level", 1], "has no member 1"),
    "no pytree": ([codes.PYTREE, f"{HERE}:Point", None, 1], "'tree_unflatten'"),
    "short pytree": ([codes.PYTREE, f"{HERE}:Line"], "cannot be made: .* 'static'"),
    "broken pytree": ([codes.PYTREE, f"{HERE}:Line", "broken"], "cannot be made"),
    "exception of text": ([codes.EXCEPTION, "oh"], "is malformed"),
    "registered": ([codes.REGISTERED, "rref", 1], "No type is registered"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees(codec, name):
    """Each is refused for what is wrong with it; nothing of ours runs meanwhile."""
    tree, message = MALFORMED[name]
    keys = jax.random.key_data(jax.random.key(1))
    leaves = [np.ones(3), np.array([255], np.uint8), jnp.ones(2), keys]
    before = copy.deepcopy(tree)
    for nested in (tree, [codes.LIST, 1, tree]):
        with pytest.raises(ProtocolError, match=message):
            codec.decode(nested, leaves)
    assert tree == before
    assert nameable.CALLS == []

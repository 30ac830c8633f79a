"""One compilation for one code and contents; a warning when contents keep changing."""

import array
import functools
import gc
import re
import warnings
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist.segment import RecompilationWarning, segment
from jdist.segment._lookup import traced
from jdist.segment._lookup.cache import FunctionCache, ProgramVersions
from jdist.segment._lookup.contents import contents_of

SCALE = 2.0
SETTINGS = {"scale": 1}


@dataclass(frozen=True)
class Frozen:
    scale: int


class Mutable:
    def __init__(self, scale):
        self.scale = scale
        self.me = self

    def apply(self, x):
        return x * self.scale


def key(fn):
    return contents_of(fn, "segment").key()


def closing_over(value):
    return lambda x: (x, value)


def test_a_lambda_in_a_loop_compiles_once(rng, compilations):
    """Ten lambdas of one program share their halves."""
    x = jnp.asarray(rng.standard_normal(3))
    compilations.clear()
    for _ in range(10):
        seg = segment(lambda p, x, n=2: jnp.sin(p * x) * n)
        _, residuals = seg.forward(x, x)
        seg.backward(x, residuals, x)
    assert len(compilations) == 2


def test_one_function_is_traced_once(rng, monkeypatch):
    """However often a segment of it is made, until a value that it reads changes."""
    x = jnp.asarray(rng.standard_normal(3))
    config, found = {"scale": 2.0}, []
    trace = traced.trace_whole
    monkeypatch.setattr(
        traced, "trace_whole", lambda *given: (found.append(given), trace(*given))[1]
    )

    def fn(p, x):
        return p * x * config["scale"]

    for scale in (2.0, 2.0, 3.0, 3.0, 2.0):
        config["scale"] = scale
        y, _ = segment(fn).forward(x, x)
        np.testing.assert_allclose(y, x * x * scale, rtol=1e-6)
    # That of an earlier value is traced anew, and found by its program.
    assert len(found) == 3


def test_traced_once(rng):
    """Forward and backward together run the Python function a single time."""
    x = jnp.asarray(rng.standard_normal(3))
    traces = Mutable(0)

    def fn(p, x):
        traces.scale += 1
        return jnp.sin(p * x)

    seg = segment(fn)
    for _ in range(3):
        _, residuals = seg.forward(x, x)
        seg.backward(x, residuals, x)
        _, rest = seg.backward_inputs(x, residuals, x)
        seg.backward_params(rest)
    assert traces.scale == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.float32(1), np.float64(1)),
        (np.arange(3), np.arange(1, 4)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (jnp.arange(3), jnp.arange(3)),  # By identity: to compare would wait for them.
        (Frozen(1), Frozen(2)),
        (closing_over(1), closing_over(2)),
        (Mutable(1).apply, Mutable(2).apply),
        (Mutable(1), Mutable(1)),  # Something may ask which one it is.
        (object(), object()),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(closing_over, value=1), functools.partial(closing_over)),
        (jnp.sin, jnp.cos),
        (None, ...),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_different_contents(first, second):
    """Whatever could make two functions differ makes their keys differ."""
    assert key(closing_over(first)) != key(closing_over(second))
    assert key(closing_over([first])) != key(closing_over([second]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1,
        lambda: float("nan"),
        lambda: "text",
        lambda: [1, (2, {"a": {3}})],
        lambda: np.arange(3),
        lambda: np.float32(2),
        lambda: Frozen(3),
        lambda: closing_over(4),
        lambda: functools.partial(closing_over, 5),
        lambda: jnp.sin,
        lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
        lambda: None,
    ],
)
def test_equal_contents(make):
    """Equal values made twice are one key."""
    assert key(closing_over(make())) == key(closing_over(make()))
    assert hash(key(closing_over(make()))) == hash(key(closing_over(make())))


def test_what_changes_inside_counts():
    """Attributes, list items, array elements and variables that change are seen."""
    thing, items, array = Mutable(1), [1], np.arange(3)

    def keys():
        return [key(closing_over(x)) for x in (thing, items, array, thing.apply)]

    before = keys()
    assert keys() == before
    thing.scale, items[0], array[0] = 2, 2, 2
    assert not any(a == b for a, b in zip(before, keys(), strict=True))


def test_modules_count_by_their_parameters(rng):
    """A Flax module in a closure counts by its arrays: each step is another key."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    before = key(closing_over(model))
    assert key(closing_over(model)) == before
    nnx.update(model, jax.tree.map(lambda p: p + 1, params))
    assert key(closing_over(model)) != before
    # Its structure is equal: to split and merge is the way that compiles once.
    assert key(closing_over(nnx.split(model)[0])) == key(closing_over(graph))


def test_globals_count():
    """A lambda at the top of a script reads the loop's variable as a global."""
    names = {"jnp": jnp, "helper": None, "i": 0}
    exec("def helper(x): return x * i\nmake = lambda: lambda p, x: helper(p)", names)
    first = key(names["make"]())
    assert key(names["make"]()) == first
    names["i"] = 1
    assert key(names["make"]()) != first


def test_globals_and_defaults_are_read(monkeypatch):
    """Globals by value, to any depth inside this module; defaults too."""

    def make():
        def inner(x, *, shift=SETTINGS["scale"]):
            return x * SCALE + shift

        return lambda x: inner(x)

    first = key(make())
    assert key(make()) == first
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    second = key(make())
    assert second != first
    monkeypatch.setitem(SETTINGS, "scale", 5)
    assert key(make()) != second


def test_recursive_functions_and_unassigned_variables():
    """A function that refers to itself, or to a variable not yet there, has a key."""

    def make():
        def countdown(n):
            return n and countdown(n - 1) + later

        first = key(countdown)
        later = 1
        return first, key(countdown), later

    (before, after, _), (again, _, _) = make(), make()
    assert before == again
    assert before != after


def test_third_version_warns_and_says_what_changed():
    """The third version of one code object warns, once; others are not counted."""
    versions = ProgramVersions(size=8)

    def compile_for(scale):
        contents = contents_of(lambda x: x * scale, "segment")
        return versions.get("apply", contents, (), contents.key(), object())

    compile_for(1)
    compile_for(1.5)
    message = (
        r"apply compiles .*<lambda> \(test_cache.py:\d+\) for the 3rd time, because "
        r"what it refers to changed: closure variable `scale` from 1.5 to 2\.5\. "
    )
    with pytest.warns(RecompilationWarning, match=message):
        compile_for(2.5)
    compile_for(3.5)
    assert compile_for(3.5) is compile_for(3.5)
    assert len(versions) == 4


def test_threads_that_compile_one_program_together_count_once():
    """Each asks for the same entry; a second compilation would be a version."""
    versions = ProgramVersions(size=8)
    contents = contents_of(closing_over(1), "segment")
    entry = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecompilationWarning)
        for _ in range(5):
            assert versions.get("segment", contents, (), "program", entry) is entry


def test_versions_are_bounded():
    """The program not used for longest goes."""
    versions = ProgramVersions(size=2)
    contents = contents_of(closing_over(1), "segment")

    def get(program):
        return versions.get("apply", contents, program, program, object())

    first, second = get(1), get(2)
    assert get(1) is first
    get(3)
    assert len(versions) == 2
    assert get(1) is first
    assert get(2) is not second


def test_segment_warns(rng):
    """The warning reaches who writes `segment(lambda ...)` in a loop."""
    x = jnp.asarray(rng.standard_normal(3))

    def loop():
        for step in range(4):
            segment(lambda p, x, step=step: p * x + step).forward(x, x)

    with pytest.warns(RecompilationWarning, match="`step` from 1 to 2") as caught:
        loop()
    assert [w.filename for w in caught] == [__file__]


def test_the_warning_names_what_cannot_be_read(rng):
    """Of a thing whose contents are not seen, that it is what may have changed."""
    x, held = jnp.asarray(rng.standard_normal(3)), array.array("d", [0.0])

    def loop():
        for step in range(3):
            held[0] = step + 0.5
            segment(lambda p, x: p * x * held[0]).forward(x, x)

    message = r"something within closure variable `held` \(a array\)"
    with pytest.warns(RecompilationWarning, match=message):
        loop()


def test_a_change_is_never_missed(rng):
    """A lambda whose closure changed computes with the new value, not the old."""
    x = jnp.asarray(rng.standard_normal(3))

    def run(scale):
        outputs, _ = segment(lambda p, x: p * x * scale).forward(x, x)
        return outputs

    assert np.array_equal(run(2.0), x * x * 2)
    assert np.array_equal(run(3.0), x * x * 3)


def test_cache_is_bounded():
    """The entry not used for longest goes; nothing of it is left in the cache."""
    cache = FunctionCache("apply", size=2)

    class Entry:
        def __init__(self, contents):
            self.contents = contents

    fns = {n: closing_over(n) for n in (1, 2, 3, 4)}
    made = {n: cache.get(fns[n], n, Entry) for n in (1, 2)}
    for n in (3, 4):
        assert cache.get(fns[1], 1, Entry) is made[1]
        cache.get(fns[n], n, Entry)
    assert len(cache) == 2
    gone = weakref.ref(made.pop(2))
    gc.collect()
    assert gone() is None
    assert cache.get(fns[1], 1, Entry) is made[1]
    # Another function of equal contents may change apart.
    assert cache.get(closing_over(1), 1, Entry) is not made[1]


def test_options_are_part_of_the_key():
    """One function under two policies is two entries, and no version too many."""
    cache, fn = FunctionCache("apply", size=8), closing_over(1)
    made = [cache.get(fn, n, lambda _: object()) for n in range(4)]
    assert len(set(map(id, made))) == 4


def test_traced_values_are_refused():
    """A closure over a value that is being traced would lose its derivative."""

    def loss(scale):
        return segment(lambda p, x: p * x * scale).forward(scale, scale)[0]

    message = (
        r"`segment\(fn\)` must not refer to values that are being traced; closure "
        r"variable `scale` is one. Got .* Pass it as an input"
    )
    with pytest.raises(TypeError, match=message):
        jax.grad(loss)(2.0)

"""Traces, compilations and reads, by counts."""

import argparse
import functools
import hashlib
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import RecompilationWarning, segment
from jdist.segment._lookup.cache import VERSIONS
from jdist.segment._lookup.contents import (
    MOST_BYTES,
    MOST_VALUES,
    Contents,
    contents_of,
)
from jdist.segment._segment import CACHE
from tests.segment.referents import FOREIGN


class Layer:
    """A layer beside which a trainer keeps its books."""

    def __init__(self):
        self.k, self.steps, self.history = 2.0, 0, []

    def call(self, p, x):
        return jnp.tanh(p * x) * self.k

    def call_by_helper(self, p, x):
        return read(self) * p * x


def read(thing):
    return thing.k


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    """Clears the caches: programs of another test would be found."""
    CACHE.clear()
    VERSIONS.clear()


@pytest.fixture
def arrays(rng):
    return jnp.float32(rng.normal()), jnp.asarray(rng.normal(size=3), jnp.float32)


@pytest.fixture
def counted(monkeypatch):
    """Values and bytes that were read to find compiled functions."""
    found = types.SimpleNamespace(values=0, bytes=0)
    value_read, digest = Contents._value, hashlib.blake2b

    def counting(self, part, value):
        found.values += 1
        return value_read(self, part, value)

    def hashing(data, **options):
        found.bytes += len(data)
        return digest(data, **options)

    monkeypatch.setattr(Contents, "_value", counting)
    monkeypatch.setattr("hashlib.blake2b", hashing)
    return found


def test_an_unrelated_attribute_changes_nothing(arrays, compilations):
    """Code that reads `self.k` is found whatever else the object holds."""
    p, x = arrays
    layer, made = Layer(), set()
    compilations.clear()
    for _ in range(8):
        seg = segment(layer.call)
        seg.forward(p, x)
        made.add(seg._halves)
        layer.steps += 1
        layer.history.append(float(layer.steps))
    assert (len(made), len(compilations)) == (1, 1)


def test_an_object_that_is_passed_on_is_traced_anew_and_not_compiled(
    arrays, compilations
):
    """Then all of it may be read, and its program tells that nothing has changed."""
    p, x = arrays
    layer, made = Layer(), set()
    compilations.clear()
    for _ in range(8):
        seg = segment(layer.call_by_helper)
        y, residuals = seg.forward(p, x)
        seg.backward(p, residuals, np.ones(3, np.float32))
        made.add(seg._halves)
        layer.steps += 1
    assert (len(made), len(compilations)) == (8, 2)
    layer.k = 5.0
    y, _ = segment(layer.call_by_helper).forward(p, x)
    np.testing.assert_allclose(y, 5 * p * x, rtol=1e-6)


def test_halves_of_one_program_take_residuals_of_each_call(arrays):
    """Programs of another segment serve this one in all its calls."""
    p, x = arrays
    lock = threading.Lock()  # It cannot be read.
    first, second = [segment(lambda p, x: (lock, jnp.sin(p * x))[1]) for _ in range(2)]
    assert first._halves is not second._halves
    for each in (x, jnp.tile(x, 2), x):
        first.forward(p, each)
        y, residuals = second.forward(p, each)
        d_p, _ = second.backward(p, residuals, jnp.ones_like(y))
        d_x, rest = second.backward_inputs(p, residuals, jnp.ones_like(y))
        np.testing.assert_array_equal(second.backward_params(rest), d_p)
        np.testing.assert_allclose(d_x[0], p * jnp.cos(p * each), rtol=1e-6)
        np.testing.assert_array_equal(second.outputs(p, each), y)
    stranger = segment(lambda p, x: (lock, jnp.cos(p * x))[1])
    with pytest.raises(ValueError, match="of this very segment"):
        stranger.backward(p, residuals, y)


def test_a_long_history_is_not_read(arrays, counted, compilations):
    """A limit ends the reading, and a trace takes its place."""
    p, x = arrays
    layer = Layer()
    layer.k, layer.history = 2.5, [float(n) for n in range(100_000)]
    compilations.clear()
    for _ in range(3):
        segment(layer.call_by_helper).forward(p, x)
        layer.history.append(1.0)
    assert counted.values < 6 * MOST_VALUES
    assert len(compilations) == 1


def test_a_large_closure_is_not_hashed(arrays, counted):
    """Each segment compiles if an array is too large to be read in every call."""
    p, x = arrays
    table = np.arange(4_000_000, dtype=np.float32)

    def look_up(p, x):
        return p * x * table[7]

    for _ in range(3):
        y, _ = segment(look_up).forward(p, x)
        np.testing.assert_allclose(y, p * x * 7, rtol=1e-6)
    assert counted.bytes < MOST_BYTES


def test_a_large_constant_is_not_hashed(arrays, counted):
    """An array that is in the program as a whole; the warning names it."""
    p, _ = arrays
    table = np.zeros(1_000_000, np.float32)

    def loop():
        for change in (1.0, 2.0, 3.0):
            table[3] = change
            y, _ = segment(lambda p, x: p * (x * table).sum()).forward(p, p)
            np.testing.assert_allclose(y, p * p * change, rtol=1e-6)

    with pytest.warns(RecompilationWarning, match=r"within closure variable `table`"):
        loop()
    assert counted.bytes < MOST_BYTES


def test_a_program_keeps_its_own_copy_of_an_array(arrays):
    """JAX would read the caller's memory again for another device, or after this."""
    p, x = arrays
    table = np.array([2.0, 5.0], np.float32)
    seg = segment(lambda p, x: p * x * table[:1])
    y, residuals = seg.forward(p, x)
    table[0] = 3.0
    jax.clear_caches()
    # A call that was begun is finished with the values that it began with.
    d_p, (d_x,) = seg.backward(p, residuals, jnp.ones_like(y))
    np.testing.assert_allclose(d_p, 2 * x.sum(), rtol=1e-6)
    np.testing.assert_allclose(d_x, np.full(3, 2 * p), rtol=1e-6)
    with pytest.raises(ValueError, match=r"must stay what it was"):
        seg.forward(p, x)


def test_a_module_that_is_closed_over_is_read(arrays, compilations):
    """Flax modules in closures, the commonest case: found without a trace."""
    from flax import linen, nnx

    class Bound(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.linear(x))

    class Net(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x):
            return linen.Dense(self.width)(jnp.tanh(x))

    _, x = arrays
    bound, net = Bound(nnx.Rngs(0)), Net(4)
    graph, params = nnx.split(bound)
    variables = net.init(jax.random.key(0), x)
    cases = {
        "closed over": (lambda _, x: bound(x), None),
        "split": (lambda p, x: nnx.merge(graph, p)(x), params),
        "linen": (lambda p, x: net.apply(p, x), variables),
    }
    for name, (fn, given) in cases.items():
        assert contents_of(fn, "segment").complete, name
        made = {segment(fn)._halves for _ in range(3)}
        assert len(made) == 1, name
        np.testing.assert_allclose(
            segment(fn).forward(given, x)[0], fn(given, x), rtol=1e-5
        )


# --- one version of what a function reads ---


def test_a_segment_is_of_one_version(arrays):
    """Another set of shapes, when what the function reads has changed, is refused."""
    p, x = arrays
    config = argparse.Namespace(scale=2.0)
    seg = segment(lambda p, x: p * x * config.scale)
    seg.forward(p, x)
    config.scale = 3.0
    message = (
        r"`segment\(fn\)` must stay what it was when it was first compiled\. "
        r"Got another program of .*<lambda> .*: closure variable `config.scale` from "
        r"2.0 to 3.0\. "
        r"Pass what changes as an input, or make .* anew"
    )
    for call in (seg.forward, seg.outputs, seg.lower):
        for rows in (3, 2):
            with pytest.raises(ValueError, match=message):
                call(p, x[:rows])
    config.scale = 2.0
    for rows in (3, 2):
        y, _ = seg.forward(p, x[:rows])
        np.testing.assert_allclose(y, 2 * p * x[:rows], rtol=1e-6)


@pytest.mark.parametrize("seen", ["list", "attribute", "global", "array"])
def test_a_change_is_seen_where_a_segment_of_equal_contents_was_compiled(
    seen, arrays, monkeypatch
):
    """The second one, for which nothing is traced, changes before its first call."""
    p, x = arrays
    monkeypatch.setitem(globals(), "scale", 2.0)

    def made():
        if seen == "list":
            held = [2.0]
            change = functools.partial(held.__setitem__, 0, 3.0)
            return (lambda p, x: p * x * held[0]), change
        if seen == "attribute":
            layer = Layer()
            return (lambda p, x: layer.k * p * x), (lambda: setattr(layer, "k", 3.0))
        if seen == "global":
            change = functools.partial(globals().__setitem__, "scale", 3.0)
            return (lambda p, x: scale * p * x), change  # noqa: F821
        table = np.array([2.0], np.float32)
        return (lambda p, x: table * p * x), functools.partial(table.fill, 3.0)

    (one, _), (other, change) = made(), made()
    first, second = segment(one), segment(other)
    first.forward(p, x)
    change()
    np.testing.assert_allclose(second.forward(p, x)[0], 3 * p * x, rtol=1e-6)
    np.testing.assert_allclose(second.outputs(p, x), 3 * p * x, rtol=1e-6)
    if seen == "global":  # Both read it.
        for call in (first.forward, first.outputs):
            with pytest.raises(ValueError, match=r"must stay .*from 2\.0 to 3\.0"):
                call(p, x)
    else:
        np.testing.assert_allclose(first.forward(p, x)[0], 2 * p * x, rtol=1e-6)


def test_a_function_that_writes_as_it_is_traced_is_traced_once(arrays):
    """What it writes is no change that a later call would have to look into."""
    p, x = arrays
    traces, layer = [], Layer()

    def fn(p, x):
        traces.append(x.shape)
        layer.steps += 1
        return layer.call(p, x) + 0.0 * len(traces) + 0.0 * layer.steps

    seg = segment(fn)
    for rows in (3, 3, 2, 3, 2):
        y, _ = seg.forward(p, x[:rows])
        np.testing.assert_allclose(y, jnp.tanh(p * x[:rows]) * 2, rtol=1e-6)
    # A new shape is compared with one that is known.
    assert traces.count((3,)) <= 2
    assert traces.count((2,)) == 1
    before = len(traces)
    for rows in (3, 2, 3):
        seg.forward(p, x[:rows])
    assert len(traces) == before


def test_one_version_of_what_cannot_be_read(arrays):
    """There the programs tell: one that is the same for the old shapes may go on."""
    p, x = arrays
    layer = Layer()
    layer.lock = threading.Lock()
    seg = segment(layer.call_by_helper)
    seg.forward(p, x)
    layer.steps += 1
    seg.forward(p, x[:2])
    layer.k = 3.0
    with pytest.raises(ValueError, match=r"must stay what it was"):
        seg.forward(p, x[:1])


def test_one_that_changes_does_not_stop_another_that_does_not(arrays):
    """Functions of equal contents share what is compiled, and change apart."""
    p, x = arrays
    layers = [Layer(), Layer()]
    first, second = [segment(layer.call) for layer in layers]
    y, residuals = second.forward(p, x)
    layers[0].k = 7.0
    halved, _ = second.forward(p, x[:2])
    np.testing.assert_allclose(halved, jnp.tanh(p * x[:2]) * 2, rtol=1e-6)
    d_p, _ = second.backward(p, residuals, np.ones(3, np.float32))
    np.testing.assert_allclose(d_p, (2 * x / jnp.cosh(p * x) ** 2).sum(), rtol=1e-5)
    np.testing.assert_array_equal(second.forward(p, x)[0], y)
    # Nothing was traced for it before.
    found, _ = first.forward(p, x[:1])
    np.testing.assert_allclose(found, jnp.tanh(p * x[:1]) * 7, rtol=1e-6)
    layers[1].k = 3.0
    with pytest.raises(ValueError, match=r"must stay what it was .* 2\.0 to 3\.0"):
        second.forward(p, x[:1])


def test_a_program_of_another_version_is_not_found_by_the_old_contents(arrays):
    """A change between making a segment and its first call misleads no other."""
    p, x = arrays
    FOREIGN.K = 2.0

    def fn(p, x):
        return p * x * FOREIGN.K

    early = segment(fn)
    FOREIGN.K = 3.0
    np.testing.assert_allclose(early.forward(p, x)[0], 3 * p * x, rtol=1e-6)
    FOREIGN.K = 2.0
    np.testing.assert_allclose(segment(fn).forward(p, x)[0], 2 * p * x, rtol=1e-6)


@pytest.mark.parametrize("rule", ["forward", "backward"])
def test_a_traced_value_in_a_derivative_rule_is_refused(rule, arrays):
    """It runs when the function is differentiated, after the function itself."""
    p, x = arrays

    def loss(k):
        hidden = [k] if rule == "forward" else [1.0]
        late = [k] if rule == "backward" else [1.0]

        @jax.custom_vjp
        def scaled(x):
            return x * 2

        scaled.defvjp(lambda x: (x * 2 * hidden[0], x), lambda x, d: (d * 2 * late[0],))
        return segment(lambda p, x: scaled(p * x)).forward(p, x)[0].sum()

    with pytest.raises(TypeError, match=r"must not refer to values .*being traced"):
        jax.grad(loss)(jnp.float32(1.5))


def test_a_derivative_rule_that_changes_is_seen(arrays):
    """The function's own program is the same; its rule is not."""
    p, x = arrays

    def gradient(scale):
        held = threading.local()  # It cannot be read.
        held.k = scale

        @jax.custom_vjp
        def doubled(x):
            return x * 2

        doubled.defvjp(lambda x: (x * 2, None), lambda _, d: (d * held.k,))
        seg = segment(lambda p, x: doubled(p * x))
        y, residuals = seg.forward(p, x)
        return seg.backward(p, residuals, jnp.ones_like(y))[1][0]

    for scale in (2.0, 3.0):
        np.testing.assert_allclose(gradient(scale), np.full(3, scale * p), rtol=1e-6)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def clipped(kind, bounds, x):
    return x


clipped.defvjp(
    lambda kind, bounds, x: (x, None),
    lambda kind, bounds, _, d: (getattr(jnp, kind)(d, bounds[0]),),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scaled_tangent(factor, x):
    return x


scaled_tangent.defjvp(lambda factor, x, dx: (x[0], factor * dx[0]))


def test_a_static_argument_of_a_derivative_rule_is_a_part_of_it(arrays):
    """Functions that differ in it alone have one program forward, and two backward."""
    p, x = arrays
    d = jnp.array([-2.0, 0.5, 3.0], x.dtype)

    def gradient(fn):
        seg = segment(fn)
        _, residuals = seg.forward(p, x)
        return seg.backward(p, residuals, d)[1][0]

    for kind, bound in (("minimum", 1.0), ("maximum", 1.0)):
        fn = functools.partial(clipped, kind, [bound])
        found = gradient(lambda p, x, fn=fn: fn(x))
        np.testing.assert_array_equal(found, getattr(np, kind)(d, bound))
    for factor in (2.0, 3.0):
        fn = functools.partial(scaled_tangent, factor)
        found = gradient(lambda p, x, fn=fn: fn(x))
        np.testing.assert_array_equal(found, factor * d)


def test_callbacks_write_to_their_own_objects(arrays):
    """Two functions with equal lists are one program only until they write to them."""
    p, x = arrays

    def telling(log):
        def fn(p, x):
            jax.debug.callback(lambda y: log.append(float(y)), p)
            return p * x

        return segment(fn)

    logs = [[], []]
    segments = [telling(log) for log in logs]
    for seg in segments:
        seg.forward(p, x)
        jax.effects_barrier()
    assert [len(log) for log in logs] == [1, 1]
    telling(logs[1]).forward(p, x)
    jax.effects_barrier()
    assert [len(log) for log in logs] == [1, 2]


def scaled_rows(p, x, y):
    return (x * p) + y[None]


def test_ragged_data_are_warned_of(rng, compilations):
    """At the eighth size of one dimension, once, with the last shapes."""
    p, y, seg = jnp.float32(2), jnp.ones(3, jnp.float32), segment(scaled_rows)
    expected = (
        r"segment compiles scaled_rows \(.*\) for the 8th size of one dimension: "
        r"float32\[9,3\] then float32\[2,3\] then float32\[13,3\]\. Each size costs"
    )
    for rows in (4, 17, 5, 1, 8, 9, 2, 2, 4):
        seg.forward(p, jnp.ones((rows, 3), jnp.float32), y)
    with pytest.warns(RecompilationWarning, match=expected):
        seg.forward(p, jnp.ones((13, 3), jnp.float32), y)
    for rows in range(20, 23):
        seg.forward(p, jnp.ones((rows, 3), jnp.float32), y)


def test_layers_of_many_shapes_are_no_ragged_data(rng):
    """Shapes that differ in several dimensions, or in rank or dtype."""
    seg = segment(lambda p, x: jnp.sum(x) * p)
    for size in range(2, 20):
        seg.forward(jnp.float32(1), jnp.ones((size, 2 * size), jnp.float32))
    for rank in range(9):
        seg.forward(jnp.float32(1), jnp.ones((2,) * rank, jnp.float32))
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64):
        for size in (1, 2, 3, 4, 5):
            seg.forward(jnp.float32(1).astype(dtype), jnp.ones(size, dtype))

"""`apply` and operators: values and pull-backs equal JAX's, and compile once."""

import functools
import itertools
import operator
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.recording.node import SegmentNode
from jdist.autograd.recording.recorded import Recorded
from jdist.segment import RecompilationWarning


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def leaf(*shape, seed=0, dtype=np.float64):
    return autograd.variable(normal(*shape, seed=seed, dtype=dtype))


def compare(fn, *variables):
    """Outputs and cotangents of `fn` on variables, beside those of `jax.vjp`."""
    result = fn(*variables)
    arrays = [variable.value for variable in variables]
    expected, vjp = jax.vjp(jax.jit(fn), *arrays)
    assert isinstance(result, Recorded)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert (result.ndim, result.size) == (expected.ndim, expected.size)
    np.testing.assert_allclose(result.value, expected, rtol=1e-14)
    cotangent = jnp.asarray(normal(*expected.shape, seed=9))
    found = pull(result, cotangent)
    for variable, want in zip(variables, vjp(cotangent), strict=True):
        np.testing.assert_allclose(found[variable], want, rtol=1e-12, atol=1e-14)


def pull(value, cotangent):
    """Gradients of variables, by hand: depth first, for graphs that are trees."""
    found = {}

    def visit(edge, cotangent):
        if edge is None or cotangent is None:
            return
        node = edge.node
        if not isinstance(node, SegmentNode):
            before = found.get(node.variable, 0.0)
            found[node.variable] = before + cotangent
            return
        given = [None] * node.outputs
        given[edge.index] = cotangent
        for below, flows in zip(node.inputs, node.pull(given), strict=True):
            visit(below, flows)

    visit(value.edge, cotangent)
    return found


ARRAY = normal(3, 4, seed=5)
OPERATORS = {
    "neg": lambda x, y: -x * y,
    "abs": lambda x, y: abs(x) + y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "truediv": lambda x, y: x / y,
    "pow": lambda x, y: x**3 + y,
    "pow of a number": lambda x, y: 2.0**x + y,
    "numbers": lambda x, y: 2 * x - 3 + y / 4 + (1.5 - x) * 2.5 + 1 / y,
    "left array": lambda x, y: jnp.asarray(ARRAY) * x + y,
    "right array": lambda x, y: x * ARRAY + y,
    "matmul": lambda x, y: x @ y.T,
    "matmul array": lambda x, y: jnp.asarray(ARRAY.T) @ (x * y),
    "sum": lambda x, y: (x * y).sum(),
    "sum of an axis": lambda x, y: (x * y).sum(axis=0),
    "sum kept": lambda x, y: (x * y).sum(1, keepdims=True),
    "mean": lambda x, y: (x * y).mean(axis=(0, 1)),
    "item": lambda x, y: x[1] * y[2],
    "slice": lambda x, y: x[:, 1:3] * y[0:, -2:],
    "new axis": lambda x, y: x[None, ..., 0] * y[:1, :3],
    "array of indices": lambda x, y: x[jnp.array([2, 0])] + y[np.array([1, 1])],
    "reshape": lambda x, y: x.reshape(4, 3) * y.reshape((4, 3)),
    "reshape to one": lambda x, y: x.reshape(-1) * y.reshape(12),
    "transpose": lambda x, y: x.T * y.T,
}


@pytest.mark.parametrize("fn", OPERATORS.values(), ids=OPERATORS.keys())
def test_operators(fn):
    compare(fn, leaf(3, 4, seed=1), leaf(3, 4, seed=2))


def test_a_numpy_array_on_the_left_leaves_it_to_us():
    x = leaf(3, 4)
    result = ARRAY * x
    np.testing.assert_array_equal(result.value, ARRAY * normal(3, 4))
    assert isinstance(ARRAY @ x.T, Recorded)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_dtypes_are_kept(dtype):
    x = autograd.variable(jnp.asarray(normal(5), dtype))
    y = (x * 2 + 1) ** 2
    assert y.dtype == dtype
    assert pull(y, jnp.ones(5, dtype))[x].dtype == dtype


def test_outputs_that_depend_on_nothing_recorded_are_plain():
    x, n = leaf(3), normal(3, seed=1)

    def fn(x, n, k):
        return {"x": x * n, "n": n * 2, "k": k, "i": jnp.argmax(x), "t": (x.sum(), 4)}

    out = autograd.apply(fn, x, n, 3)
    recorded = jax.tree.map(lambda leaf: isinstance(leaf, Recorded), out)
    assert recorded == {
        "x": True,
        "n": False,
        "k": False,
        "i": False,
        "t": (True, False),
    }
    assert out["x"].edge.node is out["t"][0].edge.node
    np.testing.assert_array_equal(out["n"], 2 * n)
    assert (int(out["k"]), int(out["t"][1])) == (3, 4)
    assert out["i"] == np.argmax(normal(3))


def test_a_call_without_floating_results_makes_no_node():
    x = leaf(4)
    assert autograd.apply(lambda x: x > 0, x).tolist() == (normal(4) > 0).tolist()


def test_without_anything_recorded_it_simply_runs():
    marker = object()
    assert autograd.apply(lambda x, y: (x, y), marker, y=1) == (marker, 1)


def test_absent_cotangents_stay_absent():
    x, y, plain = leaf(3, seed=1), leaf(3, seed=2), normal(3, seed=3)

    def fn(x, y, plain, n):
        return x * 2, y * plain * n.astype(y.dtype), x * y

    one, other, both = autograd.apply(fn, x, y, plain, jnp.arange(3))
    node = one.edge.node
    assert len(node.inputs) == 4
    assert [edge is None for edge in node.inputs] == [False, False, True, True]
    ones = jnp.ones(3)
    patterns = [
        ([ones, None, None], [False, True, True, True]),
        ([None, ones, None], [True, False, True, True]),
        ([None, None, ones], [False, False, True, True]),
        ([None, None, None], [True, True, True, True]),
    ]
    for given, absent in patterns:
        assert [d is None for d in node.pull(given)] == absent
    assert other.edge.index == 1
    assert both.edge.index == 2


def test_a_variable_is_given_as_its_tree():
    w = autograd.variable({"a": normal(3), "n": np.arange(3), "c": 2.0})
    y = autograd.apply(lambda w, x: _weighted(w, x), w, normal(3))
    d = y.edge.node.pull([jnp.array(1.0)])
    assert [edge and edge.index for edge in y.edge.node.inputs] == [0, 1, None, None]
    np.testing.assert_allclose(d[0], np.arange(3) * 2.0 * normal(3))
    np.testing.assert_allclose(d[1], (normal(3) ** 2 * np.arange(3)).sum())
    assert d[2:] == (None, None)


def _weighted(w, x):
    return (w["a"] * w["n"].astype(x.dtype) * w["c"] * x).sum()


def test_keywords_and_nested_arguments():
    x, y = leaf(3, seed=1), leaf(3, seed=2)
    fn = lambda pair, *, scale, at: pair["x"] * scale[0] + pair["y"][at]  # noqa: E731
    out = autograd.apply(fn, {"x": x, "y": y}, scale=[y], at=slice(0, 1))
    want = normal(3, seed=1) * normal(3, seed=2) + normal(3, seed=2)[:1]
    np.testing.assert_allclose(out.value, want)


def test_python_values_are_static_but_floating_numbers():
    def fn(x, shape, number, text):
        return x.reshape(shape) * number + len(text)

    x, before = leaf(6), _compilations()
    for number in (1.5, 2.5, -0.5):
        out = autograd.apply(fn, x, (2, 3), number, "a")
        want = normal(6).reshape(2, 3) * number + 1
        np.testing.assert_allclose(out.value, want, rtol=1e-12, atol=1e-15)
    assert _compilations() - before == 1
    autograd.apply(fn, x, (3, 2), 1.5, "a")
    autograd.apply(fn, x, (3, 2), 1.5, "bc")
    assert _compilations() - before == 3


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), ("a", b"a")])
def test_static_values_are_told_apart_by_type(one, other):
    fn = lambda x, v: x * len(type(v).__name__)  # noqa: E731
    x = leaf(2)
    for value in (one, other):
        out = autograd.apply(fn, x, value)
        np.testing.assert_array_equal(out.value, normal(2) * len(type(value).__name__))


def test_functions_as_arguments():
    def fn(x, act):
        return act(x)

    x, before = leaf(4), _compilations()
    for _ in range(3):
        autograd.apply(fn, x, lambda v: jnp.tanh(v) * 2)
        autograd.apply(fn, x, jnp.sin)
    assert _compilations() - before == 2


def test_a_lambda_in_a_loop_is_compiled_once():
    x, before = leaf(3), _compilations()
    for _ in range(5):
        autograd.apply(lambda v: v * 2 + 1, x)
    assert _compilations() - before == 1


def test_what_cannot_be_read_is_traced_anew_and_compiled_once():
    """A queue may hold anything: the function is traced in every call."""
    traced, x, before = SimpleQueue(), leaf(5), _compilations()
    for _ in range(4):
        autograd.apply(lambda v: (traced.put(1), v * 3 - 1)[1], x)
    assert (traced.qsize(), _compilations() - before) == (4, 1)


def test_a_function_argument_that_cannot_be_read_is_never_stale():
    """Its key equals no other, its program decides."""
    scales, x, before = SimpleQueue(), leaf(3, seed=4), _compilations()

    def scaled(v):
        return v * scales.get()

    for scale in (2, 2, 5):
        scales.put(scale)
        out = autograd.apply(lambda v, act: act(v), x, scaled)
        np.testing.assert_array_equal(out.value, normal(3, seed=4) * scale)
    assert _compilations() - before == 2


def test_functions_of_equal_contents_change_apart():
    """Programs of one serve the other, until it must be traced anew."""

    def make():
        held = [2.0]
        return lambda v: v * held[0], held

    (first, held), (second, _) = make(), make()
    autograd.apply(first, leaf(3))
    held[0] = 5.0
    for fn, n, scale in ((second, 3, 2.0), (second, 4, 2.0), (first, 4, 5.0)):
        out = autograd.apply(fn, leaf(n))
        np.testing.assert_array_equal(out.value, normal(n) * scale)


def test_callbacks_write_to_their_own_objects():
    """Also where two functions are alike in all that can be read."""
    logs = [[], []]
    for log in (*logs, *logs):
        autograd.apply(lambda v: (jax.debug.callback(log.append, 1), v * 2)[1], leaf(3))  # noqa: B023
        jax.effects_barrier()
    assert [len(log) for log in logs] == [2, 2]


def test_a_closure_that_changes_is_told():
    x = leaf(3)

    def loop():
        for scale in (1.0, 2.0, 3.0):
            out = autograd.apply(lambda v: v * scale, x)  # noqa: B023
            np.testing.assert_array_equal(out.value, normal(3) * scale)

    with pytest.warns(RecompilationWarning, match="apply compiles .* for the 3rd time"):
        loop()


def test_no_compilation_without_need():
    """Of one function, for other values, numbers and variables."""
    fn = functools.partial(operator.mul, 2.0)
    ones = jnp.ones(7)
    variables = [leaf(7, seed=seed) for seed in range(5)]
    before = _compilations()
    autograd.apply(fn, variables[0]).edge.node.pull([ones])
    assert _compilations() - before == 2  # the two halves
    for variable in variables:
        autograd.apply(fn, variable).edge.node.pull([ones])
    assert _compilations() - before == 2


_compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        _compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
)


def _compilations():
    return len(_compiled)


# --- what has a history ---


def outputs(w, u, x):
    return {
        "product": w * x,
        "itself": w,
        "relu": jax.nn.relu(w),
        "chosen": jnp.where(w > 1, x, w),
        "behind one of two": jax.lax.stop_gradient(w) * u,
        "stopped": jax.lax.stop_gradient(w) * x,
        "rounded": jnp.floor(w),
        "compared": jnp.where(w > 1, 1.5, x),
        "counted": w.argmax().astype(x.dtype),
        "given": x,
        "constant": jnp.zeros(3),
        "integer": jnp.int32(3),
        "loop": jax.lax.scan(
            lambda c, t: (c + t, jax.lax.stop_gradient(c)), jnp.zeros_like(w[0]), w
        ),
    }


def test_what_a_cotangent_flows_through_has_a_history():
    w, u, x = leaf(1), leaf(2), normal(3)
    found = autograd.apply(outputs, w, u, x)
    recorded = jax.tree.map(lambda y: isinstance(y, autograd.Recorded), found)
    true = {"product", "itself", "relu", "chosen", "behind one of two"}
    expected = {name: name in true for name in found} | {"loop": (True, False)}
    assert recorded == expected
    # What is not, is for another recorded input: `u`, but not `w`.
    only = autograd.apply(outputs, w.value, u, x)
    assert [name for name, y in only.items() if isinstance(y, autograd.Recorded)] == [
        "behind one of two"
    ]


# --- what is refused ---


def test_history_is_never_dropped_silently():
    y = leaf(3) * 2.0
    for what, drop in {
        "numpy.asarray": lambda: np.asarray(y),
        "float": lambda: float(y.sum()),
        "int": lambda: int(y.sum()),
        "bool": lambda: bool(y.sum()),
        "index": lambda: [1, 2][y.sum()],
        "iter": lambda: list(y),
    }.items():
        with pytest.raises(TypeError, match=rf"`{what}\(x\)` .*autograd\.apply"):
            drop()
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.sin(y)
    for refused in (jnp.sin, jax.jit(abs)):
        with pytest.raises(autograd.AutogradError, match=r"autograd\.apply\(jnp\.sin"):
            refused(y)
    with pytest.raises(AttributeError, match=r"no attribute 'nonzero'.*autograd\.ap"):
        _ = y.nonzero
    np.testing.assert_array_equal(y.value, 2.0 * normal(3))


def test_recorded_values_have_to_be_arguments():
    w, y = leaf(3), leaf(3) * 2.0
    remedy = "Pass them as arguments"
    for fn in (lambda x: x * w, lambda x: x * y):
        with pytest.raises(TypeError, match=remedy):
            autograd.apply(fn, w)
    hidden = {"w": w, "y": y}
    for fn in (
        lambda x: x * hidden["w"].value,
        lambda x: x * hidden["y"].value,
        lambda x: (hidden["w"] * 2.0).value * x,
    ):
        with pytest.raises(TypeError, match=r"mark the function with @autograd\.eager"):
            autograd.apply(fn, w)


def test_recorded_values_are_refused_wherever_they_hide():
    """In an object, in one that cannot be read, and by way of a helper."""
    thing, local = SimpleNamespace(), threading.local()
    for thing.held in (leaf(3), leaf(3) * 2.0):
        local.held = thing.held
        for fn in (
            lambda x: x * thing.held,
            lambda x: thing.held * x,
            lambda x: jnp.sin(x * vars(thing)["held"]),
            lambda x: x + local.held.value,
        ):
            with pytest.raises(TypeError, match=r"autograd\.(eager|remote_call|apply)"):
                autograd.apply(fn, leaf(3))


def test_a_function_in_the_name_of_a_library_is_the_users():
    """`functools.wraps` gives it the library's name, and nothing else of it."""
    thing = SimpleNamespace(scale=2.0)

    @functools.wraps(jnp.tanh)
    def tanh(x):
        return x * thing.scale

    for thing.scale in (2.0, 3.0):
        for fn in (tanh, jax.jit(lambda x: x * thing.scale)):
            jax.clear_caches()  # What a jitted function has read is JAX's to keep.
            out = autograd.apply(fn, leaf(3))
            np.testing.assert_array_equal(out.value, normal(3) * thing.scale)


def test_a_pure_function_makes_no_calls(threads):
    with pytest.raises(TypeError, match="Got a call to 'worker1'"):
        autograd.apply(
            lambda x: x * rpc.rpc_sync("worker1", abs, args=(-2.0,)), leaf(3)
        )
    assert rpc.rpc_sync("worker1", abs, args=(-2.0,)) == 2.0


class Opaque:
    """Neither a pytree nor a constant."""


def test_what_can_be_neither_input_nor_constant_is_refused():
    for value in (Opaque(), {1, 2}, bytearray(b"x")):
        with pytest.raises(TypeError, match=r"apply\(\*args\).*Register its class"):
            autograd.apply(lambda x, v: x, leaf(3), value)


def test_traced_arrays_are_refused():
    def loss(x):
        return autograd.apply(jnp.add, leaf(3), x).value.sum()

    with pytest.raises(TypeError, match=r"use autograd\.remote_call"):
        jax.grad(loss)(jnp.ones(3))


def test_a_second_backward_needs_the_graph():
    node = (leaf(3) * 2.0).edge.node
    node.pull([jnp.ones(3)])
    node.pull([jnp.ones(3)])
    node.release()
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=r"graph a second time: .* retain_graph=True"):
            node.pull([jnp.ones(3)])


def test_errors_of_the_function_are_its_own():
    with pytest.raises(ZeroDivisionError, match="division"):
        autograd.apply(lambda x: x / (1 // 0), leaf(3))
    with pytest.raises(TypeError, match=r"`apply\(fn\)` must be a function"):
        autograd.apply(3, leaf(3))


def test_nodes_have_an_order_that_repeats():
    def orders():
        x = leaf(3)
        y = [x * 2.0, x + 1.0, x - 1.0]
        return [value.edge.node.order for value in y]

    one, other = orders(), orders()
    assert one == sorted(one) < other == sorted(other)
    steps = [b[1] - a[1] for a, b in itertools.pairwise(one)]
    assert steps == [1, 1]
    assert {order[0] for order in one + other} == {0}


def total_of(w, x):
    return (x @ w).sum()


def test_ragged_batches_are_warned_of():
    """With the name of the function, the shapes and what to do."""
    w = leaf(6, dtype=np.float32)
    for rows in range(1, 8):
        autograd.apply(total_of, w, normal(rows, 6, dtype=np.float32))
    expected = (
        r"apply compiles total_of .* float32\[7,6\] then float32\[8,6\].*no weight"
    )
    with pytest.warns(RecompilationWarning, match=expected):
        autograd.apply(total_of, w, normal(8, 6, dtype=np.float32))

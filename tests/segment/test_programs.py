"""The parts of JAX's programs that `_compat` reaches; fails when JAX changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from jdist import _compat
from jdist.segment._lookup.program_key import users_parts

pytestmark = pytest.mark.compiled

X = np.arange(1.0, 7.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _on_the_cpu():
    """Programs are the same on any device; values are compared with NumPy's."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def names(program):
    return [equation.primitive.name for equation in program.jaxpr.eqns]


def test_nested_jit_is_opened():
    """Plain jit calls dissolve to any depth; one that places its values stays."""
    inner = jax.jit(lambda x: jnp.sin(jax.jit(jnp.cos)(x)))
    program, shapes = _compat.trace(lambda x: {"y": inner(x) * 2}, X)
    assert names(program) == ["cos", "sin", "mul"]
    assert shapes["y"].shape == (2, 3)
    assert np.array_equal(_compat.evaluate(program, [X])[0], np.sin(np.cos(X)) * 2)
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    placed = jax.jit(jnp.sin, out_shardings=device)
    assert len(names(_compat.trace(placed, X)[0])) == 1
    assert names(_compat.trace(placed, X)[0])[0] in ("jit", "pjit")


def test_opened_programs_keep_loops_and_effects():
    """Loops, branches and effects are untouched by the opening of calls."""

    def fn(x):
        jax.debug.print("{}", x)
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)
        return jax.lax.cond(y[0, 0] > 0, jnp.cos, jnp.sin, y)

    program, _ = _compat.trace(fn, X)
    assert {"scan", "cond"} <= set(names(program))
    assert program.jaxpr.effects
    quiet = _compat.part_of(
        program, program.jaxpr.invars, program.jaxpr.outvars, effects=False
    )
    assert not quiet.jaxpr.effects
    assert np.allclose(
        _compat.evaluate(quiet, [X])[0], np.cos(np.sin(np.sin(X))), 1e-15
    )


def test_part_of_a_program():
    """A part leads from any values to any others and computes nothing else."""
    program, _ = _compat.trace(lambda x: (jnp.sin(x), jnp.exp(jnp.cos(x)) + 1), X)
    (x,), (sine, sum_) = program.jaxpr.invars, program.jaxpr.outvars
    cosine = program.jaxpr.eqns[1].outvars[0]
    first = _compat.part_of(program, [x], [cosine], effects=True)
    second = _compat.part_of(program, [cosine], [sum_, cosine], effects=True)
    assert names(first) == ["cos"]
    assert names(second) == ["exp", "add"]
    middle = _compat.evaluate(first, [X])
    assert np.array_equal(_compat.evaluate(second, middle)[0], np.exp(np.cos(X)) + 1)
    only = _compat.equations_for(program, [x], [sine], effects=True)
    assert [e.primitive.name for e in only] == ["sin"]


def test_part_of_a_loop():
    """Given one result of a loop, the part that yields the other leaves it out."""

    def fn(x, w):
        return jax.lax.scan(lambda c, w: (jnp.sin(c * w), (c, w.sum())), x, w)

    program, _ = _compat.trace(fn, X[0], np.ones((4, 3)))
    _, carries, sums = program.jaxpr.outvars
    weights = program.jaxpr.invars[1]
    part = _compat.part_of(program, [weights, carries], [carries, sums], effects=False)
    found = _compat.evaluate(part, [np.full((4, 3), 2.0), np.zeros((4, 3))])
    assert np.array_equal(found[0], np.zeros((4, 3)))
    assert np.array_equal(found[1], np.full(4, 6.0))
    (loop,) = part.jaxpr.eqns
    assert not [
        e for p in _compat.inner_programs(loop) for e in p.eqns if "sin" in str(e)
    ]


def test_what_results_of_an_equation_depend_on():
    """In a loop, what is computed from the weights alone depends on them alone."""

    def fn(x, w):
        return jax.lax.scan(lambda c, w: (jnp.sin(c * w), w * 2), x, w)

    program, _ = _compat.trace(fn, X[0], np.ones((4, 3)))
    loop = next(e for e in program.jaxpr.eqns if e.primitive.name == "scan")
    x, w = program.jaxpr.invars
    final, doubled = program.jaxpr.outvars
    found = _compat.reads(loop, program)
    assert set(found[final]) == {x, w}
    assert found[doubled] == [w]


def test_parts_of_a_loop():
    """The body of a scan is a program: constants, carries, slices; calls are opened."""

    def fn(x, w, k):
        return jax.lax.scan(
            lambda c, w: (jax.nn.silu(c * w) + k, c), x, w, reverse=True, unroll=2
        )

    program, _ = _compat.trace(fn, X[0], np.ones((4, 3)), X[1])
    (loop,) = filter(None, map(_compat.loop_of, program.jaxpr.eqns))
    assert (loop.constants, loop.carries) == (1, 1)
    assert loop.options == {"length": 4, "reverse": True, "unroll": 2}
    assert names(loop.body) == ["mul", "logistic", "mul", "add"]
    found = _compat.evaluate(loop.body, [X[1], X[0], np.full(3, 2.0)])
    assert np.array_equal(found[1], X[0])
    z = 2 * X[0]
    assert np.allclose(found[0], z / (1 + np.exp(-z)) + X[1], rtol=2.0**-50)


def test_equations_can_be_replaced():
    """A rewrite computes chosen equations otherwise and leaves the others."""
    program, _ = _compat.trace(lambda x: jnp.cos(jnp.sin(x)), X)

    def rewrite(equation):
        return (lambda x: [x + 1]) if equation.primitive.name == "sin" else None

    changed = _compat.rewritten(program, [X], rewrite)
    assert names(changed) == ["add", "cos"]
    assert np.array_equal(_compat.evaluate(changed, [X])[0], np.cos(X + 1))


def test_unread_inputs_are_dropped():
    """Only optional inputs go, and it is said which."""
    program, _ = _compat.trace(lambda a, b, c: a * 2, 1.0, 2.0, 3.0)
    pruned, read = _compat.without_unread(program, optional=2)
    assert read == [True, False]
    assert len(pruned.jaxpr.invars) == 2
    assert _compat.evaluate(pruned, [5.0, 7.0]) == [10.0]


def test_bytes():
    """Bytes of arrays of all kinds; a key has two words of four bytes."""
    key = jax.random.key(0)
    arguments = (X, jnp.zeros(3, jnp.bfloat16), jnp.zeros(5, bool), key)
    program, _ = _compat.trace(lambda *xs: xs, *arguments)
    assert [_compat.byte_count(x) for x in program.jaxpr.invars] == [48, 6, 5, 8]


def test_no_cotangent_leaves_work_out():
    """A pull-back has no product for an absent cotangent; given none, only zeros."""

    def fn(w, x):
        return x @ w, jnp.sin(x) @ w

    w = np.ones((3, 4))
    outputs, pull_back = jax.vjp(fn, w, X)
    shape = jax.ShapeDtypeStruct((2, 4), outputs[0].dtype)
    nothing = _compat.no_cotangent(shape)
    program, _ = _compat.trace(lambda d: pull_back((nothing, d)), outputs[1])
    assert names(program).count("dot_general") == 2
    program, _ = _compat.trace(lambda: pull_back((nothing, nothing)))
    assert names(program) == ["broadcast_in_dim"] * 2
    zero = program.jaxpr.eqns[0].invars[0]
    assert isinstance(zero, Literal)
    assert zero.val == 0


def test_a_pull_back_is_a_pytree():
    """The residuals of `jax.vjp` are leaves, and can be exchanged."""
    program, (_, pull_back) = _compat.trace(lambda x: jax.vjp(jnp.sin, x), X)
    leaves, structure = jax.tree.flatten(pull_back)
    assert len(program.jaxpr.outvars) == 1 + len(leaves)
    again = jax.tree.unflatten(structure, [np.full((2, 3), 3.0)] * len(leaves))
    assert np.array_equal(again(X)[0], 3 * X)


def test_a_program_has_its_own_constants():
    """NumPy arrays are copied, at any depth, with their weak types; others are not."""
    table, fixed = np.arange(3, dtype=np.float32), jnp.arange(3, dtype=jnp.float32)

    def fn(x):
        return jax.jit(lambda y: y * table)(x) + table[1] + fixed

    program, shapes = _compat.trace_whole(fn, jnp.ones(3, jnp.float32))
    before = _compat.evaluate(program, [jnp.ones(3, jnp.float32)])
    constants = list(_compat.constants_of(program))
    assert len(constants) == 2
    assert any(x is fixed for x in constants)
    assert not any(np.shares_memory(np.asarray(x), table) for x in constants)
    table[:] = 7
    after = _compat.evaluate(program, [jnp.ones(3, jnp.float32)])
    np.testing.assert_array_equal(after[0], before[0])
    assert shapes.shape == (3,)


def test_constants_tell_of_traced_values():
    """A value of an outer transformation is a constant of the program, at any depth."""
    found = []

    def outer(hidden):
        def fn(x):
            total, _ = jax.lax.scan(lambda s, _: (s * hidden, None), x, None, length=2)
            return jax.jit(lambda y: jax.nn.relu(y) * hidden)(total)

        program, _ = _compat.trace_whole(fn, 1.0)
        found.extend(_compat.constants_of(program))
        return hidden

    jax.grad(outer)(2.0)
    assert found
    assert all(_compat.is_traced(x) for x in found)


def test_the_context_of_a_trace():
    """Settings that change programs change the key."""
    plain = _compat.trace_context()
    assert _compat.trace_context() == plain
    assert hash(_compat.trace_context()) == hash(plain)
    with jax.default_matmul_precision("bfloat16"):
        assert _compat.trace_context() != plain
    with jax.enable_x64(not jax.config.jax_enable_x64):
        assert _compat.trace_context() != plain


def test_rules_that_are_yet_to_be_called():
    """Equations hold them as wrapped functions, whose parts lead to the user's."""

    def rule(x, d):
        return (d * 3,)

    @jax.custom_vjp
    def fn(x):
        return x * 2

    fn.defvjp(lambda x: (x * 2, x), rule)
    program, _ = _compat.trace_whole(lambda x: fn(x), 1.0)
    values = program.jaxpr.eqns[0].params.values()
    wrapped = [x for x in values if isinstance(x, _compat.WRAPPED_FUNCTION)]
    assert wrapped
    assert rule in [part for x in values for part in users_parts(x)]

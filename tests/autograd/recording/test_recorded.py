"""Recorded values outside operators and `apply`: comparisons, copies, libraries."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd

ONE = np.array([0.5, -1.25, 2.0, 0.5])
OTHER = np.array([0.5, 3.0, -2.0, 0.25])
COMPARISONS = (
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip


def leaf(array=ONE):
    return autograd.variable(array)


def tree():
    return autograd.variable({"a": ONE, "b": OTHER[:2]})


def is_plain(found, expected):
    assert isinstance(found, jax.Array)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("make", [leaf, lambda a=ONE: leaf(a) * 1.0])
def test_comparisons_are_of_the_values(compare, make):
    """They have no derivative, so the booleans are a plain array."""
    value, other = make(), make(OTHER)
    expected = compare(ONE, OTHER)
    assert expected.any() != expected.all()
    for right in (other, other.value, OTHER):
        is_plain(compare(value, right), expected)
    for left in (value.value, ONE):
        is_plain(compare(left, other), expected)
    is_plain(compare(value, 0.5), compare(ONE, 0.5))
    is_plain(compare(0.5, value), compare(0.5, ONE))
    is_plain(compare(value, 1), compare(ONE, 1))
    is_plain(compare(np.float64(0.5), value), compare(0.5, ONE))
    same = {operator.eq, operator.le, operator.ge}
    is_plain(compare(value, value), [compare in same] * 4)


def test_booleans_choose_what_is_recorded():
    w = leaf()
    y = autograd.apply(lambda w, m: jnp.where(m, 3 * w, w), w, w > OTHER)
    np.testing.assert_array_equal(y.value, np.where(ONE > OTHER, 3 * ONE, ONE))
    (gradient,) = y.edge.node.pull([jnp.ones(4)])[:1]
    np.testing.assert_array_equal(gradient, np.where(ONE > OTHER, 3.0, 1.0))


def test_one_value_decides_a_condition():
    total = leaf().sum()
    assert total > 1.0
    assert not total > 2.0
    assert max(total, leaf(OTHER).sum()) is total
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(leaf() > 1.0)


@pytest.mark.parametrize("other", [[0.5, 1.0], (0.5,), {"a": ONE}], ids=type)
def test_containers_are_not_compared(other):
    for compare in (operator.eq, operator.ne):
        for one in (leaf(), leaf() * 2.0):
            with pytest.raises(TypeError, match="must compare one array with an array"):
                compare(one, other)


def test_trees_are_not_compared():
    one = tree()
    for other in (one, one.value, leaf(), 1.0):
        for compare in COMPARISONS:
            with pytest.raises(TypeError, match=r"leaf by leaf: `autograd\.apply"):
                compare(one, other)
    with pytest.raises(TypeError, match=r"leaf by leaf: `autograd\.apply"):
        assert leaf() == one


@pytest.mark.parametrize("other", [None, "a", b"a", object(), print])
def test_what_is_no_array_is_not_equal(other):
    for one in (leaf(), leaf() * 2.0):
        assert (one == other) is False
        assert (one != other) is True
        with pytest.raises(TypeError, match="not supported between instances"):
            assert one < other


def test_keys_are_known_by_identity():
    twins = [leaf(), leaf(), leaf() * 1.0, leaf() * 1.0]
    numbers = {one: place for place, one in enumerate(twins)}
    assert [numbers[one] for one in twins] == [0, 1, 2, 3]
    assert len({*twins, *twins}) == 4


DROPPING = {
    "numpy.asarray": np.asarray,
    "numpy.array_equal": lambda y: np.array_equal(y, ONE),
    "numpy.array_equiv": lambda y: np.array_equiv(ONE, y),
    "numpy.sum": np.sum,
    "numpy.mean": np.mean,
    "numpy.stack": lambda y: np.stack([ONE, y]),
    "numpy.where": lambda y: np.where(ONE > 0, y, 0.0),
    "numpy.dot": lambda y: np.dot(ONE, y),
    "numpy.copy": np.copy,
    "iter": list,
    "contains": lambda y: 0.5 in y,
    "pickle.dumps": pickle.dumps,
}


@pytest.mark.parametrize("what", DROPPING)
def test_what_would_drop_the_history_is_refused(what):
    for y in (leaf(), leaf() * 2.0):
        with pytest.raises(TypeError, match=rf"`{what}\(x\)` .*autograd\.apply"):
            DROPPING[what](y)


FUNCTIONS_OF_JAX = {
    "asarray": jnp.asarray,
    "array": lambda y: jnp.array([y.sum(), y.sum()]),
    "sin": jnp.sin,
    "sum": jnp.sum,
    "argmax": jnp.argmax,
    "dot": lambda y: jnp.dot(y, y),
    "power": lambda y: jnp.power(ONE, y),
    "where": lambda y: jnp.where(y > 1.0, y, 0.0),
    "stack": lambda y: jnp.stack([y, y]),
    "concatenate": lambda y: jnp.concatenate([jnp.asarray(ONE), y]),
    "einsum": lambda y: jnp.einsum("i,i", y, y),
    "array_equal": lambda y: jnp.array_equal(y, ONE),
    "allclose": lambda y: jnp.allclose(y, ONE),
    "astype": lambda y: jnp.astype(y, jnp.float16),
    "set": lambda y: jnp.zeros(4).at[0].set(y),
    "index": lambda y: jnp.zeros(4)[y],
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "one_hot": lambda y: jax.nn.one_hot(y, 3),
    "jit": jax.jit(lambda y: y),
    "grad": jax.grad(lambda y: y),
    "vmap": jax.vmap(lambda y: y),
    "lax": lambda y: jax.lax.add(y, y),
    "cond": lambda y: jax.lax.cond(True, lambda x: x, lambda x: x, y),
    "device_put": jax.device_put,
}


@pytest.mark.parametrize("what", FUNCTIONS_OF_JAX)
def test_functions_of_jax_name_the_remedy(what):
    for y in (leaf(), leaf() * 2.0):
        match = r"history would be lost\. Got (Recorded|Variable).*autograd\.apply\(jnp"
        with pytest.raises(autograd.AutogradError, match=match):
            FUNCTIONS_OF_JAX[what](y)


METHODS = {
    "astype": lambda x: x.astype(jnp.float32),
    "clip": lambda x: x.clip(-0.5, 1.0),
    "cumsum": lambda x: x.cumsum(axis=1),
    "divmod": lambda x: divmod(x, 0.75)[1],
    "flatten": lambda x: x.flatten(),
    "max": lambda x: x.max(axis=1, keepdims=True),
    "mean": lambda x: x.mean(0),
    "pos": lambda x: +x,
    "rmod": lambda x: 3.0 % x,
    "std": lambda x: x.std(),
    "take": lambda x: x.take(jnp.array([4, 1])),
    "transpose": lambda x: x.transpose(1, 0),
    "transpose by a tuple": lambda x: x.transpose((1, 0)),
    "transpose of all": lambda x: x.transpose(),
}
PLAIN = {
    "all": lambda x: (x > 0).all(),
    "any": lambda x: x.any(),
    "argmax": lambda x: x.argmax(1),
    "astype": lambda x: x.astype(jnp.int32),
    "floor": lambda x: x // 0.75,
    "imag": lambda x: x.imag,
    "round": lambda x: x.round(1),
    "built-in round": round,
}
MATRIX = np.random.default_rng(5).normal(size=(2, 3))


@pytest.mark.parametrize("what", METHODS)
def test_methods_are_recorded(what):
    """Their values and derivatives are those of the same methods of JAX's arrays."""
    w = leaf(MATRIX)
    found = METHODS[what](w)
    expected, pull = jax.vjp(METHODS[what], jnp.asarray(MATRIX))
    assert isinstance(found, autograd.Recorded)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.value, expected)
    seed = np.random.default_rng(6).normal(size=expected.shape).astype(found.dtype)
    (d_expected,) = pull(jnp.asarray(seed))
    np.testing.assert_allclose(pulled(found, w, seed), d_expected, rtol=1e-6)


def pulled(y, w, cotangent):
    """Back through a chain of functions of one recorded argument each."""
    cotangents = [None] * y.edge.node.outputs
    cotangents[y.edge.index] = jnp.asarray(cotangent)
    edge, d_input = next(
        (edge, d)
        for edge, d in zip(
            y.edge.node.inputs, y.edge.node.pull(cotangents), strict=True
        )
        if edge is not None
    )
    return (
        d_input
        if edge.node is w.node
        else pulled(autograd.Recorded(None, edge), w, d_input)
    )


@pytest.mark.parametrize("what", PLAIN)
def test_what_has_no_derivative_is_a_plain_array(what):
    for value in (leaf(MATRIX), leaf(MATRIX) * 1.0):
        found = PLAIN[what](value)
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, PLAIN[what](jnp.asarray(MATRIX)))


def test_methods_are_of_one_array():
    """A variable may hold a tree."""
    for name in ("max", "sum", "reshape", "transpose", "real"):
        with pytest.raises(
            TypeError, match=rf"`x\.{name}` must be of one array. Got V"
        ):
            getattr(tree(), name)()
    for name in ("shape", "dtype", "ndim", "size"):
        assert not hasattr(tree(), name)
    for shown in (len, lambda w: f"{w:.2f}"):
        with pytest.raises(TypeError, match=r"must be of one array\. Got Variable"):
            shown(tree())
    assert leaf(MATRIX).shape == (2, 3)
    assert (leaf(MATRIX).dtype, leaf(MATRIX).ndim, leaf(MATRIX).size) == (float, 2, 6)
    assert len(leaf(MATRIX)) == 2


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("backward", r"autograd\.backward\(context_id, \[x\]\)"),
        ("item", r"x\.value\.item\(\)"),
        ("at", r"autograd\.apply\(lambda x: x\.at\.\.\., x\)"),
        ("grad", r"autograd\.get_gradients"),
        ("detach", r"autograd\.detach\(x\)"),
    ],
)
def test_other_attributes_say_what_takes_their_place(name, remedy):
    for value in (leaf(), leaf() * 1.0):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. .*{remedy}"):
            getattr(value, name)
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\.$"):
            value.nonsense  # noqa: B018


def test_a_number_can_be_shown():
    loss = (leaf() * 2.0).sum()
    assert f"{loss:.2f} {loss}" == f"{2 * ONE.sum():.2f} Recorded(float64[] of sum)"
    with pytest.raises(TypeError, match=r"`complex\(x\)` must not be given"):
        complex(loss)


def test_detached_values_have_no_history():
    w, y = leaf(), leaf() * 2.0
    found = autograd.detach({"w": w, "y": [y, 3], "tree": tree(), "none": None})
    np.testing.assert_array_equal(found["w"], ONE)
    np.testing.assert_array_equal(found["y"][0], 2 * ONE)
    np.testing.assert_array_equal(found["tree"]["b"], OTHER[:2])
    assert found["y"][1] == 3
    assert all(
        isinstance(x, jax.Array | int) and not isinstance(x, autograd.Recorded)
        for x in jax.tree.leaves(found)
    )
    # The same in a function that is being traced.
    z = autograd.apply(lambda w: w * autograd.detach(w), w)
    np.testing.assert_array_equal(pulled(z, w, OTHER), ONE * OTHER)
    count = autograd.apply(lambda w, n: autograd.detach((w, n)), w, jnp.arange(3))
    assert [type(x).__name__ for x in count] == ["ArrayImpl", "ArrayImpl"]


def test_what_has_no_history_is_told():
    y = leaf() * 2.0
    assert (np.shape(y), np.ndim(y), np.size(y), len(y)) == ((4,), 1, 4, 4)
    assert jnp.shape(y) == (4,)


def test_copies_keep_the_history():
    y = leaf() * 2.0
    assert copy.copy(y) is y
    assert copy.deepcopy({"y": [y]})["y"][0] is y


def test_a_variable_is_not_copied():
    """Gradients of a copy would go to the original, or nowhere."""
    for make in (copy.copy, copy.deepcopy, lambda w: copy.deepcopy([w])):
        with pytest.raises(
            TypeError, match=r"another one: `autograd\.variable\(x\.val"
        ):
            make(tree())

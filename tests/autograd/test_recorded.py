"""What is neither an operator nor `apply`: comparisons, copies, other libraries."""

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


REFUSED_BY_JAX = {
    "asarray": jnp.asarray,
    "array": lambda y: jnp.array([y.sum(), y.sum()]),
    "sin": jnp.sin,
    "dot": lambda y: jnp.dot(y, y),
    "where": lambda y: jnp.where(y > 1.0, y, 0.0),
    "stack": lambda y: jnp.stack([y, y]),
    "array_equal": lambda y: jnp.array_equal(y, ONE),
    "allclose": lambda y: jnp.allclose(y, ONE),
    "jit": jax.jit(lambda y: y),
    "lax": lambda y: jax.lax.add(y, y),
    "// ": lambda y: y // 2,
    "round": round,
    "format": lambda y: f"{y:.2f}",
    "complex": complex,
}


@pytest.mark.parametrize("what", REFUSED_BY_JAX)
def test_what_is_not_recorded_is_an_error(what):
    for y in (leaf(), leaf() * 2.0):
        with pytest.raises(TypeError, match=r"Recorded|Variable|not a valid JAX type"):
            REFUSED_BY_JAX[what](y)


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

"""PyTorch's scenarios: gradients over workers equal those of the graph on one worker.

Each runs on all four workers at once, in every way of calling, over both transports.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.engine_cases import after, call, leaves, me, numbers

REMOTE = ("sync", "async", "remote")
CLOSE = 1e-12  # float64; the order of some sums differs from that of the local graph


def add(mode, x, y):
    return call(mode, after(), cases.add, x, y).sum()


def add_on_self(mode, x, y):
    return call(mode, after(0), cases.add, x, y).sum()


def round_trips(mode, *x):
    a = call(mode, after(1), cases.add, x[0], x[1])
    b = call(mode, after(2), cases.mul, a, x[2])
    c = call(mode, after(3), cases.stack, a, b, x[0])
    d = call(mode, after(1), cases.stack, b, a, x[2])
    e = call(mode, after(2), cases.batched, c, d)
    return call(mode, after(3), cases.total, e)


def dimensions(mode, x, y, *more):
    product = call(mode, after(), cases.matmul, x, y)
    return call(mode, after(2), cases.chain, product, *more).sum()


def unused_rows(mode, *x):
    stacked = call(mode, after(), cases.stack, *x)
    return (stacked[0:1].sum() * stacked[2:3]).sum()


def some_outputs(mode, x):
    parts = call(mode, after(), cases.split, x, 5)
    return (parts[0] * parts[2] + parts[4]).sum()


def integers_and_trees(mode, x, y):
    power, place, tree = call(mode, after(), cases.scaled, x, 3, y)
    assert not isinstance(place, autograd.Recorded)
    return (power * tree["rest"]).sum()


def several_roots(mode, x, y):
    first = call(mode, after(), cases.add, x, y)
    second = call(mode, after(2), cases.mul, first, y)
    third = call(mode, after(3), cases.cosine, second)
    return [first.sum(), second.sum(), third.sum(), (third / y).sum()]


def nested(mode, x, y):
    return call(mode, after(), cases.nested, x, y, 0 if mode == "local" else 2).sum()


def both_uses(mode, x, y):
    if mode == "local":
        return ((x + y) * (x * y)).sum()
    return call(mode, after(), cases.product_of_nested, x, y).sum()


def calls_back(mode, x, y):
    if mode == "local":
        return (x * y + x).sum()
    return call(mode, after(), cases.back_and_forth, x, y, me().name).sum()


def one_argument_twice(mode, x, y):
    return call(mode, after(), cases.mul, x, x) @ y


def to_a_scalar(mode, x, y):
    return call(mode, after(), cases.total, x * y)


SCENES = {
    "add": (add, lambda: leaves(2, 1)),
    "add on self": (add_on_self, lambda: leaves(2, 2)),
    "round trips": (round_trips, lambda: leaves(3, 3)),
    "dimensions": (
        dimensions,
        lambda: [
            autograd.variable(numbers(4, *shape, shape=shape))
            for shape in ((4, 6), (6, 5), (5, 7), (7, 2))
        ],
    ),
    "unused rows": (unused_rows, lambda: leaves(3, 5)),
    "some outputs": (some_outputs, lambda: leaves(1, 6, shape=(10, 3))),
    "integers and trees": (integers_and_trees, lambda: leaves(2, 7)),
    "several roots": (several_roots, lambda: leaves(2, 8)),
    "nested": (nested, lambda: leaves(2, 9)),
    "both uses": (both_uses, lambda: leaves(2, 10)),
    "calls back": (calls_back, lambda: leaves(2, 11)),
    "one argument twice": (
        one_argument_twice,
        lambda: leaves(2, 12, shape=(3,)),
    ),
    "to a scalar": (to_a_scalar, lambda: leaves(2, 13)),
}


def compare(name, mode, how):
    compute, make = SCENES[name]
    variables = make()
    here, there = cases.both(compute, variables, mode, how)
    assert [x is None for x in here] == [x is None for x in there]
    for one, other in zip(here, there, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=CLOSE, atol=CLOSE)
    return [float(np.abs(x).sum()) for x in there]


WAYS = [("sync", "fast"), *((mode, "smart") for mode in REMOTE)]
"""FAST mode does not see how a call was made."""


@pytest.mark.parametrize(("mode", "how"), WAYS)
@pytest.mark.parametrize("name", SCENES)
def test_gradients_over_workers_are_those_of_the_same_graph_here(
    cluster, name, mode, how
):
    for sizes in cluster.everywhere(compare, name, mode, how):
        # A row that is not used has zeros: it was an argument of what was used.
        assert [size == 0 for size in sizes] == [
            name == "unused rows" and position == 1 for position in range(len(sizes))
        ]


# --- dtypes, mixed arguments, integers ---


def dtypes():
    x, y = leaves(2, 20, dtype=np.float32), leaves(2, 21, dtype=np.float64)
    low = autograd.variable(numbers(22).astype(jnp.bfloat16))
    with autograd.context() as context_id:
        first = rpc.rpc_sync(after(), cases.mul, args=tuple(x))
        second = rpc.rpc_sync(after(), cases.mul, args=tuple(y))
        third = rpc.rpc_sync(after(), cases.sine, args=(low,))
        roots = [first.sum(), second.sum(), third.sum()]
        autograd.backward(context_id, roots)
        gradients = autograd.get_gradients(context_id)
    expected = [(x[0], x[1].value), (x[1], x[0].value), (y[0], y[1].value)]
    for variable, value in [*expected, (low, jnp.cos(low.value))]:
        assert gradients[variable].dtype == variable.value.dtype
        np.testing.assert_array_equal(gradients[variable], value)


def test_each_gradient_has_its_variables_dtype(cluster):
    cluster.everywhere(dtypes)


def mixed():
    (x,), y = leaves(1, 23), numbers(24)
    with autograd.context() as context_id:
        product = rpc.rpc_sync(after(), cases.mul, args=(x, y))
        autograd.backward(context_id, [product.sum()])
        gradients = autograd.get_gradients(context_id)
        assert len(gradients) == 1
    np.testing.assert_array_equal(gradients[x], y)


def test_arguments_that_are_not_recorded_have_no_gradient(cluster):
    cluster.everywhere(mixed)


@autograd.eager
def by_history(x, y):
    """What is recorded and what is not is known on the callee, too."""
    if isinstance(y, autograd.Recorded):
        return x + y
    return x * y


def branches():
    (x,), y = leaves(1, 36), numbers(37)
    with autograd.context() as context_id:
        product = rpc.rpc_sync(after(), by_history, args=(x, y))
        np.testing.assert_array_equal(product.value, x.value * y)
        autograd.backward(context_id, [product.sum()])
        gradients = autograd.get_gradients(context_id)
        assert set(gradients) == {x}
    np.testing.assert_array_equal(gradients[x], y)


def test_a_callee_knows_which_arguments_are_recorded(cluster):
    cluster.everywhere(branches)


def embedding():
    weights = autograd.variable(numbers(25, shape=(7, 4)))
    indices = np.array([[1, 5], [2, 5], [1, 1]])
    with autograd.context() as context_id:
        for _ in range(2):
            picked = rpc.rpc_sync(after(), cases.select, args=(weights, indices))
            autograd.backward(context_id, [picked.sum()])
        gradient = autograd.get_gradients(context_id)[weights]
    expected = np.zeros((7, 4))
    np.add.at(expected, indices, 1.0)
    np.testing.assert_array_equal(gradient, 2 * expected)


def test_integer_arguments_are_passed_over_and_passes_accumulate(cluster):
    cluster.everywhere(embedding)


# --- accumulation ---


def accumulating(deep):
    x, y = leaves(2, 26)
    with autograd.context() as context_id:
        args = (x, y, 2)
        product = (
            rpc.rpc_sync(after(), cases.nested, args=args)
            if deep
            else rpc.rpc_sync(after(), cases.mul, args=(x, y))
        )
        loss = (product * product).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        once = autograd.get_gradients(context_id)
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        thrice = autograd.get_gradients(context_id)
        assert set(once) == set(thrice) == {x, y}
        for variable in (x, y):
            one = once[variable]
            np.testing.assert_array_equal(thrice[variable], one + one + one)
        # What was let go is missed by name, on whichever worker it was.
        with pytest.raises(autograd.BackwardError, match="a second time") as caught:
            autograd.backward(context_id, [loss])
        assert isinstance(caught.value.__cause__, autograd.GraphFreed)
        assert set(autograd.get_gradients(context_id)) == {x, y}


@pytest.mark.parametrize("deep", [False, True])
def test_passes_in_one_context_accumulate(cluster, deep):
    cluster.everywhere(accumulating, deep)


def only_here():
    x, y = leaves(2, 27)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(x * y).sum()])
        gradients = autograd.get_gradients(context_id)
    assert len(gradients) == 2
    np.testing.assert_array_equal(gradients[x], y.value)
    np.testing.assert_array_equal(gradients[y], x.value)


def test_a_graph_without_other_workers(cluster):
    cluster.everywhere(only_here)


def cotangents():
    x, y = leaves(2, 28)
    given = numbers(29)
    with autograd.context() as context_id:
        product = rpc.rpc_sync(after(), cases.mul, args=(x, y))
        second = rpc.rpc_sync(after(2), cases.sine, args=(product,))
        autograd.backward(context_id, [product, second], cotangents=[given, 2 * given])
        gradients = autograd.get_gradients(context_id)
    weight = given + 2 * given * np.cos(x.value * y.value)
    np.testing.assert_allclose(gradients[x], weight * y.value, rtol=CLOSE)
    np.testing.assert_allclose(gradients[y], weight * x.value, rtol=CLOSE)


def test_roots_of_any_shape_with_given_cotangents(cluster):
    cluster.everywhere(cotangents)


# --- several leaves in one variable ---


def trees():
    params = {"w": numbers(30, shape=(3, 2)), "b": numbers(31, shape=(1, 2))}
    variable = autograd.variable({**params, "unused": numbers(32), "step": 3})
    x = numbers(33, shape=(4, 3))
    with autograd.context() as context_id:
        y = rpc.rpc_sync(after(), _affine, args=(variable, x))
        autograd.backward(context_id, [(y * y).sum()])
        autograd.backward(context_id, [autograd.apply(_bias, variable)])
        gradient = autograd.get_gradients(context_id)[variable]
    error = 2 * (x @ params["w"] + params["b"])
    np.testing.assert_allclose(gradient["w"], x.T @ error, rtol=CLOSE)
    np.testing.assert_allclose(gradient["b"], error.sum(0, keepdims=True) + 1)
    assert gradient["unused"] is gradient["step"] is None


def _affine(p, x):
    return x @ p["w"] + jnp.broadcast_to(p["b"], (len(x), 2))


def _bias(p):
    return p["b"].sum()


def test_a_gradient_is_a_tree_like_its_variable_with_none_where_nothing_flows(cluster):
    cluster.everywhere(trees)


# --- hooks ---


def hooks():
    x, y = leaves(2, 34)
    seen = []
    x.register_hook(seen.append)  # returns None: changes nothing
    remove = x.register_hook(lambda gradient: 2 * gradient)
    x.register_hook(lambda gradient: gradient + 1)
    with autograd.context() as context_id:
        product = rpc.rpc_sync(after(), cases.mul, args=(x, y)) + x * y
        autograd.backward(context_id, [product.sum()], retain_graph=True)
        gradients = autograd.get_gradients(context_id)
        np.testing.assert_array_equal(gradients[x], 2 * (y.value + y.value) + 1)
        np.testing.assert_array_equal(gradients[y], x.value + x.value)
        assert len(seen) == 1  # once for the sum, not for each summand
        remove()
        autograd.backward(context_id, [product.sum()])
        again = autograd.get_gradients(context_id)[x]
        np.testing.assert_array_equal(again, gradients[x] + (y.value + y.value + 1))
        assert len(seen) == 2


def test_hooks_of_a_variable_transform_its_gradient_once_in_each_pass(cluster):
    cluster.everywhere(hooks)


def wrong_hook():
    x, y = leaves(2, 35)
    remove = x.register_hook(lambda gradient: gradient[0])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        with pytest.raises(autograd.BackwardError, match="same structure, shapes"):
            autograd.backward(context_id, [loss], retain_graph=True)
        assert autograd.get_gradients(context_id) == {}
        remove()
        autograd.backward(context_id, [loss])
        np.testing.assert_array_equal(autograd.get_gradients(context_id)[x], y.value)


def test_a_hook_must_keep_the_shape(cluster):
    cluster.run(0, wrong_hook)


def test_a_gradient_may_be_donated():
    """Also one that is the cotangent with which the pass began."""
    with rpc.local_cluster(["a"]):
        for _ in range(2):
            x, y = (autograd.variable(np.float32(k)) for k in (2, 3))
            with autograd.context() as context_id:
                autograd.backward(context_id, [x + y])
                gradient = autograd.get_gradients(context_id)[x]
            assert jax.jit(jnp.negative, donate_argnums=0)(gradient) == -1

"""Replicated variables: every trainer gets the gradient of all trainers' examples."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, optim, rpc
from jdist.autograd.contexts import here
from jdist.autograd.engine import replicated
from tests.autograd.engine_cases import numbers
from tests.cotangents import rule
from tests.rpc.hosts import become_worker, results

TRAINERS = ["worker0", "worker1", "worker2"]
SIZES = (2, 3, 6)
SHAPES = {"w": (4, 3), "b": (3,), "unused": (2,)}


def rank():
    return rpc.get_worker_info().id


def params(*seed):
    return {
        name: numbers(*seed, k, shape=s) for k, (name, s) in enumerate(SHAPES.items())
    }


def trainers(cluster, body, *args):
    """The result of a body on each trainer, or the error that it raises."""
    tasks = [cluster.start(k, outcome, body, *args) for k in range(len(TRAINERS))]
    return results(tasks)


def outcome(body, *args):
    try:
        return body(*args)
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return error
    finally:  # What a test has replicated is not the next one's.
        replicated.install(here())
        here().replicated.clear()


def rows_of(table, tokens):
    return table[tokens]


@autograd.eager
def embed(table, tokens):
    return autograd.apply(rows_of, table.local_value(), tokens)


def predict(replica, rows):
    return jnp.tanh(rows @ replica["w"] + replica["b"][None]).mean()


TOKENS = np.random.default_rng(3).integers(0, 5, sum(SIZES))
TABLE = numbers(8, shape=(5, 4))


def own_tokens():
    start = sum(SIZES[: rank()])
    return TOKENS[start : start + SIZES[rank()]]


def make_table():
    return autograd.variable(TABLE)


def with_a_server(rounds):
    """Dense layers on every trainer, a table on a server, as in torch's tutorial."""
    replica = autograd.replicated(params(rank()), TRAINERS, weight=SIZES[rank()])
    table = rpc.remote("worker3", make_table)
    refs = [rpc.RRef(replica), table]
    dist_opt = autograd.DistributedOptimizer(optim.sgd, refs, lr=0.3)
    gradients = []
    for _ in range(rounds):
        with autograd.context() as context_id:
            rows = rpc.rpc_sync("worker3", embed, args=(table, own_tokens()))
            autograd.backward(context_id, [autograd.apply(predict, replica, rows)])
            gradient = autograd.get_gradients(context_id)[replica]
            gradients.append(jax.tree.map(np.asarray, gradient))
            if rounds > 1:
                dist_opt.step(context_id)
    return gradients, jax.tree.map(np.asarray, replica.value)


def bits(tree):
    return [x.tobytes() for x in jax.tree.leaves(tree)]


def test_the_gradient_of_the_whole_batch(cluster):
    """Of uneven shards, from the values of the first trainer, to the bit on all."""
    found = trainers(cluster, with_a_server, 1)
    (gradient,), value = found[0]
    assert all(bits(each) == bits(found[0]) for each in found[1:])
    assert bits(value) == bits(params(0))
    assert gradient["unused"] is None
    expected = jax.grad(lambda p: predict(p, TABLE[TOKENS]))(params(0))
    for name in ("w", "b"):
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-12)


def test_replicas_stay_equal(cluster):
    found = trainers(cluster, with_a_server, 3)
    assert all(bits(each) == bits(found[0]) for each in found[1:])
    assert bits(found[0][1]["w"]) != bits(params(0)["w"])


def two(*weights):
    weight = weights[rank()] if weights else 1.0
    values = [np.float32([k + rank(), 2, 5]) for k in (1, 10)]
    return [autograd.replicated(v, TRAINERS, weight) for v in values]


def clipped():
    a, b = two(1.0, 2.0, 3.0)
    c = autograd.variable(np.float32([3, 2, 5]))
    refs = [rpc.RRef(v) for v in (a, b, c)]
    shared, mixed = (
        autograd.DistributedOptimizer(optim.sgd, some, lr=1.0)
        for some in (refs[:2], refs)
    )
    with autograd.context() as context_id:
        autograd.backward(context_id, [(a * b * c).sum() * (rank() + 1.0)])
        with pytest.raises(ValueError, match="must be of replicated variables alone"):
            mixed.step(context_id, max_norm=0.5)
        shared.step(context_id, max_norm=0.5)
    moved = [np.asarray(v.value) - x for v, x in ((a, [1, 2, 5]), (b, [10, 2, 5]))]
    assert np.isclose(np.linalg.norm(moved), 0.5)
    return bits([a.value, b.value])


def test_a_norm_is_the_same_on_all_trainers(cluster):
    """Where it would not be, replicas would part without a word."""
    found = trainers(cluster, clipped)
    assert found == found[:1] * 3
    assert isinstance(found[0], list)


def swapped():
    """Each trainer uses the variables in another order, and one uses one of them."""
    a, b = two(1.0, 4.0, 3.0)
    with autograd.context() as context_id:
        x = {0: lambda: a * 2.0, 1: lambda: b * 3.0, 2: lambda: b * 7.0}[rank()]()
        y = {0: lambda: x * (b * 3.0), 1: lambda: x * (a * 2.0), 2: lambda: x}[rank()]()
        autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)
        return [np.asarray(found[v]).tolist() for v in (a, b)]


def test_the_order_of_use_does_not_matter(cluster):
    """By hand: 6 b of weight 1 and 4; 6 a likewise, and 7 of weight 3."""
    a, b = np.float32([1, 2, 5]), np.float32([10, 2, 5])
    expected = [(30 * b / 8).tolist(), ((30 * a + 21) / 8).tolist()]
    assert trainers(cluster, swapped) == [expected] * 3


def some_use_nothing():
    a, b = two()
    c = autograd.variable(np.float32(3))
    with autograd.context() as context_id:
        root = (a * 6.0).sum() if rank() == 1 else c * 2.0
        for retain in (True, False):
            autograd.backward(context_id, [root], retain_graph=retain)
        found = autograd.get_gradients(context_id)
        assert (b in found, c in found) == (False, rank() != 1)
        return np.asarray(found[a]).tolist()


def test_what_a_trainer_does_not_use_counts_as_zero(cluster):
    """Twice, because two passes add; and what no trainer uses has no gradient."""
    assert trainers(cluster, some_use_nothing) == [[4.0, 4.0, 4.0]] * 3


def of_functions():
    counts = []

    def weight():
        counts.append(rank())
        return np.float32([0, 2, 6][rank()])

    w = autograd.replicated(np.float32(5), TRAINERS, weight=weight)
    hooked = []
    w.register_hook(lambda g: hooked.append(float(g)))
    factor = [np.nan, 4.0, 8.0][rank()]
    with autograd.context() as context_id:
        autograd.backward(context_id, [w * factor])
        return float(autograd.get_gradients(context_id)[w]), len(counts), hooked


def test_weights_are_asked_for_at_each_pass(cluster):
    """One of 0 leaves a trainer out, whatever its gradient; hooks see their own."""
    found = trainers(cluster, of_functions)
    assert [each[:2] for each in found] == [(7.0, 1)] * 3
    assert [each[2] for each in found[1:]] == [[4.0], [8.0]]


clip = rule(lambda g: jnp.clip(g, -0.01, 0.02))
ROWS, COUNTS = numbers(11, shape=(sum(SIZES), 4)), numbers(12, shape=sum(SIZES)) ** 2


def clipping(w, rows, counts):
    losses = (jnp.tanh(clip(rows @ w)) ** 2).sum(axis=1)
    return (counts * losses).sum() / COUNTS.sum()


def shares():
    own = slice(sum(SIZES[: rank()]), sum(SIZES[: rank() + 1]))
    w = autograd.replicated(params(0)["w"], TRAINERS, weight=None)
    with autograd.context() as context_id:
        root = autograd.apply(clipping, w, ROWS[own], COUNTS[own])
        autograd.backward(context_id, [root])
        return np.asarray(autograd.get_gradients(context_id)[w])


def test_shares_of_the_whole_mean_are_added(cluster):
    """A rule that clips sees what it sees on one device."""
    found = trainers(cluster, shares)
    assert bits(found) == bits(found[:1]) * 3
    expected = jax.grad(clipping)(params(0)["w"], ROWS, COUNTS)
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


def weighing(*weights):
    w = autograd.replicated(np.float32(5), TRAINERS, weight=weights[rank()])
    with autograd.context() as context_id:
        autograd.backward(context_id, [w * 2.0])


def no_weight():
    return 0


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([no_weight] * 3, "must be positive on one of worker0, worker1, worker2"),
        ([None, 2, 2], "None on all of worker0, worker1, worker2, or on none"),
    ],
)
def test_weights_that_are_refused_together(cluster, weights, told):
    for error in trainers(cluster, weighing, *weights):
        assert isinstance(error, ValueError)
        assert told in str(error)


def no_gradient(_):
    raise ArithmeticError("no derivative today")


def one_fails(how):
    a, b = two()
    told, remove = None, lambda: None
    if rank() == 1 and how == "hook":
        remove = b.register_hook(no_gradient)
    with autograd.context() as context_id:
        try:
            root = (a * b).sum()
            roots = [] if rank() == 1 and how == "roots" else [root]
            autograd.backward(context_id, roots)
        except Exception as error:  # noqa: BLE001 - which it is stands below
            told = f"{type(error).__name__}: {error}"
        assert not autograd.get_gradients(context_id)
    remove()
    with autograd.context() as context_id:
        autograd.backward(context_id, [(a * (rank() + 1.0)).sum()])
        return told, np.asarray(autograd.get_gradients(context_id)[a]).tolist()


@pytest.mark.parametrize("how", ["hook", "roots"])
def test_a_pass_that_fails_on_one_trainer_fails_on_all(cluster, how):
    """With its name, and no trainer has a gradient of it; the next pass is in step."""
    found = trainers(cluster, one_fails, how)
    assert [after for _, after in found] == [[2.0, 2.0, 2.0]] * 3
    own = {"hook": "no derivative today", "roots": "No tensors provided"}[how]
    for k, (told, _) in enumerate(found):
        assert own in told
        assert ("'worker1' had no value to send" in told) == (k != 1)


def unequal():
    shape = (3, 2) if rank() == 2 else (2, 3)
    autograd.replicated({"w": np.zeros(shape, "f4")}, TRAINERS)


def test_parameters_are_alike(cluster):
    expected = r"float32\[2,3\] at w on 'worker0'. Got float32\[3,2\] on 'worker2'"
    for error in trainers(cluster, unequal):
        with pytest.raises(ValueError, match=expected):
            raise error


def refused_by_one():
    autograd.replicated(np.float32(1), TRAINERS, weight=-1 if rank() == 1 else 1)


def test_arguments_that_one_trainer_refuses(cluster):
    """The others do not wait for it."""
    first, own, last = trainers(cluster, refused_by_one)
    assert type(own) is ValueError
    for error in (first, last):
        with pytest.raises(
            autograd.AutogradError, match=r"'worker1' had no value .*-1"
        ):
            raise error


def arguments():
    with pytest.raises(ValueError, match="must be workers of the group, worker3 among"):
        autograd.replicated(np.float32(1), TRAINERS)
    for weight in (-1, float("nan"), float("inf"), "2", True):
        with pytest.raises(ValueError, match="must be a number that is not negative"):
            autograd.replicated(np.float32(1), ["worker3"], weight=weight)
    with pytest.raises(ValueError, match="must have at least one floating array"):
        autograd.replicated(np.int32(1), ["worker3"])


def test_arguments_are_checked(cluster):
    cluster.run(3, arguments)


@autograd.eager
def times(x, ref):
    return ref.local_value() * x


def alone():
    return autograd.replicated(np.float32(5), [rpc.get_worker_info().name])


def from_elsewhere():
    ref = rpc.remote("worker2", alone)
    x = autograd.variable(np.float32(2))
    with autograd.context() as context_id:
        root = rpc.rpc_sync("worker2", times, args=(x, ref))
        with pytest.raises(
            autograd.AutogradError, match="Call `backward` on each trainer"
        ):
            autograd.backward(context_id, [root])


def test_a_pass_that_begins_elsewhere_is_refused(cluster):
    cluster.run(3, from_elsewhere)


def two_at_once():
    given = []

    def weight():
        autograd.backward(*given)

    w = autograd.replicated(np.float32(5), ["worker3"], weight=weight)
    with autograd.context() as context_id:
        given += [context_id, [w * 3.0]]
        with pytest.raises(
            autograd.AutogradError,
            match="must run alone where variables are replicated",
        ):
            autograd.backward(*given, retain_graph=True)


def test_passes_run_one_at_a_time(cluster):
    cluster.run(3, two_at_once)


def left_alone():
    """One trainer is late, which is told to all; then none has any variable left."""
    a, b = two()
    if rank() != 2:
        autograd.unreplicate(b)
    expected = r"the same variables .* on 'worker2'"
    with autograd.context() as context_id, pytest.raises(ValueError, match=expected):
        autograd.backward(context_id, [(a * b).sum()])
    if rank() == 2:
        autograd.unreplicate(b)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(a * b).sum()])
        found = autograd.get_gradients(context_id)
        gradients = [np.asarray(found[v]).tolist() for v in (a, b)]
    autograd.unreplicate(a)
    with pytest.raises(ValueError, match="must be a replicated variable of this"):
        autograd.unreplicate(a)
    if rank() == 1:
        with autograd.context() as context_id:
            autograd.backward(context_id, [a.sum()])
    return gradients


def test_variables_that_are_not_replicated_any_more(cluster):
    """The one that is left is reduced; and at last a pass is a trainer's own."""
    a, b = np.float32([1, 2, 5]), np.float32([10, 2, 5])
    for found in trainers(cluster, left_alone):
        assert found == [b.tolist(), a.tolist()]


def waits_for_the_dead():
    w = autograd.replicated(np.float32(5), TRAINERS)
    with autograd.context() as context_id:
        if rank() == 1:
            signal.pause()
        autograd.backward(context_id, [w * 2.0])


def test_a_trainer_that_dies(fresh_hosts):
    """While the others wait for it at the end of their pass."""
    hosts = fresh_hosts(3)
    hosts.everywhere(become_worker)
    tasks = [hosts.start(k, outcome, waits_for_the_dead) for k in range(3)]
    assert not tasks[0].done(0.5)
    hosts.signal(1, signal.SIGKILL)
    for k in (0, 2):
        with pytest.raises(rpc.WorkerLost, match="'worker1'"):
            raise tasks[k].result()

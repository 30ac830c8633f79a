"""Errors and refused arguments of a distributed optimizer."""

import os

import jax.numpy as jnp
import optax
import pytest

from jdist import autograd, optim, rpc
from tests.autograd import optimizer_cases as cases
from tests.rpc.hosts import PATIENCE, become_worker
from tests.rpc.rref.common import settle


def three(value=None):
    """One variable on each of three workers."""
    return cases.remote_variables(
        [(f"worker{i}", cases.tree(i) if value is None else value) for i in (0, 1, 2)]
    )


def of_owner(i, *seed):
    """No two owners' have the same shapes: each compiles its own step."""
    return {"w": cases.numbers(i, *seed, shape=(i + 2, 3))}


def fails_on_worker1():
    rrefs = cases.remote_variables([(f"worker{i}", of_owner(i)) for i in range(3)])
    dist_opt = autograd.DistributedOptimizer(
        cases.failing, rrefs, "worker1", "Error running optimizer."
    )
    with pytest.raises(Exception, match="Error running optimizer") as caught:
        cases.step(dist_opt, rrefs, [of_owner(i, 7) for i in range(3)])
    (error,) = caught.value.exceptions
    assert type(error) is ArithmeticError
    assert error.remote_worker == "worker1"
    assert "Done on 'worker0', 'worker2'." in str(caught.value)
    return cases.values_of(rrefs)


def test_an_error_of_one_owner(cluster):
    """It comes with its type; the others have made their step, and it says so."""
    found = cluster.run(0, fails_on_worker1)
    expected = []
    for i in range(3):
        given = [[of_owner(i, 7) if i != 1 else None]]
        ((value,),) = cases.local_steps(optim.sgd(lr=0.25), [of_owner(i)], given)
        expected.append(value)
    cases.assert_same_bits(found, expected)
    settle(cluster)


def fails_everywhere():
    rrefs = three()
    with pytest.raises(ExceptionGroup, match=r"Error creating optimizer\.") as caught:
        autograd.DistributedOptimizer(cases.fails_at_once, rrefs, "Simulated.")
    errors = caught.value.exceptions
    assert [type(error) for error in errors] == [ValueError] * 3
    assert [error.remote_worker for error in errors] == [f"worker{i}" for i in range(3)]
    told = str(caught.value)
    for i in range(3):
        text = f"'worker{i}': ValueError: Error creating optimizer. Simulated."
        assert text in told


def test_the_errors_of_all_owners(cluster):
    """None is lost, as all but the last are in torch; by rank."""
    cluster.run(0, fails_everywhere)
    settle(cluster)


def bad_rate():
    rrefs = three()
    with pytest.raises(ExceptionGroup, match=r"sgd\(lr=...\)` must be at least 0"):
        autograd.DistributedOptimizer(optim.sgd, rrefs, lr=-1.0)
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=0.5)
    given = [cases.tree(1)] * 3
    with pytest.raises(ExceptionGroup, match=r"lr=...\)` must be at least 0"):
        cases.step(dist_opt, rrefs, given, lr=-2.0)
    with pytest.raises(ExceptionGroup, match=r"no hyperparameter 'rate'.*It has lr"):
        cases.step(dist_opt, rrefs, given, rate=1.0)
    with pytest.raises(ExceptionGroup, match="cannot be overridden in a step: built"):
        cases.step(dist_opt, rrefs, given, momentum=0.5)
    with pytest.raises(TypeError, match=r"step\(lr=...\)` must be a number or"):
        cases.step(dist_opt, rrefs, given, lr=cases.halving)
    with pytest.raises(ValueError, match=r"step\(max_norm=...\)` must be at least 0"):
        cases.step(dist_opt, rrefs, given, max_norm=-1.0)
    with pytest.raises(ValueError, match=r"step\(max_norm=...\)` must be at least 0"):
        cases.step(dist_opt, rrefs, given, max_norm=float("nan"))
    return cases.values_of(rrefs)


def test_numbers_that_are_wrong(cluster):
    """At the owners, before anything moves."""
    found = cluster.run(0, bad_rate)
    cases.assert_same_bits(found, [cases.tree(i) for i in range(3)])


def no_context():
    (rref,) = cases.remote_variables([("worker1", cases.tree(1))])
    dist_opt = autograd.DistributedOptimizer(optim.sgd, [rref], lr=0.5)
    with pytest.raises(
        RuntimeError, match="Could not find autograd context with id: 123"
    ):
        dist_opt.step(123)
    with autograd.context() as context_id:
        pass
    with pytest.raises(
        RuntimeError, match=f"Could not find autograd context with id: {context_id}"
    ):
        dist_opt.step(context_id)
    with autograd.context() as context_id:
        dist_opt.step(context_id)  # in which no variable has a gradient
    return cases.values_of([rref])


def test_a_context_that_is_not_there(cluster):
    """It is looked for on the worker that asks; the owner need not have it."""
    (found,) = cluster.run(0, no_context)
    cases.assert_same_bits(found, cases.tree(1))


def given_twice():
    first, second = (rpc.RRef(cases.make(cases.tree(i))) for i in (1, 2))
    again = rpc.RRef(first.local_value())
    with pytest.raises(
        ExceptionGroup,
        match=r"rrefs\[2\]\)` must .* not come twice. Got that of params_rrefs\[0\]",
    ):
        autograd.DistributedOptimizer(optim.sgd, [first, second, again], lr=0.5)
    (far,) = cases.remote_variables([("worker1", cases.tree(3))])
    with pytest.raises(ExceptionGroup, match=r"that of params_rrefs\[1\]"):
        autograd.DistributedOptimizer(optim.sgd, [first, far, far], lr=0.5)
    one, other = (
        autograd.DistributedOptimizer(optim.sgd, [far, first], lr=0.5) for _ in range(2)
    )
    for dist_opt in (one, other):
        cases.step(dist_opt, [far], [cases.tree(4)])
    return cases.values_of([far])


def test_a_variable_given_twice(cluster):
    """Refused within an optimizer, however it is referred to; not among several."""
    (found,) = cluster.run(0, given_twice)
    given = [[cases.tree(4)]] * 2
    *_, (expected,) = cases.local_steps(optim.sgd(lr=0.5), [cases.tree(3)], given)
    cases.assert_same_bits(found, expected)


def wrong_arguments():
    (rref,) = cases.remote_variables([("worker1", cases.tree(1))])
    make = autograd.DistributedOptimizer
    for made in (optim.sgd(lr=0.5), optax.sgd(0.5)):
        remedy = "must be a function.* Pass a constructor, such as `optim.sgd` or "
        with pytest.raises(TypeError, match=remedy):
            make(made, [rref])
    with pytest.raises(ValueError, match="can find by its name"):
        make(lambda lr: optim.sgd(lr=lr), [rref], 0.5)
    with pytest.raises(rpc.ForbiddenFunction, match="`allow="):
        make(optax.sgd, [rref], 0.5)
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make(optim.sgd, [], lr=0.5)
    with pytest.raises(TypeError, match=r"params_rrefs\[1\]\)` must be a reference"):
        make(optim.sgd, [rref, autograd.variable(jnp.ones(2))], lr=0.5)
    with pytest.raises(ExceptionGroup, match=r"refer to a variable. Got a list"):
        make(optim.sgd, [rref, rpc.remote("worker1", list)], lr=0.5)
    with pytest.raises(ExceptionGroup, match="Got a dict from it"):
        make(cases.no_optimizer, [rref], lr=0.5)
    with pytest.raises(ExceptionGroup, match="without a loss scale"):
        make(cases.scaled_loss, [rref])
    with pytest.raises(ExceptionGroup, match="`sgd` has no hyperparameter 'rate'"):
        make(optim.sgd, [rref], rate=0.5)


def test_arguments_that_are_wrong(cluster):
    cluster.run(0, wrong_arguments)
    settle(cluster)


def a_value_that_failed():
    rref = rpc.remote("worker1", cases.fails_at_once, args=("No value.",))
    with pytest.raises(ExceptionGroup, match=r"ValueError.*No value\."):
        autograd.DistributedOptimizer(optim.sgd, [rref], lr=0.5)


def test_a_variable_that_could_not_be_made(cluster):
    cluster.run(0, a_value_that_failed)


# --- a worker that dies ---


def loses_worker1():
    rrefs = three()
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=0.5)
    with autograd.context() as context_id:
        cases.give(context_id, rrefs, [cases.tree(4)] * 3)
        rpc.rpc_async("worker1", die)
        with pytest.raises(ExceptionGroup, match=r"'worker1': WorkerLost") as caught:
            until_it_fails(dist_opt, context_id)
    (error,) = caught.value.exceptions
    assert error.worker == "worker1"
    assert "Done on 'worker0', 'worker2'" in str(caught.value)
    return cases.values_of([rrefs[0], rrefs[2]])


def until_it_fails(dist_opt, context_id):
    while True:
        dist_opt.step(context_id, lr=0.0)


def die():
    os._exit(1)


def test_a_worker_that_is_lost(fresh_hosts):
    """Its error names it; the others step on."""
    hosts = fresh_hosts(3)
    hosts.everywhere(become_worker)
    hosts.alive.discard(1)
    found = hosts.start(0, loses_worker1).result(PATIENCE)
    cases.assert_same_bits(found, [cases.tree(0), cases.tree(2)])

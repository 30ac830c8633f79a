"""Steps on shared parameters are serialized; steps on others run concurrently."""

import weakref

import numpy as np
import pytest
from msgspec.structs import replace

from jdist import autograd, optim, rpc
from jdist.autograd.contexts import here
from jdist.autograd.optimizer.compiled_optimizer import compiled_optimizer
from jdist.autograd.optimizer.owned_optimizer import OwnedOptimizer
from jdist.rpc.base import current
from jdist.rpc.calls.callee import Execution
from jdist.rpc.wire.frame import Frame
from tests.autograd import optimizer_cases as cases
from tests.rpc.rref.common import close_gate, gate, settle, wait_for

TURNS = 8


def forget():
    cases.log.clear()


def one_holds():
    """`slow` is in its step; `same` wants the same variables, `other` does not."""
    variables = [rpc.RRef(cases.make(cases.numbers(i))) for i in range(3)]
    sets = {"slow": [0, 1], "same": [1, 0], "overlap": [1, 2], "other": [2]}
    rrefs = {name: [variables[i] for i in indices] for name, indices in sets.items()}
    optimizers = {
        name: autograd.DistributedOptimizer(cases.watched, mine, name, name == "slow")
        for name, mine in rrefs.items()
    }

    def step(name):
        gradients = [np.ones((3, 2), np.float32)] * len(rrefs[name])
        cases.step(optimizers[name], rrefs[name], gradients)

    slow = cases.in_thread(step, "slow")
    assert gate("slow is in").wait(cases.PATIENCE)
    waiting = [cases.in_thread(step, "same")]
    step("other")
    assert cases.log == [("slow", "begins"), ("other", "begins"), ("other", "ends")]
    waiting.append(cases.in_thread(step, "overlap"))
    gate("slow may end").set()
    for join in (slow, *waiting):
        assert join() == (None, None)
    return list(cases.log), cases.values_of(variables)


def test_steps_that_share_a_variable_wait():
    """The same set in another order, and a set that overlaps."""
    forget()
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        log, values = one_holds()
    # Between the beginning and the end of a step no other one of its variables is.
    spans = {name: log.index((name, "begins")) for name in ("same", "overlap")}
    assert log.index(("slow", "ends")) < min(spans.values())
    for name, begins in spans.items():
        assert log[begins + 1] == (name, "ends")
    for i, (found, steps) in enumerate(zip(values, (2, 3, 2), strict=True)):
        expected = cases.numbers(i)
        for _ in range(steps):
            expected = expected - np.float32(1)
        np.testing.assert_array_equal(found, expected)
    for name in ("slow is in", "slow may end"):
        close_gate(name)


def gives_up():
    """A step that waits for another one longer than it may."""
    rref = rpc.RRef(cases.make(cases.numbers(1)))
    slow = autograd.DistributedOptimizer(cases.watched, [rref], "holder", True)
    other = autograd.DistributedOptimizer(optim.sgd, [rref], lr=1.0)
    gradient = np.full((3, 2), 2.0, np.float32)
    holder = cases.in_thread(cases.step, slow, [rref], [gradient])
    assert gate("holder is in").wait(cases.PATIENCE)
    with pytest.raises(
        ExceptionGroup, match=r"Error running optimizer.*RpcTimeout"
    ) as caught:
        cases.step(other, [rref], [gradient], timeout=0.05)
    assert isinstance(caught.value.exceptions[0], rpc.RpcTimeout)
    gate("holder may end").set()
    assert holder() == (None, None)
    cases.step(other, [rref], [gradient])  # a step that gave up has left no lock
    return cases.values_of([rref])


def test_who_gives_up_steps_no_more():
    """Neither then nor later; the next one gets its turn."""
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        (found,) = gives_up()
    expected = cases.numbers(1) - np.float32(2) - np.float32(2)
    np.testing.assert_array_equal(found, expected)
    for name in ("holder is in", "holder may end"):
        close_gate(name)


def train(variables, order):
    """A trainer with an optimizer of its own; whole numbers, so no sum is rounded."""
    rrefs = [variables[i] for i in order]
    dist_opt = autograd.DistributedOptimizer(optim.sgd, rrefs, lr=1.0)
    rank = rpc.get_worker_info().id
    for turn in range(TURNS):
        gradients = [
            np.full((2, 3), 100.0**rank * (turn + 1), np.float64) for _ in rrefs
        ]
        cases.step(dist_opt, rrefs, gradients)


def share(variables):
    orders = {0: (0, 1, 2), 1: (2, 1, 0), 2: (1, 0), 3: (2, 0, 1)}
    trainers = [
        rpc.rpc_async(f"worker{rank}", train, args=(variables, order))
        for rank, order in orders.items()
    ]
    rpc.wait_all(trainers)
    return cases.values_of(variables)


def hogwild(start):
    variables = cases.remote_variables(
        [(f"worker{i}", np.full((2, 3), start)) for i in (0, 1, 1)]
    )
    return share(variables)


def test_four_trainers_lose_no_step(cluster):
    """All share variables on two workers, each in an order of its own."""
    start = 2.0**40
    found = cluster.run(0, hogwild, start)
    turns = TURNS * (TURNS + 1) // 2
    everybody = sum(100**rank for rank in (0, 1, 3)) * turns
    for i, trainer2 in enumerate((1, 1, 0)):
        expected = start - everybody - trainer2 * 100**2 * turns
        np.testing.assert_array_equal(found[i], np.full((2, 3), expected))
    settle(cluster)


def many_threads(threads):
    """One optimizer, many threads."""
    rrefs = cases.remote_variables([("worker1", np.zeros((2, 3)))])
    dist_opt = autograd.DistributedOptimizer(optim.adam, rrefs, lr=0.5)

    def steps(number):
        for _ in range(4):
            cases.step(dist_opt, rrefs, [np.full((2, 3), 3.0)])
        return number

    joins = [cases.in_thread(steps, number) for number in range(threads)]
    assert [join() for join in joins] == [(number, None) for number in range(threads)]
    state = dist_opt.state()["worker1"]
    return state["state/0/step"], cases.values_of(rrefs)


def test_one_optimizer_in_many_threads(cluster):
    """Its state goes through as many steps as were made."""
    count, (found,) = cluster.run(0, many_threads, 6)
    assert count == 24
    given = [[np.full((2, 3), 3.0)]] * 24
    opt = optim.adam(lr=0.5)
    *_, (expected,) = cases.local_steps(opt, [np.zeros((2, 3))], given)
    np.testing.assert_array_equal(found, expected)


def test_an_optimizer_keeps_no_variable_alive():
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        variable = cases.make(cases.numbers(1))
        rref = rpc.RRef(variable)
        dist_opt = autograd.DistributedOptimizer(optim.sgd, [rref], lr=1.0)
        alive = weakref.ref(variable)
        del variable, rref, dist_opt
        assert wait_for(lambda: alive() is None)


def test_a_step_whose_caller_is_gone():
    """It had its turn too late: nothing changes."""
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        variable = cases.make(cases.numbers(1))
        owned = OwnedOptimizer(
            compiled_optimizer(optim.sgd, (), {"lr": 1.0}), {0: variable}
        )
        context = here().new()
        context.accumulate({variable: cases.numbers(2)})
        scope = current.scope.get()
        agent = scope.agent
        frame = Frame("optimizer.step", 1, {}, None, [])
        execution = Execution(agent.info, frame, agent.pool)
        execution.cancel("'worker7' is gone")
        token = current.scope.set(replace(scope, execution=execution))
        try:
            with pytest.raises(
                rpc.RpcTimeout, match="Nothing was changed: 'worker7' is gone"
            ):
                owned.step(context.id, None, {})
            with pytest.raises(rpc.RpcTimeout, match="Nothing was changed"):
                owned.write(owned.read())
        finally:
            current.scope.reset(token)
        np.testing.assert_array_equal(variable.value, cases.numbers(1))

"""A distributed optimizer compared with a local one, bit for bit."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import autograd, optim, rpc
from jdist.autograd.optimizer.compiled_optimizer import compiled_optimizer
from tests.autograd import optimizer_cases as cases
from tests.rpc.rref.common import settle

STEPS = 5


def values():
    """For variables on worker1, worker2, and worker1 again."""
    return [
        ("worker1", {"deep": [cases.numbers(1)]}),
        ("worker2", cases.numbers(2, shape=(5,))),
        ("worker1", cases.numbers(4, shape=(7,), dtype=np.float64)),
    ]


def gradients(missing=()):
    """For each step one for each variable, some of them missing."""
    return [
        [
            None
            if (step, i) in missing
            else jax.tree.map(
                lambda x, step=step, i=i: cases.numbers(
                    5, step, i, shape=x.shape, dtype=x.dtype
                ),
                value,
            )
            for i, (_, value) in enumerate(values())
        ]
        for step in range(STEPS)
    ]


def stepped(name, given):
    """Values of all variables after each step."""
    constructor, options = cases.CONFIGURATIONS[name]
    rrefs = cases.remote_variables(values())
    dist_opt = autograd.DistributedOptimizer(constructor, rrefs, **options)
    found = []
    for each in given:
        cases.step(dist_opt, rrefs, each)
        found.append(cases.values_of(rrefs))
    return found


MISSING = {(step, i) for step in (1, 3) for i in (1, 2)}


@pytest.mark.parametrize("name", cases.CONFIGURATIONS)
def test_every_optimizer_is_its_local_one(cluster, name):
    """Variables on two workers, several on one, of two dtypes.

    Where there is no gradient, on all of a worker or on a part of it, nothing moves:
    neither value nor state nor count.
    """
    found = cluster.run(0, stepped, name, gradients(MISSING))
    constructor, options = cases.CONFIGURATIONS[name]
    before = [value for _, value in values()]
    local = cases.local_steps(constructor(**options), before, gradients(MISSING))
    cases.assert_same_bits(found, local)
    for step in range(STEPS):
        earlier = before if step == 0 else found[step - 1]
        for i in range(len(before)):
            one, other = (
                jax.tree.leaves(each[i])[0] for each in (found[step], earlier)
            )
            assert np.array_equal(one, other) == ((step, i) in MISSING)
    settle(cluster)


def partly():
    """One leaf of a variable has a gradient, the other has none."""
    value = cases.tree(6)
    (rref,) = cases.remote_variables([("worker1", value)])
    dist_opt = autograd.DistributedOptimizer(optim.adam, [rref], lr=0.1)
    gradient = {"w": cases.numbers(7), "b": None}
    cases.step(dist_opt, [rref], [gradient])
    cases.step(dist_opt, [rref], [cases.tree(8)])
    return cases.values_of([rref])


def test_a_leaf_without_a_gradient(cluster):
    """It keeps its own count."""
    (found,) = cluster.run(0, partly)
    given = [[{"w": cases.numbers(7), "b": None}], [cases.tree(8)]]
    *_, (expected,) = cases.local_steps(optim.adam(lr=0.1), [cases.tree(6)], given)
    cases.assert_same_bits(found, expected)


def rates():
    (rref,) = cases.remote_variables([("worker1", cases.tree(1))])
    dist_opt = autograd.DistributedOptimizer(
        optim.sgd, [rref], lr=cases.halving, momentum=0.9
    )
    found = []
    for turn, options in enumerate([{}, {}, {"lr": 0.5}, {"lr": jnp.float32(0.25)}]):
        cases.step(dist_opt, [rref], [cases.tree(9, turn)], **options)
        found.append(cases.values_of([rref]))
    return found


def test_rates_that_change(cluster):
    """A schedule travels by name; a step may have its own rate."""
    found = cluster.run(0, rates)
    opt = optim.sgd(lr=cases.halving, momentum=0.9)
    run = jax.jit(opt.step)
    params = [jax.tree.map(jnp.asarray, cases.tree(1))]
    state = opt.init(params)
    for turn, options in enumerate([{}, {}, {"lr": 0.5}, {"lr": np.float32(0.25)}]):
        params, state = run(params, [cases.tree(9, turn)], state, **options)
        cases.assert_same_bits(found[turn], jax.tree.map(np.asarray, params))


def by_optax(constructor, *args, **kwargs):
    rrefs = cases.remote_variables(values())
    dist_opt = autograd.DistributedOptimizer(constructor, rrefs, *args, **kwargs)
    found = []
    for each in gradients()[:3]:
        cases.step(dist_opt, rrefs, each)
        found.append(cases.values_of(rrefs))
    # No parameter of worker2 has a gradient: its one count stays, too.
    last = gradients()[3]
    cases.step(dist_opt, rrefs, [last[0], None, last[2]])
    found.append(cases.values_of(rrefs))
    return found


def test_an_optax_chain(cluster):
    """By a function that makes it; one transformation, with one count, per owner."""
    found = cluster.run(0, by_optax, cases.clipped, 0.05)
    for group in ([0, 2], [1]):
        given = [[each[i] for i in group] for each in gradients()[:4]]
        if group == [1]:
            given = given[:3]
        opt = optim.from_optax(cases.clipped(0.05))
        local = cases.local_steps(opt, [values()[i][1] for i in group], given)
        local += [local[-1]] * (4 - len(local))
        mine = [[each[i] for i in group] for each in found]
        cases.assert_same_bits(mine, local)


def by_masters():
    rrefs = cases.remote_variables(values())
    before = cases.values_of(rrefs)
    with pytest.raises(ExceptionGroup, match="No optimizer"):
        autograd.DistributedOptimizer(cases.masters_here, rrefs, 1e-3, "worker2")
    # An owner that could not is no reason to round on the others.
    cases.assert_same_bits(cases.values_of(rrefs), before)
    dist_opt = autograd.DistributedOptimizer(cases.masters, rrefs, 1e-3)
    found = [cases.values_of(rrefs)]
    for each in gradients()[:3]:
        cases.step(dist_opt, rrefs, each)
        found.append(cases.values_of(rrefs))
    return before, found, dist_opt.state()


def test_variables_in_full_precision_become_copies_of_masters(cluster):
    """On each owner the bits of the same optimizer on one device."""
    before, found, state = cluster.run(0, by_masters)
    full = [value for _, value in values()]
    opt, run = cases.masters(1e-3), jax.jit(cases.masters(1e-3).step)
    kept, params = opt.init(full), optim.compute_copies(full, jnp.bfloat16)
    expected = [params]
    for each in gradients()[:3]:
        params, kept = run(params, each, kept)
        expected.append(params)
    cases.assert_same_bits(found, jax.tree.map(np.asarray, expected))
    assert jax.tree.leaves(found[0])[0].dtype == jnp.bfloat16
    masters = {
        path: array
        for numbers in state.values()
        for path, array in numbers.items()
        if path.startswith("state/masters")
    }
    assert len(masters) == len(jax.tree.leaves(before))
    wide = {array.dtype.name for array in masters.values()}
    assert wide == {"float32", "float64"}


def by_two():
    rrefs = cases.remote_variables(values())
    first, second = (
        autograd.DistributedOptimizer(cases.masters, rrefs, 1e-3) for _ in range(2)
    )
    each = gradients()[0]
    cases.step(second, rrefs, each)
    before = cases.values_of(rrefs)
    with pytest.raises(
        ExceptionGroup, match=r"its masters alone\. Got a value that an"
    ):
        cases.step(first, rrefs, each)
    cases.assert_same_bits(cases.values_of(rrefs), before)
    cases.step(second, rrefs, each)


def test_masters_do_not_undo_the_steps_of_another(cluster):
    cluster.run(0, by_two)


def some_without():
    rrefs = cases.remote_variables(
        [("worker1", cases.tree(1)), ("worker1", cases.tree(2))]
    )
    dist_opt = autograd.DistributedOptimizer(cases.clipped, rrefs, 0.1)
    with pytest.raises(
        ExceptionGroup, match=r"for every parameter.*by_label"
    ) as caught:
        cases.step(dist_opt, rrefs, [cases.tree(3), None])
    assert isinstance(caught.value.exceptions[0], ValueError)
    return cases.values_of(rrefs)


def test_optax_cannot_skip_one_of_several(cluster):
    """It says so, and nothing has moved."""
    found = cluster.run(0, some_without)
    cases.assert_same_bits(found, [cases.tree(1), cases.tree(2)])


def test_optaxs_own_constructor():
    """It may be named where `allow` has its module."""
    with rpc.local_cluster(["worker0", "worker1"], allow=["tests", "optax"]):
        (rref,) = cases.remote_variables([("worker1", cases.tree(1))])
        dist_opt = autograd.DistributedOptimizer(optax.sgd, [rref], 0.1, momentum=0.9)
        cases.step(dist_opt, [rref], [cases.tree(2)])
        (found,) = cases.values_of([rref])
        opt = optim.from_optax(optax.sgd(0.1, momentum=0.9))
        ((expected,),) = cases.local_steps(opt, [cases.tree(1)], [[cases.tree(2)]])
        cases.assert_same_bits(found, expected)


def torchs_model(ranks):
    """`w1 @ (w2 @ t)`, with one weight on either worker, and one step."""
    owners = [f"worker{rank}" for rank in ranks]
    rrefs = cases.remote_variables(
        [(owner, cases.numbers(i, shape=(3, 3))) for i, owner in enumerate(owners)]
    )
    before = cases.values_of(rrefs)
    dist_opt = autograd.DistributedOptimizer(optim.adam, rrefs, lr=1e-2, amsgrad=True)
    t = cases.numbers(9, shape=(3, 3))
    with autograd.context() as context_id:
        first, second = (rref.to_here() for rref in rrefs)
        loss = (first @ (second @ t)).sum()
        autograd.backward(context_id, [loss])
        dist_opt.step(context_id)
    return before, cases.values_of(rrefs)


@pytest.mark.parametrize("ranks", [(1, 2), (1, 1), (0, 1)])
def test_torchs_model(cluster, ranks):
    """The scenario of torch's `test_dist_optim`, with a real backward pass."""
    before, after = cluster.run(0, torchs_model, ranks)
    t = cases.numbers(9, shape=(3, 3))
    grads = jax.grad(lambda w: (w[0] @ (w[1] @ t)).sum())(before)
    opt = optim.adam(lr=1e-2, amsgrad=True)
    (expected,) = cases.local_steps(opt, before, [grads])
    for found, wanted, old in zip(after, expected, before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert not np.array_equal(found, old)


def no_path(name):
    """The second weight is plain numbers in the loss."""
    constructor, options = cases.CONFIGURATIONS[name]
    rrefs = cases.remote_variables(
        [(f"worker{i}", cases.numbers(i, shape=(3, 3))) for i in (1, 2)]
    )
    dist_opt = autograd.DistributedOptimizer(constructor, rrefs, **options)
    with autograd.context() as context_id:
        loss = (rrefs[0].to_here() @ cases.numbers(8, shape=(3, 3))).sum()
        autograd.backward(context_id, [loss])
        dist_opt.step(context_id)
    return cases.values_of(rrefs)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "rprop", "adadelta", "adagrad"])
def test_a_weight_that_the_loss_does_not_need(cluster, name):
    """The scenario of torch's `test_dist_optim_none_grads`; also for Adagrad."""
    first, second = cluster.run(0, no_path, name)
    before = [cases.numbers(i, shape=(3, 3)) for i in (1, 2)]
    np.testing.assert_array_equal(second, before[1], strict=True)
    t = cases.numbers(8, shape=(3, 3))
    grad = jax.grad(lambda w: (w @ t).sum())(before[0])
    constructor, options = cases.CONFIGURATIONS[name]
    ((expected, _),) = cases.local_steps(constructor(**options), before, [[grad, None]])
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    assert not np.array_equal(first, before[0])


def several_devices():
    """Two variables of one owner on two devices, one of them on both."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[2:4]), ("rows",))
    where = [
        devices[1],
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")),
    ]
    variables = [
        autograd.variable(jax.device_put(cases.numbers(i, shape=(4, 2)), place))
        for i, place in enumerate(where)
    ]
    rrefs = [rpc.RRef(variable) for variable in variables]
    dist_opt = autograd.DistributedOptimizer(optim.adam, rrefs, lr=0.1)
    for turn in range(2):
        gradients = [cases.numbers(3, turn, i, shape=(4, 2)) for i in (0, 1)]
        placed = [
            jax.device_put(gradient, place)
            for gradient, place in zip(gradients, where, strict=True)
        ]
        cases.step(dist_opt, rrefs, placed)
    return [v.value.sharding for v in variables], where, cases.values_of(rrefs)


def test_variables_stay_where_they_are():
    """One owner may have several devices."""
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        shardings, where, found = several_devices()
    assert shardings[0].device_set == {where[0]}
    assert shardings[1] == where[1]
    given = [
        [cases.numbers(3, turn, i, shape=(4, 2)) for i in (0, 1)] for turn in range(2)
    ]
    opt, before = optim.adam(lr=0.1), [cases.numbers(i, shape=(4, 2)) for i in (0, 1)]
    *_, expected = cases.local_steps(opt, before, given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


STEP_IS_TRACED = "/jdist/tests/step_is_traced"


def counting():
    """Plain SGD; JAX is told when its step is traced."""
    inner = optim.sgd(lr=1.0)

    def step_tree(*arguments):
        jax.monitoring.record_event(STEP_IS_TRACED)
        return inner.step_tree(*arguments)

    return optim.Optimizer("counting", inner.init_tree, step_tree)


def traced():
    """How many times a step is traced: once for each pattern of gradients."""
    events, counts = [], []

    def listen(event, **_):
        if event == STEP_IS_TRACED:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    rrefs = [rpc.RRef(cases.make(cases.numbers(i))) for i in (0, 1)]
    dist_opt = autograd.DistributedOptimizer(counting, rrefs)
    for turn in range(6):
        pattern = [cases.numbers(turn), None if turn % 2 else cases.numbers(turn, 1)]
        cases.step(dist_opt, rrefs, pattern)
        counts.append(len(events))
    jax.monitoring.unregister_event_listener(listen)
    return counts


def test_each_pattern_of_gradients_compiles_once():
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        assert traced() == [1, 2, 2, 2, 2, 2]


def test_a_schedule_reads_what_is_there_now():
    """For sizes that are known and for new ones; a held optimizer as a new one."""
    held = SimpleNamespace(scale=2.0)

    def make():
        return optim.sgd(lr=lambda _: jnp.float32(0.1 * held.scale))

    def stepped(one, size):
        params = [jnp.ones(size)]
        return one.compiled(params, params, one.init(params), None, {})[0][0]

    for held.scale in (2.0, 3.0):
        one = compiled_optimizer(make, (), {})
        want = np.full(3, 1 - 0.1 * held.scale)
        np.testing.assert_allclose(stepped(one, 3), want, rtol=1e-6)
    for held.scale, size in ((4.0, 3), (4.0, 2), (3.0, 3)):
        want = np.full(size, 1 - 0.1 * held.scale)
        np.testing.assert_allclose(stepped(one, size), want, rtol=1e-6)


def test_trainers_with_the_same_optimizer_share_its_program():
    """Another one, or the same with another number, is not the same."""
    rates = (0.5, 0.5, 0.25, 1, 1.0, 0.5)
    made = [compiled_optimizer(optim.sgd, (), {"lr": rate}) for rate in rates]
    assert made[0] is made[1] is made[5]
    assert len({id(one) for one in made}) == 4
    with pytest.raises(TypeError, match="Got True"):  # which equals 1
        compiled_optimizer(optim.sgd, (), {"lr": True})
    assert compiled_optimizer(optim.adam, (), {"lr": 0.5}) not in made
    chains = [
        compiled_optimizer(cases.clipped, (rate,), {}) for rate in (0.5, 0.5, 0.25)
    ]
    assert chains[0] is chains[1] is not chains[2]

"""State and parameters of a distributed optimizer: gathered and set."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

from jdist import autograd, optim, rpc
from tests.autograd import optimizer_cases as cases
from tests.rpc.rref.common import settle

VALUES = [cases.tree(1), cases.numbers(2, dtype=jnp.bfloat16), cases.numbers(3)]
OWNERS = ["worker1", "worker2", "worker1"]


def gradient(turn):
    return [
        jax.tree.map(
            lambda x, i=i: cases.numbers(turn, i, shape=x.shape, dtype=x.dtype), value
        )
        for i, value in enumerate(VALUES)
    ]


def made(constructor, values, *args, **options):
    rrefs = cases.remote_variables(list(zip(OWNERS, values, strict=True)))
    return rrefs, autograd.DistributedOptimizer(constructor, rrefs, *args, **options)


def steps(dist_opt, rrefs, turns):
    found = []
    for turn in turns:
        cases.step(dist_opt, rrefs, gradient(turn))
        found.append(cases.values_of(rrefs))
    return found


CONSTRUCTORS = {
    "adam": (optim.adam, (), {"lr": 0.05, "amsgrad": True}),
    "schedule": (optim.sgd, (), {"lr": cases.halving, "momentum": 0.5}),
    "optax": (cases.clipped, (0.05,), {}),
    "keys": (cases.noisy, (), {}),
}


def resumed(name, folder):
    """Six steps at once; and three, by another optimizer from what orbax stored."""
    constructor, args, options = CONSTRUCTORS[name]
    rrefs, dist_opt = made(constructor, VALUES, *args, **options)
    straight = steps(dist_opt, rrefs, range(3))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "3", dist_opt.state())
    straight += steps(dist_opt, rrefs, range(3, 6))
    others = [jax.tree.map(np.zeros_like, value) for value in VALUES]
    rrefs, dist_opt = made(constructor, others, *args, **options)
    steps(dist_opt, rrefs, [9])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        dist_opt.load_state(checkpointer.restore(folder / "3", dist_opt.state()))
    again = [cases.values_of(rrefs)]
    return straight, again + steps(dist_opt, rrefs, range(3, 6))


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_curve_goes_on(cluster, name, tmp_path):
    """Bit for bit: values, moments, counts of steps, and random keys."""
    straight, again = cluster.run(0, resumed, name, tmp_path)
    cases.assert_same_bits(again, straight[2:])
    settle(cluster)


def by_hand():
    rrefs, dist_opt = made(optim.adam, VALUES, lr=0.05)
    steps(dist_opt, rrefs, range(2))
    state = dist_opt.state()
    straight = steps(dist_opt, rrefs, range(2, 4))
    dist_opt.load_state(state)
    return state, straight, steps(dist_opt, rrefs, range(2, 4))


def test_without_a_file(cluster):
    """Named by worker and path."""
    state, straight, again = cluster.run(0, by_hand)
    cases.assert_same_bits(again, straight)
    assert state.keys() == {"worker1", "worker2"}
    assert set(state["worker2"]) == {
        "params/0", "state/0/step", "state/0/exp_avg", "state/0/exp_avg_sq",
    }  # fmt: skip
    assert {"params/0/w", "params/0/b", "params/1", "state/1/step"} <= set(
        state["worker1"]
    )
    assert type(state["worker1"]["params/1"]) is np.ndarray
    assert state["worker2"]["params/0"].dtype == jnp.bfloat16


def others():
    rrefs, dist_opt = made(optim.adam, VALUES, lr=0.05)
    steps(dist_opt, rrefs, range(1))
    state = dist_opt.state()
    _, other = made(optim.sgd, VALUES, lr=0.05)
    before = other.state()
    with pytest.raises(
        ValueError, match=r"no leaf at worker1/state/0/b/exp_avg\. Got float32"
    ):
        other.load_state(state)
    shapes = [VALUES[0], VALUES[1], cases.numbers(4, shape=(2, 3))]
    _, wide = made(optim.adam, shapes, lr=0.05)
    with pytest.raises(
        ValueError, match=r"of shape \(2, 3\) at worker1/params/1. Got .*\(3, 2\)"
    ):
        wide.load_state(state)
    state.pop("worker1")
    with pytest.raises(ValueError, match=r"at worker1/params/0/b\. Got no leaf"):
        dist_opt.load_state(state)
    # Nothing was written by what was refused.
    cases.assert_same_bits(other.state(), before)


def test_a_state_of_another_optimizer(cluster):
    """Refused by the first path that differs."""
    cluster.run(0, others)


def test_leaves_stay_where_they_are():
    """Sharded and on their devices, also after a state was set."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[2:4]), ("rows",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    with rpc.local_cluster(["worker0"], allow=["tests"]):
        value = jax.device_put(cases.numbers(1, shape=(4, 2)), place)
        variable = autograd.variable(value)
        rref = rpc.RRef(variable)
        dist_opt = autograd.DistributedOptimizer(optim.adam, [rref], lr=0.5)
        grad = jax.device_put(cases.numbers(2, shape=(4, 2)), place)
        cases.step(dist_opt, [rref], [grad])
        after = np.asarray(variable.value)
        state = dist_opt.state()
        cases.step(dist_opt, [rref], [grad])
        assert not np.array_equal(variable.value, after)
        dist_opt.load_state(state)
        assert variable.value.sharding == place
        np.testing.assert_array_equal(variable.value, after)

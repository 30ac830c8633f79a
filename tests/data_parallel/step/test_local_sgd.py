"""Local SGD: when parameters are averaged, by which weights, and what that equals."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, verify
from jdist.data_parallel import LocalSGD, shard_batch, value_and_grad
from tests.replicas import over

SIZES = (4, 0, 3)


def losses_of(params, batch):
    """A regression with a parameter that is not floating."""
    x, y = batch
    return ((jnp.tanh(x @ params["w"]) - y) ** 2).sum(axis=1)


@pytest.fixture
def params(rng):
    """3 x 2, float64."""
    return {"w": jnp.asarray(rng.normal(size=(3, 2))), "steps": jnp.arange(2)}


@pytest.fixture
def batches(rng):
    """Seven steps of seven examples."""
    return [(rng.normal(size=(7, 3)), rng.normal(size=(7, 2))) for _ in range(7)]


def run(local, params, batches, where, sizes=SIZES, weights=None):
    """The state after every step."""
    state, path = local.init(params), []
    for batch in batches:
        state, loss = local.step(
            state, *shard_batch(batch, **over(where), sizes=sizes, weights=weights)
        )
        path.append((jax.device_get(state), float(loss)))
    return path


def spread(state):
    """How far apart the replicas' parameters are."""
    rows = state.params["w"]
    return float(np.abs(rows - rows[0]).max())


@pytest.mark.parametrize("on_devices", [False, True])
def test_an_average_after_every_step_is_data_parallel_sgd(
    params, batches, rng, mesh, on_devices
):
    """With plain SGD, any sizes and weights, an empty replica among them."""
    where = mesh(3) if on_devices else 3
    weights = rng.uniform(0.5, 2, size=7)
    opt = optim.sgd(lr=0.1)
    local = LocalSGD(losses_of, opt, **over(where), period=1)
    path = run(local, params, batches, where, weights=weights)
    fn, state = value_and_grad(losses_of, **over(where)), opt.init(params)
    for batch, (found, found_loss) in zip(batches, path, strict=True):
        loss, grads = fn(
            params, *shard_batch(batch, **over(where), sizes=SIZES, weights=weights)
        )
        params, state = opt.step(params, grads, state)
        np.testing.assert_allclose(found_loss, loss, rtol=1e-13)
        for row in found.params["w"]:
            np.testing.assert_allclose(row, params["w"], atol=1e-13)
    assert np.all(found.params["steps"] == [0, 1])


def test_the_schedule_is_start_then_every_period(params, batches):
    """start=2, period=3: steps 0 and 1 as one, averages after steps 2 and 5."""
    local = LocalSGD(losses_of, optim.sgd(lr=0.1), replicas=3, start=2, period=3)
    path = run(local, params, batches, 3)
    together = [spread(state) == 0 for state, _ in path]
    assert together == [True, True, True, False, False, True, False]
    seen = [state.seen.tolist() for state, _ in path]
    assert seen[1:6] == [[8, 0, 6], [0] * 3, [4, 0, 3], [8, 0, 6], [0] * 3]


def test_between_averages_each_is_alone(params, batches):
    """Every replica's own SGD on its own rows, then the mean by what each has seen."""
    sizes = ((1, 2, 4), (3, 3, 1), (2, 0, 5))
    opt = optim.sgd(lr=0.1, momentum=0.9)
    local = LocalSGD(losses_of, opt, replicas=3, start=0, period=2)
    state, own = local.init(params), [params["w"]] * 3
    memory = [opt.init(params["w"]) for _ in range(3)]
    counts = np.zeros(3)
    for t, (batch, parts) in enumerate(zip(batches[:3], sizes, strict=True)):
        state, _ = local.step(state, *shard_batch(batch, replicas=3, sizes=parts))
        edges = np.cumsum((0, *parts))
        for rank, (a, b) in enumerate(pairwise(edges)):
            rows = tuple(part[a:b] for part in batch)
            grads = jnp.zeros((3, 2))
            if b > a:
                grads = jax.grad(lambda w, rows=rows: losses_of({"w": w}, rows).mean())(
                    own[rank]
                )
            own[rank], memory[rank] = opt.step(own[rank], grads, memory[rank])
        counts += parts
        if t % 2 == 0:
            mean = sum(n * w for n, w in zip(counts, own, strict=True)) / counts.sum()
            own, counts = [mean] * 3, np.zeros(3)
        np.testing.assert_allclose(state.params["w"], np.stack(own), atol=1e-13)
    average = local.average(state)["w"]
    np.testing.assert_allclose(average, own[0], atol=1e-13)


def test_groups_share_their_gradients(params, batches, mesh):
    """Of four replicas the first two stay together bit for bit, as do the last two."""
    local = LocalSGD(losses_of, optim.sgd(lr=0.1), mesh(4), period=9, group_size=2)
    path = run(local, params, batches, mesh(4), (1, 3, 2, 1))
    rows = path[-1][0].params["w"]
    assert rows[0].tobytes() == rows[1].tobytes()
    assert rows[2].tobytes() == rows[3].tobytes()
    assert np.abs(rows[0] - rows[2]).max() > 1e-3


def test_it_converges_where_replicas_disagree(rng):
    """A quadratic whose optimum differs between replicas: the average finds the mean's.

    For loss (x - w)^2 and an average after h steps of rate a each replica moves by the
    factor (1 - 2a)^h towards its own mean, and the average to the whole mean: exactly.
    """
    x = rng.normal(size=6) + np.array([0, 0, 0, 5, 5, 5])
    local = LocalSGD(
        lambda w, x: (x - w) ** 2, optim.sgd(lr=0.1), replicas=2, start=1, period=4
    )
    state = local.init(jnp.array(10.0))
    for _ in range(29):
        state, _ = local.step(state, x)
    remaining = (10 - x.mean()) * 0.8**29
    np.testing.assert_allclose(local.average(state), x.mean() + remaining, rtol=1e-12)
    assert np.ptp(state.params) > 1


def test_compiled_once_and_donated(params, batches):
    """Steps before and after the start, with and without an average: one program."""
    local = LocalSGD(losses_of, optim.adam(), replicas=3, start=2, period=2)
    state = first = local.init(params)
    for batch in batches:
        state, _ = local.step(state, *shard_batch(batch, replicas=3, sizes=SIZES))
    assert local._step._cache_size() == 1
    assert first.params["w"].is_deleted()
    copy = {"w": local.init(params).params["w"][2], "steps": params["steps"]}
    assert verify.compare(params, copy).bit_equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, r"LocalSGD\(period=...\)` must be at least 1. Got 0"),
        ({"period": 1, "start": -1}, r"LocalSGD\(start=...\)` must be at least 0"),
        ({"period": 1, "group_size": 0}, r"group_size=...\)` must be at least 1. Got"),
        ({"period": 1, "data_axis": "x"}, "must have the axis 'x'"),
    ],
)
def test_wrong_options_are_refused(mesh, options, message):
    """When it is made."""
    with pytest.raises(ValueError, match=message):
        LocalSGD(losses_of, optim.sgd(), mesh(2), **options)


def test_masters_are_refused():
    """Each replica's masters would undo every average of the copies."""
    opt = optim.with_master_weights(optim.sgd(), compute_dtype=jnp.float16)
    message = (
        r"LocalSGD\(optimizer=...\)` must have no masters.*Got with_master_weights"
    )
    with pytest.raises(ValueError, match=message):
        LocalSGD(losses_of, opt, replicas=2, period=2)


def test_wrong_calls_are_refused(params, batches):
    """Rows that do not divide, and weights that are wrong."""
    local = LocalSGD(losses_of, optim.sgd(), replicas=2, period=1)
    state = local.init(params)
    with pytest.raises(ValueError, match=r"a multiple of 2 rows.* Got 7"):
        local.step(state, batches[0])
    rows = tuple(part[:6] for part in batches[0])
    with pytest.raises(ValueError, match="must not all be 0"):
        local.step(state, rows, np.zeros(6))

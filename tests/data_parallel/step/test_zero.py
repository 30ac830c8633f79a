"""Optimizer state divided over replicas: the same bits, a share of the memory."""

import os
import platform
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import data_parallel, optim, rpc
from jdist.data_parallel import shard_batch, train_step, zero
from jdist.data_parallel.gradient.scattered import can_scatter
from jdist.optim import Optimizer
from tests.data_parallel import zero_bits
from tests.data_parallel.recording import copies_differ
from tests.replicas import over


@pytest.fixture
def params(rng):
    """Float64, with a parameter that is no floating array."""
    return zero_bits.parameters(rng)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="only on x86 can XLA be told to contract no product and sum",
)
def test_every_optimizer_bit_for_bit(monkeypatch):
    """Parameters and state of all algorithms, and masters.

    In a process that has no fused multiply-add: with it, XLA contracts a product and a
    sum into one rounding in one program and not in another, as it sees fit.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
    monkeypatch.setenv("XLA_FLAGS", flags)
    (agree,) = rpc.spawn(zero_bits.names, nprocs=1, settings=None, timeout=280)
    elementwise = {*optim.functional_optim_map} - {"Adafactor", "Muon"}
    assert agree == [*sorted(elementwise), "masters"]


def test_as_processors_are(params, mesh, rng):
    """With contractions: a rounding or two a step, in parameters and state."""
    opt = optim.adamw(lr=0.1)
    grads = zero_bits.gradients(rng)
    expected = zero_bits.stepped(opt, params, grads)
    found, state = zero_bits.stepped(zero(opt, mesh(4)), params, grads)
    found = (found, zero_bits.unwrapped(state))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        # Four steps, of numbers near 1.
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * np.finfo(float).eps)
    assert copies_differ(found[0]) == 0


def test_each_device_holds_its_share(params, mesh):
    """Counted in the buffers: a quarter of what is padded, and the counts."""
    state = zero(optim.adam(), mesh(4)).init(params)
    held = dict.fromkeys(mesh(4).devices.flat, 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    numbers = 2 * 3 + 5 * 3 + 6 * 2 + 2  # rows, columns, 7 -> 8 columns, 5 -> 8
    counts, one = 5 * 4, 2 * 8
    assert set(held.values()) == {2 * numbers * 8 + counts + one}
    assert state["padded"].exp_avg.array.shape == (6, 8)
    assert state["padded"].exp_avg.shape == (6, 7)
    assert state["columns"].exp_avg.array.sharding.spec == PartitionSpec(None, "data")
    assert state["count"] is None


def losses_of(params, batch):
    """Uses all parameters but the counter."""
    hidden = jnp.tanh(batch @ params["rows"] @ jnp.ones((3, 5)) @ params["columns"])
    hidden = jnp.tanh(hidden[:, :6] @ params["padded"])
    return (hidden.sum(axis=1) * params["one"] + params["few"].sum()) ** 2


def test_training(params, mesh, rng):
    """Through the training step, clipped, uneven shards; replicas stay the same."""
    x = rng.normal(size=(11, 8))
    where = mesh(3)
    runs = []
    for opt in (optim.adamw(lr=0.05), zero(optim.adamw(lr=0.05), where)):
        step = train_step(losses_of, opt, **over(where), max_norm=0.5)
        state = step.init(params)
        for t in range(50):
            sizes = np.roll((6, 0, 5), t)
            state, _ = step(state, *shard_batch(x, **over(where), sizes=sizes, rows=6))
            assert copies_differ(state.params) == 0
        assert step.compiled._cache_size() == 1
        runs.append(state.params)
    for name in zero_bits.SHAPES:
        np.testing.assert_allclose(runs[1][name], runs[0][name], rtol=1e-10)


@pytest.mark.parametrize("masters", [False, True])
def test_steps_beside_a_model_axis(params, rng, masters):
    """Each array is divided over both axes, where it has a dimension for each."""
    where = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    specs = dict.fromkeys(params) | {"columns": PartitionSpec(None, "model")}
    specs["padded"] = PartitionSpec("model")
    opt, tolerance = optim.adamw(lr=0.05), 1e-12
    if masters:
        opt = optim.with_master_weights(opt, compute_dtype=jnp.float32)
        params, tolerance = optim.compute_copies(params, jnp.float32), 1e-5
    layouts = {k: NamedSharding(where, s or PartitionSpec()) for k, s in specs.items()}
    placed = {k: jax.device_put(x, layouts[k]) for k, x in params.items()}
    grads, runs = zero_bits.gradients(rng), []
    if masters:
        kinds = {k: x.dtype for k, x in params.items()}
        grads = [
            {k: None if g is None else g.astype(kinds[k]) for k, g in tree.items()}
            for tree in grads
        ]
    for one in (opt, zero(opt, where, specs=specs)):
        own, state = placed, one.init(placed)
        for grad in grads:
            own, state = jax.jit(one.step)(own, grad, state)
        runs.append((own, state))
    (expected, _), (found, state) = runs
    for name in zero_bits.SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance)
        layout = found[name].sharding
        assert layout.is_equivalent_to(layouts[name], found[name].ndim), name
    kept = state.inner if masters else state
    assert kept["columns"].exp_avg.array.sharding.spec == PartitionSpec("data", "model")


def test_a_training_step_refuses_it_beside_a_model_axis():
    where = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    opt = zero(optim.adam(), where, specs={"w": PartitionSpec("model")})
    with pytest.raises(ValueError, match="must not be divided by `zero` on a mesh"):
        train_step(losses_of, opt, **over(where))


def test_what_the_compiler_adds(params, mesh, rng):
    """One all-gather for each array that moves; sums that divide are scattered."""
    params = params | {"unused": jnp.ones((8, 5))}
    step = train_step(losses_of, zero(optim.adam(), mesh(4)), mesh(4))
    lowered = step.lower(step.init(params), rng.normal(size=(8, 8)))
    text = lowered.compile().as_text()
    count = {
        name: len(re.findall(rf" {name}(?:-start)?\(", text))
        for name in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
    }
    assert count == {
        "all-gather": 4, "all-reduce": 1, "reduce-scatter": 1, "all-to-all": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("reduction", "accumulate"), [("mean", 2), ("max", 1)])
def test_scattered_sums_are_the_whole_ones(mesh, rng, reduction, accumulate):
    """To the bit: alone and in rows, real and complex; wholes where nothing divides."""
    where = mesh(4)
    shapes = {"wide": (3, 43692), "rows": (8, 3), "columns": (5, 12), "odd": (6, 7)}
    width = sum(int(np.prod(size)) for size in shapes.values()) + 4
    x = rng.normal(size=(13, width))

    def losses(params, batch):
        leaves = [params[name] for name in sorted(params)]
        bent = [jnp.sin(p.real) + 2.0 * jnp.sin(p.imag) for p in leaves]
        return batch @ jnp.concatenate([p.ravel() for p in bent])

    params = {name: jnp.zeros(size) for name, size in shapes.items()}
    params["turned"] = jnp.zeros(4, complex)
    given = shard_batch(
        x,
        **over(where),
        sizes=(4, 1, 6, 2),
        rows=6,
        weights=rng.uniform(0.5, 2, size=13),
    )
    found, kinds = [], []
    # One step from 0 leaves the gradient, negated.
    for opt in (optim.sgd(lr=1.0), zero(optim.sgd(lr=1.0), where)):
        step = train_step(
            losses,
            opt,
            **over(where),
            reduction=reduction,
            accumulate=accumulate,
        )
        state = step.init(params)
        kinds.append(step.lower(state, *given).as_text().count("reduce_scatter"))
        found.append(step(state, *given)[0].params)
    assert kinds == [0, 3]  # The wide one alone, the real rows, the complex ones.
    for name, leaf in found[0].items():
        assert np.abs(leaf).min() > 0
        np.testing.assert_array_equal(found[1][name], leaf)


def test_a_distributed_runtime_of_cpus_scatters_nothing(mesh, monkeypatch):
    """There gloo would: JAX issue 40830. Chips of another kind do."""
    assert can_scatter(mesh(2))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert not can_scatter(mesh(2))
    step = train_step(lambda w, x: x @ w, zero(optim.sgd(lr=1.0), mesh(2)), mesh(2))
    state = step.init(jnp.zeros(2))
    assert "reduce_scatter" not in step.lower(state, jnp.ones((2, 2))).as_text()


@pytest.mark.parametrize("bad", [False, True])
def test_masters_and_loss_scale(params, mesh, rng, bad):
    """Masters are divided too; an infinity in one share makes all skip the step."""
    opt = zero(zero_bits.with_masters(), mesh(4))
    grads = jax.tree.map(lambda g: g.astype(jnp.float16), zero_bits.gradients(rng, 1))
    if bad:
        grads[0]["rows"] = grads[0]["rows"].at[7, 2].set(jnp.inf)
    before = optim.compute_copies(params, jnp.float16)
    state = opt.init(params)
    assert state.masters["rows"].array.sharding.spec == PartitionSpec("data")
    after, state = jax.jit(opt.step)(before, *grads, state)
    assert int(state.loss_scale.skipped) == bad
    assert float(opt.loss_factor(state)) == (4.0 if bad else 8.0)
    for name in zero_bits.SHAPES:
        same = (
            np.array_equal(state.masters[name].whole(), params[name])
            if (name != "one")
            else float(state.masters[name]) == float(params[name])
        )
        assert same == bad
        assert np.array_equal(after[name], before[name]) == bad


def test_optax_and_explicit_axes(params, mesh, rng):
    """A foreign optimizer whose update looks at all numbers, and the other mesh."""
    params = {k: params[k] for k in zero_bits.SHAPES if k != "one"}
    grads = [{k: row[k] for k in params} for row in zero_bits.gradients(rng)[2:]]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    opt = optim.from_optax(tx)
    expected, _ = zero_bits.stepped(opt, params, grads)
    for types in (AxisType.Auto, AxisType.Explicit):
        where = mesh(4, types)
        placed = jax.device_put((params, grads), NamedSharding(where, PartitionSpec()))
        found, _ = zero_bits.stepped(zero(opt, where), *placed)
        for name, leaf in expected.items():
            # The norm is summed in another order.
            np.testing.assert_allclose(found[name], leaf, rtol=1e-13)


def test_hyperparameters_can_be_overridden(params, mesh, rng):
    """As of the optimizer inside."""
    opt, (grads, *_) = optim.sgd(lr=0.1), zero_bits.gradients(rng)
    divided = zero(opt, mesh(4))
    found, _ = jax.jit(divided.step)(params, grads, divided.init(params), lr=0.7)
    expected, _ = jax.jit(opt.step)(params, grads, opt.init(params), lr=0.7)
    for name in zero_bits.SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-14)
        assert np.abs(found[name] - params[name]).max() > 0


# --- what is refused ---


def flattened():
    """State of another shape than the parameter's."""
    return Optimizer(
        "flattened",
        lambda params: jax.tree.map(jnp.ravel, params),
        lambda params, grads, state, _: (params, state),
        elementwise=True,
    )


def test_what_cannot_be_divided(mesh):
    """A number of replicas; state that padding would change."""
    with pytest.raises(TypeError, match=r"zero\(mesh=.*one device has nothing.*Got 2"):
        zero(optim.adam(), 2)
    with pytest.raises(ValueError, match=r"zero\(mesh=.*the axis 'model'"):
        zero(optim.adam(), mesh(2), data_axis="model")
    opt = zero(flattened(), mesh(4))
    assert opt.init({"even": jnp.ones((4, 3))})["even"].shape == (12,)
    assert opt.init({"odd": jnp.ones((4, 3, 7))})["odd"].shape == (84,)
    with pytest.raises(
        ValueError, match=r"by the 4 replicas. Got \(16,\) for \(10,\) at odd"
    ):
        opt.init({"odd": jnp.ones((2, 5))})


def test_updates_are_those_of_the_optimizer_itself(rng):
    """Divided or averaged; a None gradient gives an update of 0."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole = optim.adam(lr=0.1, weight_decay=0.25)
    params = {"w": rng.standard_normal((3, 5)), "b": rng.standard_normal(4), "n": 3}
    grads = {"w": rng.standard_normal((3, 5)), "b": None, "n": None}
    params, grads = jax.tree.map(jnp.asarray, (params, grads))
    expected, _ = whole.updates(params, grads, whole.init(params))
    assert not np.any(expected["b"])
    assert np.all(np.asarray(expected["w"]) != 0)
    opt = data_parallel.zero(whole, mesh)
    found, state = opt.updates(params, grads, opt.init(params))
    moved, same = opt.step(params, grads, opt.init(params))
    for name, update in expected.items():
        np.testing.assert_allclose(found[name], update, rtol=1e-12)
        np.testing.assert_allclose(moved[name], params[name] + update, rtol=1e-12)
    for a, b in zip(*map(jax.tree.leaves, (state, same)), strict=True):
        np.testing.assert_array_equal(a, b)
    mean = data_parallel.averaged(optim.sgd(lr=0.5), "data")

    def update(gradient):
        return mean.updates(jnp.array(7.0), gradient, mean.init(jnp.array(7.0)))[0]

    found = jax.vmap(update, axis_name="data")(jnp.array([1.0, 2.0, 6.0]))
    np.testing.assert_allclose(found, [-1.5] * 3)

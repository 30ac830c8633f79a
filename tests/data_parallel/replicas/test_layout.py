"""Parameters divided over another axis of the mesh stay so, in bytes and in FLOPs."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import optim, verify
from jdist._compat import KEEPS_EXPLICIT_SHARDS
from jdist.data_parallel import (
    LocalSGD,
    hooks,
    replicate,
    shard_batch,
    train_step,
    value_and_grad,
    zero,
)

SPECS = {
    "in": PartitionSpec(None, "model"),
    "out": PartitionSpec("model"),
    "bias": PartitionSpec(),
    "unused": PartitionSpec("model"),
}
INPUTS, HIDDEN, OUTPUTS = 48, 128, 24


def grid(types=AxisType.Auto, shape=(4, 2)):
    devices = np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("data", "model"), axis_types=(types,) * 2)


def losses_of(params, batch):
    """A hidden layer divided by columns, the next by rows: one sum over "model"."""
    hidden = jnp.tanh(batch @ params["in"])
    return ((hidden @ params["out"] + params["bias"][None]) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """Parameters on the host, 22 examples, unequal weights."""
    params = {
        "in": rng.normal(size=(INPUTS, HIDDEN)) / 7,
        "out": rng.normal(size=(HIDDEN, OUTPUTS)) / 11,
        "bias": rng.normal(size=OUTPUTS),
        "unused": rng.normal(size=16),
    }
    batch, weights = rng.normal(size=(22, INPUTS)), rng.uniform(0.5, 2, size=22)
    return jax.tree.map(np.float32, (params, batch, weights))


def placed(params, mesh, specs=SPECS):
    return {
        k: jax.device_put(p, NamedSharding(mesh, specs[k])) for k, p in params.items()
    }


def layouts(tree):
    """By path, as JAX's own equivalence sees them: of each device, what it holds."""
    return {
        jax.tree_util.keystr(keys): leaf.sharding.devices_indices_map(leaf.shape)
        for keys, leaf in jax.tree.leaves_with_path(tree)
    }


def cost(compiled):
    """FLOPs and bytes of one device, and the shapes that its collectives move."""
    memory = compiled.memory_analysis()
    moved = re.findall(r"= \(?(\w+\[[\d,]*\]).* (?:all|collective|reduce)-[\w-]+\(",
                       compiled.as_text())  # fmt: skip
    return {
        "flops": compiled.cost_analysis()["flops"],
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "largest": max(size_of(shape) for shape in moved),
    }  # fmt: skip


def size_of(shape):
    """Of `f32[4,8]`: 32."""
    return np.prod([int(n) for n in re.findall(r"\d+", shape.partition("[")[2])])


def near(found, expected):
    """At most a tenth above the program written by hand, in each respect.

    The tenth is for products and quotients by the weights' total, and scalars.
    """
    assert found["largest"] <= INPUTS * HIDDEN / 2
    for name, limit in expected.items():
        assert found[name] <= 1.1 * limit + 256, (name, found, expected)


def by_hand(params, batch, weights):
    """What one writes with `jax.jit` and shardings alone."""
    return jax.value_and_grad(
        lambda p: (weights * losses_of(p, batch)).sum() / weights.sum()
    )(params)


@cache
def judge():
    return verify.gradients_judge(losses_of)


@pytest.mark.parametrize("kind", ["called", "inside jit"])
def test_a_gradient_is_divided_as_its_parameter_is(problem, kind):
    """Values within the bound; bytes and FLOPs those of jit with shardings."""
    params, batch, weights = problem
    mesh = grid()
    own = placed(params, mesh)
    shards = shard_batch(batch, mesh, (7, 0, 10, 5), weights=weights)
    fn = value_and_grad(losses_of, mesh)
    compiled = jax.jit(fn)
    run = fn if kind == "called" else compiled
    _, gradient = run(own, *shards)
    assert layouts(gradient) == layouts(own)
    candidate = {"grid": lambda p, b: run(placed(p, mesh), *shards)}
    judge()(
        params, batch, candidate, weights=weights, finite_differences=False
    ).raise_if_failed()
    expected = jax.jit(by_hand).lower(own, *shards).compile()
    near(cost(compiled.lower(own, *shards).compile()), cost(expected))


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_keeps_every_layout(problem, accumulate, reduction):
    """Parameters and both moments, after each of three steps, compiled once."""
    params, batch, weights = problem
    mesh = grid()
    opt = optim.adam(lr=0.01)
    step = train_step(losses_of, opt, mesh, accumulate=accumulate, max_norm=0.5,
                      reduction=reduction)  # fmt: skip
    alone = train_step(losses_of, opt, replicas=1, max_norm=0.5, reduction=reduction)
    state, expected = step.init(placed(params, mesh)), alone.init(params)
    before = layouts(state)
    shards = shard_batch(batch, mesh, (6, 1, 9, 6), weights=weights, rows=9)
    for _ in range(3):
        state, metrics = step(state, *shards)
        assert layouts(state) == before
        expected, plain = alone(expected, batch, weights)
        np.testing.assert_allclose(metrics.loss, plain.loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.grad_norm, plain.grad_norm, rtol=1e-4)
    assert step.compiled._cache_size() == 1
    for name, spec in SPECS.items():
        for leaf in (state.params[name], state.opt_state[name].exp_avg_sq):
            assert leaf.sharding.spec == spec
        np.testing.assert_allclose(state.params[name], expected.params[name], atol=3e-4)


def test_a_training_step_costs_what_one_by_hand_does(problem):
    params, batch, weights = problem
    mesh = grid()
    opt = optim.adam(lr=0.01)
    step = train_step(losses_of, opt, mesh)
    state = step.init(placed(params, mesh))
    shards = shard_batch(batch, mesh, weights=weights)

    def plain(params, state, batch, weights):
        loss, gradient = by_hand(params, batch, weights)
        return loss, opt.step(params, gradient, state)

    given = state.params, state.opt_state, *shards
    expected = jax.jit(plain, donate_argnums=(0, 1)).lower(*given).compile()
    near(cost(step.lower(state, *shards).compile()), cost(expected))


def test_model_state_keeps_its_layout(problem):
    """Also where the new state follows from the batch alone, which has another one."""
    params, batch, _ = problem
    mesh = grid()

    def losses(params, batch, states):
        rows = jnp.arange(states["rows"].size, dtype=jnp.float32)
        return losses_of(params, batch), {"mean": batch.mean(axis=0), "rows": rows}

    step = train_step(losses, optim.sgd(), mesh)
    columns = NamedSharding(mesh, PartitionSpec("model"))
    zeros = {"mean": np.zeros(INPUTS), "rows": np.zeros(64)}
    zeros = jax.tree.map(lambda x: jax.device_put(np.float32(x), columns), zeros)
    state = step.init(placed(params, mesh), states=zeros)
    before = layouts(state)
    sizes = (6, 5, 5, 6)
    shards = shard_batch(batch, mesh, sizes, weights=np.ones(22, np.float32), rows=6)
    state, _ = step(state, *shards)
    assert layouts(state) == before


def test_masters_are_divided_as_their_copies_are(problem):
    params, batch, _ = problem
    mesh = grid()
    opt = optim.with_master_weights(optim.adam(), compute_dtype=jnp.bfloat16)
    full = placed(params, mesh)
    step = train_step(losses_of, opt, mesh)
    state = step.init(
        optim.compute_copies(full, jnp.bfloat16), opt_state=opt.init(full)
    )
    batch = batch[:20].astype(jnp.bfloat16)
    state, _ = step(state, batch)
    for tree in (state.params, state.opt_state.masters):
        assert {k: p.sharding.spec for k, p in tree.items()} == SPECS


def test_replicating_keeps_what_is_divided(problem):
    """New buffers, and the layout; what is whole goes everywhere."""
    params, *_ = problem
    mesh = grid()
    own = placed(params, mesh)
    copies = replicate(own | {"count": 3}, mesh)
    assert layouts(copies) == layouts(
        own | {"count": jax.device_put(3, NamedSharding(mesh, PartitionSpec()))}
    )
    for name, leaf in own.items():
        np.testing.assert_array_equal(copies[name], leaf)
        pointers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
                    for x in (leaf, copies[name])]  # fmt: skip
        assert not set.intersection(*pointers)


# --- explicit axes ---


def explicit_losses_of(params, batch):
    """`losses_of` for explicit axes, over which a product must say what it sums."""
    hidden = jnp.tanh(batch @ params["in"])
    whole = PartitionSpec(None, None)
    outputs = jnp.matmul(hidden, params["out"], out_sharding=whole)
    return ((outputs + params["bias"][None]) ** 2).sum(axis=1)


LOSSES = {AxisType.Auto: losses_of, AxisType.Explicit: explicit_losses_of}
older = pytest.mark.skipif(KEEPS_EXPLICIT_SHARDS, reason="JAX 0.12 keeps shards")
newer = pytest.mark.skipif(not KEEPS_EXPLICIT_SHARDS, reason="refused before JAX 0.12")


def same_bits(automatic, explicit):
    assert layouts(automatic) == layouts(explicit)
    for one, other in zip(*map(jax.tree.leaves, (automatic, explicit)), strict=True):
        np.testing.assert_array_equal(one, other)


@newer
@pytest.mark.parametrize("how", ["called", "inside jit", "under set_mesh"])
def test_explicit_axes_change_no_bit_of_a_gradient(problem, how):
    params, batch, weights = problem
    found = []
    for kind, losses in LOSSES.items():
        mesh = grid(kind)
        fn = value_and_grad(losses, mesh)
        run = jax.jit(fn) if how == "inside jit" else fn
        shards = shard_batch(batch, mesh, (7, 0, 10, 5), weights=weights)
        given = placed(params, mesh), *shards
        if how == "under set_mesh":
            with jax.set_mesh(mesh):
                found.append(run(*given))
        else:
            found.append(run(*given))
        assert layouts(found[-1][1]) == layouts(given[0])
    same_bits(*found)


@newer
@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_explicit_axes_change_no_bit_of_a_step(problem, accumulate, reduction):
    """Compiled once; the state's axes stay explicit."""
    params, batch, weights = problem
    found = []
    for kind, losses in LOSSES.items():
        mesh = grid(kind)
        step = train_step(losses, optim.adam(lr=0.01), mesh, accumulate=accumulate,
                          max_norm=0.5, reduction=reduction)  # fmt: skip
        state = step.init(placed(params, mesh))
        shards = shard_batch(batch, mesh, (6, 1, 9, 6), weights=weights, rows=9)
        for _ in range(2):
            state, metrics = step(state, *shards)
        assert step.compiled._cache_size() == 1
        assert state.params["in"].sharding.mesh.axis_types == (kind,) * 2
        found.append((state, metrics, step.evaluate(state, *shards)))
    same_bits(*found)


@newer
def test_an_explicit_axis_gathers_nothing(problem):
    """Bytes and FLOPs are those of automatic axes, and no collective moves more."""
    params, batch, weights = problem
    costs = []
    for kind, losses in LOSSES.items():
        mesh = grid(kind)
        given = placed(params, mesh), *shard_batch(batch, mesh, weights=weights)
        compiled = jax.jit(value_and_grad(losses, mesh)).lower(*given).compile()
        costs.append(cost(compiled))
    near(costs[1], costs[0])


@older
@pytest.mark.parametrize(
    "make",
    [
        lambda m: value_and_grad(losses_of, m),
        lambda m: train_step(losses_of, optim.sgd(), m),
    ],
)
def test_explicit_axes_that_would_be_gathered_are_refused(make):
    message = (
        r"\(mesh=...\)` must have axes of type Auto beside 'data' before JAX 0.12. Got "
        r"the explicit axis 'model' and JAX [\d.]+. This JAX would gather"
    )
    with pytest.raises(ValueError, match=message):
        make(grid(AxisType.Explicit))


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: value_and_grad(losses_of, m, hook=hooks.bf16()),
            r"value_and_grad\(hook=...\)` must be left out on a mesh with axes beside "
            r"'data'.*it would be made whole",
        ),
        (
            lambda m: value_and_grad(losses_of, m, bucket_cap_mb=25),
            r"bucket_cap_mb=...\)` must be left out on a mesh with axes.*Got 25",
        ),
        (
            lambda m: train_step(losses_of, optim.sgd(), m, method="all_gather"),
            r"train_step\(method=...\)` must be left out on a mesh.*Got 'all_gather'",
        ),
        (
            lambda m: zero(optim.adam(), m),
            r"zero\(mesh=...\)` must have no axis beside 'data'.*Got axes 'model'",
        ),
        (
            lambda m: LocalSGD(losses_of, optim.sgd(), m, period=2),
            r"LocalSGD\(mesh=...\)` must have no axis beside 'data'",
        ),
    ],
)  # fmt: skip
def test_what_would_make_them_whole_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(grid())


def test_a_further_axis_of_one_device_divides_nothing(problem):
    """So that hooks and explicit axes are as on a mesh without it."""
    params, batch, weights = problem
    for types in (AxisType.Auto, AxisType.Explicit):
        mesh = grid(types, (4, 1))
        fn = value_and_grad(losses_of, mesh, hook=hooks.all_reduce())
        found = fn(placed(params, mesh), *shard_batch(batch, mesh, weights=weights))
        np.testing.assert_allclose(
            found[0], by_hand(params, batch, weights)[0], rtol=1e-5
        )


@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
def test_parameters_divided_over_the_replicas_are_refused(problem, shape):
    """A replica needs all of its parameters; `zero` divides the optimizer's state."""
    params, batch, _ = problem
    mesh = grid(shape=shape)
    own = placed(params, mesh, SPECS | {"in": PartitionSpec("model", "data")})
    batch = batch[:16]
    step = train_step(losses_of, optim.sgd(), mesh)
    calls = {
        "fn": lambda: value_and_grad(losses_of, mesh)(own, batch),
        "init": lambda: step.init(own),
    }
    if shape == (8, 1):
        line = Mesh(np.array(jax.devices("cpu")), ("data",))
        own = placed(params, line, dict.fromkeys(SPECS, PartitionSpec("data")))
        local = LocalSGD(losses_of, optim.sgd(), line, period=2)
        calls = {
            "init": lambda: local.init(own),
            "init ": lambda: zero(optim.sgd(), line).init(own),
        }
    for call, run in calls.items():
        message = (
            rf"`{call.strip()}\(params=...\)` must be whole on each replica, or "
            rf"divided over axes beside 'data'. Got NamedSharding.*Lay them out"
        )
        with pytest.raises(ValueError, match=message):
            run()


def test_an_axis_of_one_replica_divides_nothing(problem):
    """Whatever names it: the layout is that without it."""
    params, batch, weights = problem
    mesh = grid(shape=(1, 2))
    both = PartitionSpec(("data", "model"))
    named = placed(params, mesh, {**SPECS, "out": both, "unused": both})
    fn = value_and_grad(losses_of, mesh)
    found, expected = (fn(p, batch, weights) for p in (named, placed(params, mesh)))
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    step = train_step(losses_of, optim.adam(), mesh)
    state, _ = step(step.init(named), batch, weights)
    step(state, batch, weights)


def test_parameters_on_another_mesh_are_refused(problem):
    """The same axes in another order of devices would move them all in each step."""
    params, batch, _ = problem
    other = Mesh(grid().devices[::-1], ("data", "model"))
    with pytest.raises(ValueError, match="must be whole on each replica"):
        value_and_grad(losses_of, grid())(placed(params, other), batch[:16])

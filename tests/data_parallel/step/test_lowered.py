"""Steps lowered from shapes: the very programs that arrays would run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import data_parallel, optim
from jdist.data_parallel import hooks
from tests.replicas import over


def losses(params, batch):
    x, y = batch
    h = jnp.tanh(x.astype(params["w"].dtype) @ params["w"] + params["b"][None])
    return ((h * params["b"][None]).sum(-1).astype(y.dtype) - y) ** 2


def keyed(params, batch, key, states):
    x, _ = batch
    kept = jax.random.bernoulli(key, 0.7, x.shape).astype(x.dtype)
    found = losses(params, (x * kept, batch[1]))
    return found, {"mean": 0.9 * states["mean"] + 0.1 * x.mean(0)}


@pytest.fixture
def problem(rng):
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(3, 7), "b": normal(7), "unused": normal(2)}
    return params, (normal(8, 3), normal(8)), rng.uniform(0.1, 2, 8).astype(np.float32)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def begun(step, params):
    """`init` of arrays, or of what another function makes of them."""
    return lambda of: step.init(of(params))


def as_given(program, *arguments):
    """What a compiled program does with arrays laid out as it takes them."""
    placed = jax.device_put(arguments, program.input_shardings[0])
    return program(*placed)


def steps(mesh):
    four = mesh(4)
    masters = optim.with_master_weights(
        optim.adam(), compute_dtype=jnp.bfloat16, loss_scale=8.0
    )
    make = functools.partial(data_parallel.train_step, losses)
    return {
        "replicas": make(optim.adam(), replicas=4),
        "mesh": make(optim.adam(), four, max_norm=0.1),
        "explicit mesh": make(optim.adam(), mesh(4, jax.sharding.AxisType.Explicit)),
        "buckets": make(optim.sgd(lr=0.1, momentum=0.9), four, bucket_cap_mb=0),
        "accumulation": make(optim.adam(), four, accumulate=2),
        "all_gather": make(optim.adamw(), four, method="all_gather"),
        "zero": make(data_parallel.zero(optim.adam(), four), four),
        "bf16 hook": make(optim.adam(), four, hook=hooks.bf16()),
        "powerSGD": make(optim.adam(), four, hook=hooks.power_sgd(rank=1)),
        "masters": make(masters, four),
    }


CASES = [
    "replicas", "mesh", "explicit mesh", "buckets", "accumulation", "all_gather",
    "zero", "bf16 hook", "powerSGD", "masters",
]  # fmt: skip


def test_every_case_is_tested(mesh):
    assert list(steps(mesh)) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_program_from_shapes_is_the_one_that_is_called(case, mesh, problem):
    """The same text as from arrays, and the same bits as the step."""
    params, batch, weights = problem
    step = steps(mesh)[case]
    init = begun(step, params)
    lowered = step.lower(init(shapes), *shapes((batch, weights)))
    state = init(lambda tree: tree)
    where = over(step.placement.mesh or 4)
    given = data_parallel.shard_batch(batch, weights=weights, **where)
    # A hook's state belongs to the program of every step but is not made by `init`.
    if step.start is not None:
        state = state._replace(hook_state=step.start(state, *given))
    assert lowered.as_text() == step.lower(state, *given).as_text()
    moving = state._replace(key=None)
    expected = as_given(lowered.compile(), moving, state.key, *given, {})
    after, metrics = step(init(lambda tree: tree), *given)
    for one, other in zip(
        *map(jax.tree.leaves, ((after, metrics), expected[:2])), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_keys_and_states_are_shapes_too(mesh, problem):
    params, batch, weights = problem
    step = data_parallel.train_step(keyed, optim.adam(), mesh(4))
    states, key = {"mean": np.zeros(3, np.float32)}, jax.random.key(3)
    of_shapes = step.init(shapes(params), states=shapes(states), key=shapes(key))
    state = step.init(params, states=states, key=key)
    assert jax.tree.structure(of_shapes) == jax.tree.structure(state)
    for shape, array in zip(*map(jax.tree.leaves, (of_shapes, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
    where = over(step.placement.mesh or 4)
    given = data_parallel.shard_batch(batch, weights=weights, **where)
    text = step.lower(of_shapes, *shapes((batch, weights))).as_text()
    assert text == step.lower(state, *given).as_text()


def test_the_state_of_zero_is_divided_by_its_shapes(mesh, problem):
    """A whole state would be counted whole on each device."""
    params, _, _ = problem
    four = mesh(4)
    step = data_parallel.train_step(
        losses, data_parallel.zero(optim.adam(), four), four
    )
    found = step.init(shapes(params)).opt_state["w"].exp_avg.array
    assert found.sharding.shard_shape(found.shape) == (3, 2)


@pytest.mark.parametrize("hook", [None, hooks.bf16(), hooks.int8_per_tensor()])
def test_value_and_grad_is_lowered_under_jit(mesh, problem, hook):
    params, batch, weights = problem
    fn = data_parallel.value_and_grad(losses, mesh(4), hook=hook)
    lowered = jax.jit(fn).lower(*shapes((params, batch, weights)))
    given = data_parallel.shard_batch(batch, mesh(4), weights=weights)
    found = as_given(lowered.compile(), params, *given)
    expected = fn(params, *given)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("on_devices", [False, True])
def test_local_sgd_is_lowered_from_shapes(mesh, problem, on_devices):
    """The same text as from arrays; what a step refuses is refused."""
    params, batch, weights = problem
    where = mesh(4) if on_devices else 4
    local = data_parallel.LocalSGD(
        losses, optim.adam(), **over(where), period=2, start=3
    )
    state, of_shapes = local.init(params), local.init(shapes(params))
    assert jax.tree.structure(of_shapes) == jax.tree.structure(state)
    for shape, array in zip(*map(jax.tree.leaves, (of_shapes, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    given = data_parallel.shard_batch(batch, **over(where), weights=weights)
    text = local.lower(of_shapes, *shapes((batch, weights))).as_text()
    assert text == local.lower(state, *given).as_text()
    with pytest.raises(ValueError, match="must have a multiple of 4 rows"):
        local.lower(of_shapes, shapes(jax.tree.map(lambda x: x[:7], batch)))


def test_what_a_step_refuses_its_lowering_refuses(mesh, problem):
    params, batch, _ = problem
    step = data_parallel.train_step(losses, optim.sgd(), mesh(4), accumulate=3)
    state = step.init(shapes(params))
    with pytest.raises(ValueError, match=r"lower\(batch=...\)` must have a multiple"):
        step.lower(state, shapes(batch))
    step = data_parallel.train_step(losses, optim.sgd(), mesh(4))
    wrong = jax.ShapeDtypeStruct((7,), np.float32)
    with pytest.raises(ValueError, match=r"lower\(weights=...\)` must be one per row"):
        step.lower(state, shapes(batch), wrong)
    divided = jax.ShapeDtypeStruct(
        (8, 7),
        np.float32,
        sharding=jax.sharding.NamedSharding(mesh(4), jax.P("data")),
    )
    with pytest.raises(ValueError, match="must be whole on each replica"):
        step.init({"w": divided})


def test_weights_of_integers_count_as_the_array_would(mesh, problem):
    params, batch, _ = problem
    step = data_parallel.train_step(losses, optim.sgd(), mesh(4))
    state = step.init(shapes(params))
    counts = jax.ShapeDtypeStruct((8,), np.int32)
    floats = jax.ShapeDtypeStruct((8,), np.float32)
    texts = [step.lower(state, shapes(batch), w).as_text() for w in (counts, floats)]
    assert texts[0] == texts[1]


OPTIMIZERS = {
    name: make
    for name, make in vars(optim).items()
    if name in {type_.lower() for type_ in optim.functional_optim_map}
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_is_lowered_under_jit(name, problem):
    params, _, _ = problem
    if name == "muon":  # It takes matrices only.
        params = {k: x for k, x in params.items() if x.ndim == 2}
    opt = OPTIMIZERS[name](lr=0.1)
    of_shapes = shapes(params)
    state = jax.eval_shape(opt.init, of_shapes)
    lowered = jax.jit(opt.step).lower(of_shapes, of_shapes, state)
    assert "xf64>" not in lowered.as_text()  # Although 64-bit types are switched on.
    program = lowered.compile()
    grads = jax.tree.map(lambda x: 0.3 * x, params)
    found = program(params, grads, opt.init(params))
    expected = jax.jit(opt.step)(params, grads, opt.init(params))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)

"""Rules of every algorithm: None, dtypes, transformations, overrides, trees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import optim
from jdist.optim.algorithms.adam import AdamState
from jdist.optim.algorithms.sgd import SGDState
from tests.optim.cases import ALGORITHMS, ELEMENTWISE, SHAPES, problem
from tests.optim.runs import run

# The last golden options of each algorithm turn most of its features on.
LAST = [(a, list(a.golden.values())[-1]) for a in ALGORITHMS]
EACH = pytest.mark.parametrize(
    ("algorithm", "options"), LAST, ids=[a.name for a in ALGORITHMS]
)
EACH_ELEMENTWISE = pytest.mark.parametrize(
    ("algorithm", "options"),
    LAST[: len(ELEMENTWISE)],
    ids=[a.name for a in ELEMENTWISE],
)
# A jitted step and an eager one differ by fused multiply-adds, each saving one rounding
# out of at most 20 a step; a few steps are compared.
FUSED = 100 * 2.0**-53


def start(dtype=jnp.float64, seed=3, shapes=SHAPES):
    """Parameters and three steps' gradients, none None, as dicts."""
    data = problem(seed, steps=3, with_none=False, shapes=shapes)
    names = ("w", "b", "scale", "still")

    def tree(row):
        return {k: jnp.asarray(x, dtype) for k, x in zip(names, row, strict=True)}

    return tree(data.params), [tree(row) for row in data.grads]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def close(found, expected, rtol=FUSED):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        size = np.max(np.abs(np.asarray(b)), initial=0)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * size)


def steps(opt, params, rows, state=None, step=None):
    state = opt.init(params) if state is None else state
    for grads in rows:
        params, state = (step or opt.step)(params, grads, state)
    return params, state


# --- None and what is not floating ---


@pytest.mark.parametrize("compiled", [False, True])
@EACH
def test_none_leaves_parameter_state_and_count_as_they_are(
    algorithm, options, compiled
):
    """Bit for bit, at the first step and later, while the other leaves move."""
    # By a schedule, for which every algorithm counts.
    opt = algorithm(**options | {"lr": lambda count: 0.03})
    params, rows = start(shapes=algorithm.shapes)
    step = jax.jit(opt.step) if compiled else opt.step
    state = opt.init(params)
    for t, grads in enumerate(rows):
        skipped = {"b", "scale"} if t == 0 else {"w"}
        partial = {k: None if k in skipped else g for k, g in grads.items()}
        new, new_state = step(params, partial, state)
        for name in params:
            same = bits((new[name], new_state[name])) == bits(
                (params[name], state[name])
            )
            assert same == (name in skipped), (t, name)
            moved = 0 if name in skipped else 1
            assert new_state[name].step == state[name].step + moved
        params, state = new, new_state
    assert {k: int(s.step) for k, s in state.items()} == {
        "w": 1,
        "b": 2,
        "scale": 2,
        "still": 3,
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_without_a_count_makes_the_steps_of_sgd_with_one(nesterov, compiled):
    """Bit for bit from the first step on: zeros of both signs, infinities, None."""
    opt = optim.sgd(lr=0.1, momentum=0.9, nesterov=nesterov)
    counted = optim.sgd(lr=lambda count: 0.1, momentum=0.9, nesterov=nesterov)
    params = {"w": jnp.array([-0.0, 0.0, -0.0, 1.0, 2.0]), "b": jnp.ones(2)}
    first = {"w": jnp.array([-0.0, -0.0, 0.0, jnp.inf, 0.3]), "b": None}
    later = {"w": jnp.array([-0.0, 0.0, -0.0, 1.0, -0.7]), "b": jnp.array([0.1, -0.0])}
    states = opt.init(params), counted.init(params)
    assert states[0]["w"].step is None
    assert states[1]["w"].step == 0
    news = [params, params]
    for grads in (first, later, later):
        for i, each in enumerate((opt, counted)):
            step = jax.jit(each.step) if compiled else each.step
            new, state = step(news[i], grads, states[i])
            if grads is first:
                assert bits((new["b"], state["b"])) == bits(
                    (params["b"], states[i]["b"])
                )
            news[i], states = new, (*states[:i], state, *states[i + 1 :])
        assert bits(news[0]) == bits(news[1])
        moved = grads["w"] if grads is first else states[1]["w"].momentum_buffer
        assert bits(states[0]["w"].momentum_buffer) == bits(moved)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (optim.rmsprop, {}),
        (optim.rmsprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
        (optim.adadelta, {"weight_decay": 0.1}),
        (optim.adagrad, {"weight_decay": 0.1}),
    ],
)
def test_steps_without_a_count_are_those_with_one(algorithm, options, compiled):
    """Bit for bit, also after a step without a gradient."""
    opt, counted = (algorithm(lr=lr, **options) for lr in (0.1, lambda count: 0.1))
    params, rows = start(jnp.float32)
    rows[0] = rows[0] | {"b": None}
    ends = []
    for each in (opt, counted):
        step = jax.jit(each.step) if compiled else each.step
        ends.append(steps(each, params, rows, step=step))
    (new, state), (expected, expected_state) = ends
    assert bits(new) == bits(expected)
    for name, leaf in state.items():
        assert leaf.step is None
        assert expected_state[name].step == len(rows) - (name == "b")
        assert bits(leaf) == bits(expected_state[name]._replace(step=None))


ALWAYS_COUNTED = (
    optim.adam,
    optim.adamw,
    optim.adamax,
    optim.nadam,
    optim.radam,
    optim.asgd,
    optim.rprop,
    optim.adafactor,
)


def test_steps_are_counted_where_something_reads_the_count():
    params = jnp.ones((2, 3))
    for made, counts in [
        (optim.sgd(), False),
        (optim.sgd(dampening=0.5), False),
        (optim.sgd(momentum=0.9), False),
        (optim.sgd(momentum=0.9, dampening=0.5), True),
        (optim.sgd(momentum=0.9, dampening=jnp.zeros(())), True),
        (optim.sgd(weight_decay=lambda count: 0.1), True),
        (optim.rmsprop(momentum=0.9, centered=True), False),
        (optim.rmsprop(alpha=lambda count: 0.9), True),
        (optim.adadelta(), False),
        (optim.adadelta(rho=lambda count: 0.9), True),
        (optim.adagrad(), False),
        (optim.adagrad(lr_decay=0.1), True),
        (optim.adagrad(lr_decay=jnp.zeros(())), True),
        (optim.adagrad(eps=lambda count: 0.1), True),
        (optim.muon(), False),
        (optim.muon(ns_coefficients=(2.0, lambda count: -1.5, 0.5)), True),
        *((made(), True) for made in ALWAYS_COUNTED),
    ]:
        assert (made.init(params).step is not None) == counts, made.hyperparameters


def test_a_state_with_a_count_that_is_no_longer_kept_is_refused():
    """As a state of an earlier version is, from a checkpoint or not."""
    params = {"w": jnp.ones(2)}
    counted = optim.rmsprop(lr=lambda count: 0.1).init(params)
    with pytest.raises(ValueError, match=r"must hold what `rmsprop.init` or the last"):
        optim.rmsprop(lr=0.1).step(params, params, counted)


def test_what_an_optimizer_without_a_count_cannot_do_is_refused():
    opt, params = optim.sgd(momentum=0.9), jnp.ones(2)
    state = opt.init(params)
    with pytest.raises(ValueError, match=r"lr=...\)` must be a number: without a sche"):
        opt.step(params, params, state, lr=lambda count: 0.1)
    with pytest.raises(ValueError, match="built with dampening 0, it cannot tell the "):
        opt.step(params, params, state, dampening=0.5)
    for opt in (optim.rmsprop(), optim.adadelta(), optim.adagrad()):
        with pytest.raises(ValueError, match="without a schedule at construction no s"):
            opt.step(params, params, opt.init(params), lr=lambda count: 0.1)
    with pytest.raises(ValueError, match="built with lr_decay 0, it counts no steps"):
        opt.step(params, params, opt.init(params), lr_decay=0.1)
    # A schedule needs the count already, so that an lr_decay can have it too.
    opt = optim.adagrad(lr=lambda count: 0.1)
    opt.step(params, params, opt.init(params), lr_decay=0.1)


@EACH
def test_all_none_is_no_step(algorithm, options):
    opt = algorithm(**options)
    params, rows = start(shapes=algorithm.shapes)
    params, state = steps(opt, params, rows[:1])
    after = opt.step(params, dict.fromkeys(params), state)
    assert bits(after) == bits((params, state))


def test_leaves_that_are_not_floating_pass_through():
    """Integers, booleans, PRNG keys and strings of structure; with gradient or not."""
    opt = optim.adam()
    params = {
        "w": jnp.array([1.0, -2.0]),
        "n": jnp.arange(3),
        "on": jnp.array([True]),
        "key": jax.random.key(7),
        "absent": None,
    }
    state = opt.init(params)
    assert [state[k] for k in ("n", "on", "key")] == [None] * 3
    grads = {
        "w": jnp.array([0.5, 3.0]),
        "n": np.zeros(3, jax.dtypes.float0),
        "on": None,
        "key": None,
        "absent": None,
    }
    new, new_state = jax.jit(opt.step)(params, grads, state)
    assert new["absent"] is None
    assert new["n"].dtype == params["n"].dtype
    assert bits(new["n"]) == bits(params["n"])
    assert bits(new["on"]) == bits(params["on"])
    assert jax.random.key_data(new["key"]).tolist() == [0, 7]
    assert new_state["w"].step == 1
    assert not np.any(np.asarray(new["w"]) == np.asarray(params["w"]))


# --- precision ---


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@EACH
def test_sixteen_bits_are_rounded_once_a_step(algorithm, options, dtype):
    """A step is float32's from the same numbers, rounded: bit for bit, state too."""
    opt = algorithm(**options)
    params, rows = start(dtype, shapes=algorithm.shapes)
    rows = [jax.tree.map(lambda g: g + jnp.asarray(0.01, dtype), r) for r in rows]

    def widened(tree):
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, tree
        )

    state = opt.init(params)
    for grads in rows[:2]:
        wide = opt.step(widened(params), widened(grads), widened(state))
        params, state = opt.step(params, grads, state)
        for leaf in jax.tree.leaves(params):
            assert leaf.dtype == dtype
        rounded = jax.tree.map(lambda w, x: w.astype(x.dtype), wide, (params, state))
        assert bits(rounded) == bits((params, state))


@EACH
def test_state_has_the_dtype_and_shape_of_its_parameter(algorithm, options):
    """Counts are int32; other scalars float32 or wider, whatever the parameter is.

    Adafactor's factors have one number along a dimension.
    """
    real = (jnp.bfloat16, jnp.float32, jnp.float64)
    for dtype in (*real, jnp.complex64) if algorithm.elementwise else real:
        param = jnp.zeros((3, 5), dtype)
        state = algorithm(**options).init(param)
        for name, leaf in state._asdict().items():
            if leaf is None:
                continue
            if leaf.ndim:
                shape = {"row_var": (3, 1), "col_var": (1, 5)}.get(name, param.shape)
                assert (leaf.shape, leaf.dtype) == (shape, param.dtype), name
            elif name == "step":
                assert leaf.dtype == jnp.int32
            else:
                wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
                assert leaf.dtype == wide, name


@EACH
def test_float32_without_x64(algorithm, options):
    """JAX's default setting: nothing widens, and the numbers are the same."""
    opt = algorithm(**options)
    with_x64 = run(opt, algorithm.problem(5, steps=3), jnp.float32)
    with jax.enable_x64(False):
        without = run(opt, algorithm.problem(5, steps=3), jnp.float32)
    assert bits(without.params) == bits(with_x64.params)
    assert bits(without.states) == bits(with_x64.states)


@EACH_ELEMENTWISE
def test_a_complex_parameter_is_two_real_ones(algorithm, options, rng):
    opt = algorithm(**options)
    pairs = [rng.standard_normal((2, 4, 3)) for _ in range(4)]
    both = [jnp.asarray(x + 1j * y) for x, y in pairs]
    real = [{"re": jnp.asarray(x), "im": jnp.asarray(y)} for x, y in pairs]
    params, state = steps(opt, both[0], both[1:], step=jax.jit(opt.step))
    expected, expected_state = steps(opt, real[0], real[1:], step=jax.jit(opt.step))
    assert params.dtype == jnp.complex128
    close((params.real, params.imag), (expected["re"], expected["im"]))
    for name, leaf in state._asdict().items():
        if leaf is not None and leaf.ndim:
            parts = [getattr(expected_state[k], name) for k in ("re", "im")]
            close([leaf.real, leaf.imag], parts)


def test_the_conjugate_of_jaxs_complex_gradient_descends():
    """As documented: torch's gradient is the direction of ascent, jax.grad's is not."""
    target = jnp.array([1.0 + 2.0j, -0.5 + 0.1j])

    def loss(z):
        return jnp.sum(jnp.abs(z - target) ** 2)

    opt = optim.sgd(lr=0.1)
    z = jnp.array([0.3 - 0.2j, 1.0 + 1.0j])
    before, state = loss(z), opt.init(z)
    for _ in range(3):
        z, state = opt.step(z, jnp.conj(jax.grad(loss)(z)), state)
    # Each step multiplies the distance by 1 - 2 lr = 0.8, its square by 0.64.
    np.testing.assert_allclose(loss(z), before * 0.64**3, rtol=1e-14)


@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.9999])
def test_bias_corrections_keep_float32s_precision(beta2):
    """Steps 1 to 30 of float32 are float64's to 12 roundings; 1 - b**t loses 1e-5."""
    for make in (optim.adam, optim.nadam, optim.radam, optim.adamax):
        opt = make(lr=1.0, betas=(0.9, beta2))
        grads = [np.float32(g) for g in (0.7, 2.0, 1.1, 0.4, 1.6) * 6]
        found = {}
        for dtype in (jnp.float32, jnp.float64):
            # From zero each time, so that only the update is seen.
            state, updates = opt.init(jnp.zeros((), dtype)), []
            for grad in grads:
                zero = jnp.zeros((), dtype)
                moved, state = opt.step(zero, jnp.asarray(grad, dtype), state)
                updates.append(float(moved))
            found[dtype] = np.array(updates)
        error = np.abs(found[jnp.float32] / found[jnp.float64] - 1)
        # Averages of t terms with 3 roundings each, and 12 more on the way.
        assert np.all(error < 2.0**-24 * (12 + 3 * np.arange(1, 31)))


# --- transformations ---


@pytest.mark.compiled
@EACH
def test_jit_changes_rounding_only(algorithm, options):
    opt = algorithm(**options)
    params, rows = start(shapes=algorithm.shapes)
    close(steps(opt, params, rows, step=jax.jit(opt.step)), steps(opt, params, rows))


@EACH
def test_vmap_over_a_hyperparameter_is_one_run_for_each(algorithm, options):
    params, rows = start(shapes=algorithm.shapes)
    name = next(iter(algorithm.overridable))
    values = np.array(
        [
            np.linspace(0.3, 0.9, 2) * v
            for v in np.atleast_1d(algorithm.overridable[name])
        ]
    ).T
    if name == "etas":
        values = np.array([[0.3, 1.2], [0.9, 2.0]])
    pair = values.shape[1] == 2
    opt = algorithm(**options)

    def train(value):
        given = {name: tuple(value) if pair else value[0]}
        return steps(opt, params, rows, step=lambda p, g, s: opt.step(p, g, s, **given))

    together = jax.vmap(train)(jnp.asarray(values))
    for i, value in enumerate(values):
        alone = train(tuple(map(float, value)))
        close(jax.tree.map(lambda x, i=i: x[i], together), alone)


def test_an_optimizer_may_be_made_of_traced_hyperparameters():
    """Made and run inside vmap: one training for each momentum."""
    params, rows = start()

    def train(momentum):
        return steps(optim.sgd(lr=0.1, momentum=momentum), params, rows)[0]

    together = jax.vmap(train)(jnp.array([0.2, 0.9]))
    for i, momentum in enumerate((0.2, 0.9)):
        close(jax.tree.map(lambda x, i=i: x[i], together), train(momentum))


@pytest.mark.parametrize("checked", [False, True])
@EACH_ELEMENTWISE
def test_shard_map_steps_each_shard(algorithm, options, checked, mesh, rng):
    opt = algorithm(**options)
    params, grads = (jnp.asarray(rng.standard_normal((8, 3))) for _ in range(2))
    state = opt.init(params)
    row = PartitionSpec("data")
    specs = jax.tree.map(lambda x: row if x.ndim else PartitionSpec(), state)
    sharded = jax.jit(
        jax.shard_map(
            opt.step,
            mesh=mesh(4),
            in_specs=(row, row, specs),
            out_specs=(row, specs),
            check_vma=checked,
        )
    )
    close(sharded(params, grads, state), jax.jit(opt.step)(params, grads, state))


# Where XLA on CPU holds intermediate arrays, in parameters' bytes: it does not compute
# a penalized gradient twice, nor write two arrays in one pass where each needs the old
# value of the other.
TEMPORARY = {
    ("sgd", "nesterov"): 1,
    ("adagrad", "lr_decay"): 1,
    ("adadelta", "default"): 2,
    ("adadelta", "decay"): 3,
    ("rmsprop", "centered"): 1,
    ("rprop", "default"): 2,
    ("rprop", "narrow"): 2,
    ("adafactor", "default"): 1,
    ("adafactor", "decay"): 1,
    # A matrix before and after an iteration, its square, and the square's.
    ("muon", "default"): 3,
    ("muon", "plain"): 3,
    ("muon", "adamw's rate"): 3,
}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("algorithm", "case"),
    [(a, case) for a in ALGORITHMS for case in a.golden],
    ids=lambda x: getattr(x, "name", x),
)
def test_donation_reuses_every_buffer(algorithm, case):
    """Parameters and state are updated in place; temporaries stay below 5 %."""
    opt = algorithm(**algorithm.golden[case])
    params = {f"p{i}": jnp.full((257, 64 + i), 0.5 + i, jnp.float32) for i in range(2)}
    grads = jax.tree.map(lambda p: p * 1e-3, params)
    state = opt.init(params)
    step = jax.jit(opt.step, donate_argnums=(0, 2))
    memory = step.lower(params, grads, state).compile().memory_analysis()
    size = sum(p.nbytes for p in params.values())
    arrays = TEMPORARY.get((algorithm.name, case), 0)
    assert memory.temp_size_in_bytes < (arrays + 0.05) * size
    # Not the factors of Adafactor, which XLA may compute elsewhere.
    leaves = (x for x in jax.tree.leaves((params, state)) if x.ndim)
    donated = [x for x in leaves if 1 not in x.shape]
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in donated)
    places = {x.unsafe_buffer_pointer() for x in donated}
    new = jax.block_until_ready(step(params, grads, state))
    assert all(x.is_deleted() for x in donated)
    assert places <= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)}


@EACH
def test_one_compilation_whatever_the_numbers(algorithm, options):
    """Neither the second call nor another value of an override compiles again."""
    opt = algorithm(**options)
    traces = []

    @jax.jit
    def step(params, grads, state, **overrides):
        traces.append(1)
        return opt.step(params, grads, state, **overrides)

    params, rows = start(jnp.float32, shapes=algorithm.shapes)
    state = opt.init(params)
    for t, grads in enumerate(rows):
        given = jax.tree.map(lambda v, t=t: v * (1 - 0.01 * t), algorithm.overridable)
        params, state = step(params, grads, state, **given)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_leaves_of_one_shape_and_dtype_are_traced_once(rng):
    """Under jit alone; and each has its own numbers, count and schedule."""
    seen = []

    def step_leaf(param, grad, state, h):
        seen.append(param.shape)
        after = state._replace(step=state.step + 1)
        return optim.Update(-h.lr * grad), after

    opt = optim.leafwise(
        "counting",
        [optim.Hyperparameter("lr", lambda count: 0.5 + count.astype(float))],
        lambda p: SGDState(jnp.zeros((), jnp.int32), None),
        step_leaf,
    )
    shapes = {"a": (2, 3), "b": (2, 3), "c": (5,), "d": (2, 3), "e": (5,)}
    # Small whole numbers, of which no product or sum is rounded.
    whole = {k: rng.integers(-99, 99, (2, *of)) for k, of in shapes.items()}
    params, grads = (
        {k: jnp.asarray(drawn[i], jnp.float32) for k, drawn in whole.items()}
        for i in (0, 1)
    )
    state = opt.init(params)
    for number, name in enumerate(shapes):
        state[name] = state[name]._replace(step=jnp.int32(number))
    expected = opt.step(params, grads, state)
    assert sorted(seen) == sorted(shapes.values())
    seen.clear()
    found = jax.jit(opt.step)(params, grads, state)
    assert sorted(seen) == [(2, 3), (5,)]
    assert bits(found) == bits(expected)
    for number, name in enumerate(shapes):
        moved = params[name] - (0.5 + number) * grads[name]
        np.testing.assert_array_equal(found[0][name], moved)


@pytest.mark.parametrize("place", ["mesh", "second device", "anywhere"])
@EACH
def test_state_is_placed_where_a_step_leaves_it(algorithm, options, place, mesh):
    """So the second step on a mesh, or on a chosen device, does not compile again."""
    opt = algorithm(**options)
    array = jnp.arange(24.0).reshape(8, 3)
    if place == "mesh":
        array = jax.device_put(array, NamedSharding(mesh(4), PartitionSpec("data")))
    elif place == "second device":
        array = jax.device_put(array, jax.devices()[1])
    params = {"a": array, "b": array * 2}
    step = jax.jit(opt.step)
    state = opt.init(params)
    for _ in range(3):
        params, state = step(params, params, state)
    assert step._cache_size() == 1
    for leaf in jax.tree.leaves(state):
        assert leaf.devices() == array.devices()
        if leaf.ndim:
            expected = array.sharding
            if (
                place == "mesh" and leaf.shape[0] == 1
            ):  # columns of rows that are shared
                expected = NamedSharding(expected.mesh, PartitionSpec())
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)


def two_axes(types=AxisType.Auto):
    devices = np.array(jax.devices("cpu")[:8]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(types,) * 2)


@EACH
def test_a_compiled_init_lays_states_out_like_their_parameters(algorithm, options):
    """Zeros follow from no parameter: the compiler is told, or they would be whole."""
    mesh = two_axes()
    param = jnp.ones((8, 6))
    param = jax.device_put(param, NamedSharding(mesh, PartitionSpec("data", "model")))
    state = jax.jit(algorithm(**options).init)(param)
    for leaf in jax.tree.leaves(state):
        assert leaf.devices() == param.devices()
        if leaf.ndim:
            sizes = zip(leaf.shape, ("data", "model"), strict=True)
            spec = PartitionSpec(*(axis if size > 1 else None for size, axis in sizes))
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_a_compiled_init_places_what_init_places(types):
    """Leaf by leaf, complex ones, scalars and masters among them."""
    mesh = two_axes(types)
    specs = {"w": ("data", "model"), "v": (None, "model"), "c": ("model",), "b": ()}
    shapes = {"w": (8, 6), "v": (3, 4), "c": (4,), "b": ()}
    params = {
        name: jax.device_put(
            jnp.ones(shapes[name], complex if name == "c" else float),
            NamedSharding(mesh, PartitionSpec(*specs[name])),
        )
        for name in specs
    }
    plain = optim.adam(amsgrad=True)
    real = {name: params[name] for name in ("w", "v", "b")}
    for opt, given in (
        (plain, params),
        (optim.with_master_weights(plain, compute_dtype=jnp.float64), params),
        (optim.adafactor(), real),
        (optim.muon(), {"w": params["w"]}),
    ):
        outside, compiled = opt.init(given), jax.jit(opt.init)(given)
        pairs = zip(jax.tree.leaves(outside), jax.tree.leaves(compiled), strict=True)
        for expected, found in pairs:
            assert found.sharding.is_equivalent_to(expected.sharding, expected.ndim)
    alone = jax.jit(plain.init)(params["b"])
    assert alone.exp_avg.devices() == params["b"].devices()


def test_parameters_and_state_made_in_one_program():
    place = NamedSharding(two_axes(), PartitionSpec("data", "model"))
    opt = optim.adam()

    @jax.jit
    def made(key):
        drawn = jax.random.normal(key, (8, 6))
        param = jax.lax.with_sharding_constraint(drawn, place)
        return param, opt.init(param)

    _, state = made(jax.random.key(0))
    for leaf in (state.exp_avg, state.exp_avg_sq):
        assert leaf.sharding.is_equivalent_to(place, 2)


# --- overrides and schedules ---


@EACH
def test_an_override_is_the_hyperparameter_for_one_step(algorithm, options):
    """As if the optimizer had been made with it, and forgotten afterwards."""
    opt, other = algorithm(**options), algorithm(**(options | algorithm.overridable))
    params, rows = start(shapes=algorithm.shapes)
    params, state = opt.step(params, rows[0], opt.init(params))
    overridden = opt.step(params, rows[1], state, **algorithm.overridable)
    assert bits(overridden) == bits(other.step(params, rows[1], state))
    assert bits(overridden) != bits(opt.step(params, rows[1], state))
    assert bits(opt.step(*_args(overridden, rows[2]))) == bits(
        algorithm(**options).step(*_args(overridden, rows[2]))
    )


def _args(new, grads):
    return new[0], grads, new[1]


@EACH
def test_a_schedule_sees_each_leafs_own_count(algorithm, options):
    """A leaf that was skipped lags behind, as its bias correction does."""
    factors = jnp.array([1.0, 0.9, 0.8])
    names = algorithm.overridable

    def scheduled(value):
        if isinstance(value, tuple):
            return tuple(map(scheduled, value))
        return lambda count: value * factors[count]

    if algorithm.name == "rprop":  # whose etas stay on their sides of 1
        names = {"step_sizes": algorithm.overridable["step_sizes"]}
    opt = algorithm(**(options | {k: scheduled(v) for k, v in names.items()}))
    params, rows = start(shapes=algorithm.shapes)
    state = opt.init(params)
    for t, grads in enumerate(rows):
        partial = grads | ({"b": None} if t == 0 else {})
        expected = {
            name: opt.step(
                params[name],
                grads[name],
                state[name],
                **jax.tree.map(
                    lambda v, factor=factors[t - (t > 0 and name == "b")]: v * factor,
                    names,
                ),
            )
            for name in params
            if partial[name] is not None
        }
        params, state = opt.step(params, partial, state)
        for name, result in expected.items():
            close((params[name], state[name]), result)


# --- trees ---


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array
    b: jax.Array


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(5, 3, rngs=rngs)
        self.second = nnx.Linear(3, 2, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def nnx_params():
    return nnx.state(Net(nnx.Rngs(0)), nnx.Param)


TREES = {
    "array": lambda: jnp.arange(3.0),
    "nested": lambda: {"a": [jnp.arange(3.0), (jnp.ones((2, 2)),)], "b": {}},
    "dataclass": lambda: [Layer(jnp.ones((3, 2)), jnp.arange(2.0))],
    "nnx state": nnx_params,
    "nnx dict": lambda: nnx.to_pure_dict(nnx_params()),
    "numpy": lambda: {"w": np.arange(3.0)},
    "number": lambda: {"w": 0.5},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_any_pytree_holds_parameters(tree):
    """The structure is kept, and each leaf moves as it would alone."""
    opt = optim.adamw(lr=0.1)
    params = tree()
    grads = jax.tree.map(lambda p: p * 0.5 + 1.0, params)
    state = opt.init(params)
    new, new_state = opt.step(params, grads, state)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for p, g, n in zip(*map(jax.tree.leaves, (params, grads, new)), strict=True):
        assert bits(opt.step(p, g, opt.init(p))[0]) == bits(n)
        assert np.all(np.asarray(p) != np.asarray(n))


def test_an_nnx_module_trains_through_its_state():
    """Split, step, merge: the loss falls, and what is no parameter stays."""
    structure, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    opt = optim.adam(lr=0.05)
    inputs = jnp.linspace(-1, 1, 20, dtype=jnp.float32).reshape(4, 5)
    wanted = jnp.array([[1, 0], [0, 1], [1, 1], [0.5, 0]], jnp.float32)

    @jax.jit
    def train(params, state):
        def loss(params):
            return jnp.mean((nnx.merge(structure, params, rest)(inputs) - wanted) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, *opt.step(params, grads, state)

    state, losses = opt.init(params), []
    for _ in range(30):
        loss, params, state = train(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    assert nnx.merge(structure, params, rest).steps[...] == 0
    assert all(s.step == 30 for s in jax.tree.leaves(state, is_leaf=_is_state))


def _is_state(x):
    return isinstance(x, AdamState)

"""The training step: equal to one device's step, replicated, compiled once, donated."""

import re
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from jdist import optim, verify
from jdist.data_parallel import shard_batch, train_step, zero
from tests.data_parallel.recording import copies_differ, gradient_of
from tests.replicas import over

ROWS = 6


def losses_of(params, batch):
    """A parameter used twice, a logarithm, a parameter that is no floating array."""
    x, y = batch
    hidden = jnp.tanh(jnp.log(x) @ params["w"] + params["b"][None])
    return ((hidden @ params["w"].T - y) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """11 examples, all sizes different."""
    params = {
        "w": rng.normal(size=(3, 4)),
        "b": rng.normal(size=4),
        "steps": np.arange(2),
    }
    batch = (rng.uniform(0.2, 3, size=(11, 3)), rng.normal(size=(11, 3)))
    return params, batch, rng.uniform(0.5, 2, size=11)


@cache
def judge(reduction):
    """One judge for each reduction, compiled once."""
    return verify.gradients_judge(losses_of, reduction=reduction)


def plain_steps(opt, params, batches):
    """Training on one device with JAX's own gradient of the weighted mean."""
    params = jax.tree.map(jnp.asarray, params)
    state = opt.init(params)

    def loss(trainable, fixed, batch, weights):
        losses = losses_of(trainable | fixed, batch)
        return (weights * losses).sum() / weights.sum()

    fixed = {k: p for k, p in params.items() if p.dtype == int}
    gradient = jax.jit(jax.grad(loss))
    for batch, weights in batches:
        trainable = {k: p for k, p in params.items() if k not in fixed}
        grads = gradient(trainable, fixed, batch, weights) | dict.fromkeys(fixed)
        params, state = opt.step(params, grads, state)
    return params


@pytest.mark.parametrize(
    ("reduction", "accumulate"),
    [("mean", 1), ("mean", 3), ("sum", 3), ("max", 3), ("min", 3)],
)
def test_the_gradient_is_the_whole_batchs(problem, mesh, reduction, accumulate):
    """On devices and by vmap, uneven shards with an empty one; judged leaf by leaf."""
    params, batch, weights = problem
    sizes = (5, 0, 6)

    def candidate(where):
        fn = gradient_of(losses_of, where, reduction=reduction, accumulate=accumulate)
        shards = shard_batch(
            batch, **over(where), sizes=sizes, weights=weights, rows=ROWS
        )

        return lambda params, _: fn(params, *shards)

    candidates = {"devices": candidate(mesh(3)), "vmap": candidate(3)}
    report = judge(reduction)(
        params, batch, candidates, weights=weights, finite_differences=False
    )
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {"accumulate": 2}),
        (8, {"method": "all_gather"}),
        (3, {"bucket_cap_mb": 0}),
    ],
)
def test_fifty_steps_are_one_devices_and_all_replicas_stay_the_same(
    problem, mesh, rng, replicas, options
):
    """Other sizes at each step; in float64 to rounding, and copies bit for bit."""
    params, batch, weights = problem
    opt = optim.adam(lr=0.01)
    step = train_step(losses_of, opt, mesh(replicas), **options)
    state = step.init(params)
    orders = [rng.permutation(11) for _ in range(50)]
    batches = [
        (tuple(part[order] for part in batch), weights[order]) for order in orders
    ]
    for own, w in batches:
        cuts = np.sort(rng.integers(0, 12, size=replicas - 1))
        sizes = np.diff([0, *cuts, 11])
        state, _ = step(
            state, *shard_batch(own, mesh(replicas), sizes, weights=w, rows=12)
        )
    assert copies_differ((state.params, state.opt_state)) == 0
    expected = plain_steps(opt, params, batches)
    for name in ("w", "b"):
        # 50 steps, each off by some units of rounding; Adam divides by small numbers.
        np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-10)
    assert step.compiled._cache_size() == 1
    assert int(state.step) == 50


@cache
def programs():
    """The step and JAX's own gradient, each compiled once: the rows are fixed."""

    def loss(params, batch, weights):
        return jnp.sum(losses_of(params, batch) * weights) / jnp.sum(weights)

    return gradient_of(losses_of, 3, accumulate=2), jax.jit(jax.value_and_grad(loss))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, ROWS), min_size=3, max_size=3).filter(any),
    seed=st.integers(0, 2**16),
    masked=st.booleans(),
)
def test_whatever_the_sizes_and_weights(sizes, seed, masked):
    """Also with whole micro-batches of padding, and examples of weight 0."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    whole = (rng.uniform(0.2, 3, size=(3 * ROWS, 3)), rng.normal(size=(3 * ROWS, 3)))
    weights = rng.uniform(0.1, 5, size=3 * ROWS) * 10.0 ** rng.integers(-3, 3)
    if masked:
        weights[: count // 2] = 0
    weights[count:] = 0
    params = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
    batch = tuple(part[:count] for part in whole)
    shards = shard_batch(
        batch, replicas=3, sizes=sizes, weights=weights[:count], rows=ROWS
    )
    replicated, plain = programs()
    (loss, gradient), (wanted, expected) = (
        replicated(params, *shards),
        plain(params, whole, weights),
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-13)
    for name, leaf in expected.items():
        # Sums of up to 18 terms of both signs, relative to the largest entry.
        np.testing.assert_allclose(
            gradient[name], leaf, rtol=0, atol=1e-13 * (np.abs(leaf).max() + wanted)
        )


def test_clipping_is_by_the_norm_of_the_whole_gradient(problem, mesh):
    """Not of each replica's: as on one device, and the norm before is reported."""
    params, batch, _ = problem
    opt = optim.sgd(lr=0.1)
    where = mesh(2)
    step = train_step(losses_of, opt, **over(where), max_norm=0.5)
    state, metrics = step(
        step.init(params), *shard_batch(batch, **over(where), sizes=(4, 7))
    )
    trainable = {k: jnp.asarray(params[k]) for k in "wb"}
    grads = jax.grad(lambda p: losses_of(p, batch).mean())(trainable)
    clipped, norm = optim.clip_by_global_norm(grads, 0.5)
    assert float(norm) > 1
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-13)
    expected, _ = opt.step(trainable, clipped, opt.init(trainable))
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-13)
    step = train_step(losses_of, opt, **over(where))
    assert (
        step(step.init(params), *shard_batch(batch, **over(where)))[1].grad_norm is None
    )


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_loss_scale_leaves_no_trace(problem, mesh, max_norm):
    """Losses are scaled inside; loss, norm, clipping and step are those without."""
    params, batch, _ = jax.tree.map(
        lambda x: x if x.dtype == int else x.astype(np.float32), problem
    )
    found = []
    for scale in (None, 2.0**10):
        opt = optim.with_master_weights(
            optim.sgd(lr=0.1), compute_dtype=jnp.bfloat16, loss_scale=scale
        )
        step = train_step(losses_of, opt, mesh(2), max_norm=max_norm)
        where = mesh(2)
        full = jax.tree.map(jnp.asarray, params)
        copies = optim.compute_copies(full, jnp.bfloat16)
        x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
        state = step.init(copies, opt_state=opt.init(full))
        state, metrics = step(state, *shard_batch(x, **over(where), sizes=(4, 7)))
        found.append((state.opt_state.masters, metrics))
    (plain, plain_metrics), (scaled, scaled_metrics) = found
    assert float(plain_metrics.loss) == float(scaled_metrics.loss)
    assert not np.array_equal(plain["w"], params["w"])
    # A power of two commutes with rounding, but not with torch's 1e-6 in clipping.
    np.testing.assert_allclose(
        plain["w"], scaled["w"], rtol=0 if max_norm is None else 1e-5
    )
    if max_norm is not None:
        np.testing.assert_allclose(
            plain_metrics.grad_norm, scaled_metrics.grad_norm, rtol=1e-6
        )


@pytest.mark.parametrize("where", ["devices", "vmap", "ZeRO"])
def test_init_takes_full_precision_and_makes_the_copies(rng, mesh, where):
    """Masters keep what float16 rounds; the run is that of copies made by hand."""
    place = 2 if where == "vmap" else mesh(2)
    opt = optim.with_master_weights(optim.adam(lr=1e-4), compute_dtype=jnp.float16)
    opt = zero(opt, place) if where == "ZeRO" else opt
    full = {"w": jnp.array([1.0001, 2.0003, -0.30007]), "n": jnp.arange(2)}
    copies = optim.compute_copies(full, jnp.float16)
    assert copies["w"].tolist() != full["w"].tolist()

    def losses(params, x):
        assert params["w"].dtype == jnp.float16
        return (x @ params["w"]).astype(jnp.float32) ** 2

    step = train_step(losses, opt, **over(place))
    x = rng.normal(size=(6, 3)).astype(np.float16)
    state = step.init(full)
    masters = state.opt_state.masters["w"]
    kept = masters.whole() if where == "ZeRO" else masters
    assert kept.tolist() == full["w"].tolist()
    begun = [state, step.init(copies, opt_state=opt.init(full))]
    # Also a state of the user's, beside parameters in full precision.
    begun.append(step.init(full, opt_state=opt.init(full)))
    ended = [step(state, x)[0] for state in begun]
    for other in ended[1:]:
        for one, two in zip(*map(jax.tree.leaves, (ended[0], other)), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    # 16-bit parameters are taken too, and their masters have no more digits.
    rough = step.init(copies)
    assert step(rough, x)[0].params["w"].dtype == jnp.float16


@pytest.mark.parametrize("kind", ["replicas", "micro-batches", "ZeRO"])
def test_masters_take_the_sum_as_it_was_added_up(mesh, kind):
    """256 + 1 is no bfloat16; the masters move by 257 and the copies are rounded."""
    opt = optim.with_master_weights(optim.sgd(lr=1.0), compute_dtype=jnp.bfloat16)
    where, accumulate = (1, 2) if kind == "micro-batches" else (mesh(2), 1)
    if kind == "ZeRO":
        opt = zero(opt, where)
    step = train_step(
        lambda w, x: x @ w, opt, **over(where), reduction="sum", accumulate=accumulate
    )
    full = jnp.zeros(2, jnp.float32)
    state = step.init(jnp.zeros(2, jnp.bfloat16), opt_state=opt.init(full))
    state, _ = step(state, jnp.array([[256, 2], [1, 512]], jnp.bfloat16))
    masters = state.opt_state.masters
    masters = masters.whole() if kind == "ZeRO" else masters
    assert masters.tolist() == [-257, -514]
    assert state.params.dtype == jnp.bfloat16
    assert state.params.tolist() == [-256, -512]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("where", ["devices", "vmap"])
def test_a_dynamic_scale_falls_no_deeper_than_in_a_plain_loop(
    rng, mesh, where, accumulate
):
    """Its height is what float16 gradients live from; a batch's size must not cost it.

    Weights of 512 tokens each and 4096 examples: undivided, the sum is two million
    times the mean, and the scale would fall by as much.
    """
    place = mesh(2) if where == "devices" else 2
    opt = optim.with_master_weights(
        optim.sgd(lr=0.0),
        compute_dtype=jnp.float16,
        loss_scale=optim.DynamicLossScale(),
    )
    full = jnp.linspace(0.05, 0.15, 4, dtype=jnp.float32)
    x = rng.uniform(0.2, 0.8, size=(4096, 4)).astype(np.float16)
    weights = rng.integers(400, 600, size=4096).astype(np.float32)

    def losses(w, x):
        return (x @ w).astype(jnp.float32) ** 2

    step = train_step(losses, opt, **over(place), accumulate=accumulate)
    copies = optim.compute_copies(full, jnp.float16)
    state = step.init(copies, opt_state=opt.init(full))
    shards = shard_batch(
        x, **over(place), sizes=(3000, 1096), weights=weights, rows=3000
    )
    for _ in range(6):
        state, _ = step(state, *shards)

    @jax.jit
    def plain(params, state):
        def loss(params):
            found = (weights * losses(params, x)).sum() / weights.sum()
            return opt.scale_loss(found, state)

        return opt.step(params, jax.grad(loss)(params), state)

    reference = copies, opt.init(full)
    for _ in range(6):
        reference = plain(*reference)
    found, expected = state.opt_state.loss_scale, reference[1].loss_scale
    assert (found.scale, found.skipped) == (expected.scale, expected.skipped)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_any_type_of_mesh(problem, mesh, types):
    """Explicit axes too, and a batch that is still on the host."""
    params, batch, _ = problem
    batch = jax.tree.map(lambda x: x[:8], batch)
    step = train_step(losses_of, optim.adam(lr=0.1), mesh(4, types), accumulate=2)
    state, _ = step(step.init(params), batch)
    state, _ = step(state, batch)
    expected = plain_steps(optim.adam(lr=0.1), params, [(batch, np.ones(8))] * 2)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-12)
    assert step.compiled._cache_size() == 1


def test_complex_parameters_descend(mesh):
    """The optimizer gets the direction of ascent, the conjugate of JAX's gradient."""
    target = np.array([[1 + 2j, -3j]])

    def losses(z, x):
        return (x * jnp.abs(z[None] - target) ** 2).sum(axis=1)

    step = train_step(losses, optim.sgd(lr=0.05), mesh(2))
    x = np.random.default_rng(0).uniform(0.5, 1, size=(4, 2))
    state = step.init(np.zeros(2, complex))
    found = []
    for _ in range(60):
        state, metrics = step(state, x)
        found.append(float(metrics.loss))
    assert found[-1] < 1e-3 * found[0]


# --- compiled once, donated, alone without overhead ---


def test_hyperparameters_change_without_recompilation(problem, mesh):
    """And take effect."""
    params, batch, _ = problem
    step = train_step(losses_of, optim.sgd(lr=0.1), mesh(2))
    shards = shard_batch(batch, mesh(2))
    state, _ = step(step.init(params), *shards, lr=0.1)
    moved = np.array(state.params["w"])
    for lr in (0.0, 0.0, 0.2):
        state, _ = step(state, *shards, lr=lr)
        assert np.array_equal(state.params["w"], moved) == (lr == 0)
    assert step.compiled._cache_size() == 1


def test_the_state_is_donated_and_the_callers_values_are_not(problem, mesh):
    """The old state's buffers are gone; parameters handed to `init` stay usable."""
    params, batch, _ = problem
    own = jax.tree.map(jnp.asarray, params)
    for where in (mesh(2), mesh(1), 2, 1):
        step = train_step(losses_of, optim.adam(lr=0.1), **over(where))
        before = step.init(own)
        after, _ = step(before, *shard_batch(batch, **over(where)))
        assert before.params["w"].is_deleted()
        assert before.opt_state["b"].exp_avg.is_deleted()
        assert not after.params["w"].is_deleted()
        np.testing.assert_array_equal(own["w"], params["w"])


def opcodes(lowered):
    """How many of each operation the main computation of a compiled program has."""
    text = lowered.compile().as_text()
    main = text[text.index("\nENTRY") :]
    return Counter(re.findall(r"^  .*? = .*? ([a-z][a-z-]*)\(", main, re.MULTILINE))


@pytest.mark.optimized
def test_alone_it_compiles_to_the_plain_step(problem, mesh):
    """World size 1: what one device does, and the count of steps; no copy, no call."""
    params, batch, _ = problem
    params.pop("steps")
    opt = optim.adam(lr=0.1)

    @partial(jax.jit, donate_argnums=(0, 1))
    def plain(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: losses_of(p, batch).mean())(params)
        return *opt.step(params, grads, state), loss

    own = jax.tree.map(jnp.asarray, params)
    expected = opcodes(plain.lower(own, opt.init(own), batch))
    for where in (mesh(1), 1):
        step = train_step(losses_of, opt, **over(where))
        found = opcodes(step.lower(step.init(params), batch))
        assert found - expected == Counter({"parameter": 1, "fusion": 1})
        assert not expected - found


# --- what is refused ---


def test_rows_that_do_not_divide(problem):
    """With the number, and the way out."""
    params, batch, weights = problem
    step = train_step(losses_of, optim.sgd(lr=0.1), replicas=2, accumulate=3)
    state = step.init(params)
    with pytest.raises(ValueError, match=r"multiple of 6 rows.*Got 11 rows.*rows="):
        step(state, batch)
    shards, w = shard_batch(batch, replicas=2, rows=6)
    with pytest.raises(ValueError, match=r"one per row, shape \(12,\).*Got shape \(11"):
        step(state, shards, weights)
    with pytest.raises(ValueError, match=r"finite and at least 0. Got -1.0"):
        step(state, shards, -np.asarray(w))
    with pytest.raises(ValueError, match="must not all be 0"):
        step(state, shards, np.zeros(12))


def test_parameters_are_no_state(problem):
    """Also when they come with an optimizer's state, as in other libraries."""
    params, batch, _ = problem
    step = train_step(losses_of, optim.sgd(lr=0.1), replicas=2)
    remedy = (
        r"`step\(state=\.\.\.\)` must be a TrainState\. Got a {}\. .*step\.init\(par"
    )
    for wrong in (params, (params, step.init(params).opt_state)):
        with pytest.raises(TypeError, match=remedy.format(type(wrong).__name__)):
            step(wrong, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulate": 0}, ValueError, r"accumulate=.*at least 1. Got 0"),
        ({"accumulate": 2.0}, TypeError, r"accumulate=.*Got 2.0"),
        ({"accumulate": True}, TypeError, r"accumulate=.*Got True"),
        ({"max_norm": -1.0}, ValueError, r"max_norm=.*at least 0. Got -1.0"),
        ({"max_norm": jnp.float32(-1)}, ValueError, r"max_norm=.*least 0. Got -1.0"),
        ({"max_norm": jnp.ones(2)}, TypeError, r"max_norm=.*a number. Got Array\("),
        ({"max_norm": "1"}, TypeError, r"max_norm=.*at least 0, a number. Got '1'"),
        ({"reduction": "median"}, ValueError, r"reduction=.*'mean'.*Got 'median'"),
        ({"method": "ring"}, ValueError, r"method=.*'all_reduce'.*Got 'ring'"),
        ({"states": "last"}, ValueError, r"states=.*'first'. Got 'last'"),
        (
            {"metod": "all_gather"},
            TypeError,
            r"further arguments reduction, accum.*Got metod",
        ),
    ],
)
def test_options_are_checked(options, error, message):
    """When the step is made, not when it first runs."""
    with pytest.raises(error, match=message):
        train_step(losses_of, optim.sgd(lr=0.1), replicas=2, **options)

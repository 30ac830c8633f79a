"""Replicas' gradients: equal to one device's, whatever is split over whatever."""

import re
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdist import optim, verify
from jdist.data_parallel import (
    Join,
    LocalSGD,
    hooks,
    shard_batch,
    value_and_grad,
)
from jdist.reduction import REDUCTIONS
from tests.data_parallel.recording import gradient_of
from tests.replicas import over

pytestmark = pytest.mark.compiled

METHODS = ("all_reduce", "all_gather")


def losses_of(params, batch):
    """Log, square root and a norm: functions that a row of zeros would break."""
    x, scale = batch
    unit = x / jnp.sqrt((x**2).sum(axis=1, keepdims=True))
    hidden = jnp.tanh(jnp.log(x) @ params["w"]) + jnp.sqrt(scale)[:, None]
    return ((hidden @ params["w"].T - unit) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """8 examples; parameters that are used twice, unused, and not floating."""
    params = {
        "w": jnp.asarray(rng.normal(size=(3, 4))),
        "unused": jnp.asarray(rng.normal(size=2)),
        "steps": jnp.arange(2),
    }
    batch = (rng.uniform(0.2, 3, size=(8, 3)), rng.uniform(0.1, 1, size=8))
    return params, batch, rng.uniform(0.5, 2, size=8)


@cache
def judge(reduction):
    """One judge for each reduction, compiled once."""
    return verify.gradients_judge(losses_of, reduction=reduction)


def replicated(mesh, sizes, weights, **options):
    """A candidate for the judge."""
    fn = value_and_grad(losses_of, **over(mesh), **options)
    return lambda p, b: fn(
        p, *shard_batch(b, **over(mesh), sizes=sizes, weights=weights)
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sizes", [(5, 3), (7, 0, 1), (2, 2, 2, 2)])
def test_equal_to_one_device(problem, mesh, reduction, sizes):
    """On several devices and on one, by both methods, judged leaf by leaf."""
    params, batch, weights = problem
    candidates = {
        f"{kind}, {method}": replicated(
            where, sizes, weights, reduction=reduction, method=method
        )
        for kind, where in (("devices", mesh(len(sizes))), ("vmap", len(sizes)))
        for method in METHODS
    }
    report = judge(reduction)(
        params, batch, candidates, weights=weights, finite_differences=False
    )
    report.raise_if_failed()
    paths = [leaf.path for leaf in report.of("vmap, all_reduce").leaves]
    assert paths == ["(loss)", "unused", "w"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(problem, mesh, dtype):
    """Gradients keep their parameter's dtype and stay within its own bound."""
    params, batch, weights = jax.tree.map(
        lambda x: x if x.dtype == int else jnp.asarray(x, dtype), problem
    )
    report = verify.gradients(
        losses_of,
        params,
        batch,
        {"devices": replicated(mesh(3), (4, 1, 3), np.asarray(weights, np.float32))},
        weights=np.asarray(weights, np.float32),
    )
    report.raise_if_failed()
    assert {leaf.dtype for leaf in report.leaves} == {dtype}


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_any_mesh_and_unplaced_batches(problem, mesh, types):
    """Explicit axes too; a batch still on the host is laid out on the way in."""
    params, batch, _ = problem
    devices = mesh(4, types)
    fn = value_and_grad(losses_of, **over(devices))
    placed = fn(params, *shard_batch(batch, **over(devices)))
    assert verify.compare(placed, fn(params, batch)).bit_equal


def test_one_axis_of_a_larger_mesh(problem):
    """Parameters are replicated over the other axis as well."""
    params, batch, weights = problem
    grid = Mesh(np.array(jax.devices("cpu")[:6]).reshape(3, 2), ("data", "model"))
    judge("mean")(
        params,
        batch,
        {"3 x 2": replicated(grid, (1, 2, 5), weights)},
        weights=weights,
        finite_differences=False,
    ).raise_if_failed()


def test_the_result_is_replicated_bit_for_bit(problem, mesh):
    """Every device holds the same gradient, and a second call repeats it."""
    params, batch, weights = problem
    for method in METHODS:
        fn = value_and_grad(losses_of, mesh(4), method=method)
        shards = shard_batch(batch, mesh(4), (1, 4, 0, 3), weights=weights)
        loss, gradient = fn(params, *shards)
        copies = [np.asarray(s.data) for s in gradient["w"].addressable_shards]
        assert len(copies) == 4
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
        assert verify.compare((loss, gradient), fn(params, *shards)).bit_equal


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("method", METHODS)
def test_ties_across_replicas_share_equally(mesh, reduction, method):
    """Four copies of the extreme on three replicas, one of them excluded by weight."""
    sign = 1.0 if reduction == "max" else -1.0
    # Powers of two and small integers: equal in every program, so that a tie is one.
    x = sign * np.array([[4.0, 8.0], [4, 8], [1, 2], [8, 0], [4, 8], [4, 8]])
    weights = np.array([1.0, 1.0, 1.0, 0.5, 3.0, 0.0])
    fn = value_and_grad(lambda w, x: x @ w, mesh(3), reduction=reduction, method=method)
    shards = shard_batch(x, mesh(3), (1, 3, 2), weights=weights)
    loss, gradient = fn(jnp.array([1.0, 0.5]), *shards)
    assert loss == 8 * sign
    # Tied: examples 0, 1, 3 and 4. Weights above 0 do not matter.
    expected = sign * np.array([4 + 4 + 8 + 4, 8 + 8 + 0 + 8]) / 4
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_rows_of_zeros_are_excluded_by_their_weight(problem, reduction):
    """Their logarithms and norms would make NaN of the gradient, times a seed of 0."""
    params, batch, weights = problem
    fn = value_and_grad(losses_of, replicas=2, reduction=reduction)
    # The second replica has one example that counts; then none.
    for rows in (14, 16):
        zeros = tuple(
            np.concatenate([x, np.zeros_like(x[:1].repeat(rows - 8, 0))]) for x in batch
        )
        padded = np.r_[weights, np.zeros(rows - 8)]
        found = fn(params, zeros, padded)
        expected = fn(
            params, *shard_batch(batch, replicas=2, sizes=(5, 3), weights=weights)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), found, expected)


def test_compiled_once_for_all_sizes(problem, mesh):
    """Shards of one padded width share a program, however the examples lie in it."""
    params, batch, weights = problem
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return losses_of(params, batch)

    fn = value_and_grad(counted, mesh(2))
    for sizes in ((5, 3), (3, 5), (5, 3)):
        fn(params, *shard_batch(batch, mesh(2), sizes, weights=weights))
    assert traces == 1


def test_one_collective_in_the_compiled_program(problem, mesh):
    """Loss, weight and all gradients travel together; weights by their total, before.

    Weights that are 1 each have a total that is known, and nothing more is sent.
    """
    params, batch, _ = problem
    fn = value_and_grad(losses_of, mesh(4))
    shards = shard_batch(batch, mesh(4))
    # w, unused, loss and total: 12 + 2 + 2.
    for arguments, expected in (
        (shards[:1], ["f64[16]"]),
        (shards, ["f64[16]", "f64[]"]),
    ):
        text = jax.jit(fn).lower(params, *arguments).compile().as_text()
        found = re.findall(r"= (\w+\[\d*\]).* all-reduce(?:-start)?\(", text)
        assert sorted(found) == expected


def test_inside_jit_bad_weights_are_nan(problem):
    """What cannot be refused is not hidden either."""
    params, batch, weights = problem
    weights = jnp.asarray(weights)
    fn = jax.jit(value_and_grad(losses_of, replicas=2))
    for bad in (weights.at[3].set(-1), weights.at[3].set(jnp.nan)):
        loss, gradient = fn(params, batch, bad)
        assert np.isnan(loss)
        assert np.isnan(gradient["w"]).all()
    loss, gradient = fn(params, batch, 0 * weights)
    assert np.isnan(loss)
    assert not gradient["w"].any()


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_a_loss_of_nan_is_seen_under_vmap(reduction):
    """Two rows of 5000: there XLA's maximum on CPU leaves a NaN out."""
    x = np.arange(20_000, dtype=np.float32).reshape(10_000, 2)
    x[[17, 5005]] = np.nan
    fn = value_and_grad(lambda w, x: x @ w, replicas=2, reduction=reduction)
    w = jnp.array([1.0, 0.5], jnp.float32)
    loss, gradient = fn(w, x)
    assert np.isnan(loss)
    assert np.isnan(gradient).all()
    some = np.ones(10_000, np.float32)
    some[[17, 5005]] = 0
    assert np.isfinite(fn(w, x, some)[0])


def test_batch_statistics_over_all_replicas(rng, mesh):
    """A loss that normalises by a psum over the axis gets the right gradient.

    Weights enter before the backward pass, so that the terms between replicas are
    weighted as well.
    """
    w = jnp.asarray(rng.normal(size=3))
    x, weights = rng.normal(size=(8, 3)), rng.uniform(0.5, 2, size=8)

    def synchronized(w, x):
        y = x @ w
        mean = jax.lax.pmean(jnp.mean(y), "data")
        return jnp.tanh(y - mean) ** 2

    def whole(w, x):
        y = x @ w
        return jnp.tanh(y - jnp.mean(y)) ** 2

    expected = jax.value_and_grad(
        lambda w: jnp.sum(weights * whole(w, x)) / weights.sum()
    )(w)
    found = value_and_grad(synchronized, mesh(4))(
        w, *shard_batch(x, mesh(4), weights=weights)
    )
    scale = float(jnp.abs(jax.jacrev(whole)(w, x)).sum())
    verify.compare(expected, found, terms=8, scale=scale).raise_if_failed()


def test_flax_states_are_pytrees_like_any_other(rng, mesh):
    """An nnx.State of parameters, without and with batch statistics left out."""
    structure, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    x = rng.normal(size=(5, 3)).astype(np.float32)

    def losses(state, x):
        return (nnx.merge(structure, state)(x) ** 2).sum(axis=1)

    found = replicated_state(losses, mesh(2), state, x)
    expected = jax.value_and_grad(lambda s: losses(s, x).mean())(state)
    scale = float(np.abs(x).max() ** 2 * 20)
    verify.compare(expected, found, terms=5, scale=scale).raise_if_failed()


def replicated_state(losses, mesh, state, x):
    """Shards of 4 and 1."""
    return value_and_grad(losses, **over(mesh))(
        state, *shard_batch(x, **over(mesh), sizes=(4, 1))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "median"}, r"one of 'mean', 'sum', 'max', 'min'. Got 'median'"),
        ({"method": "broadcast"}, "one of 'all_reduce', 'all_gather'. Got 'broadcast'"),
        ({"data_axis": "batch"}, "must have the axis 'batch'.*axis='data'"),
    ],
)
def test_wrong_options_are_refused(mesh, arguments, message):
    """Before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        value_and_grad(losses_of, mesh(2), **arguments)


@pytest.mark.parametrize(
    ("weights", "count", "message"),
    [
        (None, 7, "multiple of 2 rows.* Got 7 rows. Use `shard_batch"),
        (np.ones(6), 8, r"one per row, shape \(8,\). Got shape \(6,\)"),
        (np.r_[np.ones(7), -1.0], 8, "Got -1.0 for example 7"),
        (np.zeros(8), 8, "must not all be 0"),
    ],
)
def test_wrong_calls_are_refused(problem, weights, count, message):
    """A batch that does not divide, and weights that can be seen to be wrong."""
    params, batch, _ = problem
    fn = value_and_grad(losses_of, replicas=2)
    with pytest.raises(ValueError, match=message):
        fn(params, tuple(part[:count] for part in batch), weights)


def test_a_scalar_loss_is_told_what_to_return(problem, mesh):
    """The commonest mistake of a newcomer."""
    params, batch, _ = problem
    for where in (2, mesh(2)):
        fn = value_and_grad(lambda p, b: losses_of(p, b).mean(), **over(where))
        with pytest.raises(ValueError, match=r"shape \(\).*before their mean or sum"):
            fn(params, batch)


def test_losses_that_are_not_reduced_may_be_reduced_by_hand(problem, mesh):
    """`weighted_mean` on each replica's own mean gives the same as `value_and_grad`."""
    from jdist.reduction import weighted_mean

    params, batch, weights = problem
    shard, whole = PartitionSpec("data"), PartitionSpec()

    def body(w, batch, weights):
        w = jax.lax.pcast(w, "data", to="varying")
        total = weights.sum()
        own = jax.value_and_grad(
            lambda w: (weights * losses_of({"w": w}, batch)).sum() / total
        )(w)
        return weighted_mean(own, total, "data")

    by_hand = jax.jit(
        jax.shard_map(
            body, mesh=mesh(4), in_specs=(whole, shard, shard), out_specs=whole
        )
    )

    def candidate(p, b):
        loss, gradient = by_hand(p["w"], b, weights)
        return loss, {"w": gradient, "unused": np.zeros(2), "steps": None}

    judge("mean")(
        params, batch, {"by hand": candidate}, weights=weights, finite_differences=False
    ).raise_if_failed()


# --- sixteen bits ---


def scaled_rows(w, x):
    """A float16 loss whose sum over some hundred examples is beyond 65504."""
    return x @ w


def entries(mesh):
    """Every way to a whole batch's gradient, as `fn(w, x, weights)` over 3 replicas."""
    sizes, rows = (2048, 0, 1024), 2048

    def run_over(where, run):
        def fn(w, x, weights):
            shards = shard_batch(
                x, **over(where), sizes=sizes, weights=weights, rows=rows
            )
            return run(w, *shards)[:2]

        return fn

    found = {}
    for kind, where in (("devices", mesh(3)), ("vmap", 3)):
        for method in METHODS:
            fn = value_and_grad(scaled_rows, **over(where), method=method)
            found[f"{method}, {kind}"] = run_over(where, fn)
    for name, hook in (("hook", hooks.all_reduce()), ("int8", hooks.int8_per_tensor())):
        found[name] = run_over(3, value_and_grad(scaled_rows, replicas=3, hook=hook))
    found["accumulated"] = run_over(3, gradient_of(scaled_rows, 3, accumulate=4))

    def joined(w, x, weights):
        ends = (0, 2048, 2048, 3072)
        streams = [[(x[a:b], weights[a:b])] if b > a else [] for a, b in pairwise(ends)]
        ((batch, counts),) = Join(streams, replicas=3, rows=rows, weighted=True)
        return gradient_of(scaled_rows, 3)(w, batch, counts)

    def local(w, *shards):
        training = LocalSGD(scaled_rows, optim.sgd(lr=2.0**-10), replicas=3, period=1)
        state, loss = training.step(training.init(w), *shards)
        # Of numbers below 1, so that the difference is as exact as the gradient.
        return loss, (w - training.average(state)) * 1024

    return found | {"Join": joined, "local_sgd": run_over(3, local)}


def test_a_float16_mean_is_never_a_sum_first(rng, mesh):
    """Finite wherever the mean is, and near it, by every way; the sum is 28 x 65504.

    Bounds: float16 holds a gradient of 600 to 1/4, and one step of int8 is 650 / 255.
    """
    x = rng.uniform(550, 650, size=(3072, 3)).astype(np.float16)
    weights = rng.uniform(0.5, 400, size=3072).astype(np.float32)
    w = jnp.ones(3, jnp.float16) / 4
    expected = np.average(x.astype(float), axis=0, weights=weights.astype(float))
    for name, fn in entries(mesh).items():
        loss, gradient = fn(w, x, weights)
        assert gradient.dtype == jnp.float16, name
        bound = 3 if name == "int8" else 0.75
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=bound, err_msg=name)
        np.testing.assert_allclose(loss, expected.sum() / 4, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("wide", [False, True])
def test_weights_beyond_the_devices_precision_are_refused(problem, wide):
    """Their total would be infinite or 0, and the mean NaN."""
    params, batch, _ = problem
    with jax.enable_x64(wide):
        fn = value_and_grad(losses_of, replicas=2)
        top = 1e308 if wide else 3e38
        for weight, shown in ((top, "inf" if wide else "2.4e+39"), (1e-320, "8e-320")):
            weights = np.full(8, weight)
            message = rf"must have a total between .*Got {re.escape(shown)}"
            with pytest.raises(ValueError, match=message):
                fn(params, batch, weights)
            with pytest.raises(ValueError, match=message):
                shard_batch(batch, replicas=2, weights=weights)


@pytest.mark.parametrize("kind", [list, tuple])
def test_weights_in_a_list_under_jit(kind):
    """Converted there too, where their numbers are traced."""
    x, weights = np.arange(10.0).reshape(5, 2) / 7, kind([1.0, 0.0, 2.5, 0.25, 3.0])
    fn = value_and_grad(lambda w, x: (x @ w) ** 2, replicas=1)
    params = jnp.array([0.3, -0.4])
    expected = fn(params, x, np.array(weights))
    for one, two in zip(jax.jit(fn)(params, x, weights), expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)
    integers = jax.jit(fn)(params, x, kind([2, 1, 0, 1, 3]))
    plain = fn(params, x, np.array([2.0, 1, 0, 1, 3], np.float32))
    np.testing.assert_allclose(integers[1], plain[1], rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"one per row, shape \(5,\). Got shape \(2,\)"
    ):
        jax.jit(fn)(params, x, kind([1.0, 2.0]))

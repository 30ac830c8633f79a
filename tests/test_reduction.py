"""Partials combine to the whole batch's gradient, however the batch is split."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import reduction, verify
from jdist.reduction import REDUCTIONS
from tests.cotangents import rule

SHARD, WHOLE = PartitionSpec("data"), PartitionSpec()


def losses_of(params, batch):
    """Non-linear, with a parameter used twice and one unused."""
    hidden = jnp.tanh(batch @ params["w"])
    return ((hidden @ params["w"].T - batch) ** 2).sum(axis=1) + params["b"] * hidden[
        :, 0
    ]


@pytest.fixture
def problem(rng):
    """Parameters, 9 examples of 4 features, unequal weights with a zero."""
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 3))),
        "b": jnp.asarray(rng.normal()),
        "unused": jnp.asarray(rng.normal(size=2)),
        "count": jnp.arange(3),
    }
    weights = rng.uniform(0.5, 3, size=9)
    weights[2] = 0
    return params, jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(weights)


@cache
def judge(name):
    """One judge for each reduction, compiled once."""
    return verify.gradients_judge(losses_of, reduction=name)


def reduce_whole(params, batch, weights, name):
    """All examples as one partial."""
    return reduce_of(losses_of, params, batch, weights, name)


def reduce_of(loss_fn, params, batch, weights, name):
    """All examples as one partial, with their shares of the total."""
    weights = reduction.shares(weights, name)
    whole = reduction.partial(loss_fn, params, batch, weights, name)
    return reduction.finish(whole, name, like=params)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_partial_is_the_plain_gradient(problem, name):
    """Without any split, against `jax.value_and_grad` by the judge."""
    params, batch, weights = problem
    candidate = {"partial": lambda p, b: reduce_whole(p, b, weights, name)}
    report = judge(name)(params, batch, candidate, weights=weights)
    report.raise_if_failed()
    assert {leaf.path for leaf in report.leaves} == {"(loss)", "b", "unused", "w"}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("cut", [(4,), (0, 9), (1, 3, 3, 8)])
def test_partials_of_any_split_combine_to_the_whole(problem, name, cut):
    """Also when a part is empty, or holds only examples of weight 0."""
    params, batch, weights = problem

    def split(p, b):
        own = np.split(reduction.shares(weights, name), cut)
        parts = [
            reduction.partial(losses_of, p, rows, w, name)
            for rows, w in zip(np.split(b, cut), own, strict=True)
            if len(rows)
        ]
        whole = parts[0]
        for part in parts[1:]:
            whole = reduction.combine(whole, part, name)
        return reduction.finish(whole, name, like=p)

    report = judge(name)(
        params, batch, {"split": split}, weights=weights, finite_differences=False
    )
    report.raise_if_failed()


# JAX's tutorial on custom rules.
clipped = rule(lambda g: jnp.clip(g, -0.03, 0.02))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("examples", [5, 6, 7, 11])
def test_a_rule_that_clips_sees_the_whole_batchs_cotangent(rng, name, examples):
    """As under `jax.grad` of the reduced loss, with unequal weights."""
    w = jnp.asarray(rng.normal(size=(4, 3)))
    x = jnp.asarray(rng.normal(size=(examples, 4)))
    weights = jnp.asarray(rng.uniform(0.5, 3, size=examples))

    def losses(w, x):
        return (jnp.tanh(clipped(x @ w)) ** 2).sum(axis=-1)

    def whole(w):
        found = losses(w, x)
        if name in ("max", "min"):
            return getattr(jnp, name)(found)
        weighted = (weights * found).sum()
        return weighted / weights.sum() if name == "mean" else weighted

    loss, gradient = jax.value_and_grad(whole)(w)
    found = reduce_of(losses, w, x, weights, name)
    np.testing.assert_allclose(found[0], loss, rtol=1e-12)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_excluded_example_reaches_no_backward_pass(rng, name):
    """Its loss is 0 / 0, whose derivative no seed of 0 makes finite."""
    x = jnp.asarray(rng.normal(size=(7, 3)))
    tokens = jnp.asarray([2.0, 1.0, 0.0, 3.0, 0.0, 1.0, 5.0])
    w = jnp.asarray(rng.normal(size=3))

    def losses(w, batch):
        x, tokens = batch
        return jnp.tanh(x @ w) ** 2 * tokens / tokens

    found = reduce_of(losses, w, (x, tokens), tokens, name)
    kept = np.flatnonzero(tokens)
    alone = reduce_of(losses, w, (x[kept], tokens[kept]), tokens[kept], name)
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], alone[1], rtol=1e-12)
    part = reduction.partial(losses, w, (x[2:3], tokens[2:3]), tokens[2:3], name)
    assert not part.gradient.any()


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1), (4,)])
def test_ties_share_equally_over_the_whole_batch(name, sizes):
    """Three of four examples tie, in every arrangement over the parts."""
    sign = 1.0 if name == "max" else -1.0
    # Exact numbers: a tie must be a tie in every program.
    for rows in itertools.permutations([5.0, 5.0, 5.0, 2.0]):
        batch = sign * jnp.array(rows)[:, None] * jnp.array([[1.0, 2.0]])
        w = jnp.array([1.0, 0.5])
        start, parts = 0, []
        for size in sizes:
            part = batch[start : start + size]
            parts.append(
                reduction.partial(lambda w, x: x @ w, w, part, jnp.ones(size), name)
            )
            start += size
        whole = parts[0]
        for part in parts[1:]:
            whole = reduction.combine(whole, part, name)
        loss, gradient = reduction.finish(whole, name, like=w)
        assert loss == sign * 10
        np.testing.assert_array_equal(gradient, sign * np.array([5.0, 10.0]))
        assert whole.weight == 3


def test_ties_agree_with_jnp_max():
    """jnp.max shares a tie equally too; the same convention on one device."""
    x = jnp.array([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0]])
    w = jnp.array([0.5, 0.5])
    expected = jax.grad(lambda w: jnp.max(x @ w))(w)
    whole = reduction.partial(lambda w, x: x @ w, w, x, jnp.ones(3), "max")
    np.testing.assert_array_equal(reduction.finish(whole, "max", w)[1], expected)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("wrong", [np.nan, -1.0])
def test_negative_and_nan_weights_give_nan(problem, name, wrong):
    """In whichever part the bad weight is, the whole is NaN; nothing is hidden."""
    params, batch, weights = problem
    bad = reduction.shares(weights.at[7].set(wrong), name)
    parts = [
        reduction.partial(losses_of, params, batch[rows], bad[rows], name)
        for rows in (slice(0, 5), slice(5, 9))
    ]
    for pair in (parts, parts[::-1]):
        whole = reduction.combine(*pair, name)
        loss, gradient = reduction.finish(whole, name, like=params)
        assert np.isnan(loss)
        assert np.isnan(gradient["w"]).all()


@pytest.mark.parametrize("name", ["mean", "max", "min"])
def test_without_any_weight_there_is_no_loss_and_no_gradient(problem, name):
    """An average of nothing is not a number; no example moves the parameters."""
    params, batch, _ = problem
    loss, gradient = reduce_whole(params, batch, jnp.zeros(9), name)
    assert np.isnan(loss)
    assert not gradient["w"].any()


def test_a_sum_of_nothing_is_zero(problem):
    """The one reduction that divides by nothing."""
    params, batch, _ = problem
    loss, gradient = reduce_whole(params, batch, jnp.zeros(9), "sum")
    assert loss == 0
    assert not gradient["w"].any()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_excluded_infinite_loss_does_not_matter(name):
    """A loss that is infinite at weight 0 leaves loss and gradient finite."""
    x = jnp.array([1.0, jnp.inf, 3.0])
    weights = jnp.array([1.0, 0.0, 2.0])
    loss, gradient = reduce_of(lambda w, x: w + x, jnp.array(2.0), x, weights, name)
    assert loss == {"mean": 13 / 3, "sum": 13, "max": 5, "min": 3}[name]
    assert gradient == (3 if name == "sum" else 1)


def test_a_nan_loss_is_never_lost():
    """A maximum that has seen NaN is NaN, although comparisons with NaN are false."""
    w, x = jnp.array(2.0), jnp.array([1.0, jnp.nan, 3.0])
    for name in REDUCTIONS:
        parts = [
            reduction.partial(lambda w, x: w * x, w, row[None], jnp.ones(1), name)
            for row in x
        ]
        whole = reduction.combine(
            reduction.combine(parts[0], parts[1], name), parts[2], name
        )
        loss, gradient = reduction.finish(whole, name, like=w)
        assert np.isnan(loss)
        assert np.isnan(gradient)


def test_sixteen_bit_gradients_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16; 64 parts of 1 on top of 256 must not vanish."""
    w = jnp.array(1.0, jnp.bfloat16)
    x = jnp.array([256.0] + [1.0] * 64, jnp.bfloat16)
    parts = [
        reduction.partial(lambda w, x: w * x, w, row[None], jnp.ones(1), "sum")
        for row in x
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = reduction.combine(whole, part, "sum")
    loss, gradient = reduction.finish(whole, "sum", like=w)
    assert loss == 320
    assert loss.dtype == jnp.float32
    assert gradient == 320
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda w, x: jnp.mean(x) * w,
            r"must return one real loss per example, floating, shape \(4,\). Got "
            r"float64 of shape \(\)\. Return .* losses before their mean or sum",
        ),
        (lambda w, x: x[:, None] * w, r"Got float64 of shape \(4, 1\)"),
        (lambda w, x: x[:3] * w, r"Got float64 of shape \(3,\)"),
        (lambda w, x: (x * w, x), "Got a tuple. Return a single array"),
        (lambda w, x: jnp.arange(4), r"real .* floating.* Got int64 of shape \(4,\)"),
        (lambda w, x: x * w > 1, r"Got bool of shape \(4,\)"),
        (lambda w, x: (x * w).astype(complex), r"Got complex128 of shape \(4,\)"),
    ],
)
def test_losses_of_the_wrong_shape_are_refused(loss_fn, message):
    """With what was returned, and what to return instead."""
    with pytest.raises(ValueError, match=message):
        reduction.partial(loss_fn, jnp.array(1.0), jnp.arange(4.0), jnp.ones(4), "mean")


# --- weighted_mean ---


def shares(rng, count=4):
    """Per replica: a gradient tree and its weight."""
    tree = {"w": rng.normal(size=(count, 2, 3)), "z": rng.normal(size=(count, 5)) * 1j}
    weights = np.array([5.0, 0.0, 2.5, 1.0])[:count]
    expected = jax.tree.map(lambda g: np.tensordot(weights, g, 1) / weights.sum(), tree)
    return jax.tree.map(jnp.asarray, tree), jnp.asarray(weights), expected


def close(got, expected):
    """Each row of `got` within the judge's bound of `expected`."""
    for row in range(len(jax.tree.leaves(got)[0])):
        own = jax.tree.map(lambda x, row=row: x[row], got)
        verify.compare(
            jax.tree.map(np.asarray, expected), own, terms=4
        ).raise_if_failed()


@pytest.mark.parametrize("check", [True, False])
def test_weighted_mean_in_shard_map(rng, mesh, check):
    """With and without the check of varying axes."""
    tree, weights, expected = shares(rng)

    def body(tree, weight):
        own = jax.tree.map(lambda x: x[0], tree)
        mean = reduction.weighted_mean(own, weight[0], "data")
        return jax.tree.map(lambda x: x[None], mean)

    # The result is the same everywhere; each replica's copy is returned to see it.
    def copies(tree, weight):
        mean = body(tree, weight)
        return jax.lax.pcast(mean, "data", to="varying") if check else mean

    fn = jax.shard_map(
        copies, mesh=mesh(4), in_specs=(SHARD, SHARD), out_specs=SHARD, check_vma=check
    )
    close(jax.jit(fn)(tree, weights), expected)


@pytest.mark.parametrize("transform", [jax.pmap, jax.vmap])
def test_weighted_mean_in_pmap_and_vmap(rng, transform):
    """By axis name."""
    tree, weights, expected = shares(rng)
    fn = transform(lambda t, w: reduction.weighted_mean(t, w, "i"), axis_name="i")
    close(fn(tree, weights), expected)


def test_weighted_mean_over_two_axes(rng):
    """A tuple of names is one larger axis."""
    tree, weights, expected = shares(rng)
    grid = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), (tree, weights))
    fn = jax.vmap(
        jax.vmap(lambda t, w: reduction.weighted_mean(t, w, ("a", "b")), axis_name="a"),
        axis_name="b",
    )
    got = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), fn(*grid))
    close(got, expected)


@pytest.mark.parametrize("check", [True, False])
def test_the_unsuspected_factor_is_caught(rng, mesh, check):
    """With the check on, gradients of replicated parameters arrive already summed.

    Four devices would give four times the gradient. The sum is refused by leaf; cast
    parameters, and shard_map without the check, give the right mean.
    """
    w = jnp.asarray(rng.normal(size=3))
    x = jnp.asarray(rng.normal(size=(8, 3)))
    mean_loss = lambda w, x: jnp.mean((x @ w) ** 3)  # noqa: E731
    expected = jax.grad(mean_loss)(w, x)

    def naive(w, x):
        grads = {"w": jax.grad(mean_loss)(w, x)}
        return reduction.weighted_mean(grads, jnp.asarray(len(x)), "data")["w"]

    def cast(w, x):
        return naive(jax.lax.pcast(w, "data", to="varying"), x)

    def over_mesh(body):
        return jax.shard_map(
            body,
            mesh=mesh(4),
            in_specs=(WHOLE, SHARD),
            out_specs=WHOLE,
            check_vma=check,
        )

    terms = {"terms": 8, "scale": float(np.abs(expected).max() * 8)}
    verify.compare(expected, over_mesh(cast)(w, x), **terms).raise_if_failed()
    if check:
        message = "leaf w is the same over axis 'data'.*already summed over the axis"
        with pytest.raises(ValueError, match=message):
            over_mesh(naive)(w, x)
    else:
        verify.compare(expected, over_mesh(naive)(w, x), **terms).raise_if_failed()


def test_a_replica_without_weight_contributes_nothing():
    """Not even its NaN, which is what a mean over no examples is."""
    mean = jax.vmap(lambda g, w: reduction.weighted_mean(g, w, "i"), axis_name="i")
    got = mean(jnp.array([1.0, jnp.nan, 4.0]), jnp.array([3.0, 0.0, 1.0]))
    np.testing.assert_array_equal(got, [1.75] * 3)


@pytest.mark.parametrize("weights", [[1, -1, 2], [1, np.nan, 2], [0, 0, 0]])
def test_bad_weights_give_nan_everywhere(weights):
    """On every replica, not only on the one that has it."""
    mean = jax.vmap(lambda g, w: reduction.weighted_mean(g, w, "i"), axis_name="i")
    assert np.isnan(mean(jnp.arange(3.0), jnp.array(weights, float))).all()


def test_integer_weights_and_dtypes_are_kept():
    """Counts of examples may be integers; a bfloat16 gradient stays one."""
    mean = jax.vmap(lambda g, w: reduction.weighted_mean(g, w, "i"), axis_name="i")
    got = mean(jnp.array([1.0, 4.0], jnp.bfloat16), jnp.array([3, 1]))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), [1.75] * 2)


def test_what_cannot_be_averaged_is_refused():
    """A weight per example, and integer leaves."""
    over = lambda g, w: jax.vmap(  # noqa: E731
        lambda g, w: reduction.weighted_mean(g, w, "i"), axis_name="i"
    )(g, w)
    with pytest.raises(ValueError, match=r"one scalar per replica. Got shape \(4,\)"):
        over(jnp.ones(3), jnp.ones((3, 4)))
    with pytest.raises(TypeError, match=r"floating leaves only\. Got int64 at step"):
        over({"step": jnp.arange(3), "w": jnp.ones(3)}, jnp.ones(3))


def test_none_leaves_stay_none():
    """A parameter without a gradient keeps having none."""
    fn = jax.vmap(
        lambda g: reduction.weighted_mean({"a": g, "b": None}, jnp.array(1.0), "i"),
        axis_name="i",
    )
    assert fn(jnp.arange(2.0))["b"] is None


# --- sixteen bits ---


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_do_not_overflow_in_float16(name):
    """8192 examples hold the extreme: their sum is no float16, their mean is."""
    x = jnp.full(8192, 20.0, jnp.float16)
    w = jnp.array(-1.0 if name == "min" else 1.0, jnp.float16)
    loss, gradient = reduce_of(lambda w, x: x * w, w, x, jnp.ones(8192), name)
    assert (float(loss), float(gradient)) == (20 * float(w), 20)
    assert gradient.dtype == jnp.float16


@pytest.mark.parametrize("factor", [2.0**-90, 1.0, 2.0**90])
def test_a_factor_of_all_weights_changes_no_bit(problem, factor):
    """Nor does it let a sum overflow or vanish: a mean's weights are shares."""
    params, batch, weights = jax.tree.map(
        lambda x: x if x.dtype == int else x.astype(jnp.float32), problem
    )
    plain = reduce_whole(params, batch, weights, "mean")
    scaled = weights * jnp.float32(factor)
    assert verify.compare(plain, reduce_whole(params, batch, scaled, "mean")).bit_equal


@pytest.mark.parametrize("total", [1.0, 0.75, 3e38, 1.5e-38, 8192.0, 8193.0])
def test_shares_are_exact_to_rounding(total):
    """At the ends of float32 as well: XLA multiplies by the rounded reciprocal."""
    # Weights below the least normal number count as 0 on a CPU.
    weights = np.float32(total) * np.float32([1 / 2, 1 / 3, 1 / 7] if total > 1 else 1)
    weights = np.atleast_1d(weights)
    whole = np.float32(weights.astype(float).sum())
    found = reduction.shares(jnp.asarray(weights), "mean", whole)
    exact = weights.astype(float) / float(whole)
    np.testing.assert_allclose(found, exact, rtol=2**-23)


def test_bad_totals_are_not_hidden():
    """Their shares are NaN; the weights of other reductions stay as they are."""
    assert not reduction.shares(jnp.zeros(2), "mean").any()
    for weights in ([-1.0, 0.5], [-1.0, 1.0], [np.nan, 1.0], [np.inf, 1.0]):
        assert np.isnan(reduction.shares(jnp.array(weights), "mean")).all()
    for name in ("sum", "max", "min"):
        np.testing.assert_array_equal(
            reduction.shares(jnp.array([3.0, 5.0]), name), [3, 5]
        )


@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize("weight", [257.0, 1.0039, 511.0])
def test_weights_that_a_16_bit_loss_cannot_hold(name, weight):
    """Equal weights count equally; rounded ones kept neither their ratio nor 1.

    The parameter is float32 and only the losses are rounded, so that all that is lost
    is what the cotangents lose.
    """
    x = jnp.ones((7, 3), jnp.float32)

    def losses(w, x):
        return (x @ w).astype(jnp.bfloat16)

    weights = jnp.full(7, weight, jnp.float32)
    _, found = reduce_of(losses, jnp.ones(3, jnp.float32), x, weights, name)
    total = 7 * weight if name == "sum" else 1
    np.testing.assert_allclose(found, total, rtol=1e-6)


def test_shards_of_a_16_bit_loss_count_by_their_exact_weight():
    """B_i / B with B_i that bfloat16 rounds: 257 and 2 * 509 of 1275."""
    parts = [
        reduction.partial(
            lambda w, x: (x * w).astype(jnp.bfloat16),
            jnp.float32(1),
            jnp.full(len(weights), value, jnp.float32),
            reduction.shares(jnp.float32(weights), "mean", 1275),
            "mean",
        )
        for value, weights in ((4.0, [257]), (0.5, [509, 509]))
    ]
    whole = reduction.combine(*parts, "mean")
    _, gradient = reduction.finish(whole, "mean", like=jnp.float32(1))
    exact = (4 * 257 + 0.5 * 2 * 509) / (257 + 2 * 509)
    np.testing.assert_allclose(gradient, exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_weights_are_added_up_in_float32(dtype):
    """1024 weights of 100 are beyond float16, and bfloat16 stops counting at 256."""
    weights = jnp.full(1024, 100).astype(dtype)
    x = jnp.arange(1024.0, dtype=jnp.float32)
    loss, gradient = reduce_of(lambda w, x: x * w, jnp.float32(1), x, weights, "mean")
    np.testing.assert_allclose((loss, gradient), 511.5, rtol=1e-6)
    rows = x.reshape(8, 128).mean(axis=1)
    counts = jnp.full(8, 120).astype(dtype) + jnp.arange(8).astype(dtype)
    mean = jax.vmap(
        lambda g, n: reduction.weighted_mean(g, n, "data"), axis_name="data"
    )(rows, counts)
    exact = np.average(np.asarray(rows), weights=np.arange(120, 128))
    np.testing.assert_allclose(mean, exact, rtol=1e-6)

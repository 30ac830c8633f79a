"""Random ways to add up a gradient: every right one passes, every wrong one fails.

A way is a permutation of the examples, cut into calls of any sizes, in each of which
any examples may be repeated with weight 0, and whose results are added in any order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify

EXAMPLES = 12
WAYS = 6

# Every call has this many rows, so that each loss is compiled once.
ROWS = EXAMPLES


def deep(params, rows):
    """A matrix used twice, a bias, an exponential of the inputs."""
    hidden = jnp.tanh(jnp.exp(rows["x"] / 2) @ params["w"] + params["b"][None])
    return jnp.square(hidden @ params["w"].T).sum(axis=1)


def recurrent(params, rows):
    """Seven steps, through which errors are carried on."""

    def step(state, _):
        return jnp.tanh(state @ params["w"] @ params["w"].T + rows["x"]), None

    last, _ = jax.lax.scan(step, rows["x"], None, length=7)
    return (last.sum(axis=1) + params["b"].sum()) ** 2


def spread(params, rows):
    """Losses over six orders of magnitude, of either sign."""
    size = 10.0 ** jnp.arange(-3, 4, dtype=rows["x"].dtype)[rows["kind"]]
    return size * jnp.sin((rows["x"] @ params["w"]).sum(axis=1) + params["b"][0])


def cancelling(params, rows):
    """Gradients of neighbours that are nearly opposite."""
    sign = jnp.where(rows["kind"] % 2 == 0, 1, -1).astype(rows["x"].dtype)
    return sign * jnp.square(rows["x"] @ params["w"] + params["b"][None]).sum(axis=1)


LOSSES = [deep, recurrent, spread, cancelling]


@functools.cache
def given(dtype):
    """Parameters, a batch and weights; one example has weight 0."""
    rng = np.random.default_rng(4)
    params = {"w": rng.normal(size=(4, 3)) / 2, "b": rng.normal(size=3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    x = jnp.asarray(rng.normal(size=(EXAMPLES, 4)), dtype)
    batch = {"x": x, "kind": jnp.asarray(rng.integers(7, size=EXAMPLES))}
    weights = rng.uniform(0.5, 2, size=EXAMPLES)
    weights[5] = 0
    return params, batch, weights


@functools.cache
def judge(loss):
    """Compiled once for each loss and dtype."""
    return verify.gradients_judge(loss)


@functools.cache
def part(loss):
    """The weighted sum of some rows, and its gradient."""
    return jax.jit(
        jax.value_and_grad(lambda p, rows, own: jnp.sum(own * loss(p, rows)))
    )


def calls(rng):
    """The rows and the share of each call: a random cut of a random permutation."""
    cuts = np.sort(rng.choice(np.arange(1, EXAMPLES), rng.integers(0, 5), False))
    for own in np.split(rng.permutation(EXAMPLES), cuts):
        # The rest of the call repeats rows of its own.
        rows = np.concatenate([own, rng.choice(own, ROWS - len(own))])
        order = rng.permutation(ROWS)
        counted = np.where(np.arange(ROWS) < len(own), 1.0, 0.0)
        yield rows[order], counted[order]


def way(loss, weights, seed, defect=lambda made, rng: made):
    """A candidate; `defect` changes the list of its calls."""

    def candidate(params, batch):
        rng = np.random.default_rng(seed)
        made = defect(list(calls(rng)), rng)
        total = None
        for rows, counted in made:
            own = jnp.asarray(counted * weights[rows] / weights.sum(), batch["x"].dtype)
            few = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            found = part(loss)(params, few, own)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return total

    return candidate


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_right_ways_pass(loss, dtype):
    """In every precision."""
    with jax.enable_x64(dtype == "float64"):
        params, batch, weights = given(dtype)
        ways = {f"way {n}": way(loss, weights, n) for n in range(WAYS)}
        report = judge(loss)(
            params, batch, ways, weights=weights, finite_differences=False
        )
    assert not report.failures, str(report)
    assert dtype == "bfloat16" or report.ok


def counted_rows(made, weights):
    """Every place of an example that counts, as (call, row)."""
    return [
        (c, r)
        for c, (rows, counted) in enumerate(made)
        for r in range(ROWS)
        if counted[r] and weights[rows[r]]
    ]


def times(factor):
    """One example counts so many times."""

    def defect(made, rng, weights):
        places = counted_rows(made, weights)
        c, r = places[rng.integers(len(places))]
        rows, counted = made[c]
        made[c] = rows, np.where(np.arange(ROWS) == r, factor, counted)
        return made

    return defect


def replaced(made, rng, weights):
    """One example is another one."""
    places = counted_rows(made, weights)
    c, r = places[rng.integers(len(places))]
    rows, counted = made[c]
    other = rng.choice([e for e in range(EXAMPLES) if e not in (rows[r], 5)])
    made[c] = np.where(np.arange(ROWS) == r, other, rows), counted
    return made


def call_twice(made, rng, weights):
    """The call with most examples is added twice."""
    return [*made, max(made, key=lambda each: each[1].sum())]


def padding_counts(made, rng, weights):
    """The repeated rows of a call are not excluded."""
    small = min(range(len(made)), key=lambda c: made[c][1].sum())
    rows, counted = made[small]
    if counted.all():
        return [*made, (rows, counted)]
    made[small] = rows, np.ones(ROWS)
    return made


DEFECTS = {
    "an example lost": times(0.0),
    "an example doubled": times(2.0),
    "an example of the other sign": times(-1.0),
    "an example replaced": replaced,
    "a call doubled": call_twice,
    "padding that counts": padding_counts,
}


@pytest.mark.parametrize("loss", [deep, recurrent, cancelling])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DEFECTS)
def test_wrong_ways_fail(loss, dtype, name):
    """Each of several random ones, in the gradient and not in the loss alone."""
    with jax.enable_x64(dtype == "float64"):
        params, batch, weights = given(dtype)
        defect = functools.partial(DEFECTS[name], weights=weights)
        ways = {f"way {n}": way(loss, weights, n, defect) for n in range(3)}
        report = judge(loss)(
            params, batch, ways, weights=weights, finite_differences=False
        )
    for one in ways:
        wrong = {row.path for row in report.of(one).failures}
        assert wrong & {"w", "b"}, str(report)

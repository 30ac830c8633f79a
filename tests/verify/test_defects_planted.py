"""The public list of planted defects: what each makes of a right step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, verify
from jdist.verify import defects
from jdist.verify.defects import NoEffect, NotApplicable, Traits

EXAMPLES, SIZE = 11, 3
BY_NAME = {defect.name: defect for defect in defects.ALL}
KNOWN = Traits(weights="mask", tied="shared")


def losses(params, batch):
    """A square matrix used twice, two of one shape, noise, and an unused leaf."""
    hidden = jnp.tanh(batch["x"] @ params["shared"] + params["bias"][None])
    noise = jax.vmap(lambda key: jax.random.normal(key, (4,), "float32"))(batch["key"])
    second = jnp.tanh(hidden @ params["shared"].T + 0.1 * noise) @ params["second"]
    scores = jax.nn.log_softmax(second @ params["readout"])
    return -jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]


def weighted(params, batch):
    """The weighted mean."""
    own = losses(params, batch)
    return jnp.sum(batch["mask"] * own) / jnp.sum(batch["mask"])


def unnamed(params, batch):
    """The plain mean, of a batch in which nothing is a weight."""
    return jnp.mean(losses(params, batch))


def summed(params, batch):
    """The plain sum."""
    return jnp.sum(losses(params, batch))


STEPS = {fn: jax.jit(jax.value_and_grad(fn)) for fn in (weighted, unnamed, summed)}


@pytest.fixture(scope="module")
def data():
    """Parameters and a batch of eleven examples, one of weight 0."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "shared": normal(4, 4) / 2,
        "second": normal(4, 4) / 2,
        "bias": normal(4) / 2,
        "readout": normal(4, 3),
        "unused": normal(2),
    }
    mask = rng.uniform(0.5, 2.0, size=EXAMPLES).astype(np.float32)
    mask[4] = 0
    batch = {
        "x": normal(EXAMPLES, 4),
        "label": jnp.asarray(rng.integers(3, size=EXAMPLES)),
        "mask": jnp.asarray(mask),
        "key": jax.random.split(jax.random.key(5), EXAMPLES),
    }
    return params, batch


@pytest.fixture(scope="module")
def terms(data):
    """Each example's own loss and gradient, in float64."""
    params, batch = data

    def one(p, example):
        return losses(p, jax.tree.map(lambda x: x[None], example))[0]

    each = jax.jit(jax.vmap(jax.value_and_grad(one), (None, 0)))(params, batch)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), each)


def total(terms, weights):
    return jax.tree.map(lambda x: np.tensordot(weights, x, axes=1), terms)


def close(found, expected):
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), found, expected
    )


@pytest.fixture(scope="module")
def judged(data):
    """The judge's report on the right step and on each wrong one."""
    params, batch = data
    planted = {
        d.name: d.plant(STEPS[weighted], KNOWN)
        for d in defects.GRADIENT
        if d.name != "stale parameters"
    }
    report = verify.gradients(
        losses,
        params,
        batch,
        {"right": STEPS[weighted], **planted},
        weights=batch["mask"],
        finite_differences=False,
    )
    assert all(step.size > 0 for step in planted.values())
    return report


OF_ONE_LEAF = {
    "negated leaf": "it is -1 times the reference",
    "zero leaf": "it is 0 times the reference",
    "missing leaf": "got None",
    "NaN": "not finite",
    "wrong entry": "off by",
    "transposed leaf": "off by",
    "noise in an unused leaf": "off by",
    "tied leaf counted twice": "it is 2 times the reference",
}


OF_ALL = {
    "factor 1.001": "it is 1.001 times the reference",
    "factor 1.1": "it is 1.1 times the reference",
    "sum for mean": "times the reference",
}


@pytest.mark.parametrize("name", [d.name for d in defects.GRADIENT])
def test_the_judge_finds_each(judged, data, name):
    assert judged.of("right").ok
    if name == "stale parameters":
        return test_stale_parameters(data)
    failing = judged.of(name).failures
    if name in OF_ONE_LEAF:
        (leaf,) = failing
        assert OF_ONE_LEAF[name] in leaf.problem
    else:
        assert len(failing) >= 1
        assert any(OF_ALL.get(name, "off by") in leaf.problem for leaf in failing)
    if name == "noise in an unused leaf":
        assert leaf.path == "unused"
    if name == "tied leaf counted twice":
        assert leaf.path == "shared"
    if name == "swapped leaves":
        words = {row.path: row.problem.rpartition(" ")[2] for row in failing}
        assert words == {"second": "shared", "shared": "second"}


def parts():
    return np.split(np.arange(EXAMPLES), range(SIZE, EXAMPLES, SIZE))


def rows_given(chosen):
    return np.isin(np.arange(EXAMPLES), chosen).astype(float)


@pytest.mark.parametrize("fn", STEPS, ids=lambda fn: fn.__name__)
def test_parts_are_what_they_say(data, terms, fn):
    """Against each example's own gradient, for weights, for a mean and for a sum."""
    params, batch = data
    traits = Traits(
        weights="mask" if fn is weighted else None,
        reduction="sum" if fn is summed else "mean",
    )
    w = np.asarray(batch["mask"], float) if fn is weighted else np.ones(EXAMPLES)
    whole = w if fn is summed else w / w.sum()

    def wrong(name):
        return BY_NAME[name].plant(STEPS[fn], traits)(params, batch)

    def is_one_of(name, expected):
        found = np.asarray(wrong(name)[1]["second"])
        off = [np.abs(found - total(terms, e)[1]["second"]).max() for e in expected]
        close(wrong(name), total(terms, expected[int(np.argmin(off))]))

    lost = [whole * (1 - rows_given(own)) for own in parts()]
    is_one_of("lost micro-batch", lost)
    is_one_of("doubled micro-batch", [2 * whole - own for own in lost])
    of_each = [whole * (1 - rows_given(i)) for i in np.flatnonzero(w)]
    is_one_of("lost example", of_each)
    is_one_of("doubled example", [2 * whole - own for own in of_each])
    alone = [w * rows_given(own) for own in parts()]
    alone = alone if fn is summed else [own / own.sum() for own in alone]
    is_one_of("one shard only", alone)
    other = w.sum() if fn is not summed else 1 / w.sum()
    close(wrong("sum for mean"), total(terms, whole * other))
    if fn is summed:
        with pytest.raises(NotApplicable, match="the step returns a sum"):
            wrong("mean of means")
    else:
        close(wrong("mean of means"), total(terms, sum(alone) / len(alone)))


def test_weights_ignored(data, terms):
    params, batch = data
    found = BY_NAME["weights ignored"].plant(STEPS[weighted], KNOWN)(params, batch)
    close(found, total(terms, np.full(EXAMPLES, 1 / EXAMPLES)))


def test_bfloat16_accumulation(data, terms):
    """Off by less than a few roundings of bfloat16, and by more than float32's."""
    params, batch = data
    planted = BY_NAME["bfloat16 accumulation"].plant(STEPS[weighted], KNOWN)
    loss, found = planted(params, batch)
    right = STEPS[weighted](params, batch)
    assert loss == right[0]
    for path, leaf in found.items():
        assert leaf.dtype == jnp.float32
        scale = np.abs(np.asarray(right[1][path])).max() + 1e-30
        assert np.abs(leaf - right[1][path]).max() < 8 * 2**-8 * max(scale, 1)
    assert 1e-4 < planted.size < 0.1


def test_keys(data):
    """Other keys change the noise; one key for all is the first one's."""
    params, batch = data
    step = STEPS[weighted]
    first = {**batch, "key": batch["key"][np.zeros(EXAMPLES, int)]}
    found = BY_NAME["one key for all"].plant(step, KNOWN)(params, batch)
    close(found, step(params, first))
    assert BY_NAME["other keys"].plant(step, KNOWN)(params, batch)[0] != found[0]


def test_plain_keys_and_keys_behind_the_batch():
    """Keys as integers by their path; typed ones also as an argument of their own."""

    def plain(w, batch):
        def noise(key):
            return jax.random.normal(jax.random.wrap_key_data(key), (), "float32")

        return jnp.mean(w * jax.vmap(noise)(batch["bits"])), w

    def behind(w, x, key):
        return jnp.sum(w * jax.random.normal(key, x.shape, "float32")), w

    w = jnp.float32(2)
    bits = jax.random.key_data(jax.random.split(jax.random.key(0), 3))
    other = BY_NAME["other keys"]
    named = Traits(keys="bits")
    assert (
        other.plant(plain, named).plant
        if False
        else other.plant(plain, named)(w, {"bits": bits})[0]
        != plain(w, {"bits": bits})[0]
    )
    key = jax.random.key(1)
    x = jnp.zeros(3, jnp.float32)
    assert other.plant(behind)(w, x, key)[0] != behind(w, x, key)[0]
    with pytest.raises(NotApplicable, match="no random key for each example"):
        BY_NAME["one key for all"].plant(behind)(w, x, key)


def test_stale_parameters(data):
    """Right in the first call; then with the parameters of the call before."""
    params, batch = data
    step = STEPS[weighted]
    other = jax.tree.map(lambda x: x * 1.5, params)
    planted = BY_NAME["stale parameters"].plant(step, KNOWN)
    close(planted(params, batch), step(params, batch))
    assert planted.size == 0
    close(planted(other, batch), step(params, batch))
    assert planted.size > 0.01
    assert "no call before" in str(planted.refusals[0])


def test_the_step_sees_one_shape(data):
    """A step that is compiled for its shapes, or a mesh, is never asked for others."""
    params, batch = data
    seen = set()

    def step(*arguments):
        seen.add(str(jax.tree.map(lambda x: (x.shape, x.dtype), arguments)))
        return STEPS[unnamed](*arguments)

    for traits in (Traits(tied="bias"), Traits(tied="bias", micro_batches=2)):
        for defect in defects.GRADIENT:
            if defect.name not in ("weights ignored", "stale parameters"):
                defect.plant(step, traits)(params, batch)
    assert len(seen) == 1


def constant(**leaves):
    """A step whose gradient is given."""
    arrays = {k: jnp.asarray(v, jnp.float32) for k, v in leaves.items()}
    return lambda params, batch: (jnp.float32(1), arrays)


REFUSED = {
    "swapped leaves": (constant(a=[1.0], b=[1.0, 2.0]), "no two leaves of one shape"),
    "transposed leaf": (constant(a=[1.0, 2.0], b=[[1.0, 2.0]]), "no matrix"),
    "negated leaf": (constant(a=[0.0]), "no leaf that is not all 0"),
    "noise in an unused leaf": (constant(a=[1.0]), "no leaf that is all 0"),
    "tied leaf counted twice": (constant(a=[1.0]), r"name it, Traits\(tied=\)"),
    "weights ignored": (constant(a=[1.0]), r"name them, Traits\(weights=\)"),
    "other keys": (constant(a=[1.0]), "no typed random keys"),
    "lost micro-batch": (constant(a=[1.0]), "no two micro-batches"),
    "lost example": (constant(a=[1.0]), "no two examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_lacks_is_said(name):
    """Instead of planting nothing."""
    step, words = REFUSED[name]
    with pytest.raises(NotApplicable, match=words):
        BY_NAME[name].plant(step)(None, jnp.ones((1, 2), jnp.float32))


def test_what_changes_nothing_is_said(data):
    params, batch = data
    even = {**batch, "mask": jnp.full(EXAMPLES, 0.5, "float32")}
    step = STEPS[weighted]
    each = Traits(weights="mask", micro_batches=EXAMPLES)
    with pytest.raises(NoEffect, match="all have the same weight"):
        BY_NAME["mean of means"].plant(step, each)(params, even)
    with pytest.raises(NoEffect, match="every weight is the same"):
        BY_NAME["weights ignored"].plant(step, KNOWN)(params, even)
    first = np.arange(EXAMPLES) < 2
    ones = {**even, "mask": jnp.asarray(0.5 * first, "float32")}
    with pytest.raises(NoEffect, match="add up to 1"):
        BY_NAME["sum for mean"].plant(step, KNOWN)(params, ones)
    # bfloat16 has eight digits, and 1.001 times a number rounds back to it.
    narrow = {"a": jnp.asarray([1.5, -3.0], jnp.bfloat16)}
    with pytest.raises(NoEffect, match="bit for bit"):
        BY_NAME["factor 1.001"].plant(lambda p, b: (1.0, narrow))(params, even)


def test_what_cannot_be_altered_is_refused(data):
    """Traced calls, donated arguments, too few arguments, other results."""
    params, batch = data
    planted = BY_NAME["factor 1.1"].plant(STEPS[weighted])
    with pytest.raises(NotApplicable, match="compile the step, not its twin"):
        jax.jit(planted)(params, batch)
    with pytest.raises(TypeError, match="2 arguments at least"):
        planted(params)
    with pytest.raises(TypeError, match=r"must return \(loss, gradient\). Got a dict"):
        BY_NAME["factor 1.1"].plant(lambda p, b: p)(params, batch)
    donating = jax.jit(lambda p, b: (1.0, {"a": 2 * p["a"]}), donate_argnums=0)
    with pytest.raises(NotApplicable, match="donates its arguments"):
        BY_NAME["lost example"].plant(donating)({"a": jnp.ones(3)}, batch)
    with pytest.raises(
        ValueError, match=r"`Traits\(weights=...\)` must be one of 'key'"
    ):
        BY_NAME["lost example"].plant(STEPS[weighted], Traits(weights="nope"))(
            params, batch
        )
    ragged = {**batch, "x": batch["x"][:3]}
    with pytest.raises(NotApplicable, match="x: 3"):
        BY_NAME["lost example"].plant(lambda p, b: (1.0, p))(params, ragged)
    with pytest.raises(NotApplicable, match="no step of kind 'gradient'"):
        BY_NAME["count off by one"].plant(STEPS[weighted])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "step"}, r"`Traits\(kind=...\)` must be one of"),
        ({"reduction": "max"}, r"`Traits\(reduction=...\)` must be one of"),
        ({"micro_batches": 1}, r"`Traits\(micro_batches=...\)` must be at least 2"),
    ],
)
def test_wrong_traits(wrong, words):
    with pytest.raises(ValueError, match=words):
        Traits(**wrong)


# --- training steps ---

ADAM = optim.adam(lr=0.1)
TRAINING = Traits(kind="training", weights="mask")


@jax.jit
def train(params, state, batch):
    return ADAM.step(params, STEPS[weighted](params, batch)[1], state)


@pytest.fixture(scope="module")
def started(data):
    """A state after one step, so that its count is no longer 0."""
    params, batch = data
    return *train(params, ADAM.init(params), batch), batch


def planted(name, *arguments):
    return BY_NAME[name].plant(train, TRAINING)(*arguments)


def test_the_size_of_a_step(started):
    params, _, _ = started
    right = train(*started)[0]
    for factor in (1.001, 1.1):
        found, _ = planted(f"learning rate times {factor}", *started)
        step = jax.tree.map(lambda p, q, f=factor: p + f * (q - p), params, right)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, step)


def test_a_state_in_bfloat16(started):
    """Its floats keep their dtypes; integers and parameters are the right ones."""
    right, after = train(*started)
    found, state = planted("state in bfloat16", *started)
    assert jax.tree.map(np.array_equal, found, right) == jax.tree.map(
        lambda _: True, right
    )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
    for got, own in pairs:
        assert got.dtype == own.dtype
        wanted = own
        if jnp.issubdtype(own.dtype, jnp.floating):
            wanted = own.astype(jnp.bfloat16).astype(own.dtype)
        assert np.array_equal(got, wanted)
    with pytest.raises(NotApplicable, match="no floats of more than 16 bits"):
        BY_NAME["state in bfloat16"].plant(lambda p, s, b: (p, ()), TRAINING)(*started)


def test_the_optimizers_count(started):
    """Computed with a count one too high, which goes on counting rightly."""
    params, state, batch = started
    gradient = STEPS[weighted](params, batch)[1]
    ahead = {k: s._replace(step=s.step + 1) for k, s in state.items()}
    expected, _ = ADAM.step(params, gradient, ahead)
    found, after = planted("count off by one", *started)
    close(found, expected)
    assert {k: int(s.step) for k, s in after.items()} == dict.fromkeys(state, 2)
    with pytest.raises(NotApplicable, match="no count"):
        BY_NAME["count off by one"].plant(lambda p, s, b: (p, s), TRAINING)(*started)


def test_the_optimizers_state_is_lost(started):
    state = started[1]
    found, after = planted("state not kept", *started)
    close((found, after), (train(*started)[0], state))


def test_a_leaf_left_behind(started):
    params, *_ = started
    right, (found, _) = train(*started)[0], planted("leaf left behind", *started)
    kept = [k for k in params if np.array_equal(found[k], params[k])]
    moved = [k for k in params if np.array_equal(found[k], right[k])]
    assert len([k for k in kept if k not in moved]) == 1
    assert set(kept) | set(moved) == set(params)
    still = BY_NAME["leaf left behind"].plant(lambda p, s, b: (p, s), TRAINING)
    with pytest.raises(NoEffect, match="no parameter moves"):
        still(*started)


def test_a_step_clipped_leaf_by_leaf():
    """Of norms 4 and 3, to half of 5."""

    def step(params, state, batch):
        return jax.tree.map(lambda p: p + jnp.asarray([3.0, 0.0]), params), state

    def uneven(params, state, batch):
        return {"a": params["a"] + 4.0, "b": params["b"] + 3.0}, state

    old = {"a": jnp.asarray([1.0]), "b": jnp.asarray([1.0])}
    clipped = BY_NAME["step clipped leaf by leaf"]
    found, _ = clipped.plant(uneven, TRAINING)(old, (), None)
    close(found, {"a": jnp.asarray([3.5]), "b": jnp.asarray([3.5])})
    four = {k: jnp.asarray([1.0, 1.0]) for k in "abcde"}
    with pytest.raises(NoEffect, match="bit for bit"):
        clipped.plant(step, TRAINING)(four, (), None)


def test_a_stale_training_step(started):
    """The old parameters' step, taken from the new ones."""
    params, state, batch = started
    old = jax.tree.map(lambda p: p * 0.5, params)
    stale = BY_NAME["stale parameters"].plant(train, TRAINING)
    stale(old, state, batch)
    found, _ = stale(params, state, batch)
    step = jax.tree.map(lambda q, p: q - p, train(old, state, batch)[0], old)
    close(found, jax.tree.map(jnp.add, params, step))


def test_wrong_batches_of_a_training_step(started):
    """The same arguments' defects as of a gradient."""
    right = train(*started)[0]
    for name in ("one example for another", "weights ignored", "other keys"):
        found, _ = planted(name, *started)
        assert np.abs(found["second"] - right["second"]).max() > 1e-5

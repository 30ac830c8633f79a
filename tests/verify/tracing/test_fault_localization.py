"""The first wrong value: defects are named where they were planted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import VerificationError, verify
from jdist.verify.tracing import shares
from tests.verify.tracing.model import (
    EXAMPLES,
    UNCOUNTED,
    accumulated,
    batch,
    losses,
    parameters,
    stretched,
    weights,
)

COUNTED = tuple(e for e in range(EXAMPLES) if e != UNCOUNTED)


@pytest.fixture(scope="module")
def judged():
    """The judge of the small model, measured once."""
    return verify.trace_judge(
        losses, parameters(), batch(), weights=weights(), finite_differences=False
    )


def by_example(params, rows):
    """A gradient per example, weighted afterwards, as differential privacy needs it."""
    one = jax.value_and_grad(
        lambda p, row: losses(p, jax.tree.map(lambda x: x[None], row))[0]
    )
    found = jax.jit(jax.vmap(one, (None, 0)))(params, rows)
    share = weights() / weights().sum()
    return jax.tree.map(lambda x: jnp.tensordot(share, x, 1), found)


def padded(params, rows):
    """Parts of four, in another order; the last is filled with copies of weight 0."""
    order = np.array([9, 2, 5, 0, 7, 1, 8, 4, 3, 6, 6, 6])
    w = weights()[order]
    w[10:] = 0
    total = jax.jit(
        jax.value_and_grad(
            lambda p, few, own: jnp.sum(own * jax.checkpoint(losses)(p, few))
        )
    )
    parts = [
        total(
            params, jax.tree.map(lambda x, i=i: x[order[i : i + 4]], rows), w[i : i + 4]
        )
        for i in (8, 0, 4)
    ]
    return jax.tree.map(lambda *x: sum(x) / weights().sum(), *parts)


def side_by_side(*counts):
    """Replicas of five by `vmap`, each of which counts so many times."""

    def local(params, rows, own, count):
        found = jax.value_and_grad(lambda p: jnp.sum(own * losses(p, rows)))(params)
        return jax.lax.psum(jax.tree.map(lambda x: count * x, found), "data")

    def candidate(params, rows):
        cut = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), rows)
        share = (weights() / weights().sum()).reshape(2, -1)
        each = jnp.asarray(counts, share.dtype)
        mapped = jax.vmap(local, (None, 0, 0, 0), axis_name="data")
        found = jax.jit(mapped)(params, cut, share, each)
        return jax.tree.map(lambda x: x[0], found)

    return candidate


@pytest.mark.parametrize(
    "candidate", [accumulated(), by_example, padded, side_by_side(1, 1)]
)
def test_right_programs_have_no_difference(judged, candidate):
    trace = judged(candidate)
    assert trace.raise_if_failed() is trace
    assert trace.difference is None
    assert trace.notes == ()
    forward = ["embedded", "layer[0]", "layer[1]", "scores"]
    assert trace.right == (
        *(f"forward {name}" for name in forward),
        *(f"backward {name}" for name in reversed(forward)),
    )


def in_layer(defect, layer):
    """A defect in one layer of the loop: told by its number, which the scan lacks."""

    def loss(params, rows):
        x = verify.tap(rows["x"] @ params["inward"], "embedded")
        for number, w in enumerate(params["layers"]):
            hidden = jnp.tanh(x @ w)
            x = verify.tap(x + (defect(hidden) if number == layer else hidden), "layer")
        scores = verify.tap(x.mean(axis=1) @ params["outward"], "scores")
        logs = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(logs, rows["label"][:, None], axis=1)[:, 0]

    return loss


def only(part, loss):
    """A wrong loss in one micro-batch."""
    return lambda number: loss if number == part else losses


def stale(params, rows):
    """The loss of these parameters, and the gradient of older ones."""
    share = weights() / weights().sum()
    loss = jax.jit(lambda p: jnp.sum(share * losses(p, rows)))(params)
    return loss, accumulated()(jax.tree.map(lambda x: 0.99 * x, params), rows)[1]


DEFECTS = {
    "stale parameters": (
        stale,
        ("backward", "scores", COUNTED, "as of stale parameters"),
    ),
    "value": (
        accumulated(lambda _: in_layer(lambda h: 1.001 * h, 1)),
        ("forward", "layer[1]", COUNTED, "cosine"),
    ),
    "value of a micro-batch": (
        accumulated(only(1, in_layer(lambda h: -h, 0))),
        ("forward", "layer[0]", (4, 5, 6), "cosine"),
    ),
    "one example": (
        accumulated(
            only(2, lambda p, r: losses(p, r | {"x": r["x"].at[1].multiply(-1)}))
        ),
        ("forward", "embedded", (8,), "it is -1 times the reference"),
    ),
    "zeros": (
        accumulated(only(0, lambda p, r: losses(p | {"outward": 0 * p["outward"]}, r))),
        ("forward", "scores", (0, 1, 2), "it is 0 times the reference"),
    ),
    "not a number": (
        accumulated(only(0, lambda p, r: losses(p, r, hidden=lambda h: h / 0))),
        ("forward", "layer[0]", (0, 1, 2), "not finite"),
    ),
    "cotangent": (
        accumulated(lambda _: in_layer(stretched, 1)),
        ("backward", "layer[0]", COUNTED, "cosine"),
    ),
    "cotangent of a micro-batch": (
        accumulated(only(1, lambda p, r: losses(p, r, hidden=stretched))),
        ("backward", "layer[0]", (4, 5, 6), "cosine"),
    ),
    "loss of a micro-batch": (
        accumulated(only(1, lambda p, r: losses(p, r, scores=stretched))),
        ("backward", "scores", (4, 5, 6), "examples 4-6 count 1.1 times"),
    ),
    "swapped labels": (
        accumulated(only(2, lambda p, r: losses(p, r | {"label": 2 - r["label"]}))),
        ("backward", "scores", (7, 8, 9), "cosine"),
    ),
    "lost micro-batch": (
        accumulated(parts=((0, 4), (7, 10))),
        ("forward", "embedded", (4, 5, 6), "no such value is computed"),
    ),
    "lost gradient": (
        accumulated(after=lambda n, g: jax.tree.map(lambda x: x * float(n != 1), g)),
        ("gradient", None, (4, 5, 6), "examples 4-6 count 0 times"),
    ),
    "doubled micro-batch": (
        accumulated(parts=((0, 4), (4, 7), (4, 7), (7, 10))),
        ("gradient", None, (4, 5, 6), "examples 4-6 count 2 times"),
    ),
    "lost replica": (
        side_by_side(1, 0),
        ("gradient", None, tuple(e for e in COUNTED if e >= 5), "count 0 times"),
    ),
    "factor": (
        accumulated(after=lambda _, g: jax.tree.map(lambda x: 1.1 * x, g)),
        ("gradient", None, COUNTED, "all examples count 1.1 times"),
    ),
    "leaf": (
        accumulated(after=lambda _, g: g | {"inward": -g["inward"]}),
        ("gradient", "inward", COUNTED, "it is -1 times the reference"),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named_where_it_is(judged, name):
    candidate, (direction, tap, examples, words) = DEFECTS[name]
    trace = judged(candidate)
    assert not trace.ok
    found = trace.difference
    assert found.direction == direction
    assert tap in (None, found.tap)
    assert found.examples == examples
    assert words in found.words
    assert found.ratio > 1
    with pytest.raises(VerificationError, match=f"first difference: {direction}, "):
        trace.raise_if_failed()


def test_the_chain_before_a_difference_is_shown_as_right(judged):
    trace = judged(DEFECTS["cotangent"][0])
    assert trace.right[-3:] == (
        "forward scores",
        "backward scores",
        "backward layer[1]",
    )
    text = str(trace)
    assert text.startswith("WRONG\nfirst difference: backward, layer[0], examples 0-2")
    assert "right before it: forward embedded, forward layer[0]" in text
    assert "4 leaves judged" not in text


@functools.cache
def right_in(dtype):
    """A trace of right micro-batches and one of wrong ones."""
    judge = verify.trace_judge(
        losses,
        parameters(dtype),
        batch(dtype),
        weights=weights(),
        finite_differences=False,
    )
    wrong = only(1, in_layer(lambda h: jnp.asarray(1.5, h.dtype) * h, 0))
    return judge(accumulated()), judge(accumulated(wrong))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_bounds_are_those_of_the_dtype(dtype):
    right, wrong = right_in(jnp.dtype(dtype))
    assert right.ok
    assert right.difference is None
    assert not wrong.ok
    assert (wrong.difference.tap, wrong.difference.examples) == ("layer[0]", (4, 5, 6))
    # The same fault is thousands of bounds in float64 and few in bfloat16.
    assert (wrong.difference.ratio > 1e8) == (dtype == "float64")


def test_shares_are_told_as_finely_as_the_dtype_rounds():
    judge = verify.trace_judge(
        losses,
        parameters("bfloat16"),
        batch("bfloat16"),
        weights=weights(),
        finite_differences=False,
    )
    twice = accumulated(after=lambda n, g: jax.tree.map(lambda x: x * (1 + n // 2), g))
    found = judge(twice).difference
    assert (found.direction, found.examples) == ("gradient", (7, 8, 9))
    assert found.words.startswith("examples 7-9 count 2 times; ")


def test_a_candidate_that_reaches_no_tap_is_judged_without_a_place(judged):
    ahead = jax.jit(
        jax.value_and_grad(
            lambda p, r: jnp.sum(weights() * losses(p, r)) / weights().sum()
        )
    )
    compiled = ahead.lower(parameters(), batch()).compile()
    trace = judged(compiled)
    assert trace.ok
    assert any("has reached no tap" in note for note in trace.notes)


def test_a_loss_without_taps_is_refused():
    with pytest.raises(
        ValueError, match=r"must mark values with verify\.tap\. Got no tap"
    ):
        verify.trace(
            lambda w, x: (x - w) ** 2, jnp.array(0.5), jnp.array([1.0, 3.0]), None,
            finite_differences=False,
        )  # fmt: skip


def parts_of(loss, *sizes, own=None):
    """The mean of sums over parts of the batch; `own(number)` is another loss there."""
    total = jax.jit(
        jax.value_and_grad(lambda p, rows, f: f(p, rows).sum()), static_argnums=2
    )

    def candidate(params, rows):
        starts = np.cumsum((0, *sizes))
        parts = [
            total(
                params,
                jax.tree.map(lambda x, a=a, n=n: x[a : a + n], rows),
                (own and own(number)) or loss,
            )
            for number, (a, n) in enumerate(zip(starts, sizes, strict=False))
        ]
        return jax.tree.map(lambda *x: sum(x) / np.float32(sum(sizes)), *parts)

    return candidate


def attending(heat=1.0, minus=-jnp.inf):
    """A loss with an attention over what a mask of the batch leaves."""

    def loss(w, rows):
        logits = rows["x"] @ w
        masked = verify.tap(jnp.where(rows["mask"], logits, minus), "masked")
        shares = verify.tap(jax.nn.softmax(masked * heat, axis=-1), "shares")
        return (shares * rows["x"].mean(axis=-1)).sum(axis=-1) ** 2

    return loss


@pytest.mark.parametrize("minus", [-np.inf, -1e9, float(np.finfo("float32").min)])
def test_masked_logits_are_found_again(rng, minus):
    """A right program is right, and a wrong one has its place behind the mask."""
    x = jnp.asarray(rng.normal(size=(8, 5, 3)), jnp.float32)
    mask = jnp.asarray(rng.random((8, 5)) < 0.6).at[:, 0].set(True)
    w, rows = jnp.asarray(rng.normal(size=3), jnp.float32), {"x": x, "mask": mask}
    loss = attending(minus=minus)
    judged = verify.trace_judge(loss, w, rows, finite_differences=False)
    right = judged(parts_of(loss, 1, 7))
    assert right.raise_if_failed().difference is None
    assert right.right[0] == "forward masked"
    assert right.notes == ()

    wrongs = {
        "shares": attending(heat=1.01, minus=minus),
        "masked": attending(minus=-3.0),
    }
    for place, wrong in wrongs.items():
        trace = judged(parts_of(loss, 3, 5, own=lambda part, f=wrong: part and f))
        assert not trace.ok
        found = trace.difference
        assert (found.direction, found.tap) == ("forward", place)
        hidden = {e for e in range(3, 8) if not mask[e].all()}
        assert set(found.examples) == (
            hidden if place == "masked" else set(range(3, 8))
        )


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("leaf", ["inward", "readout"])
def test_one_leaf_that_is_wrong_by_the_number_of_parts_is_named(rng, parts, leaf):
    """The means of k parts have cotangents k times as large, which is no fault."""
    shapes = {"inward": (4, 5), "hidden": (5, 5), "readout": (5, 3)}
    params = {name: jnp.asarray(rng.normal(size=x)) for name, x in shapes.items()}
    rows = {k: jnp.asarray(rng.normal(size=(8, n))) for k, n in (("x", 4), ("y", 3))}

    def loss(params, rows):
        h = verify.tap(rows["x"] @ params["inward"], "first")
        h = verify.tap(jnp.tanh(h @ params["hidden"]), "second")
        out = verify.tap(h @ params["readout"], "last")
        return ((out - rows["y"]) ** 2).sum(axis=-1)

    def in_means(change):
        mean = jax.jit(jax.value_and_grad(lambda p, rows: loss(p, rows).mean()))

        def candidate(params, rows):
            cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), rows)
            found = [mean(params, jax.tree.map(lambda x, i=i: x[i], cut))
                     for i in range(parts)]  # fmt: skip
            value, gradient = jax.tree.map(lambda *x: sum(x) / parts, *found)
            return value, change(gradient)

        return candidate

    judged = verify.trace_judge(loss, params, rows, finite_differences=False)
    for factor in (0.5, 2.0, 4.0):
        wrong = in_means(lambda g, f=factor: g | {leaf: f * g[leaf]})
        found = judged(wrong).difference
        assert (found.direction, found.tap) == ("gradient", leaf)
        assert f"all examples count {factor:g} times" in found.words
    if parts > 1:
        # Every leaf is: a sum of means, which the cotangents show.
        summed = in_means(lambda g: jax.tree.map(lambda x: parts * x, g))
        found = judged(summed).difference
        assert (found.direction, found.tap) == ("backward", "last")


def test_weights_may_be_numpys_own(rng):
    """Of float64, while the reference computes in float32."""
    x = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
    own = rng.uniform(1, 2, size=7)
    loss = lambda w, x: verify.tap(x @ w, "y") ** 2  # noqa: E731

    def candidate(w, x):
        share = jnp.asarray(own / own.sum(), jnp.float32)
        return jax.value_and_grad(lambda w: (share * loss(w, x)).sum())(w)

    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    with jax.enable_x64(False):
        trace = verify.trace(
            loss, w, x, candidate, weights=own, finite_differences=False
        )
    assert trace.raise_if_failed().difference is None


def test_what_has_no_float64_is_as_the_program_rounds(rng):
    """Runs without a rounded side take it from the first, which has one.

    And a value that nothing takes is compared like any other.
    """

    def loss(w, x, told=1.0):
        y = verify.tap(jnp.tanh(x @ w), "before")
        y = y + jax.lax.stop_gradient(y).at[:, 0].apply(lambda z: z * z)
        verify.tap(told * y, "aside")
        return jnp.sum(verify.tap(y, "after") ** 2, axis=1)

    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 2), (5, 3)))

    def candidate(told):
        return jax.value_and_grad(lambda w, x: loss(w, x, told).mean())

    judge = verify.trace_judge(loss, w, x, finite_differences=False)
    right, other = judge(candidate(1.0)), judge(candidate(1.5))
    assert right.difference is None
    assert right.report.ok
    names = "forward before", "forward aside", "forward after", "backward after"
    assert right.right == (*names, "backward before")
    assert (other.difference.direction, other.difference.tap) == ("forward", "aside")


def test_values_in_a_loop_that_depend_on_no_input_are_compared(rng):
    """As noise is, and the cotangent of a loss in parts: they have one side alone."""
    w = jnp.asarray(rng.normal(size=(3, 4, 4)) / 2, jnp.float32)
    x = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)

    def layers(w, x, scale=1.0):
        def layer(state, own):
            h, key = state
            key, now = jax.random.split(key)
            drawn = jax.random.normal(now, (1, 4), jnp.float32)
            noise = verify.tap(scale * drawn, "noise")
            h = jnp.tanh(h @ own) + 0.1 * noise
            return (verify.tap(h, "h"), key), verify.tap((h**2).mean(), "aux")

        (h, _), aux = jax.lax.scan(layer, (x, jax.random.key(0)), w)
        return (h**2).sum(1).mean() + 0.1 * aux.sum()

    def candidate(scale):
        return jax.value_and_grad(lambda w, x: layers(w, x, scale))

    judge = verify.trace_judge(layers, w, x, finite_differences=False)
    right, other = judge(candidate(1.0)), judge(candidate(1.5))
    assert right.difference is None
    assert right.report.ok
    names = [f"{name}[{i}]" for i in range(3) for name in ("noise", "h", "aux")]
    backward = [f"{name}[{i}]" for i in (2, 1, 0) for name in ("aux", "h")]
    assert sorted(right.right) == sorted(
        [*(f"forward {x}" for x in names), *(f"backward {x}" for x in backward)]
    )
    found = other.difference
    assert (found.direction, found.tap) == ("forward", "noise[0]")


def test_a_tap_may_differ_in_a_right_candidate(rng):
    """The verdict is that of the gradient, and a note says so."""
    x = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    loss = lambda w, x, f=1.0: (verify.tap(f * (x @ w), "y") / f) ** 2  # noqa: E731
    doubled = jax.value_and_grad(lambda w, x: loss(w, x, 2.0).mean())
    trace = verify.trace(loss, w, x, doubled, finite_differences=False)
    assert trace.ok
    assert (trace.difference.tap, trace.difference.direction) == ("y", "forward")
    assert trace.notes == ("a tap differs, yet loss and gradient are right",)


def test_a_batch_may_have_none_in_the_place_of_an_array(rng):
    x = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
    w, rows = jnp.asarray(rng.normal(size=3), jnp.float32), {"x": x, "mask": None}
    loss = lambda w, rows: verify.tap(rows["x"] @ w, "y") ** 2  # noqa: E731
    doubled = lambda w, rows: loss(2 * w, rows)  # noqa: E731
    judged = verify.trace_judge(loss, w, rows, finite_differences=False)
    assert judged(parts_of(loss, 2, 5)).raise_if_failed().difference is None
    found = judged(parts_of(loss, 2, 5, own=lambda part: part and doubled)).difference
    assert (found.tap, found.examples) == ("y", (2, 3, 4, 5, 6))


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "scalar"])
def test_shares_are_of_sums_over_examples(rng, reduction):
    """A maximum has none, nor a loss that has been reduced."""
    x = jnp.asarray(rng.normal(size=(4, 12)), jnp.float32)
    w = jnp.asarray(rng.normal(size=12), jnp.float32)
    losses = lambda w, x: verify.tap(x @ w, "y") ** 2  # noqa: E731
    mean = lambda w, x: losses(w, x).mean()  # noqa: E731
    loss, options = (losses, {"reduction": reduction})
    if reduction == "scalar":
        loss, options = mean, {}
    total = {"sum": jnp.sum, "max": jnp.max}.get(reduction, jnp.mean)

    def doubled(w, x):
        value, slope = jax.value_and_grad(lambda w: total(losses(w, x)))(w)
        return value, 2 * slope

    found = verify.trace(
        loss, w, x, doubled, finite_differences=False, **options
    ).difference
    assert found.direction == "gradient"
    counted = found.words.startswith("all examples count 2 times; ")
    assert counted == (reduction in ("mean", "sum"))
    assert found.words.endswith("it is 2 times the reference")


def test_what_cannot_be_traced_is_refused(rng):
    loss = lambda w, x: verify.tap(x @ w, "y") ** 2  # noqa: E731
    w, x = jnp.ones(3), jnp.asarray(rng.normal(size=(4, 3)))
    for options, message in (
        ({"weights": -np.ones(4)}, "must be finite, at least 0"),
        ({"reduction": "median"}, "must be one of 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            verify.trace(loss, w, x, None, finite_differences=False, **options)


def test_equal_examples_in_parts_of_other_sizes(rng):
    """Each part takes its own mean: which cotangent is whose cannot be told."""
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    x = x.at[5].set(x[0])
    w = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)

    def loss(w, x):
        hidden = verify.tap(jnp.tanh(x @ w), "hidden")
        return verify.tap((hidden**2).sum(axis=1), "out") ** 2

    def candidate(w, x):
        part = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x).mean()))
        (a, da), (b, db) = part(w, x[:1]), part(w, x[1:])
        return (a + 7 * b) / 8, (da + 7 * db) / 8

    trace = verify.trace(loss, w, x, candidate, finite_differences=False)
    assert trace.raise_if_failed().difference is None
    assert trace.notes == ()


@pytest.mark.parametrize("most", [12, 6])
def test_a_loss_for_some_sizes_only(rng, most):
    """Twice the batch shows where the examples are; where it cannot, a note says so."""
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    w = jnp.asarray(rng.normal(size=3), jnp.float32)

    def loss(w, x):
        if len(x) > most:
            raise RuntimeError("too many")
        pairs = x if len(x) == 1 else x.reshape(2, -1, 3)
        return verify.tap((pairs @ w).reshape(-1), "y") ** 2

    trace = verify.trace(loss, w, x, parts_of(loss, 2, 4), finite_differences=False)
    assert trace.raise_if_failed().difference is None
    if most == 12:
        assert trace.notes == ()
    else:
        assert any("no tapped value has an axis of exam" in x for x in trace.notes)


def test_a_strange_tap_is_named_once(judged):
    """Whatever the shapes are in which it is met."""

    def strange(params, rows):
        return losses(params, {**rows, "x": verify.tap(rows["x"], "strange")})

    trace = judged(accumulated(lambda number: strange))
    told = [note for note in trace.notes if "strange" in note]
    assert told == ["strange is no tap in the loss"]


def averaging(change=lambda w: w, center=lambda c: c):
    """A loss with a value of the parameters alone, and one of the whole batch."""

    def loss(w, x):
        query = verify.tap(change(w["query"]), "query")
        hidden = verify.tap(jnp.tanh(x @ query), "hidden")
        middle = verify.tap(center(hidden.mean(axis=0)), "center")
        return ((hidden + 0 * middle[None]) @ w["out"]) ** 2

    return loss


def test_values_without_examples_are_of_parts_where_the_batch_is_split(rng):
    """Those are not compared; what is the same in all calls is."""
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    w = {
        "query": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        "out": jnp.asarray(rng.normal(size=4), jnp.float32),
    }
    judged = verify.trace_judge(averaging(), w, x, finite_differences=False)
    right = judged(parts_of(averaging(), 3, 5))
    assert right.raise_if_failed().difference is None
    (note,) = right.notes
    assert note.startswith("center was not compared: it has no axis of examples")
    assert "forward query" in right.right
    found = judged(parts_of(averaging(lambda w: 1.1 * w), 3, 5)).difference
    assert (found.tap, found.words.partition("; ")[2]) == (
        "query", "it is 1.1 times the reference"
    )  # fmt: skip
    # In one call it is the whole batch's.
    whole = judged(parts_of(averaging(center=lambda c: -c), 8))
    assert whole.difference.tap == "center"


def test_a_value_behind_a_checkpoint_is_one_passage(rng):
    """It is computed again in the backward pass."""
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)

    def loss(w, x):
        inner = lambda w, x: jnp.sin(verify.tap(x @ w, "hidden"))  # noqa: E731
        return jax.checkpoint(inner)(w, x).sum(axis=1) ** 2

    trace = verify.trace(loss, w, x, parts_of(loss, 2, 4), finite_differences=False)
    assert trace.raise_if_failed().right == ("forward hidden", "backward hidden")


def test_a_transposed_value_is_recognised(rng):
    x = jnp.asarray(rng.normal(size=(8, 3, 4)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)

    def loss(w, x, turn=False):
        scores = verify.tap(x @ w, "query") @ x.mT
        scores = verify.tap(scores.mT if turn else scores, "scores")
        return (jnp.tanh(scores) @ x).sum(axis=(1, 2)) ** 2

    wrong = parts_of(loss, 3, 5, own=lambda n: n and functools.partial(loss, turn=True))
    found = verify.trace(loss, w, x, wrong, finite_differences=False).difference
    assert (found.tap, found.examples) == ("scores", (3, 4, 5, 6, 7))
    assert found.words.endswith("it is the reference's scores transposed")


class Foreign:
    """An array of another framework, which lends its memory to NumPy."""

    dtype = "foreign.float32"

    def __init__(self, memory):
        self.memory = memory

    def __array__(self, dtype=None, copy=None):
        return self.memory.copy() if copy else self.memory


@pytest.mark.parametrize("kind", ["given away", "overwritten"])
def test_a_candidate_may_use_again_what_it_returned(rng, kind):
    """A wrong one is called again, with the memory of its first gradient."""
    x = jnp.asarray(rng.normal(size=(4, 12)), jnp.float32)
    w = jnp.asarray(rng.normal(size=12), jnp.float32)
    loss = lambda w, x: verify.tap(x @ w, "y") ** 2  # noqa: E731
    returned, memory = [], np.zeros(12, np.float32)

    def doubled(w, x):
        memory[:] = 0
        if returned:
            returned[-1].delete()
        value, slope = jax.value_and_grad(lambda w: loss(w, x).mean())(w)
        returned.append(2 * slope)
        # What it computes after the first call differs, and is no matter here.
        memory[:] = returned[-1] * (1 if len(returned) == 1 else 3)
        return value, returned[-1] if kind == "given away" else Foreign(memory)

    found = verify.trace(loss, w, x, doubled, finite_differences=False).difference
    # One that repeats itself draws nothing, and is not called a third time.
    assert len(returned) == (2 if kind == "given away" else 3)
    assert found.words.startswith("all examples count 2 times; ")


def test_a_large_gradient_that_lacks_a_leaf_has_shares(monkeypatch, rng):
    """Those of the leaves that it has: of each the same entries as in its parts."""
    monkeypatch.setattr(shares, "ENTRIES", 48)
    x = jnp.asarray(rng.normal(size=(4, 40)), jnp.float32)
    w = {name: jnp.asarray(rng.normal(size=40), jnp.float32) for name in "ab"}

    def loss(w, x):
        return verify.tap(x @ w["a"] + jnp.sin(x) @ w["b"], "y") ** 2

    def doubled(w, x):
        value, slope = jax.value_and_grad(lambda w: loss(w, x).mean())(w)
        return value, {"a": None, "b": 2 * slope["b"]}

    found = verify.trace(loss, w, x, doubled, finite_differences=False)
    assert {row.path for row in found.report.failures} == {"a", "b"}
    assert found.difference.words.startswith("all examples count 2 times; ")


TOKENS = jnp.asarray(np.random.default_rng(6).integers(0, 9, (7, 5)))


def tied(p, tokens, head=None):
    """A table at both ends; `head` is what stands for it at the last one."""
    h = verify.tap(jnp.tanh(p["table"][tokens] @ p["mix"]), "hidden")
    logits = h @ (p["table"] if head is None else head).T
    return verify.tap(jax.nn.logsumexp(logits, -1).sum(-1), "losses")


def of_ends(counts):
    """Parts of the batch, of which each end's gradient counts so often."""

    def candidate(p, tokens):
        found = []
        for (first, last), (a, b) in zip(counts, ((0, 3), (3, 7)), strict=True):
            few = tokens[a:b]
            own = lambda p, head, few=few: tied(p, few, head).sum() / 7  # noqa: E731
            loss, (g, head) = jax.value_and_grad(own, (0, 1))(p, p["table"])
            found.append((loss, g | {"table": first * g["table"] + last * head}))
        return jax.tree.map(jnp.add, *found)

    return candidate


@pytest.fixture(scope="module")
def of_tied():
    rng = np.random.default_rng(5)
    p = {"table": rng.normal(size=(9, 4)), "mix": rng.normal(size=(4, 4))}
    p = {name: jnp.asarray(x, jnp.float32) for name, x in p.items()}
    return verify.trace_judge(tied, p, TOKENS, finite_differences=False)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (((1, 1), (1, 0)),
         "gather once, dot_general once of examples 0-2 and 0 times of examples 3-6"),
        (((2, 1), (1, 1)),
         "gather 2 times of examples 0-2 and once of examples 3-6, dot_general once"),
    ],
)  # fmt: skip
def test_a_use_that_counts_wrongly_for_some_examples_is_named(of_tied, counts, words):
    found = of_tied(of_ends(counts))
    assert found.difference.direction == "gradient"
    assert f"table: the uses that it counts: {words}" in found.notes


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (((1, 1), (1, 1)), ""),
        # Of all examples: the report of the gradient says so.
        (((1, 0), (1, 0)), "gather once, dot_general 0 times"),
        # Of all uses: the examples count wrongly.
        (((1, 1), (2, 2)), ""),
    ],
)
def test_uses_are_not_told_by_example_where_less_explains(of_tied, counts, told):
    found = of_tied(of_ends(counts))
    notes = [n for n in (*found.notes, *found.report.notes) if "uses that" in n]
    assert [n.partition("counts: ")[2] for n in notes] == ([told] if told else [])
    assert found.ok == (counts == ((1, 1), (1, 1)))

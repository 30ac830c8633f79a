"""Random numbers: what is judged, what cannot be; right trainers never fail."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import threefry_2x32

from jdist import VerificationError, data_parallel, verify
from jdist.verify.draws import (
    draws_nothing,
    draws_of_its_own,
    made_of_batch,
    split_dependent,
)

KEY = jax.random.key(3)
EXAMPLES = 6


def dropout(w, x, key):
    """Half of the inputs, of one example or of many."""
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return (jnp.where(kept, x, jnp.zeros_like(x)) @ w) ** 2


def by_place(w, b):
    """A key for each place in the batch, folded from one."""
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(len(b["x"])))
    return jax.vmap(lambda x, key: dropout(w, x, key))(b["x"], keys)


def scanned(w, b, own):
    """One example after the other, with its own key or with the next of a sequence."""

    def step(key, row):
        key, other = jax.random.split(key)
        return key, dropout(w, row["x"], row["key"] if own else other)

    return jax.lax.scan(step, KEY, b)[1]


def layers(w, b):
    """Three draws for each example, in a loop over layers."""

    def one(x, key):
        keys = jax.random.split(key, 3)
        layer = lambda h, k: (h * jax.random.normal(k, h.shape, h.dtype), None)  # noqa: E731
        return jax.lax.scan(layer, x, keys)[0] @ w

    return jax.vmap(one)(b["x"], b["key"])


def in_pairs(w, b, own):
    """Of an even number of examples only, with their own keys or with one."""
    if len(b["x"]) % 2:
        raise ValueError("an example too many")
    if own:
        return verify.keyed(dropout)(w, (b["x"], b["key"]))
    return dropout(w, b["x"], KEY)


def repeated(w, b):
    """Two draws for each example, in a loop that does not know its length."""

    def one(x, key):
        def body(state):
            n, h = state
            return n + 1, h + dropout(w, x, jax.random.fold_in(key, n))

        return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, x[0]))[1]

    return jax.vmap(one)(b["x"], b["key"])


LOSSES = {
    "none": (False, lambda w, b: b["x"] @ w),
    "one key": (True, lambda w, b: dropout(w, b["x"], KEY)),
    "one of the batch's": (True, lambda w, b: dropout(w, b["x"], b["key"][0])),
    "by place": (True, by_place),
    "split inside": (
        True,
        lambda w, b: jax.vmap(lambda x, k: dropout(w, x, k))(
            b["x"], jax.random.split(KEY, len(b["x"]))
        ),
    ),
    "a sequence": (True, lambda w, b: scanned(w, b, own=False)),
    "gamma": (
        True,
        lambda w, b: (
            jax.random.gamma(KEY, np.float32(2), (len(b["x"]),), jnp.float32)
            * (b["x"] @ w)
        ),
    ),
    "the first example's key": (
        True,
        lambda w, b: (
            (jnp.where(jax.random.bernoulli(b["key"][0], 0.5, w.shape), b["x"], 0) @ w)
            ** 2
        ),
    ),
    "keyed": (
        False,
        lambda w, b: verify.keyed(dropout)(w, (b["x"], b["key"])),
    ),
    "keyed in a loop": (False, lambda w, b: scanned(w, b, own=True)),
    "keyed layers": (False, layers),
    "one key, in pairs": (True, lambda w, b: in_pairs(w, b, own=False)),
    "keyed, in pairs": (False, lambda w, b: in_pairs(w, b, own=True)),
    "one of the batch's, split": (
        True,
        lambda w, b: jax.vmap(lambda x, k: dropout(w, x, k))(
            b["x"], jax.random.split(b["key"][0], len(b["x"]))
        ),
    ),
    "gamma by place": (
        True,
        lambda w, b: jax.vmap(
            lambda i, x: jax.random.gamma(jax.random.fold_in(KEY, i), jnp.exp(x @ w))
        )(jnp.arange(len(b["x"])), b["x"]),
    ),
    "words of rbg": (
        True,
        lambda w, b: (
            jax.lax.rng_bit_generator(jnp.arange(4, dtype="uint32"), (len(b["x"]),))[1]
            * (b["x"] @ w).astype("uint32")
        ),
    ),
    "words of threefry": (
        True,
        lambda w, b: (
            threefry_2x32(
                jnp.arange(2, dtype="uint32"), jnp.arange(len(b["x"]), dtype="uint32")
            )
            * (b["x"] @ w).astype("uint32")
        ),
    ),
    "keyed in a while loop": (False, repeated),
    "noise on parameters": (
        False,
        lambda w, b: b["x"] @ (w + jax.random.normal(KEY, w.shape, w.dtype)),
    ),
}


def given():
    rng = np.random.default_rng(5)
    w = rng.normal(size=3).astype(np.float32)
    x = rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
    return w, {"x": x, "key": jax.random.split(KEY, EXAMPLES)}


@pytest.mark.parametrize("name", LOSSES)
def test_what_depends_on_the_split_is_read_off_the_program(name):
    """One key for several examples, or keys by place; not keys in the batch."""
    dependent, loss = LOSSES[name]
    found = split_dependent(loss, *given())
    assert bool(found) == dependent
    if dependent:
        assert "verify.keyed(loss_fn)" in found
        # And so it is: halves draw other numbers than the whole.
        w, batch = given()
        second = jax.tree.map(lambda x: x[4:], batch)
        assert not np.allclose(loss(w, second), loss(w, batch)[4:])
    assert draws_nothing(loss, *given()) == (name == "none")


def test_one_example_is_not_split():
    """Its key is its own, though one key serves all there are."""
    w, batch = given()
    one = jax.tree.map(lambda x: x[:1], batch)
    assert split_dependent(LOSSES["keyed"][1], w, one) == ""


def test_a_key_beside_the_examples_is_no_example_s_own():
    """What is folded from it by place is another key after a split."""
    w, batch = given()

    def loss(w, b):
        keys = jax.vmap(lambda i: jax.random.fold_in(b["run"], i))(jnp.arange(EXAMPLES))
        return jax.vmap(lambda x, key: dropout(w, x, key))(b["x"], keys[: len(b["x"])])

    assert split_dependent(loss, w, {**batch, "run": KEY})


def halves(losses, change=lambda part, batch: part):
    """Two micro-batches, of four examples and of two."""
    part = jax.jit(jax.value_and_grad(lambda w, b: losses(w, b).sum()))

    def candidate(w, batch):
        first = jax.tree.map(lambda x: x[:4], batch)
        second = jax.tree.map(lambda x: x[4:], batch)
        found = [part(w, change(piece, batch)) for piece in (first, second)]
        return jax.tree.map(lambda a, b: (a + b) / np.float32(EXAMPLES), *found)

    return candidate


def test_with_a_key_for_each_example_right_passes_and_wrong_fails():
    """One key for a whole micro-batch is wrong where each example has its own."""
    losses = lambda w, b: verify.keyed(dropout)(w, (b["x"], b["key"]))  # noqa: E731

    def one_key(part, batch):
        return {**part, "key": jnp.broadcast_to(batch["key"][0], part["key"].shape)}

    def replicas(w, batch):
        fn = data_parallel.value_and_grad(losses, replicas=2)
        return fn(w, *data_parallel.shard_batch(batch, replicas=2, sizes=(4, 2)))

    report = verify.gradients(
        losses,
        *given(),
        {"right": halves(losses), "replicas": replicas, "one": halves(losses, one_key)},
        finite_differences=False,
    )
    assert report.of("right").ok, str(report)
    assert report.of("replicas").ok, str(report)
    assert {row.path for row in report.of("one").failures} == {"(loss)", "(root)"}


def test_a_right_trainer_of_an_unkeyed_loss_is_never_called_wrong():
    """Nor is it called right: the report says why, and what to do."""
    losses = LOSSES["one key"][1]
    whole = jax.value_and_grad(lambda w, b: losses(w, b).mean())

    def missing(w, batch):
        return halves(losses)(w, batch)[0], {"w": w}

    report = verify.gradients(
        losses,
        *given(),
        {"halves": halves(losses), "whole": whole, "missing": missing},
        finite_differences=False,
    )
    assert not report.of("halves").ok
    assert not report.of("halves").failures
    for row in report.of("halves").unjudged:
        assert "a split of the batch draws others. Give each" in row.unjudged
    assert len(report.of("halves").unjudged) == 2
    # The same draws are judged all the same, and so is what is no number.
    assert report.of("whole").ok
    assert {row.path for row in report.of("missing").failures} == {"(root)", "w"}
    with pytest.raises(
        VerificationError, match=r"^not judged:\n  halves: \(root\): the "
    ):
        report.of("halves").raise_if_failed()


def test_dropout_of_flax_modules():
    """`nnx.Rngs` in the model is one key for a batch; given by example it is judged."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, rngs=None):
            return self.dense(self.drop(x, rngs=rngs)).sum(-1)

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    batch = given()[1]

    def inside(state, b):
        return nnx.merge(graph, state)(b["x"])

    def one(state, x, key):
        return nnx.merge(graph, state)(x, rngs=nnx.Rngs(dropout=key))

    assert split_dependent(inside, state, batch)
    outside = lambda s, b: verify.keyed(one)(s, (b["x"], b["key"]))  # noqa: E731
    assert not split_dependent(outside, state, batch)
    trainable, rest = nnx.split_state(state, nnx.Param, ...)
    losses = lambda p, b: outside(nnx.merge_state(p, rest), b)  # noqa: E731
    report = verify.gradients(
        losses, trainable, batch, {"halves": halves(losses)}, finite_differences=False
    )
    assert report.ok, str(report)


def test_a_trainer_with_numbers_of_its_own_is_not_judged():
    """Seen by three answers to one question, or in its program; not so a stale one."""
    loss = lambda w, b: (b["x"] @ w) ** 2  # noqa: E731
    right = jax.value_and_grad(lambda w, b: loss(w, b).mean())
    keys = (jax.random.key(i) for i in itertools.count())

    def noisy(w, batch):
        mean = lambda w: dropout(w, batch["x"], key).mean()  # noqa: E731
        key = next(keys)
        return jax.value_and_grad(mean)(w)

    @jax.jit
    def fixed(w, batch):
        return jax.value_and_grad(lambda w: dropout(w, batch["x"], KEY).mean())(w)

    earlier = [given()[0] * 2]

    def stale(w, batch):
        found = right(earlier[-1], batch)
        earlier.append(w)
        return found

    wrapped = lambda w, batch: fixed(w, batch)  # noqa: E731
    eager = functools.partial(fixed.__wrapped__)
    candidates = {"noisy": noisy, "stale": stale}
    candidates |= {"fixed": fixed, "wrapped": wrapped, "eager": eager}
    report = verify.gradients(loss, *given(), candidates, finite_differences=False)
    changes = "three calls with the same arguments gave three answers"
    draws = "it draws random numbers and the loss draws none"
    for name in candidates.keys() - {"stale"}:
        words = changes if name == "noisy" else draws
        assert not report.of(name).failures, name
        assert {words in row.unjudged for row in report.of(name).unjudged} == {True}
    assert {row.path for row in report.of("stale").failures} == {"(loss)", "(root)"}
    # It was looked into, and has the list that it had.
    assert not [note for note in report.notes if "stale" in note]
    assert all(isinstance(w, jax.Array | np.ndarray) for w in earlier)
    # The trace of a value's way gives the same answer.
    tapped = lambda w, b: verify.tap(b["x"] @ w, "y") ** 2  # noqa: E731
    traced = verify.trace(tapped, *given(), fixed, finite_differences=False)
    assert not traced.report.failures
    assert {draws in row.unjudged for row in traced.report.unjudged} == {True}


def keeps(value):
    """A candidate with a cell that it assigns to."""

    def candidate(w, batch):
        nonlocal value
        value = w
        return value

    return candidate


def decides(w, batch):
    """No program: what it does depends on the values."""
    return w if w.sum() > 0 else -w


def keeps_inside(value):
    """The same, by a function in it."""

    def candidate(w, batch):
        def keep():
            nonlocal value
            value = w

        keep()
        return w

    return candidate


SOURCE = iter("ab")


def reads(w, batch):
    """What may be another thing at each call."""
    return w if SOURCE else None


def reads_inside(w, batch):
    """The same, by a function in it."""
    return (lambda: w if SOURCE else None)()


LAST = 1.0


def assigns(w, batch):
    """Keeps the last parameters."""
    global LAST
    LAST = w
    return w


def takes_away(w, batch):
    """What is there once."""
    global LAST
    del LAST
    return w


def own_cells(w, batch):
    """Assigns to nothing but its own names."""
    total = w

    def add():
        nonlocal total
        total = total + w

    add()
    return total


class Named(dict):
    """May have attributes."""


class Timed:
    """A wrapper that may keep something, of a function that shows all it does."""

    def __init__(self, wrapped):
        self.__wrapped__ = wrapped


NAMED = Named()
CYCLE = []
CYCLE.append(CYCLE)


@dataclasses.dataclass
class Thawed:
    """A trainer whose attributes may be assigned to."""

    scale: float

    def gradient(self, w, batch):
        """Draws."""
        return self.scale * jax.random.normal(KEY, w.shape)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A trainer that keeps nothing."""

    scale: float

    def gradient(self, w, batch):
        """Draws."""
        return self.scale * jax.random.normal(KEY, w.shape)


class Open:
    """A trainer that may keep something."""

    def gradient(self, w, batch):
        """Draws."""
        return jax.random.normal(KEY, w.shape)


@pytest.mark.parametrize(
    ("candidate", "seen"),
    [
        (jax.jit(lambda w, b: w), False),
        (lambda w, b: w, False),
        (lambda w, b: jax.random.normal(KEY, w.shape), True),
        (lambda w, b: (lambda: jax.random.normal(KEY, w.shape))(), True),
        (functools.partial(lambda s, w, b: s * jax.random.normal(KEY), 2.0), True),
        (Frozen(2.0).gradient, True),
        (Open().gradient, None),
        (keeps(1.0), None),
        (lambda w, b, kept=[]: kept.append(w) or w, False),
        (lambda w, b, kept={}: kept.setdefault("w", w), False),
        (functools.partial(lambda keys, w, b: w, iter("ab")), None),
        (decides, None),
        (keeps_inside(1.0), None),
        (reads, None),
        (reads_inside, None),
        (assigns, None),
        (takes_away, None),
        (own_cells, False),
        (lambda w, b, kept=SOURCE: w, None),
        (lambda w, b, *, kept=SOURCE: w, None),
        (lambda w, b, kept=NAMED: w, None),
        (lambda w, b, kept=CYCLE: w, False),
        (functools.partial(keeps(1.0)), None),
        (functools.partial(lambda w, b, kept: w, kept=iter("a")), None),
        (Thawed(2.0).gradient, None),
        (Timed(lambda w, b: jax.random.normal(KEY, w.shape)), True),
    ],
)
def test_what_a_candidate_draws_is_seen_only_where_it_keeps_nothing(candidate, seen):
    """A wrapper of it, as `functools.wraps` makes, shows what is wrapped."""
    assert draws_of_its_own(candidate, *given()) is seen
    kept = []

    @functools.wraps(candidate)
    def wrapper(w, batch):
        kept.append(w)
        return candidate(w, batch)

    assert draws_of_its_own(wrapper, *given()) is seen
    assert not kept


def test_a_failing_candidate_that_may_draw_unseen_has_a_note():
    """It is called wrong all the same: it may be that it is."""
    loss = lambda w, b: (b["x"] @ w) ** 2  # noqa: E731
    own = Open()
    candidates = {"closed": lambda w, b: (w.sum(), own.gradient(w, b))}
    report = verify.gradients(loss, *given(), candidates, finite_differences=False)
    assert report.failures
    note = "closed: whether it draws random numbers of its own, such as dropout masks"
    assert [note in one for one in report.notes] == [True]


def test_a_loss_that_wants_a_key_is_refused_with_the_remedy():
    """Before anything is computed."""
    rule = r"Got a function of \(w, x, key\)\. For a loss_fn\(params, batch, key\) pass"
    with pytest.raises(TypeError, match=rule):
        verify.gradients(dropout, *given(), {"any": lambda w, b: (w, w)})


MADE = {
    "one operand": (lambda w, x: (w + x[0], 2 * w), [True, False]),
    "the next turn's": (
        lambda w, x: jax.lax.scan(
            lambda c, _: ((x[0], c[0], c[2]), None), (w, w, w), None, length=3
        )[0],
        [True, True, False],
    ),
    "what a turn gives": (
        lambda w, x: jax.lax.scan(lambda c, v: (c + v, v * x[0, 0]), w[0], w),
        [False, True],
    ),
    "a loop without a length": (
        lambda w, x: jax.lax.while_loop(
            lambda c: c[0].sum() < 1, lambda c: (c[1], c[1] + x[0]), (w, w)
        ),
        [True, True],
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_the_batch(name):
    """By one operand of several, and by turns of a loop."""
    step, made = MADE[name]
    assert made_of_batch(step, jnp.ones(3), jnp.ones((4, 3))) == made


@pytest.mark.parametrize("turned", [False, True])
def test_what_one_branch_makes_of_the_batch_is_made_of_it(turned):
    """As an optimizer that collects in one and moves in the other."""

    def step(w, x):
        moved, kept = (lambda: w + x.sum(axis=0)), (lambda: w)
        branches = (kept, moved) if turned else (moved, kept)
        return jax.lax.cond(w[0] > 0, *branches), 2 * w

    given = jnp.ones(3), jnp.ones((4, 3))
    assert made_of_batch(step, *given) == [True, False]


def test_what_the_batch_chooses_is_made_of_it():
    """As a count of steps that were skipped where the gradient was not finite."""

    def step(count, x):
        return jax.lax.cond(x.sum() > 0, lambda: count, lambda: count + 1), count + 1

    assert made_of_batch(step, jnp.int32(0), jnp.ones(3)) == [True, False]


def test_a_cell_that_holds_nothing_is_passed_over():
    """A name of an outer function that is bound later, if at all."""

    def outer():
        def candidate(w, batch):
            return w if batch is not None else later(w)

        if candidate is None:
            later = abs
        return candidate

    assert draws_of_its_own(outer(), *given()) is False


def test_containers_are_left_as_they_were():
    """Their keys too, where all values are the same."""
    kept = {"first": [1, 2], "second": {3}}

    def candidate(w, batch):
        kept["third"] = kept.pop("first")
        kept["third"].append(w)
        kept["second"].add(4)
        return w

    assert draws_of_its_own(candidate, *given()) is False
    assert kept == {"first": [1, 2], "second": {3}}
    renames = lambda w, batch, kept=kept: kept.update(last=kept.pop("first")) or w  # noqa: E731
    assert draws_of_its_own(renames, *given()) is False
    assert list(kept) == ["first", "second"]

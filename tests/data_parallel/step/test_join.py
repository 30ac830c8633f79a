"""Uneven inputs over time: nobody waits, and the gradient is divided as was said."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import JdistError, optim
from jdist.data_parallel import (
    EarlyEnd,
    Join,
    LocalSGD,
    evaluate,
    fit,
    train_step,
    value_and_grad,
)
from tests.data_parallel.recording import copies_differ, recorder
from tests.replicas import over


def losses_of(params, batch):
    """A logarithm, which padding by zeros would turn into NaN."""
    return (jnp.log(batch["x"]) @ params - batch["y"]) ** 2


def streams_of(rng, sizes):
    """For each replica its batches, of the sizes given."""
    return [
        [
            {"x": rng.uniform(0.2, 3, size=(n, 3)), "y": rng.normal(size=n)}
            for n in batches
        ]
        for batches in sizes
    ]


SIZES = [[4, 4, 1], [2], [4, 3]]


def gradients_by_hand(params, streams, divide_by):
    """The table of the module, step by step, from each replica's own mean."""
    found = []
    for step in range(max(map(len, streams))):
        active = [stream[step] for stream in streams if step < len(stream)]
        own = [
            jax.grad(lambda p, b=batch: losses_of(p, b).mean())(params)
            for batch in active
        ]
        counts = [len(batch["y"]) for batch in active]
        shares = {
            "weight": [count / sum(counts) for count in counts],
            "active": [1 / len(active)] * len(active),
            "initial": [1 / len(streams)] * len(active),
        }[divide_by]
        found.append(sum(s * g for s, g in zip(shares, own, strict=True)))
    return found


@pytest.mark.parametrize("divide_by", ["weight", "active", "initial"])
@pytest.mark.parametrize("kind", ["devices", "vmap"])
def test_the_table_of_division_rules(rng, mesh, kind, divide_by):
    """Every step of three replicas with 3, 1 and 2 batches, by the formula."""
    params, streams = rng.normal(size=3), streams_of(rng, SIZES)
    where = mesh(3) if kind == "devices" else 3
    joined = Join(streams, **over(where), rows=4, divide_by=divide_by)
    step = train_step(losses_of, recorder(), **over(where), reduction=joined.reduction)
    state, found = step.init(params), []
    for batch, weights in joined:
        state, _ = step(state, batch, weights)
        found.append(np.array(state.opt_state))
    expected = gradients_by_hand(params, streams, divide_by)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert step.compiled._cache_size() == 1


def by_step(where, reduction, params, given):
    step = train_step(losses_of, optim.sgd(), **over(where), reduction=reduction)
    return step(step.init(params), *given)


def by_fit(where, reduction, params, given, run=fit):
    step = train_step(losses_of, optim.sgd(), **over(where), reduction=reduction)
    return run(step, step.init(params), [given])


def by_local_sgd(where, reduction, params, given):
    assert reduction == "mean"
    local = LocalSGD(losses_of, optim.sgd(), **over(where), period=2)
    return local.step(local.init(params), *given)


TAKERS = {
    "step": by_step,
    "fit": by_fit,
    "evaluate": partial(by_fit, run=evaluate),
    "fn": lambda where, reduction, params, given: value_and_grad(
        losses_of, **over(where), reduction=reduction
    )(params, *given),
    "local_sgd": by_local_sgd,
}


@pytest.mark.parametrize(
    ("divide_by", "taker"),
    [("initial", taker) for taker in TAKERS] + [("active", "step"), ("active", "fn")],
)
def test_a_step_of_another_reduction_is_refused(rng, mesh, divide_by, taker):
    """It would silently divide otherwise than was asked for."""
    streams, where = streams_of(rng, [[3], []]), mesh(2)
    (given,) = Join(streams, **over(where), rows=3, divide_by=divide_by)
    wanted, other = {"active": ("mean", "sum"), "initial": ("sum", "mean")}[divide_by]
    expected = (
        rf"\(weights=...\)` must be for a step with reduction='{other}'\. Got those of "
        rf"a `Join` for '{wanted}'\. Build the step with `reduction=joined\.reduction`"
    )
    with pytest.raises(ValueError, match=expected):
        TAKERS[taker](where, other, rng.normal(size=3), given)


def test_weights_for_one_reduction_are_taken_like_others(rng):
    """Within another function, counted by `fit`, lowered, and as numbers."""
    params, streams = rng.normal(size=3), streams_of(rng, SIZES)
    joined = Join(streams, replicas=3, rows=4, divide_by="initial")
    steps = list(joined)
    step = train_step(losses_of, recorder(), replicas=3, reduction=joined.reduction)
    state, metrics = fit(step, step.init(params), steps)
    assert [int(m.examples) for m in metrics] == [10, 7, 1]
    # Each of the replicas that are there has a third.
    np.testing.assert_allclose([m.weight for m in metrics], [1, 2 / 3, 1 / 3])
    np.testing.assert_allclose([np.sum(w) for _, w in steps], [1, 2 / 3, 1 / 3])
    again, _ = jax.jit(step)(step.init(params), *steps[-1])
    np.testing.assert_allclose(again.opt_state, state.opt_state, rtol=1e-12)
    step.lower(state, *steps[0])


def test_only_weights_give_the_whole_batchs_gradient(rng):
    """torch's initial world size leaves a third of it where two of three have left."""
    params, streams = rng.normal(size=3), streams_of(rng, SIZES)
    whole = [
        jax.grad(lambda p, b=batch: losses_of(p, b).mean())(params)
        for batch in (
            jax.tree.map(
                lambda *parts: np.concatenate(parts),
                *(stream[step] for stream in streams if step < len(stream)),
            )
            for step in range(3)
        )
    ]
    rules = ("weight", "active", "initial")
    by = {rule: gradients_by_hand(params, streams, rule) for rule in rules}
    for t in range(3):
        np.testing.assert_allclose(by["weight"][t], whole[t], rtol=1e-12)
    assert np.abs(by["active"][0] - whole[0]).max() > 1e-3
    np.testing.assert_allclose(by["initial"][2] * 3, whole[2], rtol=1e-12)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=4
    ).filter(any),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_example_is_seen_once(sizes, masked, seed):
    """Whatever the lengths: its weight arrives once, and nobody else's does."""
    rng = np.random.default_rng(seed)
    count = sum(map(sum, sizes))
    own = rng.uniform(0.5, 2, size=count) if masked else np.ones(count)
    ends = np.cumsum([n for batches in sizes for n in batches])[:-1]
    numbers, weights = (iter(np.split(x, ends)) for x in (np.arange(count), own))
    streams = [[(next(numbers), next(weights)) for _ in batches] for batches in sizes]
    seen, steps = np.zeros(count), 0
    for batch, w in Join(streams, replicas=len(sizes), rows=4, weighted=True):
        assert len(batch) == 4 * len(sizes)
        np.add.at(seen, np.asarray(batch), np.asarray(w))
        steps += 1
    np.testing.assert_allclose(seen, own)
    assert steps == max(map(len, sizes))


def test_replicas_stay_the_same_to_the_end(rng, mesh):
    """Those that have left step along, so that no last one need be copied from."""
    lengths = [50, 3, 20, 41]
    streams = streams_of(rng, [[2] * n for n in lengths])
    step = train_step(losses_of, optim.adam(lr=0.01), mesh(4))
    state = step.init(rng.normal(size=3))
    for batch, weights in Join(streams, mesh(4), rows=2):
        state, metrics = step(state, batch, weights)
        assert copies_differ((state.params, state.opt_state)) == 0
        assert np.isfinite(metrics.loss)
    assert int(state.step) == 50


def test_an_early_end_can_be_an_error(rng):
    """After the steps that all could make; naming who ended."""
    streams = streams_of(rng, [[2, 2, 2], [1, 1], [2, 1, 1], [2, 2]])
    steps = iter(Join(streams, replicas=4, rows=2, early_end="error"))
    for _ in range(2):
        next(steps)
    with pytest.raises(EarlyEnd, match=r"replicas 1, 3 of 4 ran out of data after 2"):
        next(steps)
    assert issubclass(EarlyEnd, JdistError)
    even = streams_of(rng, [[2, 2], [1, 1]])
    assert len(list(Join(even, replicas=2, rows=2, early_end="error"))) == 2


def test_streams_may_be_generators(rng):
    """Read one batch ahead of nothing: each only when its step comes."""
    read = []

    def stream(name, sizes):
        for i, n in enumerate(sizes):
            read.append((name, i))
            yield np.arange(n)

    steps = iter(Join([stream("a", [1, 2]), stream("b", [2])], replicas=2, rows=2))
    assert read == []
    next(steps)
    assert read == [("a", 0), ("b", 0)]
    assert len(list(steps)) == 1
    assert list(Join([iter(()), iter(())], replicas=2, rows=2)) == []


@pytest.mark.parametrize(
    ("streams", "options", "message"),
    [
        ([[]], {}, r"one stream for each of the 2 replicas here. Got 1"),
        ([[], []], {"divide_by": "rank"}, r"divide_by=.*'active'.*Got 'rank'"),
        ([[], []], {"early_end": "stop"}, r"early_end=.*'error'. Got 'stop'"),
        ([[np.zeros((0, 2))], []], {}, r"one example or more. Got an empty batch"),
        ([[np.zeros(3)], []], {}, r"largest of the sizes, \(3, 0\)\. Got 2"),
        ([[{"x": np.zeros(2), "y": np.zeros(1)}], []], {}, "same first dimension"),
    ],
)
def test_what_is_refused(streams, options, message):
    """At once, or when the batch comes."""
    with pytest.raises(ValueError, match=message):
        list(Join(streams, replicas=2, rows=2, **options))


def test_streams_may_fill_one_buffer(rng):
    """Also with what an ended one leaves: an example of it is repeated as padding."""
    memory, batches = np.zeros((3, 2)), rng.standard_normal((3, 3, 2))

    def stream(numbers):
        for number in numbers:
            memory[...] = batches[number]
            yield memory
        memory[...] = np.nan

    first, second = Join([stream([0]), stream([1, 2])], replicas=2, rows=3)
    np.testing.assert_array_equal(first[0], np.concatenate(batches[:2]))
    padding = np.repeat(batches[2, :1], 3, axis=0)
    np.testing.assert_array_equal(second[0], np.concatenate([padding, batches[2]]))

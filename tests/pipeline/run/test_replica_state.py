"""Replicated stages: schedules, too few micro-batches, and stages with a state."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline
from jdist.pipeline.run.replicas import joined_state
from tests.pipeline import trained, worker_cases
from tests.pipeline.epochs import asynchronous, paired

SIZES = [2, 2, 2, 1]
"""Of the micro-batches of `trained.batch_of`, which has 7 examples."""


@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b"])
def test_schedules_with_replicas(family):
    """Valid, in turn, stage by stage; the order of PipeDream's for 1F1B."""
    make = getattr(pipeline, family)
    for counts in [(1,), (3,), (2, 1), (1, 3, 2), (2, 2, 1)]:
        for m in range(max(counts), 7):
            schedule = make(len(counts), m, replicas=counts).validate()
            assert [len(workers) for workers in schedule.placement] == list(counts)
            ranks = [w for workers in schedule.placement for w in workers]
            assert ranks == list(range(sum(counts)))
            asynchronous = pipeline.pipedream(len(counts), m, replicas=counts)
            assert schedule.placement == asynchronous.placement
            if family == "one_f_one_b":
                assert schedule.columns == asynchronous.columns
            else:
                per_worker = [-(-(m - t) // r) for r in counts for t in range(r)]
                assert schedule.peak_activations == tuple(per_worker)
    assert make(2, 3, replicas=(1, 1)) == make(2, 3)


@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((3, 1), r"replicas=.* at most the 2 micro-batches.*Got \(3, 1\)"),
        ((1,), "a number for each of 2 stages"),
        ((1, 0), "must be an integer of at least 1"),
    ],
)
def test_replicas_that_are_refused(family, counts, message):
    with pytest.raises(ValueError, match=message):
        getattr(pipeline, family)(2, 2, replicas=counts)


def test_fewer_micro_batches_than_workers_of_a_stage():
    """Before the first step, not at the end of it."""
    asynchronous = pipeline.pipedream(2, 2, replicas=(1, 3))
    schedule = asynchronous.synchronous()
    stages = trained.made().stages
    message = r"a micro-batch for each worker of stage 1. Got 2 for the workers \(1, 2"
    with pytest.raises(ValueError, match=message):
        pipeline.Pipeline(stages, trained.losses, schedule)


def in_turn(count, start, batch, weights, params, key):
    """Stage 1's states by hand: each worker's own micro-batches, then the mean."""
    ends = np.cumsum([0, *SIZES])
    states, totals = [start] * count, [0.0] * count
    for micro, (begin, end) in enumerate(pairwise(ends)):
        own = jax.random.fold_in(jax.random.fold_in(key, 0), micro)
        h = trained.noisy(params[0], batch["x"][begin:end], own)
        turn = micro % count
        states[turn] = trained.centred(params[1], states[turn], h)[1]
        totals[turn] += float(weights[begin:end].sum())
    mean = sum(w * s["mean"] for w, s in zip(totals, states, strict=True)) / sum(totals)
    return {"mean": mean, "seen": states[0]["seen"]}


@pytest.mark.parametrize("devices", [None, slice(1, 4)])
def test_the_state_is_the_mean_of_the_workers_states(devices):
    """In proportion to weights; counts are the first worker's; two steps long."""
    schedule = pipeline.one_f_one_b(2, 4, replicas=(1, 2))
    places = None if devices is None else jax.devices()[devices]
    options = {"optimizer": optim.sgd(lr=0.1), "max_norm": None}
    start = trained.made()
    pipe = pipeline.Pipeline(start.stages, trained.losses, schedule, places, **options)
    state = trained.start(pipe)
    for _ in range(2):
        batch, weights = trained.batch_of(state.step)
        key = jax.random.fold_in(state.key, state.step)
        given = jax.device_get((state.states[1], state.params))
        expected = in_turn(2, given[0], batch, weights, given[1], key)
        state, _ = pipe.train_step(state, batch, weights)
        after = state.states[1]
        np.testing.assert_allclose(after["mean"], expected["mean"], rtol=1e-5)
        assert int(after["seen"]) == int(expected["seen"])
    assert int(after["seen"]) == 2 * (2 + 2)  # micro-batches 0 and 2, of 2 each


def test_a_replica_whose_examples_do_not_count():
    """Its state does not either."""
    kept = {"mean": jnp.array([1.0, 2.0]), "seen": jnp.int32(3)}
    other = {"mean": jnp.array([np.nan, 7.0]), "seen": jnp.int32(5)}
    found = joined_state([other, kept], [0.0, 2.5])
    np.testing.assert_array_equal(found["mean"], [1.0, 2.0])
    assert int(found["seen"]) == 3
    assert int(joined_state([kept, other], [0.0, 0.0])["seen"]) == 3


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_the_mean_of_states_is_rounded_to_their_dtype_alone(dtype, rng):
    """Shares of 2/7, 1/7 and 4/7 have no end in binary; float64 must not see float32's
    rounding. Equal states stay what they are to the last bit or two."""
    weights = [2.0, 0.0, 1.0, 4.0]
    rows = rng.uniform(1, 2, (4, 5))
    states = [jnp.asarray(row, dtype) for row in rows]
    states[1] = jnp.full(5, jnp.nan, dtype)
    wide = [np.asarray(state, np.float64) for state in states]
    expected = (2 * wide[0] + wide[2] + 4 * wide[3]) / 7
    found = joined_state(states, weights)
    assert found.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    close = {"rtol": 2 * eps, "atol": 0.0}
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, **close)
    alike = joined_state([states[0]] * 4, weights)
    np.testing.assert_allclose(np.asarray(alike, np.float64), wide[0], **close)


def test_workers_leave_the_state_of_one_process(cluster):
    expected = worker_cases.replicated_state(False)
    found = cluster.everywhere(worker_cases.replicated_state, True)
    assert found[0][1] is None
    for rank in (1, 2):
        trained.same(trained.numbers(found[rank][1]), trained.numbers(expected[1]))


def test_pipedream_with_replicas_that_have_a_state():
    """At the end of an epoch one state again: each worker's own, then the mean."""
    runtime = asynchronous(
        trained.made().stages,
        trained.losses,
        optimizer=optim.sgd(lr=0.0),
        replicas=(1, 2),
    )
    state = trained.start(runtime)
    batch, weights = trained.batch_of(0)
    ends = np.cumsum([0, *SIZES])
    spans = list(pairwise(ends))
    batches = [{k: v[a:b] for k, v in batch.items()} for a, b in spans]
    key = jax.random.fold_in(state.key, state.step)
    expected = in_turn(2, state.states[1], batch, weights, state.params, key)
    after, _ = runtime.train_epoch(
        state, paired(batches, [weights[a:b] for a, b in spans])
    )
    found = after.states[1]
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-5)
    assert int(found["seen"]) == 4

"""A static loss scale where stages update, and skip, at different times."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, verify
from jdist.pipeline.weight_stashing.epoch import EpochStep
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.pipedream_cases import SCALE, half_problem, scaled_optimizer
from tests.pipeline.pipedream_rules import (
    SKIPPED,
    adam,
    fragile,
    fragile_stages,
    momentum,
    planted,
    problem,
    serial,
    version,
    wide_losses,
)

IN_FLOAT64 = {
    change: scaled_optimizer(jnp.float64, change) for change in (momentum, adam)
}
RATE = 1 / 16
"""A power of two: steps divided by it are gradients again."""
IN_FLOAT16 = optim.with_master_weights(
    optim.sgd(lr=RATE), compute_dtype=jnp.float16, loss_scale=SCALE
)


def made(optimizer, policy="stashing", k=1, stages=None, **options):
    return asynchronous(
        stages or fragile_stages(3),
        wide_losses,
        optimizer=optimizer,
        policy=policy,
        update_every=k,
        **options,
    )


def masters_of(state):
    return [opt_state.masters for opt_state in state.opt_states]


@pytest.mark.parametrize(
    ("policy", "k", "change", "replicas"),
    [
        ("stashing", 1, adam, None),
        ("stashing", 2, momentum, (1, 2, 1)),
        ("vertical_sync", 1, momentum, None),
        ("2bw", 3, adam, None),
        ("flush", 2, momentum, None),
    ],
)
def test_each_stage_skips_its_own_updates(policy, k, change, replicas):
    """The serial program in float64, whose overflows are its own: the same updates are
    skipped, and neither momentum nor schedule nor bias correction has seen them."""
    params, batches, weights = problem(3, 8)
    batches = planted(batches, 1e308)
    runtime = made(IN_FLOAT64[change], policy, k, replicas=replicas)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    options = {"k": k, "replicas": replicas, "scale": SCALE}
    history = serial(policy, params, batches, weights, change, **options)
    same = [sum(a is b for a, b in pairwise(h)) for h in history]
    assert metrics.skipped == same == SKIPPED
    expected = [versions[-1] for versions in history]
    for found in (masters_of(state), state.params):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
    assert np.isfinite(metrics.losses).all()
    # The next epoch counts from nothing.
    _, metrics = runtime.train_epoch(state, paired(batches[:2], weights[:2]))
    assert metrics.skipped == [0, 0, 0]


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_batch_without_weight_is_no_overflow(kind):
    """Its own mean does not exist, and is not needed."""
    params, batches, weights = problem(3, 8)
    batches = planted(batches, 0.0)
    weights[3] = np.zeros_like(weights[3])
    runtime = made(IN_FLOAT64[momentum], k=2, reduction=kind)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    history = serial("stashing", params, batches, weights, k=2, scale=SCALE, kind=kind)
    assert metrics.skipped == [0, 0, 0]
    expected = [versions[-1] for versions in history]
    pairs = zip(
        jax.tree.leaves(masters_of(state)), jax.tree.leaves(expected), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_updates_in_16_bits(monkeypatch):
    """Each follows a gradient at the very versions that the judge accepts, but those
    that are skipped; and a skipped one leaves all bits as they are."""
    k, update, history = 3, EpochStep._update, [[], [], []]

    def noted(epoch, stage):
        stash = epoch._stashed[stage, stage].stash
        found = stash.kept[stash.version], stash.opt_state.masters
        history[stage].append(jax.device_get(found))

    def watched(epoch, worker, stage):
        if not history[stage]:
            noted(epoch, stage)
        update(epoch, worker, stage)
        noted(epoch, stage)

    monkeypatch.setattr(EpochStep, "_update", watched)
    params, batches, weights = half_problem()
    runtime = made(IN_FLOAT16, "2bw", k)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    assert metrics.skipped == SKIPPED
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float16"}
    assert {str(x.dtype) for x in jax.tree.leaves(masters_of(state))} == {"float32"}
    judge = verify.gradients_judge(whole_losses)
    for t, skipped in enumerate([{"0", "1"}, {"1"}, set()]):
        group = range(t * k, (t + 1) * k)
        whole = {
            name: np.concatenate([batches[i][name] for i in group])
            for name in batches[0]
        }
        met = [history[j][version("2bw", 3, k, j, t * k)][0] for j in range(3)]
        moved = []
        for j in range(3):
            (copies, before), (next_copies, after) = history[j][t : t + 2]
            moved.append(jax.tree.map(moved_by, before, after))
            if str(j) in skipped:
                same_bits((next_copies, after), (copies, before))
        together = np.concatenate([weights[i] for i in group])
        loss = np.average(metrics.losses[[*group]], weights=sums(weights, group))
        candidate = {"update": returning(np.float32(loss), moved)}
        report = judge(met, whole, candidate, weights=together)
        # Where float16 overflows nothing can be accepted: it fails, or is not judged.
        refused = [leaf for leaf in report.leaves if not leaf.ok]
        assert {leaf.path.split("/")[0] for leaf in refused} == skipped
    met = [versions[t][0] for versions in history]  # as if it flushed
    assert not judge(met, whole, candidate, weights=together).ok


def whole_losses(params, batch):
    h = batch["x"]
    for j, each in enumerate(params):
        h = fragile(each, h, batch[f"boom{j}"], batch[f"spike{j}"])
    return wide_losses(h, batch)


def sums(weights, group):
    return [weights[i].sum() for i in group]


def moved_by(before, after):
    return jnp.asarray((before - after) / RATE, jnp.float16)


def returning(loss, grads):
    return lambda *_: (loss, grads)


def same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_memory_is_that_of_the_versions(monkeypatch):
    """Live copies of a stage's weights, after every action: a skipped update's version
    counts like any other, and nothing beside the versions is kept."""
    params, batches, weights = half_problem()
    runtime = made(IN_FLOAT16)
    shapes = [each["w"].shape for each in params]
    do, seen = EpochStep._do, set()

    def copies(shape):
        live = [x for x in jax.live_arrays() if x.shape == shape]
        return sum(x.dtype == jnp.float16 for x in live)

    outside = [copies(shape) for shape in shapes]

    def watched(epoch, worker, action):
        do(epoch, worker, action)
        for (_, j), run in epoch._stashed.items():
            assert copies(shapes[j]) == outside[j] + len(run.stash.kept)
            seen.add((j, len(run.stash.kept)))

    monkeypatch.setattr(EpochStep, "_do", watched)
    states = [runtime.init(params)]  # An epoch may drop the only reference.
    _, metrics = runtime.train_epoch(states.pop(), paired(batches, weights))
    assert metrics.skipped == SKIPPED
    assert seen == {(j, kept) for j in range(3) for kept in range(1, 4 - j)}


@pytest.mark.parametrize("policy", ["stashing", "vertical_sync", "2bw", "flush"])
def test_a_scale_that_follows_overflows_is_refused(policy):
    dynamic = optim.with_master_weights(
        optim.sgd(), compute_dtype=jnp.float16, loss_scale=optim.DynamicLossScale()
    )
    match = "must scale the loss by a constant.*would part.*65536.*stages skip together"
    with pytest.raises(ValueError, match=match):
        made(dynamic, policy, None)


def test_scales_that_cannot_be_are_refused():
    other = optim.with_master_weights(
        optim.sgd(), compute_dtype=jnp.float16, loss_scale=2 * SCALE
    )
    with pytest.raises(ValueError, match=r"in all stages alike.*2048"):
        made([IN_FLOAT16, IN_FLOAT16, other])

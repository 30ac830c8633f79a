"""PipeDream's runtime beside serial programs written from the update rules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import optim, pipeline, verify
from jdist.pipeline.weight_stashing import epoch as epoch_module
from jdist.pipeline.weight_stashing.epoch import EpochStep
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.pipedream_rules import (
    OPTIMIZERS,
    adam,
    layer,
    losses,
    momentum,
    problem,
    serial,
    stages,
    version,
)

POLICIES = ["stashing", "vertical_sync", "2bw", "flush"]


def close(found, expected, rtol):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def newest(history):
    return [versions[-1] for versions in history]


def made(n, policy="stashing", k=1, optimizer=OPTIMIZERS[momentum], **options):
    return asynchronous(
        stages(n),
        losses,
        optimizer=optimizer,
        policy=policy,
        update_every=k,
        **options,
    )


@settings(max_examples=8, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    n=st.integers(1, 4),
    m=st.integers(1, 9),
    k=st.integers(1, 4),
    change=st.sampled_from(list(OPTIMIZERS)),
    kind=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 1000),
)
def test_rules_in_float64(policy, n, m, k, change, kind, seed):
    k = max(k, n) if policy == "2bw" else k
    params, batches, weights = problem(n, m, seed)
    runtime = made(n, policy, k, OPTIMIZERS[change], reduction=kind)
    state, _ = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    expected = serial(policy, params, batches, weights, change, k, kind=kind)
    close(state.params, newest(expected), 1e-11)


def test_losses_of_a_sum():
    params, batches, weights = problem(3, 6)
    mean, whole = made(3), made(3, reduction="sum")
    _, means = mean.train_epoch(mean.init(params), paired(batches, weights))
    _, sums = whole.train_epoch(whole.init(params), paired(batches, weights))
    first = weights[0].sum()  # Before the first update.
    np.testing.assert_allclose(sums.losses[0], means.losses[0] * first, rtol=1e-12)
    np.testing.assert_allclose(sums.loss, sums.losses.sum(), rtol=1e-12)
    assert sums.losses.shape == (6,)


@pytest.mark.parametrize(("policy", "k"), [("stashing", 2), ("flush", 3), ("2bw", 3)])
def test_a_batch_without_weight_in_an_update(policy, k):
    """It adds nothing, and is met by the versions that it would meet anyway."""
    params, batches, weights = problem(3, 8)
    for empty in (0, 4):
        weights[empty] = np.zeros_like(weights[empty])
    runtime = made(3, policy, k)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    expected = serial(policy, params, batches, weights, k=k)
    close(state.params, newest(expected), 1e-11)
    assert np.flatnonzero(np.isnan(metrics.losses)).tolist() == [0, 4]
    totals = [own.sum() for own in weights]
    total = np.average(np.nan_to_num(metrics.losses), weights=totals)
    np.testing.assert_allclose(metrics.loss, total, rtol=1e-12)
    weights[1] = np.zeros_like(weights[1])
    with pytest.raises(
        ValueError, match=r"weights=...\)` must not all be zero in the m"
    ):
        runtime.train_epoch(runtime.init(params), paired(batches[:2], weights[:2]))


def gradients_kept():
    """SGD that leaves its last gradient in its state, for the judge."""

    def step(params, grads, state, overrides):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optim.Optimizer("gradients_kept", zeros, step)


@pytest.fixture(scope="module")
def judge():
    def whole_losses(params, batch):
        y = functools.reduce(lambda h, p: layer(p, h), params, batch["x"])
        return losses(y, batch)

    return verify.gradients_judge(whole_losses)


def test_the_judge_of_stashing(judge):
    """The last gradient in float32, at the very weights that its forward pass met."""
    n, m = 3, 5
    params, batches, weights = problem(n, m, 5, np.float32)
    runtime = made(n, optimizer=gradients_kept())
    state = runtime.init(params)
    history = [state.params]
    for t in range(1, m):  # An epoch of t updates ends with version t.
        after, _ = runtime.train_epoch(state, paired(batches[:t], weights[:t]))
        history.append(after.params)
    last = [version("stashing", n, 1, j, m - 1) for j in range(n)]
    met = [history[v][j] for j, v in enumerate(last)]

    def candidate(params, batch):
        state, metrics = runtime.train_epoch(
            runtime.init(history[0]), paired(batches, weights)
        )
        return metrics.losses[-1], state.opt_states

    report = judge(met, batches[-1], {"stashing": candidate}, weights=weights[-1])
    report.raise_if_failed()


def test_epochs_begin_with_what_the_one_before_has_left():
    n, k = 3, 2
    params, batches, weights = problem(n, 7)
    runtime = made(n, k=k, optimizer=optim.sgd(lr=0.1))
    state = runtime.init(params)
    expected = params
    for epoch in range(2):
        state, _ = runtime.train_epoch(state, paired(batches, weights))
        plain = functools.partial(serial, "stashing", change=descent, k=k)
        expected = newest(plain(expected, batches, weights))
        close(state.params, expected, 1e-11)
        assert state.step == epoch + 1
    assert jnp.isfinite(params[0]["w"]).all()  # still there


def descent(t, grad, moments):
    return -0.1 * grad, moments


def test_evaluation_is_that_of_the_newest_weights():
    params, batches, weights = problem(3, 6)
    runtime = made(3)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    found = runtime.evaluate(state, batches[0], weights[0])
    y = functools.reduce(lambda h, p: layer(p, h), state.params, batches[0]["x"])
    expected = np.average(losses(y, batches[0]), weights=weights[0])
    np.testing.assert_allclose(found.loss, expected, rtol=1e-12)
    assert metrics.losses.shape == (6,)
    assert metrics.skipped is None  # without a loss scale
    total = np.average(metrics.losses, weights=[own.sum() for own in weights])
    np.testing.assert_allclose(metrics.loss, total, rtol=1e-12)
    first = functools.reduce(lambda h, p: layer(p, h), params, batches[0]["x"])
    expected = np.average(losses(first, batches[0]), weights=weights[0])
    np.testing.assert_allclose(metrics.losses[0], expected, rtol=1e-12)


def test_a_step_of_the_flush_policy_drains_once():
    """Its passes are those of 1F1B, and its update is the whole batch's."""
    n = 3
    params, _, _ = problem(n, 1)
    _, (_, batch), (_, weights) = problem(n, 2)
    runtime = made(n, "flush")
    assert runtime.schedule.clocks == 2 * n * n  # an epoch drains for every update
    (state, _), timeline = pipeline.timed(
        runtime, lambda: runtime.train_step(runtime.init(params), batch, weights)
    )
    expected = pipeline.one_f_one_b(n, n)
    for worker in range(n):
        done = sorted(r for r in timeline.records() if r.worker == worker)
        done.sort(key=lambda record: record.start)
        assert [r[1:4] for r in done] == [tuple(a) for a in expected.actions(worker)]
    other = pipeline.Pipeline(
        stages(n), losses, expected, optimizer=OPTIMIZERS[momentum]
    )
    same(state, other.train_step(other.init(params), batch, weights)[0])


def test_masters_in_an_asynchronous_stage():
    """Stages compute in bfloat16; what they hand on is a copy of the masters."""
    params, batches, weights = problem(2, 5, dtype=np.float32)
    kept = optim.with_master_weights(optim.sgd(lr=0.1), compute_dtype=jnp.bfloat16)
    runtime = made(2, optimizer=kept)
    bf16 = [{name: x.astype(jnp.bfloat16) for name, x in b.items()} for b in batches]
    state = runtime.init(params)
    after, _ = runtime.train_epoch(state, paired(bf16, weights))
    pairs = zip(after.params, after.opt_states, state.params, strict=True)
    for own, opt_state, before in pairs:
        for name, x in own.items():
            assert x.dtype == jnp.bfloat16
            assert opt_state.masters[name].dtype == jnp.float32
            assert np.array_equal(x, opt_state.masters[name].astype(jnp.bfloat16))
            assert not np.array_equal(x, before[name])


def noisy(params, state, x, key):
    noise = jax.random.normal(key, x.shape, x.dtype)
    return (x + noise) @ params + state, state + x.mean()


def test_states_and_keys():
    """The state goes from micro-batch to micro-batch; each epoch has its own keys."""
    params, batches, weights = problem(1, 5)
    key = jax.random.key(7)
    stage = pipeline.Stage(noisy, ("x",), ("y",), stateful=True, keyed=True)
    runtime = asynchronous([stage], losses, optimizer=optim.sgd(lr=0.1))
    state = runtime.init([params[0]["w"]], [jnp.zeros(())], key)
    w, kept = params[0]["w"], jnp.zeros(())
    for epoch in range(2):
        state, _ = runtime.train_epoch(state, paired(batches, weights))
        own = jax.random.fold_in(jax.random.fold_in(key, epoch), 0)
        for i, (batch, each) in enumerate(zip(batches, weights, strict=True)):
            # An example that counts stands where one is excluded, for the state too.
            x = np.where(each[:, None] == 0, batch["x"][each > 0][0], batch["x"])
            drawn = x + jax.random.normal(jax.random.fold_in(own, i), x.shape)
            error = np.asarray(drawn @ w + kept - batch["target"])
            w = w - 0.1 * drawn.T @ (2 * error * each[:, None]) / each.sum()
            kept = kept + x.mean()
    np.testing.assert_allclose(state.params[0], w, rtol=1e-11)
    np.testing.assert_allclose(state.states[0], kept, rtol=1e-12)


# --- replicas ---

REPLICAS = [(1, 2, 1), (2, 1, 1), (3, 2, 1), (1, 1, 2), (2, 3, 1)]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_follow_their_formula(replicas, k):
    """Micro-batches go round; an update has k of each worker of the stage."""
    params, batches, weights = problem(3, 11)
    runtime = made(3, k=k, replicas=replicas)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    expected = serial("stashing", params, batches, weights, k=k, replicas=replicas)
    close(state.params, newest(expected), 1e-11)
    assert np.isfinite(metrics.losses).all()
    for each in runtime.passes:
        own = runtime.schedule.placement[each.stage]
        assert each.worker == own[each.micro_batch % len(own)]
    for worker in range(sum(replicas)):
        stage = next(j for j, w in enumerate(runtime.schedule.placement) if worker in w)
        kinds = [p.kind for p in runtime.passes if p.worker == worker]
        warm_up = (sum(replicas[stage:]) - 1) // replicas[stage]
        assert kinds.index("B") == warm_up + 1  # its first one has a forward before it
    if k == 1:
        later = [sum(replicas[j:]) for j in range(3)]
        ahead = [1 + (w - 1) // r for w, r in zip(later, replicas, strict=True)]
        expected = [a for a, r in zip(ahead, replicas, strict=True) for _ in range(r)]
        fits = [min(a, math.ceil(11 / r)) for a, r in zip(ahead, replicas, strict=True)]
        assert fits == ahead
        assert held(runtime) == tuple(expected)


def test_replicas_are_bit_identical(monkeypatch):
    """After each update, on one device and on several."""
    do, versions = EpochStep._update, {}

    def watched(epoch, worker, stage):
        do(epoch, worker, stage)
        stash = epoch._stashed[worker, stage].stash
        found = [
            np.asarray(x).tobytes() for x in jax.tree.leaves(stash.kept[stash.version])
        ]
        versions.setdefault((stage, stash.version), {})[worker] = found

    monkeypatch.setattr(EpochStep, "_update", watched)
    params, batches, weights = problem(3, 11)
    runtime = made(3, replicas=(2, 1, 3), places=jax.devices()[:6])
    runtime.train_epoch(runtime.init(params), paired(batches, weights))
    assert dict(list(versions)) == {0: 6, 1: 11, 2: 4}  # the last of each stage
    for (stage, _), found in versions.items():
        assert tuple(sorted(found)) == runtime.schedule.placement[stage]
        assert len(set(map(tuple, found.values()))) == 1


# --- batches that are read one by one ---


def test_batches_are_read_when_they_are_needed(monkeypatch):
    """No more than are under way: those of the first stage, and one more."""
    n, m = 3, 9
    params, batches, weights = problem(n, m)
    do, read, done = EpochStep._do, [], []

    def supply():
        for pair in zip(batches, weights, strict=True):
            read.append(len(read))
            yield pair

    def watched(epoch, worker, action):
        do(epoch, worker, action)
        if action == ("F", 0, len(done)):
            assert len(read) == action.micro_batch + 1
            done.append(action)
        assert len(epoch._stream._parts) <= n + 1

    monkeypatch.setattr(EpochStep, "_do", watched)
    runtime = made(n)
    found = runtime.train_epoch(runtime.init(params), supply(), total=m)
    assert (len(read), len(done)) == (m, m)
    monkeypatch.undo()
    same(found, runtime.train_epoch(runtime.init(params), paired(batches, weights)))


def test_an_iterator_that_fails_ends_the_epoch():
    params, batches, weights = problem(3, 6)
    runtime = made(3)
    state = runtime.init(params)

    def supply():
        yield from zip(batches[:4], weights[:4], strict=True)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        runtime.train_epoch(state, supply(), total=6)
    assert caught.value.__notes__[0] == "It was raised when batch 4 was read."
    after, _ = runtime.train_epoch(state, paired(batches, weights))
    close(after.params, newest(serial("stashing", params, batches, weights)), 1e-11)


def test_losses_are_not_fetched_all_at_the_end(monkeypatch):
    """JAX does not run ahead of the devices by more than so many micro-batches."""
    monkeypatch.setattr(epoch_module, "AHEAD", 2)
    params, batches, weights = problem(3, 6)
    do, waiting = EpochStep._do, []

    def watched(epoch, worker, action):
        do(epoch, worker, action)
        waiting.append(len(epoch._computing))

    monkeypatch.setattr(EpochStep, "_do", watched)
    runtime = made(3)
    _, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    assert max(waiting) == 2
    assert metrics.losses.shape == (6,)


# --- checkpoints between epochs ---


def test_a_run_continues_from_a_checkpoint_between_its_epochs(tmp_path):
    params, batches, weights = problem(3, 8)
    runtime, given = made(3, k=2, optimizer=OPTIMIZERS[adam]), paired(batches, weights)
    plain = runtime.init(params)
    with pipeline.PipelineCheckpoints(tmp_path, runtime, keep=None) as saved:
        for first in range(0, 8, 3):
            plain, _ = runtime.train_epoch(plain, given[first : first + 3])
            saved.save(plain)
        assert plain.step == saved.latest() == 3
        state = saved.restore(runtime.init(params), step=1)
        for first in range(3 * state.step, 8, 3):
            state, _ = runtime.train_epoch(state, given[first : first + 3])
    same(state, plain)


# --- versions: how many, how stale, and what they weigh ---


def held(runtime):
    """The most versions that each worker keeps."""
    most = {}
    for each in runtime.passes:
        most[each.worker] = max(most.get(each.worker, 0), each.held)
    return tuple(most[worker] for worker in sorted(most))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_versions_needed(k):
    n, m = 4, 12
    params, batches, _ = problem(n, m)
    runtime = made(n, k=k)
    runtime.train_epoch(runtime.init(params), batches)
    assert held(runtime) == tuple(1 + math.ceil((n - j - 1) / k) for j in range(n))
    for each in runtime.passes:
        assert each.version == version("stashing", n, k, each.stage, each.micro_batch)
    if k == 1:
        steady = [p for p in runtime.passes if p.kind == "B" and p.micro_batch >= n]
        assert {(p.stage, p.newest - p.version) for p in steady} == {
            (j, n - 1 - j) for j in range(n)
        }


@pytest.mark.parametrize(("policy", "expected"), [("vertical_sync", 3), ("2bw", 2)])
def test_versions_of_other_policies(policy, expected):
    n, k = 3, 3 if policy == "2bw" else 1
    params, batches, _ = problem(n, 12)
    runtime = made(n, policy, k)
    runtime.train_epoch(runtime.init(params), batches)
    assert held(runtime) == (expected,) * n
    for each in runtime.passes:
        assert each.version == version(policy, n, k, each.stage, each.micro_batch)


# Unoptimized programs are given up later than the next action begins.
@pytest.mark.optimized
def test_memory_is_that_of_distinct_versions(monkeypatch):
    """Live buffers of a stage's weights, after every action, to the byte."""
    n, m = 4, 9
    params, batches, weights = problem(n, m)
    runtime = made(n, optimizer=optim.sgd(lr=0.1))
    shapes = [params[j]["w"].shape for j in range(n)]
    assert len(set(shapes)) == n
    outside = [sum(x.shape == shape for x in jax.live_arrays()) for shape in shapes]
    do, seen = EpochStep._do, set()

    def watched(epoch, worker, action):
        do(epoch, worker, action)
        for (_, j), run in epoch._stashed.items():
            live = [x for x in jax.live_arrays() if x.shape == shapes[j]]
            one = params[j]["w"].nbytes
            kept = len(run.stash.kept) + outside[j]
            assert sum(x.nbytes for x in live) == kept * one
            seen.add((j, len(run.stash.kept)))

    monkeypatch.setattr(EpochStep, "_do", watched)
    states = [runtime.init(params)]  # An epoch may drop the only reference.
    runtime.train_epoch(states.pop(), paired(batches, weights))
    assert seen == {(j, kept) for j in range(n) for kept in range(1, n - j + 1)}
    assert (
        held(runtime) == pipeline.simulate(runtime.schedule.resized(m)).weight_versions
    )


def test_what_is_donated_is_never_in_flight(monkeypatch):
    """The optimizer's state is given away; no version that is kept ever is."""
    n = 3
    params, batches, weights = problem(n, 7)
    runtime = made(n, optimizer=OPTIMIZERS[adam])
    do, states = EpochStep._do, []

    def watched(epoch, worker, action):
        states.append(epoch._stashed[worker, action.stage].stash.opt_state)
        do(epoch, worker, action)
        for run in epoch._stashed.values():
            leaves = jax.tree.leaves((run.stash.kept, run.stash.opt_state, params))
            assert not any(leaf.is_deleted() for leaf in leaves)

    monkeypatch.setattr(EpochStep, "_do", watched)
    state = runtime.init(params)
    after, _ = runtime.train_epoch(state, paired(batches, weights))
    donated = [leaf.is_deleted() for leaf in jax.tree.leaves(states)]
    assert any(donated)
    leaves = jax.tree.leaves((state, after))
    assert not any(x.is_deleted() for x in leaves if isinstance(x, jax.Array))


def test_nothing_compiles_in_the_second_epoch(caplog):
    params, batches, weights = problem(3, 6)
    runtime = made(3, k=2)
    state, _ = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    with jax.log_compiles():
        runtime.train_epoch(state, paired(batches, weights))
    assert not [r for r in caplog.records if "Compiling" in r.message]


def test_one_device_and_several_have_the_same_bits():
    params, batches, weights = problem(3, 6)
    one, several = made(3), made(3, places=jax.devices()[:3])
    expected = one.train_epoch(one.init(params), paired(batches, weights))
    found = several.train_epoch(several.init(params), paired(batches, weights))
    same(found, expected)
    for j, own in enumerate(found[0].params):
        assert {x.device for x in jax.tree.leaves(own)} == {jax.devices()[j]}


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "latest"}, "must be one of 'stashing', 'vertical_sync', '2bw'"),
        ({"policy": "2bw", "k": 2}, "must be at least the 3 stages"),
        ({"policy": "flush", "replicas": (1, 2, 1)}, "1 for each stage .* 'flush'"),
        ({"replicas": (1, 2)}, "must have a number for each of 3 stages"),
    ],
)
def test_policies_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(3, **options)


def test_arguments_that_are_refused():
    params, batches, weights = problem(3, 2)
    runtime = made(3)
    state = runtime.init(params)
    with pytest.raises(ValueError, match=r"train_epoch\(weights=...\)` must be one"):
        runtime.train_epoch(state, [batches[0], (batches[1], weights[1][:1])])
    with pytest.raises(TypeError, match="must be a dict of named arrays"):
        runtime.train_epoch(state, [batches[0], [1.0]])
    with pytest.raises(
        TypeError, match=r"train_epoch\(batches\)` must be batches, one"
    ):
        runtime.train_epoch(state, batches[0])
    with pytest.raises(ValueError, match=r"pairs of .* weights. Got a tuple of 3"):
        runtime.train_epoch(state, [(batches[0], weights[0], None)])
    with pytest.raises(ValueError, match="must have one batch at least"):
        runtime.train_epoch(state, [])
    with pytest.raises(ValueError, match=r"train_epoch\(total=...\)` must be given"):
        runtime.train_epoch(state, iter(()))
    with pytest.raises(ValueError, match="must be given for training"):
        made(3, optimizer=None).init(params)
    with pytest.raises(ValueError, match=r"max_norm=...\)` must be None with.*Got 1.0"):
        made(3, policy="flush", max_norm=1.0)
    tied = [
        pipeline.Stage(lambda w, x: x @ w, (x,), (y,), tied={"(root)": "w"})
        for x, y in (("x", "h"), ("h", "y"))
    ]
    with pytest.raises(ValueError, match=r"must not be tied with an async.*one_f_on"):
        pipeline.Pipeline(tied, losses, pipeline.pipedream(2, 2))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("stage",))
    with pytest.raises(TypeError, match=r"a list of places with an async.* Got On"):
        made(3, places=pipeline.OneProgram(mesh))

"""PipeDream's runtime over workers: threads of a local cluster, and processes."""

import re
import signal

import jax
import numpy as np
import pytest

from tests.pipeline import pipedream_cases as cases
from tests.pipeline.epochs import paired
from tests.pipeline.pipedream_rules import problem
from tests.pipeline.places import workers
from tests.rpc import hosts as processes_of

CASES = [("processes", 2, 4), ("processes", 3, 5), ("threads", 2, 4)]


def same_bits(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def on_each(cluster, count, body, *args):
    tasks = [cluster.start(rank, body, *args) for rank in range(count)]
    return [task.result() for task in tasks]


@pytest.mark.parametrize(("kind", "n", "m"), CASES)
def test_every_policy_has_the_bits_of_one_process(request, kind, n, m):
    cluster = request.getfixturevalue(kind)
    found = on_each(cluster, n, cases.every_policy, n, m, workers(n))
    alone = cases.every_policy(n, m)
    for policy in cases.POLICIES:
        trees, losses, passes, evaluated = alone[policy]
        for rank in range(n):
            own, own_losses, own_passes, own_evaluated = found[rank][policy]
            for mine, whole in zip(own, trees, strict=True):
                same_bits(mine[rank], whole[rank])
                assert [x is None for x in mine] == [j != rank for j in range(n)]
            same_bits((own_losses, own_evaluated), (losses, evaluated))
            assert own_passes == [p for p in passes if p[1] == rank]


def test_replicas_on_workers(cluster):
    """Two workers of stage 1: the same bits, and those of one process."""
    args = (3, 7, "stashing", 1)
    found = cluster.everywhere(cases.epoch, *args, workers(4), (1, 2, 1))
    trees, losses, passes, evaluated = cases.epoch(*args, None, (1, 2, 1))
    for rank, stage in enumerate((0, 1, 1, 2)):
        own, own_losses, own_passes, own_evaluated = found[rank]
        for mine, whole in zip(own, trees, strict=True):
            same_bits(mine[stage], whole[stage])
        same_bits((own_losses, own_evaluated), (losses, evaluated))
        assert own_passes == [p for p in passes if p[1] == rank]


def test_a_pipeline_that_was_refused_does_not_count(threads):
    """One worker alone was refused three; the next one is the same on both."""
    tasks = [threads.start(rank, cases.after_refusals, rank) for rank in range(2)]
    (refused, first), (none, second) = (task.result() for task in tasks)
    rules = "must be 'mean' or 'sum'", "must be None with", "at two stages or more"
    for rule, text in zip(rules, refused, strict=True):
        assert rule in text
    assert none == []
    assert first == second


def test_skipped_updates_on_workers(processes):
    """Stages in 16 bits skip the updates that they skip in one process, bit for bit."""
    found = on_each(processes, 4, cases.planted_epoch, workers(4))
    trees, losses, skipped = cases.planted_epoch()
    assert skipped == [1, 2, 0]
    for rank, stage in enumerate((0, 1, 1, 2)):
        own, own_losses, own_skipped = found[rank]
        for mine, whole in zip(own, trees, strict=True):
            same_bits(mine[stage], whole[stage])
        same_bits(own_losses, losses)
        alone = [skipped[j] if j == stage else None for j in range(3)]
        assert own_skipped == alone


def test_epochs_that_are_not_the_same(cluster):
    tasks = [cluster.start(rank, cases.other_epochs, rank) for rank in range(2)]
    for task in tasks:
        text = task.result()
        assert "`train_epoch` must be called by all workers alike" in text
        for batches in (3, 2):
            assert f"(first of={batches}, schedule=PipeDream with UpdatePolicy(" in text


FAULTS = {
    "raises": "OSError: the disk is gone .*raised when batch 6 was read",
    "short": "must be the 9 batches of the epoch. Got 6",
    "order": "must be the same batches .*another entry 'target' on worker 2 .* on 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_batches_that_fail_or_differ_end_the_epoch_on_all_workers(cluster, fault):
    """One worker's data raise, end early, or come in another order."""
    tasks = [cluster.start(rank, cases.bad_streams, rank, fault) for rank in range(3)]
    found = [task.result() for task in tasks]
    for text, _ in found:
        assert re.search(FAULTS[fault], text), text
    if fault == "raises":
        assert ["'worker1'" in text for text, _ in found] == [True, False, True]
    runtime = cases.runtime_of(3)
    params, batches, weights = problem(3, 9, dtype=np.float32)
    after, _ = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    for rank, (_, own) in enumerate(found):
        same_bits(own[rank], after.params[rank])


def test_a_resumed_epoch_repeats_every_bit(cluster, tmp_path):
    """Drained and saved after every fourth batch, over workers and in one process."""
    whole, losses = cases.streamed(None, folder=tmp_path / "whole")
    folder = tmp_path / "cut"
    for last, expected in ((8, losses[:8]), (None, losses[8:])):
        args = (workers(3), last, folder)
        tasks = [cluster.start(rank, cases.streamed, *args) for rank in range(3)]
        found = [task.result() for task in tasks]
        for _, own_losses in found:
            same_bits(own_losses, expected)
    for rank, (own, _) in enumerate(found):
        same_bits(own[rank], whole[rank])


def test_a_killed_stage_is_named_and_its_checkpoints_go_on(
    fresh_hosts, processes, tmp_path
):
    """Two epochs are saved, a stage dies in a later one, others go on from there."""
    group = fresh_hosts(3)
    group.everywhere(processes_of.become_worker, heartbeat_timeout=600.0)
    folder, whole = str(tmp_path / "a"), str(tmp_path / "whole")
    on_each(group, 3, cases.some_epochs, 2, folder, workers(3))
    tasks = [group.start(r, cases.until_somebody_dies, workers(3)) for r in (0, 1, 2)]
    assert not tasks[0].done(0.5)
    group.signal(1, signal.SIGKILL)
    for task in (tasks[0], tasks[2]):
        name, text = task.result(timeout=10.0)
        assert name == "worker1"
        assert "train_epoch, call " in text
    curve, params = cases.some_epochs(4, whole)
    resumed = on_each(processes, 3, cases.some_epochs, 2, folder, workers(3))
    for rank, (own_curve, own) in enumerate(resumed):
        assert [step for step, _ in own_curve] == [3, 4]
        same_bits([x for _, x in own_curve], [x for _, x in curve[2:]])
        same_bits(own[rank], params[rank])

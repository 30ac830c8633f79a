"""A pipeline whose workers are processes, or threads of a local cluster."""

import re

import jax
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline.run.stage_channels import InProcessChannels
from jdist.pipeline.run.step import Step
from tests.pipeline import trained, worker_cases
from tests.pipeline.models import losses, problem, stages
from tests.pipeline.places import workers
from tests.rpc import hosts as processes_of

REDUCTIONS = ["mean", "max"]


def in_one_process(schedule, reduction, examples, seed):
    pipe = pipeline.Pipeline(stages(), losses, schedule, reduction=reduction)
    params, batch, weights = problem(examples, seed)
    return pipe.value_and_grad(params, batch, weights)


def same_bits(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, np.asarray(b))


def on_each(cluster, body, *args):
    """Of the first three workers; results by rank."""
    tasks = [cluster.start(rank, body, *args) for rank in range(3)]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("family", worker_cases.FAMILIES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bits_are_those_of_one_process(cluster, family, reduction):
    found = on_each(cluster, worker_cases.steps, family, reduction, 2)
    schedule = worker_cases.FAMILIES[family](3, 3)
    for step in range(2):
        loss, grads = in_one_process(schedule, reduction, 7, step)
        for rank, results in enumerate(found):
            own_loss, own = results[step]
            assert own_loss == np.asarray(loss)
            same_bits(own[rank], grads[rank])
            assert [g is None for g in own] == [j != rank for j in range(3)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_replicas_of_a_stage_have_the_same_gradient(cluster, reduction):
    found = cluster.everywhere(worker_cases.replicated, reduction)
    schedule = pipeline.gpipe(3, 4)
    loss, grads = in_one_process(schedule, reduction, 9, 0)
    for rank, stage in enumerate((0, 1, 1, 2)):
        own_loss, own = found[rank]
        np.testing.assert_allclose(own_loss, loss, rtol=1e-6)
        pairs = zip(
            jax.tree.leaves(own[stage]), jax.tree.leaves(grads[stage]), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    same_bits(found[1][1][1], found[2][1][1])


def test_a_stage_that_does_not_fit_is_named_on_all_workers(cluster):
    found = on_each(cluster, worker_cases.refused_first_step, 4)
    for rank, (text, notes) in enumerate(found):
        assert "ValueError" in text
        assert "stage 1 cannot take h: float32[3,5]" in text
        if rank != 1:
            assert any("worker1" in note for note in notes)


def test_workers_with_other_schedules(cluster):
    tasks = [cluster.start(r, worker_cases.other_schedules, r) for r in range(3)]
    for task in tasks:
        assert "must be the same on all workers" in task.result()


@pytest.mark.parametrize("size", [1, 2])
def test_stages_on_meshes_compile_before_the_first_micro_batch(processes, size):
    """All of them, and no other programs than without that."""
    found = on_each(processes, worker_cases.on_a_mesh, size, True)
    expected = on_each(processes, worker_cases.on_a_mesh, size, False)
    for rank, (names, own) in enumerate(found):
        later, same = expected[rank]
        assert names[-1] == "all"
        assert sorted(names[:-1]) == sorted(later)
        assert len(later) >= 2 + (rank == 2)  # both halves of a stage, and the loss
        same_bits(own, same)


def test_a_worker_that_does_not_come(cluster):
    tasks = [cluster.start(r, worker_cases.abandoned, r) for r in range(3)]
    assert tasks[0].result() == "left"
    for task in tasks[1:]:  # Who notices first tells the other.
        text = task.result()
        assert re.search(
            r"'worker[12]' waited more than 2\.0 s in value_and_grad, call 1", text
        )
        assert "F0 for an output of 'worker0'" in text
        assert "Not in the call: 'worker0'." in text


def test_a_worker_killed_in_its_stage_is_named_on_the_others(fresh_hosts):
    """They are in the middle of the step, and wait for what it would have sent."""
    group = fresh_hosts(3)
    group.everywhere(processes_of.become_worker, heartbeat_timeout=600.0)
    tasks = {r: group.start(r, worker_cases.until_somebody_dies) for r in (0, 2)}
    group.start(1, worker_cases.dies_in_the_second_step)
    group.alive.discard(1)
    for task in tasks.values():
        name, text = task.result()
        assert name == "worker1"
        assert "value_and_grad, call 1 of a pipeline" in text


def test_a_killed_saver_leaves_the_last_complete_step(fresh_hosts, tmp_path):
    """It dies between two stages of a step: the step before is there, every bit."""
    group = fresh_hosts(2)
    group.everywhere(processes_of.become_worker, heartbeat_timeout=600.0)
    task = group.start(0, worker_cases.saves_each_step, str(tmp_path))
    group.start(1, worker_cases.saves_each_step, str(tmp_path), 3)
    group.alive.discard(1)
    assert task.result() == "worker1"
    assert (tmp_path / "stage0" / "3").exists()
    pipe = trained.made()
    with pipeline.PipelineCheckpoints(tmp_path, pipe) as saved:
        assert saved.latest() == 2
        found = saved.restore(trained.start(pipe, seed=1))
    expected, _ = trained.steps(pipe, trained.start(pipe), 2)
    trained.same(trained.numbers(found), trained.numbers(expected))


def test_replicated_stages_train_alike(cluster):
    """Two workers for each part of the model: the same bits, and one process's."""
    expected = worker_cases.two_by_two()
    found = cluster.everywhere(worker_cases.two_by_two, workers(4))
    for rank, stages_there in enumerate([{0}, {0}, {1, 2}, {1, 2}]):
        for stage in range(3):
            assert (found[rank][stage] is not None) == (stage in stages_there)
        for stage in stages_there:
            same_bits(found[rank][stage], expected[stage])


def test_a_sum_leaves_when_its_stage_is_done(monkeypatch):
    """Before the worker's other stage, and the stages before it, go back."""
    events = []
    put, backward = InProcessChannels.put, Step._backward

    def noted_put(channels, tag, worker, value):
        if tag.kind == "G":
            events.append(("sum", tag.stage, tag.sender))
        put(channels, tag, worker, value)

    def noted_backward(step, worker, run, action, split):
        events.append(("backward", action.stage, worker))
        backward(step, worker, run, action, split)

    monkeypatch.setattr(InProcessChannels, "put", noted_put)
    monkeypatch.setattr(Step, "_backward", noted_backward)
    worker_cases.two_by_two(count=1)
    for stage, ranks in enumerate(worker_cases.TWO_BY_TWO.placement):
        for worker in ranks:
            sent = events.index(("sum", stage, worker))
            own = ("backward", stage, worker)
            assert sent == max(n for n, event in enumerate(events) if event == own) + 1
            before = [n for n, (_, j, _) in enumerate(events) if j < stage]
            assert max(before, default=sent + 1) > sent

"""One program over two processes: each has its own stages, and both the same loss."""

import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdist import optim, pipeline
from tests.pipeline import language_blocks as blocks
from tests.pipeline import spmd_runs as runs
from tests.pipeline.spmd_models import (
    close,
    losses,
    noisy,
    problem,
    stages,
    whole_gradient,
)


def test_the_gradient_is_that_of_the_whole_batch(pair):
    """Two stages each, as a V: a micro-batch ends where it began."""
    (own, found), (theirs, other) = pair.everywhere(runs.gradient, "ZBV", "mean")
    assert (own, theirs) == ([0, 3], [1, 2])
    (loss, grads), (same, others) = found, other
    assert loss.tobytes() == same.tobytes()
    assert [grads[j] is None for j in range(4)] == [False, True, True, False]
    assert [others[j] is None for j in range(4)] == [True, False, False, True]
    whole = [grads[0], others[1], others[2], grads[3]]
    params, batch, weights = problem(4, runs.EXAMPLES, dtype=np.float64)
    close((loss, whole), whole_gradient(params, batch, weights, "mean"))


def test_training_is_that_of_one_process(pair):
    """With the norm over the stages of both."""
    one, other = pair.everywhere(runs.trained, "1F1B", 2)
    assert one == other
    schedule = runs.FAMILIES["1F1B"]()
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    pipe = pipeline.Pipeline(stages(2), losses, schedule, **options)
    params, batch, weights = problem(2, runs.EXAMPLES)
    state = pipe.init(params)
    for found in one:
        state, metrics = pipe.train_step(state, batch, weights)
        np.testing.assert_allclose(found, (metrics.loss, metrics.grad_norm), rtol=1e-5)


def test_stages_of_two_processes_draw_as_those_of_one(pair):
    (_, (loss, (first, _))), (_, (_, (_, second))) = pair.everywhere(
        runs.noisy_gradient
    )
    schedule = runs.FAMILIES["1F1B"]()
    pipe = pipeline.Pipeline(stages(2, noisy, keyed=True), losses, schedule)
    problems = problem(2, runs.EXAMPLES, dtype=np.float64)
    expected = pipe.value_and_grad(*problems, key=jax.random.key(2))
    close((loss, [first, second]), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize("what", ["batch", "parameters", "key"])
def test_processes_that_disagree_are_refused(pair, what):
    """Before a program starts that would wait for ever."""
    expected = "must have parameters and a batch of the same shapes, and the same"
    for message in pair.everywhere(runs.disagreeing, what):
        assert expected in message
        assert "Got others in [1]" in message


def test_processes_that_disagree_in_a_later_step(pair):
    """One of them knows the shapes, the other does not; then both go on."""
    for first, message, last in pair.everywhere(runs.disagreeing_later):
        assert "must have parameters and a batch of the same shapes" in message
        assert first == last


def test_stages_on_meshes_of_several_processes(pair):
    """Their values travel as messages: without rpc it is refused at once, on both."""
    for rank, message in enumerate(pair.everywhere(runs.on_meshes_of_both)):
        assert "must be in processes that are workers of rpc, each with" in message
        assert f"no worker in process {rank}" in message
        assert "Call rpc.init_rpc in each" in message


@pytest.mark.parametrize("layout", ["a stage each", "each stage on both"])
def test_a_model_with_ends_over_meshes_of_two_processes(pair, layout):
    """The mesh of a stage may span processes: they step as one device does."""
    (own, one), (theirs, other) = pair.everywhere(runs.with_ends, layout)
    alone = layout == "a stage each"
    assert (own, theirs) == (([0], [1]) if alone else ([0, 1], [0, 1]))
    assert one == other
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    places = [jax.devices()[0]] * 2
    pipe = blocks.pipeline_of(pipeline.gpipe(2, 3), places, **options)
    params, batch, weights = blocks.problem(2, np.float64)
    state = pipe.init(params)
    for found in one:
        state, metrics = pipe.train_step(state, batch, weights)
        expected = (metrics.loss, metrics.grad_norm)
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_checkpoints_of_stages_that_span_processes(pair, tmp_path):
    """Each stage has one writer; another layout goes on with the same loss."""
    folder = str(tmp_path / "saved")
    found = pair.everywhere(runs.saved, folder)
    (steps, (again, through)), other = found
    assert steps == [1]
    assert again == through
    assert other == found[0]
    places = [jax.devices()[0]] * 2
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    pipe = blocks.pipeline_of(pipeline.gpipe(2, 3), places, **options)
    params, batch, weights = blocks.problem(2, np.float64)
    with pipeline.PipelineCheckpoints(folder, pipe) as checkpoints:
        state = checkpoints.restore(pipe.init(params))
    _, metrics = pipe.train_step(state, batch, weights)
    np.testing.assert_allclose(metrics.loss, through, rtol=1e-12)


def test_checkpoints_that_another_process_would_write(pair, tmp_path):
    """orbax would leave them out, and say nothing."""
    for message in pair.everywhere(runs.saved_from_both, str(tmp_path / "both")):
        assert "must have a device of process 0 first in the place of each" in message
        assert "Got stages that begin in the processes [1]" in message


@pytest.mark.parametrize("missing", [(0, 1), (1,)])
def test_an_end_whose_parameters_a_process_has_never_seen(pair, missing):
    """Their shapes are needed everywhere; who has them does not wait for the other."""
    for rank, message in enumerate(pair.everywhere(runs.never_told, missing)):
        expected = f"must have had the parameters of stage {1 - rank} once, in each"
        if rank in missing:
            assert expected in message
            assert "Give `Pipeline.init` or `Pipeline.place` those of all" in message
        else:
            assert "must have parameters and a batch of the same shapes" in message
            assert "Got others in [1]" in message


def test_a_killed_process_is_named():
    """By its launcher, and by an exception to the one that was in a stage with it."""
    command = ["jdist.launch", "--nproc", "2", "-m", "tests.pipeline.spmd_killed"]
    ended = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL; the others were ended." in ended.stderr
    said = ended.stdout + ended.stderr
    # On a busy machine JAX itself may find out first, and ends the process.
    assert re.search("ProcessLost: Rank 1 of 2 was lost|another task died", said)


def test_copies_of_a_parameter_in_two_processes(pair):
    for message in pair.everywhere(runs.unequal_copies):
        assert "must begin with equal values at the stages 0 and 1" in message


def test_evaluation_needs_all_devices(pair):
    """It is made of the other executor's forward passes."""
    for message in pair.everywhere(runs.evaluated):
        assert "must be called where one process has all devices" in message
        assert "Got 1 of 2 devices" in message


def test_a_mesh_without_a_device_of_the_process_is_refused(pair):
    expected = "must have a device of each process that calls it"
    assert expected in pair.run(1, runs.elsewhere)
    assert jax.process_count() == 1

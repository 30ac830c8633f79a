"""A pipeline's training states on disk: a step is saved when all stages of it are."""

import inspect
import shutil
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import Unavailable, optim, pipeline
from jdist._checkpoint import StepFolder
from jdist.pipeline import PipelineCheckpoints
from jdist.pipeline import checkpoint as module
from jdist.pipeline.run.update import PipelineState
from tests.pipeline import worker_cases
from tests.pipeline.trained import batch_of, made, numbers, same, start, steps


def numbered(step, number=None):
    """A state whose parameters are a number, by default that of its step."""
    number = step if number is None else number
    params = [{"w": jnp.full((2, 3), number, jnp.int32)}, [jnp.int32(number), None]]
    return PipelineState(step, params, [None, None], [None, None])


def number_in(state):
    assert (state.params[0]["w"] == state.params[1][0]).all()
    return int(state.params[1][0])


def saved_until(folder, last, keep=None):
    with PipelineCheckpoints(folder, made(), keep=keep) as checkpoints:
        for step in range(1, last + 1):
            checkpoints.save(numbered(step))


@pytest.fixture(scope="module")
def history():
    """Four steps at once: the states after the second and the last, and the losses."""
    pipe = made()
    middle, before = steps(pipe, start(pipe), 2)
    kept = numbers(middle)
    last, after = steps(pipe, middle, 2)
    return kept, numbers(last), before + after


def test_a_resumed_run_repeats_every_bit(history, tmp_path):
    """On other devices too: parameters, optimizers, states, key and step come back."""
    middle, last, losses = history
    pipe = made()
    state, _ = steps(pipe, start(pipe), 2)
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        assert saved.latest() is None
        saved.save(state)
        assert saved.latest() == 2
    for places in (None, jax.devices()[3:5]):
        again = made(places)
        with PipelineCheckpoints(tmp_path, again) as saved:
            state = saved.restore(start(again, seed=1))
        same(numbers(state), middle)
        if places:
            where = [{x.device for x in jax.tree.leaves(p)} for p in state.params]
            assert where == [{device} for device in places]
        state, found = steps(again, state, 2)
        assert found == losses[2:]
        same(numbers(state), last)


def test_nothing_compiles_again_after_a_restore(history, tmp_path, caplog):
    pipe = made()
    state, _ = steps(pipe, start(pipe), 1)
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        saved.save(state)
        state = saved.restore(state)
    with jax.log_compiles():
        steps(pipe, state, 1)
    assert not [r for r in caplog.records if "Compiling" in r.message]


def test_workers_go_on_where_one_process_stopped(cluster, history, tmp_path):
    """And one process where they stopped: each reads and writes its own stages."""
    _, last, losses = history
    pipe = made()
    state, _ = steps(pipe, start(pipe), 2)
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        saved.save(state)
    tasks = [cluster.start(r, worker_cases.resumed, str(tmp_path)) for r in range(2)]
    for rank, task in enumerate(tasks):
        found, numbers_there = task.result()
        assert found == losses[2:]
        own = {k for k in last if f"[{rank}]" in k or k in {".step", ".key"}}
        same(numbers_there, {key: last[key] for key in own})
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        assert saved.latest() == 4
        same(numbers(saved.restore(start(pipe, seed=1))), last)


def test_replicas_read_what_the_first_of_them_wrote(cluster, tmp_path):
    found = cluster.everywhere(worker_cases.restored_replicas, str(tmp_path))
    for step, own, again in found:
        assert step == 1
        same(again, own)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stage0", "stage1", "stage2"]


def test_a_step_without_all_its_stages_is_none(tmp_path):
    """A saver was killed between two stages, or in the middle of one."""
    saved_until(tmp_path, 3)
    shutil.rmtree(tmp_path / "stage1" / "3")
    (tmp_path / "stage1" / "3.orbax-checkpoint-tmp-0" / "arrays").mkdir(parents=True)
    with PipelineCheckpoints(tmp_path, made()) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        found = checkpoints.restore(numbered(0))
        assert (found.step, number_in(found)) == (2, 2)
        checkpoints.save(numbered(3, 30))
        assert checkpoints.steps() == [1, 2, 3]
        assert number_in(checkpoints.restore(numbered(0))) == 30
        assert number_in(checkpoints.restore(numbered(0), 1)) == 1


def test_nothing_is_taken_away_before_the_next_is_complete(tmp_path):
    """With keep=1, and a stage that is never written: its last step stays on disk."""
    saved_until(tmp_path, 2, keep=1)
    with PipelineCheckpoints(tmp_path, made(), keep=1) as checkpoints:
        assert checkpoints.steps() == [2]

        del checkpoints._folders[1]  # So that saving breaks off between two stages.
        with pytest.raises(KeyError, match="1"):
            checkpoints.save(numbered(3))
    with PipelineCheckpoints(tmp_path, made(), keep=1) as checkpoints:
        assert checkpoints.steps() == [2]
        assert number_in(checkpoints.restore(numbered(0))) == 2
        checkpoints.save(numbered(5))
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("*/*")}
    assert found == {"stage0/5", "stage1/5"}


def test_only_the_last_are_kept(tmp_path):
    saved_until(tmp_path, 4, keep=2)
    with PipelineCheckpoints(tmp_path, made()) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert number_in(checkpoints.restore(numbered(0), step=3)) == 3
        with pytest.raises(ValueError, match=r"that was saved, \[3, 4\]. Got 2"):
            checkpoints.restore(numbered(0), step=2)
        with pytest.raises(
            TypeError, match=r"that was saved, .*, an integer. Got 3\.0"
        ):
            checkpoints.restore(numbered(0), step=3.0)
        with pytest.raises(ValueError, match=r"after the last step .* 4. Got 4"):
            checkpoints.save(numbered(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": optim.sgd(lr=0.1, momentum=0.9)},
            r"stage 0: opt_states/b/exp_avg\. Got no leaf",
        ),
        ({"optimizer": optim.adamw(lr=0.1)}, r"stage 1: opt_states/w/exp_avg. Got"),
    ],
)
def test_another_state_is_refused(history, tmp_path, options, message):
    pipe = made()
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        saved.save(start(pipe))
    other = made(**options)
    with (
        PipelineCheckpoints(tmp_path, other) as saved,
        pytest.raises(ValueError, match=message),
    ):
        saved.restore(start(other))


def test_three_are_kept_unless_another_number_is_given(tmp_path):
    with PipelineCheckpoints(tmp_path, made()) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(numbered(step))
        assert checkpoints.steps() == [2, 3, 4]
    assert inspect.signature(PipelineCheckpoints).parameters["keep"].default == 3


def test_steps_are_in_order_and_those_that_are_kept(tmp_path):
    with PipelineCheckpoints(tmp_path, made(), keep=2) as checkpoints:
        for step in (2, 7, 8):
            checkpoints.save(numbered(step))
        assert checkpoints.steps() == [7, 8]
        assert number_in(checkpoints.restore(numbered(0))) == 8


def test_what_raises_on_opening_leaves_nothing_open(tmp_path, monkeypatch):
    """orbax has threads by then."""
    opened, closed = [], []

    class Folder(StepFolder):
        def __init__(self, *given, **options):
            opened.append(self)
            super().__init__(*given, **options)

        def steps(self):
            raise OSError("planted")

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(module, "StepFolder", Folder)
    with pytest.raises(OSError, match="planted"):
        PipelineCheckpoints(tmp_path, made())
    assert len(opened) == 2
    assert closed == opened


def test_a_restored_array_is_a_copy():
    """On CPU it would be the memory that was read into, and the next step's to give."""
    memory = np.zeros(64 + 8, np.float64)
    start = -memory.ctypes.data % 64 // 8  # JAX takes over what begins at such a place.
    found = memory[start : start + 64]
    for like in (jnp.zeros(64), jax.device_put(np.zeros(64), jax.devices()[0])):
        array = module._placed(found, like)
        array.block_until_ready()
        found += 1
        np.testing.assert_array_equal(array, found - 1)


@pytest.mark.parametrize("stages", [1, 3, 5])
def test_another_number_of_stages_is_refused(tmp_path, stages):
    saved_until(tmp_path, 1)
    each = [
        pipeline.Stage(lambda w, x: x * w, (f"{j}",), (f"{j + 1}",))
        for j in range(stages)
    ]
    other = pipeline.Pipeline(each, lambda y, batch: y, pipeline.gpipe(stages, 1))
    message = (
        rf"the 2 stages that were saved\. Got {stages} stages\. .*`old` of the saved"
    )
    message += r" stages.*restore\(old\.init\(old_params\)\)`, then `state = "
    with (
        PipelineCheckpoints(tmp_path, other) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.restore(PipelineState(0, *[[None] * stages] * 3))


def test_parameters_are_no_state(tmp_path):
    """Nothing is written, and a step refuses them as well."""
    pipe = made()
    params = start(pipe).params
    message = r"must be a PipelineState\. Got a list\. .* = pipe\.init\(params\)` makes"
    with pytest.raises(TypeError, match=rf"`Pipeline\.train_step\(state\)` {message}"):
        pipe.train_step(params, *batch_of(0))
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        with pytest.raises(TypeError, match=rf"`save\(state\)` {message}"):
            saved.save(params)
        with pytest.raises(TypeError, match=rf"`restore\(like=\.\.\.\)` {message}"):
            saved.restore(params)
        assert saved.latest() is None


def test_what_cannot_be_kept_or_found(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must be at least 1. Got 0"):
        PipelineCheckpoints(tmp_path, made(), keep=0)
    rule = r"PipelineCheckpoints\(keep=...\)` must be at least 1, an integer\. Got"
    for keep in (True, 2.0, "2"):
        with pytest.raises(TypeError, match=rule):
            PipelineCheckpoints(tmp_path, made(), keep=keep)
    for folder in ("", "gs://bucket/run"):
        with pytest.raises(ValueError, match=r"`PipelineCheckpoints\(folder\)` must"):
            PipelineCheckpoints(folder, made())
    with (
        PipelineCheckpoints(tmp_path, made()) as checkpoints,
        pytest.raises(ValueError, match=r"and the folder has none\. Got None\. Is it"),
    ):
        checkpoints.restore(numbered(0))
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(Unavailable, match=r"pip install .*\[checkpoint\]'"):
        PipelineCheckpoints(tmp_path, made())


def test_no_thread_stays_behind(tmp_path):
    """Of what is closed; orbax's own pools for the process grow when they like."""
    grown = []
    for turn in range(4):
        before = set(threading.enumerate())
        saved_until(tmp_path / str(turn), 1)
        grown.append(len(set(threading.enumerate()) - before))
    assert min(grown) == 0


def test_a_worker_that_does_not_save_is_named(cluster, tmp_path):
    tasks = [cluster.start(r, worker_cases.one_saves, str(tmp_path)) for r in range(2)]
    assert tasks[1].result() == "left"
    assert "for the vote of 'worker1'" in tasks[0].result()
    with PipelineCheckpoints(tmp_path, made()) as saved:
        assert saved.latest() is None

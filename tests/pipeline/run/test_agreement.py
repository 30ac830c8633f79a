"""How a call of several workers ends: on all of them, or on none."""

import contextlib
import threading

import jax
import numpy as np
import pytest

from jdist import optim, pipeline, rpc
from jdist._checkpoint import StepFolder
from jdist.pipeline.run.update import StageUpdates
from jdist.pipeline.run.worker_channels import PipelineMailbox, WorkerChannels
from tests.pipeline import refusals, shared, worker_cases
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.faults import Planted, planted
from tests.pipeline.models import losses, problem, stages
from tests.pipeline.refusals import NAMES, PLACES, batch_of, made, start

# What these stages read changes under them, which is what they are for.
pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.* compiles .* for the 3rd time"),
]


def own_rank():
    return NAMES.index(rpc.get_worker_info().name)


def outcomes(threads, body, *args):
    """Of the first three workers: what the body returned, or its error."""
    tasks = [threads.start(rank, body, *args) for rank in range(3)]
    found = []
    for task in tasks:
        try:
            found.append(task.result())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)
    return found


def texts(found):
    return ["\n".join([f"{e}", *getattr(e, "__notes__", [])]) for e in found]


# --- the commit ---


def test_a_worker_that_gives_up_before_the_decision_ends_the_call_for_all(threads):
    """It has voted; the leader has not, and finds that it is too late."""
    gave_up = threading.Event()

    def body():
        pipe, rank = made(PLACES), own_rank()
        pipe.communicator.gather(None, "first")
        rpc.set_rpc_timeout(0.2 if rank == 1 else 60.0)
        try:
            if rank == 0:
                assert gave_up.wait(60.0)
            with pipe.communicator.opened("second") as channels:
                channels.agree(rank)
        except rpc.RpcTimeout as error:
            gave_up.set()
            rpc.set_rpc_timeout(60.0)
            return str(error), pipe.communicator.gather(rank, "third")

    for text, third in outcomes(threads, body):
        assert "'worker1' waited more than 0.2 s in second, call 1" in text
        assert third == [0, 1, 2]


def test_a_worker_that_gives_up_after_the_decision_is_told(threads, monkeypatch):
    """What was decided did not reach it: it asks, and has finished like the others."""
    receive, lost = PipelineMailbox._receive, []

    def losing(mailbox, caller, body, meta):
        if meta["tag"][0] == "D" and meta["call"][1] == 1 and not lost:
            lost.append(body)
        else:
            receive(mailbox, caller, body, meta)

    def body():
        pipe, rank = made(PLACES), own_rank()
        pipe.communicator.gather(None, "first")
        rpc.set_rpc_timeout(0.5)
        found = pipe.communicator.gather(10 + rank, "second")
        rpc.set_rpc_timeout(60.0)
        return found, pipe.communicator.gather(rank, "third")

    monkeypatch.setattr(PipelineMailbox, "_receive", losing)
    assert outcomes(threads, body) == [([10, 11, 12], [0, 1, 2])] * 3
    assert len(lost) == 1


def test_an_interrupt_after_the_decision(threads, monkeypatch):
    """Its worker is a step behind, which the next call says on all."""
    take, interrupted = WorkerChannels.take, []

    def interrupting(channels, tag, worker):
        if tag.kind == "D" and channels._own == 1 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return take(channels, tag, worker)

    def body():
        pipe = made(PLACES)
        state, again = start(pipe), None
        try:
            state, _ = pipe.train_step(state, *batch_of(0))
        except KeyboardInterrupt as error:
            again = error.__notes__
        with pytest.raises(ValueError, match="called by all workers alike") as refused:
            pipe.train_step(state, *batch_of(1))
        return state.step, again, str(refused.value)

    monkeypatch.setattr(WorkerChannels, "take", interrupting)
    found = outcomes(threads, body)
    assert [step for step, *_ in found] == [1, 0, 1]
    assert found[1][1] == ["The other workers have finished the call."]
    for *_, text in found:
        assert "of step 0 with 9 examples in 4 micro-batches on 'worker1'" in text


def test_a_step_takes_one_vote_and_one_decision_of_each_worker(threads, monkeypatch):
    """Also with a norm over all stages; the loss travels with them."""
    put, ends = WorkerChannels._put, []

    def noted(channels, tag, other, value):
        if tag.kind not in "FB":
            ends.append((tag.kind, tag.sender, other))
        put(channels, tag, other, value)

    def body():
        pipe = made(PLACES)
        state, _ = pipe.train_step(start(pipe), *batch_of(0))
        pipe.communicator.gather(None, "between")
        if own_rank() == 0:
            ends.clear()
        pipe.communicator.gather(None, "counted")
        pipe.train_step(state, *batch_of(1))

    monkeypatch.setattr(WorkerChannels, "_put", noted)
    assert outcomes(threads, body) == [None] * 3
    call = [("V", 1, 0), ("V", 2, 0), ("D", 0, 1), ("D", 0, 2)]
    assert sorted(ends) == sorted(2 * call)


# --- what is refused before any stage steps ---


def with_a_rate_that_breaks(places, broken):
    def rate(step):
        if broken:
            raise Planted("the schedule of a learning rate")
        return 0.1

    with_state = optim.sgd(lr=0.1, momentum=0.9)
    optimizers = [with_state, optim.sgd(lr=rate), with_state]
    return made(places, optimizer=optimizers)


def test_a_stage_whose_optimizer_raises_leaves_the_others_as_they_were():
    """In one process: nothing was donated."""
    broken = [True]
    pipe = with_a_rate_that_breaks(None, broken)
    state = start(pipe)
    with pytest.raises(Planted, match="schedule of a learning rate"):
        pipe.train_step(state, *batch_of(0))
    arrays = jax.tree.leaves((state.params, state.opt_states))
    assert len(arrays) >= 6
    assert not any(x.is_deleted() for x in arrays)
    broken.clear()
    state, _ = pipe.train_step(state, *batch_of(0))
    assert state.step == 1


def test_an_optimizer_that_raises_on_one_worker(threads):
    def body():
        broken = [True]
        pipe = with_a_rate_that_breaks(PLACES, broken)
        state = start(pipe)
        with pytest.raises(Planted, match="schedule of a") as raised:
            pipe.train_step(state, *batch_of(0))
        broken.clear()
        state, metrics = pipe.train_step(state, *batch_of(0))
        return texts([raised.value])[0], float(metrics.loss)

    found = outcomes(threads, body)
    for rank, (text, _) in enumerate(found):
        assert (rank == 1) != ("Raised on worker 'worker1'" in text)
    assert len({loss for _, loss in found}) == 1


def test_an_update_is_traced_once(monkeypatch):
    """To look at it first costs no second trace, nor anything in later steps."""
    traced = []

    def rate(step):
        traced.append(step)
        return 0.1

    pipe = made(optimizer=optim.sgd(lr=rate))
    state, _ = pipe.train_step(start(pipe), *batch_of(0))
    assert len(traced) == 3
    check, looked = StageUpdates.check, []
    monkeypatch.setattr(
        StageUpdates,
        "check",
        lambda *given: (looked.append(given[1]), check(*given)),
    )
    pipe.train_step(state, *batch_of(1))
    assert (len(traced), looked) == (3, [0, 1, 2])


# --- calls other than steps ---


def test_shapes_are_exchanged_until_a_call_succeeds(cluster):
    """The first is refused by the second worker; the first one has passed its own."""
    found = [cluster.start(rank, worker_cases.refused_then_right) for rank in range(3)]
    params, batch, weights = problem(7)
    pipe = pipeline.Pipeline(stages(), losses, pipeline.one_f_one_b(3, 3))
    expected, _ = pipe.value_and_grad(params, batch, weights)
    for task in found:
        text, loss = task.result()
        assert "stage 1 cannot take h" in text
        assert loss == np.asarray(expected)


def test_an_epoch_is_finished_on_all_or_on_none(threads):
    """Refused by the second worker, then broken in the first stage's last backward."""
    stages_of = [
        pipeline.Stage(refusals.first, ("x",), ("h",)),
        pipeline.Stage(refusals.second, ("h",), ("m",)),
        pipeline.Stage(refusals.third, ("m",), ("y",)),
    ]

    def runtime(places):
        optimizer = optim.sgd(lr=0.01, momentum=0.9)
        made = asynchronous(stages_of, refusals.losses, places, optimizer=optimizer)
        return made, start(made)

    batches, weights = zip(*map(batch_of, range(5)), strict=True)

    def body():
        made, state = runtime(PLACES)
        rank, told = own_rank(), []
        bad = [*weights[:-1], np.full(9, np.nan if rank == 1 else 1, np.float32)]
        last = planted(0, "backward", 4) if rank == 0 else contextlib.nullcontext()
        several = [(batch, own, 1) for batch, own in paired(batches, weights)]
        right = paired(batches, weights)
        for given in paired(batches, bad), several, right:
            with last if len(told) == 2 else contextlib.nullcontext():
                try:
                    made.train_epoch(state, given)
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    told.append(str(error))
        state, metrics = made.train_epoch(state, paired(batches, weights))
        return told, metrics.losses, np.asarray(state.params[rank]["w"])

    found = outcomes(threads, body)
    one, expected = runtime(None)
    expected, metrics = one.train_epoch(expected, paired(batches, weights))
    for rank, (told, losses_of_epoch, params) in enumerate(found):
        for text, part in zip(
            told,
            ("finite and not negative", "Got a tuple of 3", "planted in"),
            strict=True,
        ):
            assert part in text
        np.testing.assert_array_equal(losses_of_epoch, metrics.losses)
        np.testing.assert_array_equal(params, expected.params[rank]["w"])


def test_a_start_with_tied_parameters(threads):
    def body():
        schedule = pipeline.one_f_one_b(3, 2)
        pipe = pipeline.Pipeline(
            shared.stages(),
            shared.losses,
            schedule,
            PLACES,
            optimizer=optim.sgd(lr=0.1),
        )
        params = shared.params_of()
        with pytest.raises(ValueError, match="must be a list of 3 trees") as refused:
            pipe.init(params[:2] if own_rank() == 1 else params)
        pipe.init(params)
        return texts([refused.value])[0]

    found = outcomes(threads, body)
    assert ["Raised on worker 'worker1'" in text for text in found] == [1, 0, 1]


def test_a_disk_that_fails_for_one(threads, tmp_path, monkeypatch):
    """No worker has saved; nor restored, where one of them could not."""
    write, full = StepFolder.write, {"stage1"}

    def writing(folder, *given):
        if folder._manager.directory.name in full:
            raise OSError("no space left")
        write(folder, *given)

    def body():
        pipe = made(PLACES)
        state = start(pipe)._replace(step=3)
        with pipeline.PipelineCheckpoints(tmp_path, pipe) as saved:
            with pytest.raises(OSError, match="no space left"):
                saved.save(state)
            before = saved.latest()
            pipe.communicator.gather(None, "all have failed")
            full.clear()
            pipe.communicator.gather(None, "there is space")
            saved.save(state)
            like = state._replace(opt_states=[None] * 3) if own_rank() == 2 else state
            with pytest.raises(ValueError, match="stage 2"):
                saved.restore(like)
            return before, saved.restore(state).step

    monkeypatch.setattr(StepFolder, "write", writing)
    assert outcomes(threads, body) == [(None, 3)] * 3


def test_a_timed_step_that_one_worker_does_not_make(threads):
    def body():
        pipe = made(PLACES)
        state = start(pipe)

        def step():
            if own_rank() == 1:
                raise Planted("before the step")
            return pipe.train_step(state, *batch_of(0))

        with pytest.raises(Planted, match="before the step"):
            pipeline.timed(pipe, step)
        pipe.communicator.gather(None, "all are here")
        return float(pipe.evaluate(state, *batch_of(0)).loss)

    assert len({*outcomes(threads, body)}) == 1


def test_training_with_other_settings(threads):
    def body():
        pipe, rank = made(PLACES), own_rank()
        state, errors = start(pipe), []
        for save_every in (0 if rank == 1 else 5, 5 + rank):
            saved = pipeline.PipelineCheckpoints.__new__(pipeline.PipelineCheckpoints)
            try:
                pipeline.fit(pipe, state, [], checkpoints=saved, save_every=save_every)
            except ValueError as error:
                errors.append(str(error))
        state, found = pipeline.fit(pipe, state, map(batch_of, range(2)))
        return errors, [float(m.loss) for m in found]

    found = outcomes(threads, body)
    for (refused, other), _ in found:
        assert "must be at least 1. Got 0" in refused
        assert "fit (save_every=5)" in other or "fit (save_every=6)" in other
    assert len({tuple(curve) for _, curve in found}) == 1


def test_another_step_or_state_to_restore_is_refused_on_all(threads, tmp_path):
    """Also where it fits what this worker has; and the next call is not affected."""

    def body():
        pipe, rank = made(PLACES), own_rank()
        state, errors = start(pipe), []
        other = state._replace(
            params=jax.tree.map(lambda x: x.astype("bfloat16"), state.params)
        )
        with pipeline.PipelineCheckpoints(tmp_path, pipe) as saved:
            for step in (1, 2):
                saved.save(state._replace(step=step))
            for like, step in (
                (state, 1 if rank == 1 else 2),
                (other if rank == 1 else state, None),
            ):
                try:
                    saved.restore(like, step)
                except ValueError as error:
                    errors.append(error)
            return errors, saved.restore(state).step

    for errors, step in outcomes(threads, body):
        assert step == 2
        apart, unlike = texts(errors)
        assert "PipelineCheckpoints.restore" in apart
        assert "must be like the state that was saved, float32" in unlike
        assert "Got bfloat16" in unlike
